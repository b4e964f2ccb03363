//! The rows that tables had at one moment, read after any changes, beside what was read at that moment.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use checkpoints::{insert, load, open, read, save, state, store, update};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{CutRows, EmbeddingStore, Error, InProcessStore, LocalStore, SaveKind, TableId};
use tempfile::TempDir;

const DIM: usize = 5;

/// Without shared rows: an id without a row of its own reads as those are now.
const CONFIGS: [&str; 9] = [
    r#""optimizer": {"kind": "adam", "lr": 0.1}"#,
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}, "dtype": "bfloat16""#,
    r#""optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}, "dtype": "int8""#,
    r#""optimizer": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.1, "catch_up": true}"#,
    r#""optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.8, "catch_up": true}"#,
    r#""optimizer": {"kind": "adamw", "lr": 0.1, "weight_decay": 0.1, "catch_up": true}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "eviction": {"ttl": 2, "interval": 2, "delay": 1}"#,
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}, "eviction": {"capacity": 20, "interval": 2, "delay": 1}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "admission": {"kind": "count", "threshold": 2}"#,
];

#[derive(Debug, Clone)]
enum Change {
    Update(Vec<i64>),
    Write(Vec<i64>),
    Insert(Vec<i64>),
    Delete(Vec<i64>),
    Clear,
    Rate(f64),
    Save(SaveKind),
    Cut,
    Drop,
}

fn ids() -> impl Strategy<Value = Vec<i64>> {
    prop_oneof![
        prop::collection::vec(0..20i64, 1..20),
        prop::collection::vec(0..200i64, 1..100),
        (0..150i64).prop_map(|start| (start..start + 60).collect()),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => ids().prop_map(Change::Update),
        2 => ids().prop_map(Change::Write),
        2 => ids().prop_map(Change::Insert),
        3 => ids().prop_map(Change::Delete),
        1 => Just(Change::Clear),
        1 => (0..4u32).prop_map(|rate| Change::Rate(f64::from(rate) / 8.0)),
        1 => prop_oneof![Just(SaveKind::Full), Just(SaveKind::Auto)].prop_map(Change::Save),
        2 => Just(Change::Cut),
        1 => Just(Change::Drop),
    ]
}

fn values(ids: &[i64], salt: i64) -> Vec<f32> {
    let value = |id: &i64, column: usize| ((id * 31 + column as i64 * 3 + salt) % 17) as f32 / 8.0 - 1.0;
    ids.iter().flat_map(|id| (0..DIM).map(move |column| value(id, column))).collect()
}

fn all_ids() -> Vec<i64> {
    (0..220).chain([-1, i64::MAX]).collect()
}

