//! What a store says of its memory agrees with what the system says of the process, and a limit is kept.
//!
//! Each measurement runs in a process of its own: what others freed before would be used again unseen.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]
#![cfg(target_os = "linux")]

mod numbered;

use std::env;
use std::fs;
use std::process::Command;

use numbered::Numbered;
use recstore::{EmbeddingStore, GradientChunk, LocalStore, Serial, Step, TableConfig, TableId, TableUpdate};

/// Tells a child what to measure.
const SHAPE: &str = "RECSTORE_TEST_SHAPE";

const BATCH: usize = 8_192;

/// Runs a test of this file again, in a process of its own, for each shape.
fn in_children(test: &str, shapes: &[&str]) {
    for shape in shapes {
        let mut child = Command::new(env::current_exe().unwrap());
        let output = child.args(["--exact", test, "--nocapture"]).env(SHAPE, shape).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{shape}: {}{text}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Returns a line of the system's account of this process, in bytes.
fn account(name: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let kibibytes = line.trim_start_matches(':').trim().split(' ').next().unwrap();
    kibibytes.parse::<f64>().unwrap() * 1024.0
}

/// Takes steps of the ids from `start` to `end`.
fn step(store: &LocalStore, table: TableId, ids: std::ops::Range<i64>, gradients: &[f32]) {
    let dim = store.dim(table).unwrap();
    for start in ids.clone().step_by(BATCH) {
        let batch: Vec<i64> = (start..(start + BATCH as i64).min(ids.end)).map(|id| id * 1_000_003).collect();
        let chunks = vec![GradientChunk::new(&batch, &gradients[..batch.len() * dim], dim)];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    }
}

/// A store that has taken a step already, so that what threads and allocator keep is there.
fn warm(dim: usize, config: &str) -> (LocalStore, Vec<f32>) {
    let store = LocalStore::new(Box::new(Serial));
    let gradients = vec![0.25; BATCH * dim];
    let table = store.open_numbered("warm", &TableConfig::from_json(dim, config).unwrap()).unwrap();
    step(&store, table, 0..BATCH as i64, &gradients);
    store.drop_table("warm").unwrap();
    (store, gradients)
}

fn parsed(shape: &str) -> (usize, i64, String) {
    let parts: Vec<&str> = shape.splitn(3, ' ').collect();
    (parts[0].parse().unwrap(), parts[1].parse().unwrap(), parts[2].to_owned())
}

fn check_growth(what: &str, store: &LocalStore, table: TableId, baseline: f64) {
    let (told, grown) = (store.statistics(table).unwrap().memory, account("VmRSS") - baseline);
    let difference = told.bytes() as f64 - grown;
    assert!(difference.abs() <= grown * 0.1, "{what}: the process has grown by {grown}, told are {told:?}");
}

#[test]
fn statistics_agree_with_the_growth_of_the_process() {
    let Ok(shape) = env::var(SHAPE) else {
        return in_children(
            "statistics_agree_with_the_growth_of_the_process",
            &[
                r#"1 900000 {"optimizer": {"kind": "sgd"}}"#,
                r#"8 400000 {"optimizer": {"kind": "rowwise_adagrad"}, "dtype": "bfloat16"}"#,
                r#"16 200000 {"optimizer": {"kind": "adagrad"}}"#,
                r#"33 100000 {"optimizer": {"kind": "adamw"}, "dtype": "float16"}"#,
                r#"64 60000 {"optimizer": {"kind": "adam"}}"#,
                r#"200 30000 {"optimizer": {"kind": "ftrl"}}"#,
            ],
        );
    };
    let (dim, rows, config) = parsed(&shape);
    let (store, gradients) = warm(dim, &config);
    let baseline = account("VmRSS");
    let table = store.open_numbered("t", &TableConfig::from_json(dim, &config).unwrap()).unwrap();
    step(&store, table, 0..rows, &gradients);
    check_growth("filled", &store, table, baseline);
    let half: Vec<i64> = (0..rows).step_by(2).map(|id| id * 1_000_003).collect();
    store.delete(table, &half).unwrap();
    drop(half);
    let memory = store.statistics(table).unwrap().memory;
    assert!(memory.free_bytes >= memory.row_bytes + memory.slot_bytes, "{memory:?}");
    check_growth("after deletes", &store, table, baseline);
}

#[test]
fn a_limit_is_kept_as_seen_from_outside() {
    const LIMIT: u64 = 48 << 20;
    let Ok(shape) = env::var(SHAPE) else {
        return in_children(
            "a_limit_is_kept_as_seen_from_outside",
            &[
                r#"64 380000 {"optimizer": {"kind": "adagrad"}"#,
                r#"16 900000 {"optimizer": {"kind": "adam"}, "dtype": "bfloat16""#,
            ],
        );
    };
    let (dim, rows, config) = parsed(&shape);
    let (store, gradients) = warm(dim, &format!("{config}}}"));
    let directory = tempfile::tempdir().unwrap();
    let baseline = account("VmRSS");
    let text = format!(r#"{config}, "memory_limit": {LIMIT}, "disk": {:?}}}"#, directory.path());
    let table = store.open_numbered("t", &TableConfig::from_json(dim, &text).unwrap()).unwrap();
    for _ in 0..2 {
        step(&store, table, 0..rows, &gradients);
    }
    let memory = store.statistics(table).unwrap().memory;
    let peak = account("VmHWM") - baseline;
    // Buffers of a step, and what an array takes while it moves to a larger one.
    let beside = (4 << 20) as f64;
    assert!(peak <= LIMIT as f64 + beside && memory.bytes() <= LIMIT, "{peak} at most, told are {memory:?}");
    assert!(memory.disk_bytes > LIMIT && memory.bytes() > LIMIT * 8 / 10, "{memory:?}");
}

/// Writes a row of each id, in batches.
fn write_all(config: &str, dim: usize, ids: impl Iterator<Item = i64>) -> recstore::MemoryUse {
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("t", &TableConfig::from_json(dim, config).unwrap()).unwrap();
    let (ids, rows): (Vec<i64>, _) = (ids.collect(), vec![0.5; BATCH * dim]);
    for batch in ids.chunks(BATCH) {
        store.write(table, batch, &rows[..batch.len() * dim]).unwrap();
    }
    store.statistics(table).unwrap().memory
}

#[test]
fn rows_of_ids_in_order_take_little_more_than_rows_and_state() {
    let memory = write_all(r#"{"optimizer": {"kind": "adagrad"}}"#, 64, 0..1_000_000);
    let ratio = memory.bytes() as f64 / (memory.row_bytes + memory.slot_bytes) as f64;
    assert_eq!((memory.row_bytes + memory.slot_bytes, memory.linear_ids), (512_000_000, 1_000_000));
    assert!(ratio <= 1.025, "{ratio} times rows and state: {memory:?}");
}

#[test]
fn ids_all_over_int64_take_what_docs_operations_says() {
    const ROWS: u64 = 1_000_000;
    let ids = (1..=ROWS).map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15).cast_signed());
    let memory = write_all(r#"{"optimizer": {"kind": "sgd"}}"#, 16, ids);
    assert_eq!(memory.hash_ids, ROWS);
    let [index, free] = [memory.index_bytes, memory.free_bytes].map(|bytes| bytes as f64 / ROWS as f64);
    assert!((37.0..=39.0).contains(&index) && free <= 2.0, "{index} bytes a row and {free} free: {memory:?}");
}
