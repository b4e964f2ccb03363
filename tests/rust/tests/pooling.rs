//! Pooled bags against libtorch's `embedding_bag`.

// tier: all

use proptest::prelude::*;
use recstore::{BagInput, EmbeddingStore, PoolingMode};
use recstore_tch::{LocalStore, TchTable};
use recstore_tests::{all_ids, elements, open};
use tch::Tensor;

const ROWS: i64 = 12;
const DIM: usize = 7;

#[derive(Debug, Clone)]
struct Bags {
    ids: Vec<i64>,
    /// One more than there are bags.
    offsets: Vec<i64>,
    weights: Vec<f32>,
    padding_idx: Option<i64>,
}

fn bags() -> impl Strategy<Value = Bags> {
    let bag = prop::collection::vec((0..ROWS, -2.0..2.0f32), 0..6);
    (prop::collection::vec(bag, 0..8), prop::option::of(0..ROWS)).prop_map(|(bags, padding_idx)| {
        let ends = bags.iter().scan(0, |end, bag| {
            *end += bag.len() as i64;
            Some(*end)
        });
        let offsets = std::iter::once(0).chain(ends).collect();
        let (ids, weights) = bags.concat().into_iter().unzip();
        Bags { ids, offsets, weights, padding_idx }
    })
}

fn pool(
    table: &TchTable<LocalStore>,
    bags: &Bags,
    mode: PoolingMode,
    weighted: bool,
) -> (Vec<f32>, Vec<i64>) {
    let input = BagInput {
        ids: &bags.ids,
        offsets: &bags.offsets,
        mode,
        per_sample_weights: weighted.then_some(&bags.weights),
        padding_idx: bags.padding_idx,
    };
    let mut pooled = vec![f32::NAN; (input.offsets.len() - 1) * DIM];
    let mut positions = vec![-2; if mode == PoolingMode::Max { pooled.len() } else { 0 }];
    let handle = table.handle();
    handle
        .store()
        .bag(&[handle.id()], input, &mut pooled, &mut positions, &mut [])
        .expect("the bags are valid");
    (pooled, positions)
}

/// Returns pooled rows, and for the maximum the id of each column's row.
fn pool_by_libtorch(weight: &Tensor, bags: &Bags, mode: i64, weighted: bool) -> (Vec<f32>, Vec<i64>) {
    let (ids, offsets) = (Tensor::from_slice(&bags.ids), Tensor::from_slice(&bags.offsets));
    let weights = weighted.then(|| Tensor::from_slice(&bags.weights));
    let (pooled, _, _, max_ids) = Tensor::embedding_bag_padding_idx(
        weight,
        &ids,
        &offsets,
        false,
        mode,
        false,
        weights,
        true,
        bags.padding_idx,
    );
    (elements(&pooled), elements(&max_ids))
}

/// libtorch multiplies by 1 / count where the store divides, and fuses additions: a few roundings of values below 40.
fn assert_close(actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len());
    for (a, b) in actual.iter().zip(expected) {
        assert!((a - b).abs() <= 1e-5, "{a} {b}");
    }
}

/// Returns a table of which half the ids have a row.
fn table() -> TchTable<LocalStore> {
    let table = open(DIM, r#"{"kind": "sgd"}"#).expect("the configuration is valid");
    let ids = all_ids(ROWS / 2);
    table.write(&ids, &(table.read(&ids).expect("valid ids") + 1.0)).expect("finite rows");
    table
}

proptest! {
    #[test]
    fn bags_are_pooled_as_by_embedding_bag(bags in bags()) {
        let table = table();
        let weight = table.read(&all_ids(ROWS)).expect("valid ids");
        for (mode, number, weighted) in
            [(PoolingMode::Sum, 0, false), (PoolingMode::Sum, 0, true), (PoolingMode::Mean, 1, false)]
        {
            let pooled = pool(&table, &bags, mode, weighted).0;
            assert_close(&pooled, &pool_by_libtorch(&weight, &bags, number, weighted).0);
        }
    }

    #[test]
    fn the_maximum_and_the_id_it_comes_from_are_those_of_embedding_bag(bags in bags()) {
        let table = table();
        let weight = table.read(&all_ids(ROWS)).expect("valid ids");
        let (pooled, positions) = pool(&table, &bags, PoolingMode::Max, false);
        let (expected, max_ids) = pool_by_libtorch(&weight, &bags, 2, false);
        prop_assert_eq!(pooled, expected);
        for (position, max_id) in positions.into_iter().zip(max_ids) {
            // In an empty bag the store says -1, libtorch leaves an arbitrary id.
            prop_assert!(position == -1 || bags.ids[position as usize] == max_id);
        }
    }
}
