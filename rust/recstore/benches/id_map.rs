//! The id map beside what memory allows: prints one line of JSON a figure.
//!
//! `cargo bench --features internals --bench id_map`; with `--quick` on small maps, to see that it runs.

#![expect(clippy::print_stdout, reason = "its figures are its output")]

use std::hint::black_box;
use std::time::Instant;

use recstore::internals::{IdMap, mix, prefetch, zeroed_lines};

const BATCH: usize = 65_536;
const AHEAD: usize = 32;
const FLOATS_PER_LINE: usize = 16;

fn main() {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let scale = if is_quick { 50 } else { 1 };
    let sizes = [6, 8, 10, 12].map(|millions| millions * 1_000_000 / scale);
    let figures: Vec<Sizes> = sizes.into_iter().map(measure).collect();
    let mean = |of: fn(&Sizes) -> f64| figures.iter().map(of).sum::<f64>() / figures.len() as f64;
    report("find / gather of one line", mean(|figure| figure.find), "x", "<= 1.2");
    report("insert / filling slots, speed", mean(|figure| figure.insert), "x", "");
    report("memory", mean(|figure| figure.bytes_a_key), "bytes a key", "<= 26");
    report_growth("", &(0..20_000_000 / scale).map(id).collect::<Vec<_>>());
    report_growth(", dense in order", &(0..10_000_000 / scale as i64).collect::<Vec<_>>());
    report_growth(", dense in random order", &shuffled(10_000_000 / scale));
}

/// Returns the numbers below `count`, in an order that looks like none.
fn shuffled(count: usize) -> Vec<i64> {
    let mut ids: Vec<i64> = (0..count as i64).collect();
    ids.sort_unstable_by_key(|id| mix(*id));
    ids
}

fn report_growth(what: &str, ids: &[i64]) {
    let growth: Vec<Growth> = (0..3).map(|_| grow(ids)).collect();
    let best = |of: fn(&Growth) -> f64| growth.iter().map(of).fold(f64::INFINITY, f64::min);
    report(&format!("median batch of fresh ids{what}"), best(|run| run.median) * 1e3, "ms", "");
    report(&format!("99th percentile / median batch{what}"), best(|run| run.p99 / run.median), "x", "<= 4");
    report(&format!("slowest / median batch{what}"), best(|run| run.max / run.median), "x", "<= 10");
}

fn report(cell: &str, value: f64, unit: &str, limit: &str) {
    println!(r#"{{"cell": "{cell}", "value": {value:.3}, "unit": "{unit}", "limit": "{limit}"}}"#);
}

/// What was measured with a number of keys.
struct Sizes {
    find: f64,
    insert: f64,
    bytes_a_key: f64,
}

/// Returns the id of a number: all over int64, none twice.
fn id(number: usize) -> i64 {
    mix(number as i64) as i64
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(keys: usize) -> Sizes {
    const ROUNDS: usize = 5;
    let ids: Vec<i64> = (0..keys).map(id).collect();
    let mut map = IdMap::default();
    let mut slots = vec![(0i64, 0u32); keys * 2];
    slots.fill((1, 1)); // Its pages are there before anything is timed.
    let inserts = (0..ROUNDS).map(|_| {
        map = IdMap::default();
        let ours = seconds(|| ids.chunks(BATCH).for_each(|batch| map.insert(batch)));
        seconds(|| fill(&mut slots, &ids)) / ours
    });
    let insert = median(inserts.collect());
    drop(slots);
    Sizes { find: find(&map, keys), insert, bytes_a_key: map.bytes() as f64 / keys as f64 }
}

/// Writes every id to its slot, whatever is there: what inserting comes down to.
fn fill(slots: &mut [(i64, u32)], ids: &[i64]) {
    let count = slots.len() as u128;
    for (number, &id) in ids.iter().enumerate() {
        slots[((u128::from(mix(id)) * count) >> 64) as usize] = (id, number as u32);
    }
    black_box(slots);
}

/// Returns the time of finding a batch over that of reading one line a key at random, in as much memory.
fn find(map: &IdMap, keys: usize) -> f64 {
    const ROUNDS: usize = 200;
    let lines = map.bytes() / (4 * FLOATS_PER_LINE);
    let mut memory = zeroed_lines(lines);
    memory.fill(1.0);
    let mut indices = vec![0; BATCH];
    let ratios = (0..ROUNDS).map(|round| {
        let numbers = (0..BATCH).map(|place| mix((round * BATCH + place) as i64 ^ i64::MIN) as usize % keys);
        let ids: Vec<i64> = numbers.map(id).collect();
        let at: Vec<usize> =
            ids.iter().map(|&id| ((u128::from(mix(id)) * lines as u128) >> 64) as usize).collect();
        let gather = seconds(|| {
            black_box(gather(&memory, &at));
        });
        let ours = seconds(|| map.find(&ids, &mut indices));
        assert!(!indices.contains(&u32::MAX), "an id was not found");
        ours / gather
    });
    median(ratios.collect())
}

fn gather(memory: &[f32], at: &[usize]) -> f32 {
    let mut sum = 0.0;
    for (place, &line) in at.iter().enumerate() {
        if let Some(&ahead) = at.get(place + AHEAD) {
            prefetch(&memory[ahead * FLOATS_PER_LINE..][..1]);
        }
        sum += memory[line * FLOATS_PER_LINE];
    }
    sum
}

/// How long batches of fresh ids take, in seconds.
struct Growth {
    median: f64,
    p99: f64,
    max: f64,
}

fn grow(ids: &[i64]) -> Growth {
    let mut map = IdMap::default();
    let batches = ids.chunks_exact(BATCH.min(ids.len() / 100)).map(|ids| seconds(|| map.insert(ids)));
    let mut times: Vec<f64> = batches.collect();
    times.sort_unstable_by(f64::total_cmp);
    Growth { median: times[times.len() / 2], p99: times[times.len() * 99 / 100], max: times[times.len() - 1] }
}
