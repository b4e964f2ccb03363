//! Two tables whose rows tell whether a snapshot is of one moment.
//!
//! A round updates both tables in one call: from each of the shared rows it takes 1, and it makes a *group* of rows that
//! nobody had, of which each holds the group's number. A store of one moment thus has the same shared rows everywhere,
//! as many groups as steps, and of no group a part.

use recstore::{EmbeddingStore, GradientChunk, LocalStore, Step, TableId, TableUpdate};

use super::{open, read};
use crate::numbered::Numbered;

pub(crate) const DIM: usize = 4;
const GROUP: i64 = 5;
/// Ids of one trainer's groups lie together.
const TRAINER: i64 = 1 << 40;
const CONFIG: &str =
    r#"{"block_size": 1000, "initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1}}"#;

/// The two tables of a store.
#[derive(Clone, Copy)]
pub(crate) struct Linked {
    pub(crate) tables: [TableId; 2],
    shared_rows: i64,
}

/// What deletes and makes again the group of this number in a table, if anything.
pub(crate) fn churned(group: i64) -> Option<usize> {
    usize::try_from(group % 3).ok().filter(|table| *table < 2)
}

fn group_ids(trainer: usize, group: i64) -> Vec<i64> {
    let first = (trainer as i64 + 1) * TRAINER + group * GROUP;
    (first..first + GROUP).collect()
}

impl Linked {
    /// Opens both tables, or finds them.
    pub(crate) fn open(store: &LocalStore, shared_rows: i64) -> Self {
        Self { tables: ["first", "second"].map(|name| open(store, name, DIM, CONFIG)), shared_rows }
    }

    /// Takes a step of both tables, in which `trainer` makes its group `group`. A trainer counts its groups from 1.
    pub(crate) fn train(&self, store: &LocalStore, trainer: usize, group: i64) {
        let mut ids: Vec<i64> = (0..self.shared_rows).collect();
        let mut gradients = vec![1.0; ids.len() * DIM];
        ids.extend(group_ids(trainer, group));
        gradients.resize(ids.len() * DIM, -group as f32);
        let update = |table| {
            let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
            TableUpdate { table, chunks, step: Step::Next }
        };
        store.update(&self.tables.map(update)).unwrap();
    }

    /// Deletes a group from the table where it may be, or makes it again.
    pub(crate) fn churn(&self, store: &LocalStore, trainer: usize, group: i64, deletes: bool) {
        let Some(table) = churned(group).map(|table| self.tables[table]) else { return };
        let ids = group_ids(trainer, group);
        if deletes {
            store.delete(table, &ids).unwrap();
        } else {
            store.write(table, &ids, &vec![group as f32; ids.len() * DIM]).unwrap();
        }
    }

    /// Checks that a store holds both tables at one moment, and returns how many groups each trainer had made.
    pub(crate) fn check(&self, store: &LocalStore, trainers: usize) -> Vec<i64> {
        let steps = self.tables.map(|table| store.statistics(table).unwrap().step);
        assert_eq!(steps[0], steps[1], "the tables are of different steps");
        let shared: Vec<i64> = (0..self.shared_rows).collect();
        for table in self.tables {
            let rows = read(store, table, &shared);
            let strays = rows.iter().filter(|value| **value != -(steps[0] as f32)).count();
            assert_eq!(strays, 0, "values that are not of step {}", steps[0]);
        }
        let made: Vec<i64> = (0..trainers).map(|trainer| self.groups(store, trainer)).collect();
        assert_eq!(made.iter().sum::<i64>(), steps[0] as i64, "a step and its group belong together");
        made
    }

    /// Returns the groups of a trainer: all up to some number.
    fn groups(&self, store: &LocalStore, trainer: usize) -> i64 {
        let has = |table: usize, group: i64| self.has(store, table, trainer, group);
        let is_there = |group: &i64| match churned(*group) {
            // Deleted from this table at times, but never from the other one.
            Some(table) => {
                has(table, *group);
                has(1 - table, *group)
            }
            None => {
                let both = [0, 1].map(|table| has(table, *group));
                assert_eq!(both[0], both[1], "group {group} is in one of the tables");
                both[0]
            }
        };
        let made = (1..).take_while(is_there).count() as i64;
        // Nothing lies behind the first that is not there.
        (made + 1..made + 50)
            .for_each(|group| assert!(!is_there(&group), "group {group} but not {made} + 1"));
        made
    }

    /// Whether a table has a group, whole and with its number.
    fn has(&self, store: &LocalStore, table: usize, trainer: usize, group: i64) -> bool {
        let ids = group_ids(trainer, group);
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * DIM]);
        store.lookup(self.tables[table], &ids, false, &mut indices, &mut rows).unwrap();
        let found = indices.iter().filter(|index| **index >= 0).count();
        assert!(found == 0 || found == ids.len(), "{found} rows of group {group} in table {table}");
        let is_whole = found > 0;
        assert!(!is_whole || rows.iter().all(|value| *value == group as f32), "group {group}: {rows:?}");
        is_whole
    }
}
