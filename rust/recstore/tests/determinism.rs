//! Rows and optimizer state are the same to the bit, however many threads, whichever vector instructions and in
//! whatever order rows came into the table.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;
mod pool;
mod rules;

use numbered::Numbered;
use pool::Pool;
use recstore::{
    BagInput, EmbeddingStore, Executor, GradientChunk, GradientPart, LocalStore, PLACES_TAG, PoolingMode,
    Serial, SimdLevel, Step, TableConfig, TableId, TableUpdate,
};
use rules::forms_at;

/// One full run of vector lanes and a rest.
const DIM: usize = 21;
/// Several blocks of rows, and enough of them for every loop to run on several threads.
const COUNT: usize = 12_000;
/// Rules beside those of the registry, some of them followed by another option of the table.
const MORE: [&str; 9] = [
    r#"{"kind": "adamw", "weight_decay": 0.1, "catch_up": true}"#,
    r#"{"kind": "sgd", "momentum": 0.9, "nesterov": true, "catch_up": true}"#,
    r#"{"kind": "rowwise_adam"}"#,
    r#"{"kind": "adagrad"}, "max_grad_norm": 8"#,
    r#"{"kind": "adam", "bias_correction": "row"}, "ema_decay": 0.9"#,
    r#"{"kind": "adam", "amsgrad": true}, "state_dtype": "bfloat16""#,
    r#"{"kind": "adagrad"}, "state_dtype": "float8""#,
    r#"{"kind": "ftrl"}, "state_dtype": "float8", "dtype": "int8""#,
    ADAGRAD,
];
const ADAGRAD: &str = r#"{"kind": "adagrad"}"#;

fn optimizers() -> Vec<String> {
    const RATE: f64 = 0.01;
    forms_at(|_, _| RATE).into_iter().chain(MORE.map(str::to_owned)).collect()
}

/// Runs the bodies one by one, the last first.
struct Backwards;

impl Executor for Backwards {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(body);
    }

    fn num_threads(&self) -> usize {
        3
    }
}

/// Ids all over int64, each about three times, in no order.
fn ids() -> Vec<i64> {
    (0..COUNT as i64)
        .map(|j| (j * 7919 % (COUNT as i64 / 3)).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64))
        .collect()
}

fn gradients(step: usize) -> Vec<f32> {
    (0..COUNT * DIM).map(|j| ((j * 31 + step * 17) % 1009) as f32 / 301.0 - 1.7).collect()
}

