//! The store's calls, by dim, optimizer and share of duplicates, on one thread.
//!
//! `cargo bench --bench store`, with a part of a name for some of them; `cargo test --bench store` runs each once.
//! Figures beside a yardstick and other libraries are those of `benches/run.py`.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use recstore::{
    BagInput, EmbeddingStore, EmbeddingTable, GradientChunk, LocalStore, PoolingMode, Serial, Step,
    TableConfig, TableUpdate, merge_gradients, optimizers, unique,
};

/// The ids of a batch.
const BATCH: usize = 4_096;

/// The rows of a table.
const ROWS: usize = 50_000;

/// Kinds of optimizers with an option of the table.
const WITH_OPTIONS: [(&str, &str); 4] =
    [("adagrad", BFLOAT16), ("adagrad", FLOAT8), ("adam", BFLOAT16), ("adam", FLOAT8)];

const BFLOAT16: &str = r#", "state_dtype": "bfloat16""#;
const FLOAT8: &str = r#", "state_dtype": "float8""#;

const DIMS: [usize; 4] = [8, 16, 64, 128];

/// Returns ids of `distinct` rows, in an order without a pattern.
fn ids(count: usize, distinct: usize) -> Vec<i64> {
    let mixed = |number: usize| (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
    (0..count).map(|number| id(mixed(number + 1) as usize % distinct)).collect()
}

/// Returns the id of a row: all over int64, none twice.
fn id(row: usize) -> i64 {
    (row as i64).wrapping_mul(-7_046_029_254_386_353_131)
}

/// A store on the calling thread with a table of that dim, optimizer and option, all its rows written.
fn store(dim: usize, (optimizer, option): (&str, &str)) -> (LocalStore, Arc<dyn EmbeddingTable>) {
    let store = LocalStore::new(Box::new(Serial));
    let config = format!(r#"{{"optimizer": {{"kind": "{optimizer}"}}{option}}}"#);
    let config = TableConfig::from_json(dim, &config);
    let table = config.and_then(|config| store.open_table("t", &config)).expect("the configuration is valid");
    let all: Vec<i64> = (0..ROWS).map(id).collect();
    table.write(&all, &vec![0.01; ROWS * dim]).expect("the rows are finite");
    (store, table)
}

fn lookups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    group.throughput(Throughput::Elements(BATCH as u64));
    for dim in DIMS {
        let ((_store, table), mut rows) = (store(dim, ("sgd", "")), vec![0.0; BATCH * dim]);
        for (what, ids) in [("rows", ids(BATCH, ROWS)), ("initial values", (1..=BATCH as i64).collect())] {
            group.bench_function(BenchmarkId::new(what, dim), |bencher| {
                bencher.iter(|| table.read(black_box(&ids), &mut rows));
            });
        }
    }
    group.finish();
}

fn bags(criterion: &mut Criterion) {
    const BAG: usize = 16;
    let mut group = criterion.benchmark_group("bag");
    group.throughput(Throughput::Elements(BATCH as u64));
    let ids = ids(BATCH, ROWS);
    let offsets: Vec<i64> = (0..=BATCH / BAG).map(|bag| (bag * BAG) as i64).collect();
    for dim in DIMS {
        let ((store, table), mut pooled) = (store(dim, ("sgd", "")), vec![0.0; BATCH / BAG * dim]);
        for (what, mode) in [("sum", PoolingMode::Sum), ("mean", PoolingMode::Mean)] {
            let input =
                BagInput { ids: &ids, offsets: &offsets, mode, per_sample_weights: None, padding_idx: None };
            group.bench_function(BenchmarkId::new(what, dim), |bencher| {
                bencher.iter(|| store.bag(&[table.id()], black_box(input), &mut pooled, &mut [], &mut []));
            });
        }
    }
    group.finish();
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update");
    group.throughput(Throughput::Elements(BATCH as u64));
    let ids = ids(BATCH, ROWS);
    let rules = optimizers();
    let kinds = rules.iter().filter_map(|rule| rule["kind"].as_str());
    for optimizer in kinds.map(|kind| (kind, "")).chain(WITH_OPTIONS) {
        for dim in DIMS {
            let ((store, table), gradients) = (store(dim, optimizer), vec![0.01; BATCH * dim]);
            let name = format!("{}{}", optimizer.0, optimizer.1);
            group.bench_function(BenchmarkId::new(name, dim), |bencher| {
                bencher.iter(|| {
                    let chunks = vec![GradientChunk::new(&ids, &gradients, dim)];
                    store.update(&[TableUpdate { table: table.id(), chunks, step: Step::Next }])
                });
            });
        }
    }
    group.finish();
}

fn duplicates(criterion: &mut Criterion) {
    const DIM: usize = 16;
    let mut group = criterion.benchmark_group("duplicates");
    group.throughput(Throughput::Elements(BATCH as u64));
    let gradients = vec![0.01; BATCH * DIM];
    let (mut distinct, mut inverse) = (vec![0; BATCH], vec![0; BATCH]);
    for share in [2, 4, 64] {
        let ids = ids(BATCH, BATCH / share);
        group.bench_function(BenchmarkId::new("unique", share), |bencher| {
            bencher.iter(|| unique(&Serial, black_box(&ids), &mut distinct, &mut inverse));
        });
        group.bench_function(BenchmarkId::new("merge_gradients", share), |bencher| {
            let chunk = GradientChunk::new(&ids, &gradients, DIM);
            bencher.iter(|| merge_gradients(&Serial, DIM, black_box(std::slice::from_ref(&chunk))));
        });
    }
    group.finish();
}

fn rows_that_come_and_go(criterion: &mut Criterion) {
    const DIM: usize = 16;
    let mut group = criterion.benchmark_group("rows");
    group.throughput(Throughput::Elements(BATCH as u64));
    let ((_store, table), rows) = (store(DIM, ("adagrad", "")), vec![0.01; BATCH * DIM]);
    let fresh: Vec<i64> = (ROWS..ROWS + BATCH).map(id).collect();
    group.bench_function("insert", |bencher| {
        let delete = || table.delete(&fresh);
        bencher.iter_batched(delete, |_| table.write(&fresh, &rows), BatchSize::PerIteration);
    });
    group.bench_function("delete", |bencher| {
        let insert = || table.write(&fresh, &rows);
        bencher.iter_batched(insert, |_| table.delete(&fresh), BatchSize::PerIteration);
    });
    group.finish();
}

criterion_group!(benches, lookups, bags, steps, duplicates, rows_that_come_and_go);
criterion_main!(benches);
