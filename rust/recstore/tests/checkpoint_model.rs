//! Whatever is done to two tables and saved to two directories in any order, a load gives what a map kept at the save.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use checkpoints::{State, insert, load, loaded, open, read, refusal, save_keeping, state, store, update};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{EmbeddingStore, LocalStore, SaveKind, TableId};
use tempfile::TempDir;

const DIM: usize = 2;
const LR: f32 = 0.5;
const INITIAL: f32 = 0.25;
const CONFIG: &str = r#"{"block_size": 2, "initializer": {"kind": "constant", "value": 0.25},
    "optimizer": {"kind": "sgd", "lr": 0.5}}"#;
const NAMES: [&str; 2] = ["one", "two"];
/// Few ids, so that they are deleted and made again.
const IDS: [i64; 6] = [i64::MIN, -1, 0, 1, 2, i64::MAX];

type Row = [f32; DIM];

#[derive(Debug, Clone)]
enum Op {
    Write(usize, BTreeMap<i64, Row>),
    Update(usize, BTreeMap<i64, Row>),
    Insert(usize, BTreeSet<i64>),
    Delete(usize, BTreeSet<i64>),
    Clear(usize),
    /// Drops a table and makes it anew.
    Renew(usize),
    /// Drops a table, or makes one that is not there.
    Toggle(usize),
    Save {
        directory: usize,
        kind: SaveKind,
        keep: usize,
    },
    Load(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let table = || 0..NAMES.len();
    let id = || prop::sample::select(&IDS[..]);
    let value = || (-8..8i32).prop_map(|value| value as f32 * 0.25);
    let rows = move || prop::collection::btree_map(id(), prop::array::uniform2(value()), 0..5);
    let ids = move || prop::collection::btree_set(id(), 0..5);
    let kind = prop::sample::select(&[SaveKind::Full, SaveKind::Delta, SaveKind::Delta, SaveKind::Auto][..]);
    // Mostly to one directory, so that chains grow long.
    let directory = || prop::sample::select(&[0, 0, 0, 1][..]);
    let save = (directory(), kind, 0..3usize);
    prop_oneof![
        3 => (table(), rows()).prop_map(|(table, rows)| Op::Write(table, rows)),
        4 => (table(), rows()).prop_map(|(table, rows)| Op::Update(table, rows)),
        2 => (table(), ids()).prop_map(|(table, ids)| Op::Insert(table, ids)),
        4 => (table(), ids()).prop_map(|(table, ids)| Op::Delete(table, ids)),
        1 => table().prop_map(Op::Clear),
        1 => table().prop_map(Op::Renew),
        1 => table().prop_map(Op::Toggle),
        6 => save.prop_map(|(directory, kind, keep)| Op::Save { directory, kind, keep }),
        2 => directory().prop_map(Op::Load),
    ]
}

/// The rows of the tables there are.
type Rows = BTreeMap<usize, BTreeMap<i64, Row>>;

/// What a directory's newest snapshot should give.
#[derive(Clone)]
struct Saved {
    number: usize,
    rows: Rows,
    state: State,
}

/// A store, what it should hold, and what the directories should.
struct Subject {
    store: LocalStore,
    rows: Rows,
    directories: [TempDir; 2],
    newest: [Option<Saved>; 2],
    /// The number of the save that the store last made or loaded.
    last: Option<usize>,
    saves: usize,
}

impl Subject {
    fn new() -> Self {
        let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let subject = Self {
            store: store(),
            rows: Rows::new(),
            directories,
            newest: [None, None],
            last: None,
            saves: 0,
        };
        open(&subject.store, NAMES[0], DIM, CONFIG);
        Self { rows: Rows::from([(0, BTreeMap::new())]), ..subject }
    }

    fn path(&self, directory: usize) -> &Path {
        self.directories[directory].path()
    }

    /// Changes a table and its model, if there is such a table.
    fn change(&mut self, table: usize, change: impl FnOnce(&LocalStore, TableId, &mut BTreeMap<i64, Row>)) {
        if let Some(rows) = self.rows.get_mut(&table) {
            change(&self.store, self.store.find_numbered(NAMES[table]).unwrap().unwrap(), rows);
        }
    }