fn open(store: &LocalStore, optimizer: &str) -> TableId {
    let text = format!(r#"{{"block_size": 7, "optimizer": {optimizer}}}"#);
    store.open_numbered("t", &TableConfig::from_json(DIM, &text).unwrap()).unwrap()
}

fn train(store: &LocalStore, table: TableId) {
    let ids = ids();
    for step in 0..3 {
        let gradients = gradients(step);
        let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    }
}

/// Returns the bits of all rows, their slots, and pooled bags of them.
fn bits(store: &LocalStore, table: TableId) -> Vec<u32> {
    let ids = ids();
    let mut values = vec![0.0; COUNT * DIM];
    store.read(table, &ids, &mut values).unwrap();
    for (slot, _) in store.describe(table).unwrap().slots {
        values.extend(store.read_slot(table, &slot, &ids).unwrap().unwrap());
    }
    let offsets: Vec<i64> = (0..=COUNT as i64).collect();
    let mut pooled = vec![0.0; COUNT * DIM];
    let bags = BagInput {
        ids: &ids,
        offsets: &offsets,
        mode: PoolingMode::Mean,
        per_sample_weights: None,
        padding_idx: None,
    };
    store.bag(&[table], bags, &mut pooled, &mut [], &mut []).unwrap();
    values.iter().chain(&pooled).map(|value| value.to_bits()).collect()
}

fn train_on(executor: Box<dyn Executor>, level: SimdLevel, optimizer: &str) -> Vec<u32> {
    let store = LocalStore::new(executor).with_simd(level).unwrap();
    let table = open(&store, optimizer);
    train(&store, table);
    bits(&store, table)
}

#[test]
fn every_thread_count_and_simd_level_gives_the_same_bits() {
    for optimizer in &optimizers() {
        let expected = train_on(Box::new(Serial), SimdLevel::Baseline, optimizer);
        assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{optimizer}");
        for level in SimdLevel::available() {
            for threads in [1, 2, 8] {
                let same = train_on(Pool::new(threads), level, optimizer) == expected;
                assert!(same, "{optimizer}, {level}, {threads} threads");
            }
        }
    }
}

#[test]
fn the_order_of_the_pieces_of_a_loop_changes_no_bit() {
    for optimizer in &optimizers() {
        let forwards = train_on(Box::new(Serial), SimdLevel::detect(), optimizer);
        assert!(train_on(Box::new(Backwards), SimdLevel::detect(), optimizer) == forwards, "{optimizer}");
    }
}

/// Trains with gradients of bags of three ids, in some columns of a matrix, or with the same ones an id each. The gradients of
/// the id `leave_out` do not count, and those of others come times their weight if there are any.
fn train_bags(text: &str, leave_out: Option<i64>, weights: &[f32], are_shared: bool) -> Vec<u32> {
    const STRIDE: usize = DIM + 4;
    const FIRST: usize = 3;
    let store = LocalStore::new(Pool::new(2));
    let table = store.open_numbered("t", &TableConfig::from_json(DIM, text).unwrap()).unwrap();
    let (ids, mut places) = (ids(), vec![0; COUNT + PLACES_TAG]);
    let row_of: Vec<u32> = (0..COUNT as u32).map(|position| position / 3).collect();
    for step in 0..3 {
        let matrix = &gradients(step)[..COUNT / 3 * STRIDE];
        let row = |row: &u32| &matrix[*row as usize * STRIDE + FIRST..][..DIM];
        let of_each: Vec<f32> = row_of.iter().flat_map(row).copied().collect();
        store.read_with_places(table, &ids, &mut vec![0.0; COUNT * DIM], &mut places).unwrap();
        let mut part = GradientPart::new(&ids, &of_each, DIM);
        if are_shared {
            let columns = GradientPart { stride: STRIDE, first_column: FIRST, ..part };
            part = GradientPart { gradients: matrix, row_of: &row_of, places: &places, ..columns };
        }
        let part = GradientPart { weights, padding_idx: leave_out, ..part };
        let chunks = vec![GradientChunk { parts: vec![part] }];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    }
    bits(&store, table)
}

#[test]
fn gradients_of_bags_give_the_bits_of_one_gradient_an_id() {
    let weights: Vec<f32> = (0..COUNT).map(|position| (position % 7) as f32 * 0.3).collect();
    for text in
        [r#"{"optimizer": {"kind": "adagrad"}}"#, r#"{"optimizer": {"kind": "adam"}, "dtype": "bfloat16"}"#]
    {
        for leave_out in [None, Some(ids()[5])] {
            for weights in [&[], &weights[..]] {
                let same = [true, false].map(|are_shared| train_bags(text, leave_out, weights, are_shared));
                assert!(same[0] == same[1], "{text}, {leave_out:?}, {} weights", weights.len());
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn the_stores_own_pool_gives_the_same_bits_from_any_thread() {
    let on_rayon = || train_on(Box::new(recstore::Rayon), SimdLevel::detect(), ADAGRAD);
    let expected = train_on(Box::new(Serial), SimdLevel::detect(), ADAGRAD);
    assert!(on_rayon() == expected);
    assert!(Pool::new(2).0.install(on_rayon) == expected);
}

#[test]
fn rows_do_not_depend_on_the_order_of_insertion() {
    let train_after = |insert: &dyn Fn(&mut Vec<i64>), optimizer| {
        let store = LocalStore::new(Pool::new(2));
        let table = open(&store, optimizer);
        let mut ids = ids();
        insert(&mut ids);
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * DIM]);
        store.lookup(table, &ids, true, &mut indices, &mut rows).unwrap();
        store.delete(table, &ids[..ids.len() / 2]).unwrap();
        train(&store, table);
        bits(&store, table)
    };
    for optimizer in &optimizers() {
        let expected = train_after(&|ids| ids.clear(), optimizer);
        assert!(train_after(&|ids| ids.sort_unstable(), optimizer) == expected, "{optimizer} ascending");
        assert!(train_after(&|ids| ids.reverse(), optimizer) == expected, "{optimizer} backwards");
    }
}
