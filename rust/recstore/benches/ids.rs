//! Ids of strings and of n-grams, on one thread, beside xxHash.
//!
//! `cargo bench --bench ids`; `cargo test --bench ids` runs each once.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use recstore::{NgramTables, Serial, bucket_ids, cross_ids, hash_strings};
use twox_hash::{XxHash3_64, XxHash64};

/// The ids of a batch.
const BATCH: usize = 65_536;

/// Returns numbers without a pattern.
fn numbers(count: usize) -> Vec<i64> {
    (0..count as i64).map(|number| number.wrapping_mul(-7_046_029_254_386_353_131) >> 40).collect()
}

/// Strings of `shortest` bytes up to twice as many, and where each begins.
fn strings(shortest: i32) -> (Vec<u8>, Vec<i32>) {
    let mut offsets = vec![0];
    for number in numbers(BATCH) {
        let length = shortest + (number as i32).rem_euclid(shortest + 1);
        offsets.push(offsets.last().copied().unwrap_or(0) + length);
    }
    let end = offsets.last().copied().unwrap_or(0);
    ((0..end).map(|place| (place * 37) as u8).collect(), offsets)
}

fn text(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("strings");
    group.throughput(Throughput::Elements(BATCH as u64));
    let mut ids = vec![0; BATCH];
    for shortest in [2, 8, 32] {
        let (characters, offsets) = strings(shortest);
        group.bench_function(BenchmarkId::new("hash_strings", shortest), |bencher| {
            bencher.iter(|| hash_strings(&Serial, black_box(&characters), &offsets, 0, &mut ids));
        });
        let mut by = |name: &str, hash: fn(&[u8]) -> u64| {
            group.bench_function(BenchmarkId::new(name, shortest), |bencher| {
                bencher.iter(|| {
                    for (id, pair) in ids.iter_mut().zip(black_box(&offsets).windows(2)) {
                        *id = hash(&characters[pair[0] as usize..pair[1] as usize]) as i64;
                    }
                });
            });
        };
        by("xxh64", |text| XxHash64::oneshot(0, text));
        by("xxh3", XxHash3_64::oneshot);
    }
    group.finish();
}

fn tokens(criterion: &mut Criterion) {
    const ROW: usize = 1_024;
    let mut group = criterion.benchmark_group("ids");
    group.throughput(Throughput::Elements(BATCH as u64));
    let (numbers, mut ids) = (numbers(BATCH), vec![0; BATCH]);
    for n in [1, 2, 3] {
        let tables = NgramTables::new(n, 1, 1_000_003, 0).expect("all counts are in range");
        group.bench_function(BenchmarkId::new("ngrams", n), |bencher| {
            bencher.iter(|| tables.ids(&Serial, black_box(&numbers), ROW, &mut ids));
        });
    }
    group.bench_function("crosses", |bencher| {
        bencher.iter(|| cross_ids(&Serial, &[black_box(&numbers), &numbers], 0, &mut ids));
    });
    group.bench_function("buckets", |bencher| {
        bencher.iter(|| bucket_ids(&Serial, black_box(&numbers), 1_000_003, 0, &mut ids));
    });
    group.finish();
}

criterion_group!(benches, text, tokens);
criterion_main!(benches);