    fn toggle(&mut self, table: usize) {
        if self.rows.remove(&table).is_some() {
            self.store.drop_table(NAMES[table]).unwrap();
        } else {
            open(&self.store, NAMES[table], DIM, CONFIG);
            self.rows.insert(table, BTreeMap::new());
        }
    }

    fn save(&mut self, directory: usize, kind: SaveKind, keep: usize) {
        let saved = save_keeping(&self.store, self.path(directory), kind, keep);
        let newest = self.newest[directory].as_ref();
        let can_follow = self.last.is_some() && newest.map(|newest| newest.number) == self.last;
        if kind == SaveKind::Delta && !can_follow {
            let (_, message) = refusal(saved);
            assert!(message.contains("a delta must follow the last save or load of this store"), "{message}");
            return;
        }
        let report = saved.unwrap();
        assert!(can_follow || !report.is_delta);
        let rows: usize = self.rows.values().map(BTreeMap::len).sum();
        assert!(report.rows == rows || (report.is_delta && report.rows < rows), "{report:?}");
        self.saves += 1;
        self.last = Some(self.saves);
        let saved = Saved { number: self.saves, rows: self.rows.clone(), state: state(&self.store) };
        assert_eq!(state(&loaded(self.path(directory))), saved.state);
        self.newest[directory] = Some(saved);
    }

    fn load(&mut self, directory: usize) {
        let result = load(&self.store, self.path(directory));
        let Some(saved) = self.newest[directory].clone() else {
            assert_eq!(refusal(result).1, "there is no checkpoint here");
            return;
        };
        let names: Vec<_> = result.unwrap().tables.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, Vec::from_iter(saved.state.keys().cloned()));
        self.last = Some(saved.number);
        let now = state(&self.store);
        saved.state.iter().for_each(|(name, table)| assert_eq!(&now[name], table));
        self.rows.extend(saved.rows);
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Write(table, rows) => self.change(table, |store, id, model| {
                let (ids, values) = split(&rows);
                store.write(id, &ids, &values).unwrap();
                model.extend(rows);
            }),
            Op::Update(table, gradients) => self.change(table, |store, id, model| {
                let (ids, values) = split(&gradients);
                update(store, id, &ids, &values);
                for (id, gradient) in gradients {
                    let row = model.entry(id).or_insert([INITIAL; DIM]);
                    row.iter_mut().zip(gradient).for_each(|(weight, g)| *weight -= LR * g);
                }
            }),
            Op::Insert(table, ids) => self.change(table, |store, id, model| {
                insert(store, id, &Vec::from_iter(ids.clone()));
                ids.into_iter().for_each(|id| _ = model.entry(id).or_insert([INITIAL; DIM]));
            }),
            Op::Delete(table, ids) => self.change(table, |store, id, model| {
                store.delete(id, &Vec::from_iter(ids.clone())).unwrap();
                model.retain(|id, _| !ids.contains(id));
            }),
            Op::Clear(table) => self.change(table, |store, id, model| {
                store.clear(id).unwrap();
                model.clear();
            }),
            Op::Renew(table) if self.rows.contains_key(&table) => {
                self.toggle(table);
                self.toggle(table);
            }
            Op::Renew(_) => {}
            Op::Toggle(table) => self.toggle(table),
            Op::Save { directory, kind, keep } => self.save(directory, kind, keep),
            Op::Load(directory) => self.load(directory),
        }
    }

    fn assert_same(&self) {
        let names: Vec<_> = self.rows.keys().map(|table| NAMES[*table].to_owned()).collect();
        assert_eq!(self.store.table_names().unwrap(), names);
        for (table, model) in &self.rows {
            let id = self.store.find_numbered(NAMES[*table]).unwrap().unwrap();
            assert_eq!(BTreeSet::from_iter(self.store.ids(id).unwrap()), model.keys().copied().collect());
            let (ids, values) = split(model);
            assert_eq!(read(&self.store, id, &ids), values);
        }
    }
}

fn split(rows: &BTreeMap<i64, Row>) -> (Vec<i64>, Vec<f32>) {
    (rows.keys().copied().collect(), rows.values().flatten().copied().collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_load_gives_what_was_saved(ops in prop::collection::vec(op(), 0..40)) {
        let mut subject = Subject::new();
        for op in ops {
            subject.act(op);
            subject.assert_same();
        }
        [0, 1].into_iter().for_each(|directory| subject.load(directory));
        subject.assert_same();
    }
}