/// The bits of all rows and slots, those of ids without a row too.
#[derive(Debug, PartialEq)]
struct Seen {
    ids: Vec<i64>,
    rows: Vec<u32>,
    slots: Vec<Vec<u32>>,
    step: u64,
    rate: f64,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn slots_of(store: &LocalStore, table: TableId) -> Vec<String> {
    store.describe(table).unwrap().slots.into_iter().map(|(name, _)| name).collect()
}

fn seen_now(store: &LocalStore, table: TableId) -> Seen {
    let mut ids = store.ids(table).unwrap();
    ids.sort_unstable();
    let slot = |name: &String| bits(&store.read_slot(table, name, &all_ids()).unwrap().unwrap());
    let slots = slots_of(store, table).iter().map(slot).collect();
    let statistics = store.statistics(table).unwrap();
    let rows = bits(&read(store, table, &all_ids()));
    Seen { ids, rows, slots, step: statistics.step, rate: statistics.learning_rate }
}

fn seen_in(cut: &CutRows, slots: &[String]) -> Seen {
    let all = all_ids();
    let mut rows = vec![f32::NAN; all.len() * cut.dim()];
    cut.read(&all, &mut rows).unwrap();
    let slots = slots.iter().map(|name| bits(&cut.read_slot(name, &all).unwrap().unwrap())).collect();
    let progress = cut.progress();
    let (step, rate) = (progress.step, progress.learning_rate);
    Seen { ids: cut.ids().to_vec(), rows: bits(&rows), slots, step, rate }
}

fn cut_of(store: &LocalStore, table: TableId) -> CutRows {
    store.cut_rows(&[table]).unwrap().pop().unwrap()
}

fn make(store: &LocalStore, table: TableId, change: &Change, salt: i64, directory: &Path) {
    match change {
        Change::Update(ids) => update(store, table, ids, &values(ids, salt)),
        Change::Write(ids) => store.write(table, ids, &values(ids, salt)).unwrap(),
        Change::Insert(ids) => insert(store, table, ids),
        Change::Delete(ids) => _ = store.delete(table, ids).unwrap(),
        Change::Clear => store.clear(table).unwrap(),
        Change::Rate(rate) => store.set_learning_rate(table, *rate, true).unwrap(),
        Change::Save(kind) => _ = save(store, directory, *kind).unwrap(),
        Change::Cut | Change::Drop => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rows_are_those_of_the_moment_whatever_changes(
        config in prop::sample::select(&CONFIGS[..]),
        is_on_disk in any::<bool>(),
        changes in prop::collection::vec(change(), 1..25),
    ) {
        let (own, saved) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let disk = format!(r#", "memory_limit": 60000, "disk": {:?}"#, own.path().display().to_string());
        let config = format!("{{{config}{}}}", if is_on_disk { &disk } else { "" });
        let store = store();
        let table = open(&store, "t", DIM, &config);
        let slots = slots_of(&store, table);
        let mut cuts: Vec<(CutRows, Seen)> = Vec::new();
        for (salt, change) in changes.iter().enumerate() {
            match change {
                Change::Cut => cuts.push((cut_of(&store, table), seen_now(&store, table))),
                Change::Drop if !cuts.is_empty() => drop(cuts.remove(0)),
                _ => make(&store, table, change, salt as i64, saved.path()),
            }
            for (cut, expected) in &cuts {
                prop_assert_eq!(&seen_in(cut, &slots), expected);
            }
        }
        drop(cuts);
        // Nothing of the moments is left that a save would find.
        let directory = TempDir::new().unwrap();
        save(&store, directory.path(), SaveKind::Full).unwrap();
        prop_assert_eq!(state(&checkpoints::loaded(directory.path()))["t"].rows.len(), store.ids(table).unwrap().len());
    }
}

#[test]
fn several_tables_are_cut_at_one_moment_beside_a_thread_that_trains_both() {
    let store = store();
    let config = r#"{"initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1.0}}"#;
    let tables = ["a", "b"].map(|name| open(&store, name, DIM, config));
    let ids: Vec<i64> = (0..2000).collect();
    let gradients = vec![-1.0; ids.len() * DIM];
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                tables.iter().for_each(|table| update(&store, *table, &ids, &gradients));
            }
        });
        for _ in 0..20 {
            let cuts = store.cut_rows(&tables).unwrap();
            let of = |cut: &CutRows, part: &[i64]| {
                let mut rows = vec![f32::NAN; part.len() * DIM];
                cut.read(part, &mut rows).unwrap();
                rows
            };
            // In parts, between which training goes on; each table is a number of whole steps, the second one behind at
            // most.
            let steps = |cut: &CutRows| {
                let rows: Vec<f32> = ids.chunks(300).flat_map(|part| of(cut, part)).collect();
                assert!(rows.iter().all(|value| *value == rows[0]), "rows of several moments");
                assert_eq!(rows[0] as u64, cut.progress().step);
                rows[0]
            };
            let [first, second] = [steps(&cuts[0]), steps(&cuts[1])];
            assert!((0.0..=1.0).contains(&(first - second)), "{first} and {second}");
        }
        ends.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_load_ends_it_a_dropped_table_stays_and_a_table_comes_once() {
    let (store, directory) = (store(), TempDir::new().unwrap());
    let table = open(&store, "t", DIM, "{}");
    store.write(table, &[1, 2], &[1.0; 2 * DIM]).unwrap();
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let cut = cut_of(&store, table);
    load(&store, directory.path()).unwrap();
    let refused = cut.read(&[1], &mut [0.0; DIM]).unwrap_err().to_string();
    assert!(
        refused.contains("a checkpoint was loaded into table \"t\" while its rows were read"),
        "{refused}"
    );
    let cut = cut_of(&store, table);
    store.drop_table("t").unwrap();
    let mut row = [0.0; DIM];
    cut.read(&[1], &mut row).unwrap();
    assert_eq!((cut.ids(), row), (&[1, 2][..], [1.0; DIM]));
    let other = open(&store, "u", DIM, "{}");
    let twice = store.cut_rows(&[other, other]).unwrap_err();
    assert!(matches!(&twice, Error::InvalidConfig { message } if message.contains("given twice")), "{twice}");
    assert!(matches!(store.cut_rows(&[table]), Err(Error::UnknownHandle { .. })));
}
