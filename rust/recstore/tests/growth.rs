//! A table grows by id, keeps every row while it does, and reuses what was deleted.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use numbered::Numbered;
use recstore::{EmbeddingStore, GradientChunk, LocalStore, Serial, Step, TableConfig, TableId, TableUpdate};

const DIM: usize = 2;

fn open(text: &str) -> (LocalStore, TableId) {
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("t", &TableConfig::from_json(DIM, text).unwrap()).unwrap();
    (store, table)
}

/// Looks `ids` up, giving each a row, and returns their indices.
fn insert(store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<i64> {
    let (mut indices, mut rows) = (vec![-1; ids.len()], vec![0.0; ids.len() * DIM]);
    store.lookup(table, ids, true, &mut indices, &mut rows).unwrap();
    indices
}

fn read(store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    store.read(table, ids, &mut rows).unwrap();
    rows
}

#[test]
fn growing_past_five_million_rows_keeps_every_row() {
    const ROWS: i64 = 5_200_000;
    const BATCH: i64 = 100_000;
    // Odd multiples are distinct; the id's own bits make its row, and single precision holds 24 of them.
    let batch = |start| (start..start + BATCH).map(|j: i64| j.wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64));
    let row = |id: i64| [(id & 0xFF_FFFF) as f32, (id >> 40) as f32];
    let (store, table) = open(r#"{"initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1}}"#);
    for start in (0..ROWS).step_by(BATCH as usize) {
        let ids: Vec<i64> = batch(start).collect();
        let gradients: Vec<f32> = batch(start).flat_map(row).map(|value| -value).collect();
        let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    }
    assert_eq!(store.num_rows(table), Ok(ROWS as usize));
    for start in (0..ROWS).step_by(BATCH as usize) {
        let ids: Vec<i64> = batch(start).collect();
        assert!(read(&store, table, &ids) == batch(start).flat_map(row).collect::<Vec<_>>(), "from {start}");
    }
}

#[test]
fn reading_a_million_unknown_ids_leaves_the_statistics_as_they_were() {
    let (store, table) = open("");
    insert(&store, table, &[7]);
    let before = store.statistics(table).unwrap();
    let unknown: Vec<i64> = (1_000..1_001_000).collect();
    let rows = read(&store, table, &unknown);
    assert!(rows.iter().any(|&value| value != 0.0));
    let (mut indices, mut same) = (vec![0; unknown.len()], vec![0.0; rows.len()]);
    store.lookup(table, &unknown, false, &mut indices, &mut same).unwrap();
    assert!(indices.iter().all(|&index| index == -1) && same == rows);
    assert_eq!(store.statistics(table), Ok(before));
}

#[test]
fn a_freed_index_goes_to_the_next_new_id() {
    let (store, table) = open("");
    assert_eq!(insert(&store, table, &[1_180_210, 721_458, 655_922, 1_000_000, 2_000_000]), [0, 1, 2, 3, 4]);
    assert_eq!(store.delete(table, &[655_922]), Ok(1));
    assert_eq!(insert(&store, table, &[328_637]), [2]);
    assert_eq!(store.ids(table), Ok(vec![1_180_210, 721_458, 328_637, 1_000_000, 2_000_000]));
}

#[test]
fn deleting_an_id_twice_does_not_hand_one_row_to_two_ids() {
    let (store, table) = open("");
    insert(&store, table, &[10, 20, 30]);
    assert_eq!(store.delete(table, &[20, 20]), Ok(1));
    assert_eq!(store.delete(table, &[20, 99]), Ok(0));
    assert_eq!(insert(&store, table, &[40, 50]), [1, 3]);
    store.write(table, &[40, 50], &[4.0, 4.0, 5.0, 5.0]).unwrap();
    assert_eq!(read(&store, table, &[40, 50]), [4.0, 4.0, 5.0, 5.0]);
}

#[test]
fn a_row_in_a_freed_place_starts_without_the_old_state() {
    let (store, table) = open(r#"{"optimizer": {"kind": "adagrad"}}"#);
    let chunks = vec![GradientChunk::new(&[1], &[2.0, 3.0], DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    store.delete(table, &[1]).unwrap();
    store.write(table, &[2], &[0.5, 0.5]).unwrap();
    assert_eq!(insert(&store, table, &[2]), [0]);
    assert_eq!(store.read_slot(table, "state_sum", &[2]), Ok(Some(vec![0.0, 0.0])));
}

#[test]
fn clearing_gives_the_memory_back_and_keeps_step_and_learning_rate() {
    let (store, table) = open("");
    store.set_learning_rate(table, 0.125, true).unwrap();
    let chunks = vec![GradientChunk::new(&[1], &[2.0, 3.0], DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    store.clear(table).unwrap();
    let after = store.statistics(table).unwrap();
    assert_eq!((after.rows, after.bytes, after.inserts, after.deletes), (0, 0, 1, 1));
    assert_eq!((after.step, after.learning_rate, after.learning_rate_was_set), (1, 0.125, true));
}
