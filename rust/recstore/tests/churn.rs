//! A table that ids come to and leave for ever stays as large and as fast as it was.
//!
//! `RECSTORE_CHURN` says how many ids come, by default 2 million. With 20 million and more, times are compared as well.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use std::time::{Duration, Instant};

use numbered::Numbered;
use recstore::{EmbeddingStore, GradientChunk, LocalStore, Serial, Step, TableConfig, TableUpdate};

const DIM: usize = 8;
const IDS_PER_STEP: usize = 5_000;
const CAPACITY: usize = 100_000;
/// Some huge pages, and what an allocator keeps for the threads of sweeps.
const SLACK_BYTES: usize = 16 << 20;
/// Enough steps for a median that one slow moment does not move.
const STEPS_COMPARED: usize = 1_000;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

#[test]
fn a_table_with_a_capacity_stays_as_it_is_for_ever() {
    let inserts = std::env::var("RECSTORE_CHURN").map_or(2_000_000, |count| count.parse().unwrap());
    let store = LocalStore::new(Box::new(Serial));
    let config = format!(
        r#"{{"optimizer": {{"kind": "adagrad"}}, "eviction": {{"capacity": {CAPACITY}, "interval": 10, "delay": 5}}}}"#
    );
    let table = store.open_numbered("t", &TableConfig::from_json(DIM, &config).unwrap()).unwrap();
    let gradients = vec![0.5; IDS_PER_STEP * DIM];
    let steps = inserts / IDS_PER_STEP;
    let take = |table, step: usize| {
        let first = (step * IDS_PER_STEP) as i64;
        let ids: Vec<i64> = (first..first + IDS_PER_STEP as i64).collect();
        let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
        let begun = Instant::now();
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
        begun.elapsed()
    };
    // From here on as many rows leave as come.
    let settled = 60.min(steps / 4);
    let mut bytes = Vec::new();
    for step in 0..steps {
        take(table, step);
        if step >= settled && step % 50 == 0 {
            bytes.push((store.statistics(table).unwrap().bytes, resident_bytes()));
        }
    }
    let statistics = store.statistics(table).unwrap();
    assert_eq!(statistics.inserts, (steps * IDS_PER_STEP) as u64);
    assert_eq!(statistics.evictions, statistics.deletes);
    assert_eq!(statistics.rows as u64, statistics.inserts - statistics.deletes);
    // A sweep, and what comes until its rows leave.
    assert!(statistics.rows <= CAPACITY + 15 * IDS_PER_STEP, "{statistics:?}");
    let (first, last) = (bytes[0], bytes[bytes.len() - 1]);
    assert!(last.0 <= first.0 + first.0 / 100, "the table grew from {} to {} bytes", first.0, last.0);
    assert!(last.1 <= first.1 + SLACK_BYTES, "the process grew from {} to {} bytes", first.1, last.1);
    if steps >= settled + 4 * STEPS_COMPARED {
        // They take turns, so that a slow moment of the machine is one of both.
        let young = store.open_numbered("young", &TableConfig::from_json(DIM, &config).unwrap()).unwrap();
        (0..settled).for_each(|step| {
            take(young, step);
        });
        let (of_young, of_old): (Vec<_>, Vec<_>) =
            (0..STEPS_COMPARED).map(|step| (take(young, settled + step), take(table, steps + step))).unzip();
        let (young, old) = (median(&of_young), median(&of_old));
        println!("after {inserts} ids a step takes {old:?}, of a young table {young:?}; {first:?} {last:?}");
        assert!(old <= young.mul_f64(1.2), "a step takes {old:?}, of a young table {young:?}");
    }
}
