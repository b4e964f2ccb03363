//! Bags of rows that lie elsewhere, read once for each distinct id, are those that a store pools itself, to the bit.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::sync::Arc;

use proptest::prelude::*;
use recstore::{
    BagInput, EmbeddingStore, EmbeddingTable, LocalStore, PlacedRows, PoolingMode, Serial, TableConfig,
    TableId, TableRead, TableValidator, arrivals,
};

/// Two tables of a dim that kernels know, or of one that they do not.
fn tables(store: &LocalStore, dims: [usize; 2]) -> ([Arc<dyn EmbeddingTable>; 2], [TableValidator; 2]) {
    let config = |dim| TableConfig::from_json(dim, r#"{"initializer": {"kind": "uniform"}}"#).unwrap();
    let open = |number: usize| store.open_table(["a", "b"][number], &config(dims[number])).unwrap();
    let rowless = |number: usize| TableValidator::new(["a", "b"][number], &config(dims[number])).unwrap();
    ([open(0), open(1)], [rowless(0), rowless(1)])
}

/// The rows of ids, each once where `is_once`, and the places of the ids' rows.
fn rows(table: &dyn EmbeddingTable, ids: &[i64], is_once: bool) -> (Vec<f32>, Vec<i64>) {
    let (read, places) = if is_once { arrivals(ids).unwrap() } else { (ids.to_vec(), Vec::new()) };
    let mut rows = vec![0.0; read.len() * table.dim()];
    table.read(&read, &mut rows).unwrap();
    (rows, places)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #[test]
    fn placed_rows_are_pooled_as_a_store_pools_its_own(
        lens in prop::collection::vec(0..9usize, 0..30),
        seed in any::<u32>(),
        dims in prop::array::uniform2(prop::sample::select(vec![1, 3, 8, 16, 32, 64, 100, 128])),
        mode in prop::sample::select(vec![PoolingMode::Sum, PoolingMode::Mean, PoolingMode::Max]),
        is_weighted in any::<bool>(),
        padding_idx in prop::option::of(0..4i64),
        is_once in any::<bool>(),
    ) {
        let store = LocalStore::new(Box::new(Serial));
        let (tables, rowless) = tables(&store, dims);
        let lens = [&lens[..], &lens].concat();
        let offsets: Vec<i64> = std::iter::once(0)
            .chain(lens.iter().scan(0, |end, &len| { *end += len as i64; Some(*end) }))
            .collect();
        let count = lens.iter().sum::<usize>();
        let ids: Vec<i64> = (0..count as u32).map(|at| i64::from(at.wrapping_mul(seed | 1) >> 7) % 23).collect();
        let weights: Vec<f32> = (0..count).map(|at| at as f32 * 0.3 - 2.0).collect();
        let per_sample_weights = (is_weighted && mode != PoolingMode::Max).then_some(&weights[..]);
        let input = BagInput { ids: &ids, offsets: &offsets, mode, per_sample_weights, padding_idx };
        let (floats, half) = (lens.len() / 2 * (dims[0] + dims[1]), count / 2);
        let positions = if mode == PoolingMode::Max { floats } else { 0 };
        let (mut expected, mut expected_positions) = (vec![0.5; floats], vec![7; positions]);
        let numbers: Vec<TableId> = tables.iter().map(|table| table.id()).collect();
        store.bag(&numbers, input, &mut expected, &mut expected_positions, &mut []).unwrap();
        let read = [rows(&*tables[0], &ids[..half], is_once), rows(&*tables[1], &ids[half..], is_once)];
        let placed = read.each_ref().map(|(rows, places)| PlacedRows { rows, places });
        let (mut pooled, mut max_positions) = (vec![0.25; floats], vec![9; positions]);
        TableValidator::pool(
            &Serial, &rowless.each_ref(), input, &placed, &mut pooled, &mut max_positions,
        );
        prop_assert_eq!(bits(&pooled), bits(&expected));
        prop_assert_eq!(max_positions, expected_positions);
    }

    #[test]
    fn tables_read_together_have_the_rows_that_each_has_alone(
        ids in prop::collection::vec(prop::collection::vec(0..9i64, 0..9), 0..6),
        large in 0..20_000usize,
        is_ahead in any::<bool>(),
    ) {
        let store = LocalStore::default();
        let (tables, _) = tables(&store, [4, 3]);
        let mut ids = ids;
        ids.push((0..large as i64).collect());
        let table = |number: usize| &tables[number % 2];
        let mut found: Vec<Vec<f32>> =
            ids.iter().enumerate().map(|(number, ids)| vec![0.5; ids.len() * table(number).dim()]).collect();
        let reads = ids.iter().zip(&mut found).enumerate();
        let reads = reads.map(|(number, (ids, rows))| TableRead { table: table(number).id(), ids, rows });
        store.read_tables(&mut reads.collect::<Vec<_>>(), is_ahead).unwrap();
        for (number, (ids, found)) in ids.iter().zip(&found).enumerate() {
            prop_assert_eq!(&rows(&**table(number), ids, false).0, found);
        }
    }
}

#[test]
fn the_first_table_that_cannot_be_read_is_named() {
    let store = LocalStore::default();
    let bounded = TableConfig::from_json(1, r#"{"num_embeddings": 5}"#).unwrap();
    let tables = ["a", "b", "c"].map(|name| store.open_table(name, &bounded).unwrap().id());
    let mut rows = [[0.0], [0.0], [0.0]];
    let ids = [[4], [5], [6]];
    let reads = tables.iter().zip(&ids).zip(&mut rows);
    let mut reads: Vec<_> = reads.map(|((&table, ids), rows)| TableRead { table, ids, rows }).collect();
    let refused = store.read_tables(&mut reads, false).unwrap_err().to_string();
    assert!(refused.contains("\"b\"") && refused.contains('5'), "{refused}");
    store.drop_table("c").unwrap();
    assert!(store.read_tables(&mut reads[2..], true).is_err());
}
