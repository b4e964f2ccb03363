//! A copy of a table holds what its original holds, and goes its own way from there.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, GradientChunk, InProcessStore, LocalStore, Serial, Step, TableConfig, TableId,
    TableUpdate, optimizers,
};

const DIM: usize = 3;
const IDS: [i64; 5] = [7, -2, 0, 1 << 40, 12];
const UNSEEN: [i64; 2] = [99, -99];

fn open(config: &str) -> (LocalStore, TableId) {
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("user", &TableConfig::from_json(DIM, config).unwrap()).unwrap();
    (store, table)
}

fn update(store: &LocalStore, table: TableId, ids: &[i64]) {
    let gradients: Vec<f32> = (0..ids.len() * DIM).map(|place| 0.5 + place as f32).collect();
    let chunks = vec![GradientChunk::new(ids, &gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
}

fn copy(store: &LocalStore, table: TableId, name: &str) -> TableId {
    store.copy_table(table, name).unwrap().id()
}

/// Rows, slots and counts.
fn content(store: &LocalStore, table: TableId) -> (Vec<f32>, Vec<Vec<f32>>, String) {
    let ids = [&IDS[..], &UNSEEN].concat();
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    store.read(table, &ids, &mut rows).unwrap();
    let slots = store.describe(table).unwrap().slots;
    let slots = slots.iter().map(|(name, _)| store.read_slot(table, name, &ids).unwrap().unwrap()).collect();
    let found = store.statistics(table).unwrap();
    let counts = (found.rows, found.inserts, found.updates, found.deletes, found.rejections, found.evictions);
    let progress = (found.candidates, found.step, found.learning_rate, found.learning_rate_was_set);
    (rows, slots, format!("{counts:?} {progress:?}"))
}

fn each_config() -> Vec<String> {
    let of_optimizers = optimizers().into_iter().map(|rule| {
        format!(r#"{{"optimizer": {{"kind": "{}"}}, "seed": 3}}"#, rule["kind"].as_str().unwrap())
    });
    let others = [
        r#"{"dtype": "bfloat16", "optimizer": {"kind": "adam"}}"#,
        r#"{"dtype": "int8", "optimizer": {"kind": "adagrad"}}"#,
        r#"{"admission": {"kind": "count", "threshold": 3}}"#,
        r#"{"admission": {"kind": "sketch", "threshold": 3}}"#,
        r#"{"admission": {"kind": "count", "threshold": 3, "shared_rows": 2}, "optimizer": {"kind": "adam"}}"#,
        r#"{"eviction": {"ttl": 3, "interval": 2, "delay": 1}, "optimizer": {"kind": "adam"}}"#,
        r#"{"eviction": {"capacity": 3, "interval": 2, "delay": 1}}"#,
    ];
    of_optimizers.into_iter().chain(others.map(str::to_owned)).collect()
}

#[test]
fn a_copy_holds_all_of_its_table_and_trains_alike() {
    for config in each_config() {
        let (store, table) = open(&config);
        store.set_learning_rate(table, 0.25, true).unwrap();
        update(&store, table, &IDS);
        update(&store, table, &IDS[..3]);
        let twin = copy(&store, table, "user.copy");
        assert_eq!(content(&store, twin), content(&store, table), "{config}");
        for _ in 0..4 {
            update(&store, table, &IDS[2..]);
            update(&store, twin, &IDS[2..]);
            assert_eq!(content(&store, twin), content(&store, table), "{config}");
        }
    }
}

#[test]
fn a_copy_and_its_table_change_apart() {
    let (store, table) = open(r#"{"optimizer": {"kind": "adam"}}"#);
    update(&store, table, &IDS);
    let before = content(&store, table);
    let twin = copy(&store, table, "user.copy");
    update(&store, twin, &IDS);
    store.delete(twin, &IDS[..1]).unwrap();
    assert_eq!(content(&store, table), before);
    let of_copy = content(&store, twin);
    store.drop_table("user").unwrap();
    assert_eq!(content(&store, twin), of_copy);
}

#[test]
fn a_copy_of_a_copy_has_the_same_initial_values() {
    let (store, table) = open("{}");
    let copied = copy(&store, table, "user.copy");
    let again = copy(&store, copied, "user.copy2");
    assert_eq!(content(&store, again), content(&store, table));
}

#[test]
fn rows_on_disk_are_copied_too() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().display();
    let config = format!(r#"{{"memory_limit": 1000000, "disk": "{disk}", "optimizer": {{"kind": "adam"}}}}"#);
    let (store, table) = open(&config);
    let ids: Vec<i64> = (0..20_000).collect();
    for part in ids.chunks(1000) {
        update(&store, table, part);
    }
    let twin = copy(&store, table, "user.copy");
    let rows_of = |table| {
        let mut rows = vec![f32::NAN; ids.len() * DIM];
        store.read(table, &ids, &mut rows).unwrap();
        rows
    };
    assert!(store.statistics(table).unwrap().memory.disk_bytes > 0);
    assert_eq!(rows_of(twin), rows_of(table));
}

#[test]
fn a_name_that_is_taken_or_empty_is_refused() {
    let (store, table) = open("{}");
    for (name, message) in [("user", "there is a table \"user\" already"), ("", "must not be empty")] {
        let error = store.copy_table(table, name).unwrap_err();
        assert!(
            matches!(error, Error::InvalidConfig { .. }) && error.to_string().contains(message),
            "{error}"
        );
    }
    assert_eq!(store.table_names().unwrap(), ["user"]);
}

#[test]
fn a_copy_beyond_the_memory_limit_is_refused_and_leaves_nothing() {
    let (store, table) = open("{}");
    update(&store, table, &(0..50_000).collect::<Vec<_>>());
    let in_use = store.memory().in_use;
    store.set_memory_limit(Some(in_use + in_use / 2)).unwrap();
    let error = store.copy_table(table, "user.copy").unwrap_err();
    assert!(matches!(error, Error::MemoryLimit { .. }), "{error}");
    assert_eq!((store.table_names().unwrap(), store.memory().in_use), (vec!["user".to_owned()], in_use));
}
