//! A load takes little more memory than the tables that it makes, however the rows were sharded.

// tier: test

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use checkpoints::{insert, open, store};
use numbered::Numbered;
use recstore::{
    EmbeddingStore, InProcessStore, LoadOptions, LocalStore, SaveOptions, Shard, commit_snapshot,
    new_snapshot_name,
};

/// The directory that a process of the test loads, and `number/of` of its shard; not set in the test itself.
const DIRECTORY: &str = "RECSTORE_MEMORY_DIRECTORY";
const SHARD: &str = "RECSTORE_MEMORY_SHARD";
const DIM: usize = 32;
const ROWS: i64 = 600_000;
const CONFIG: &str = r#"{"optimizer": {"kind": "adagrad"}}"#;
const SAVED_BY: usize = 4;
/// What a process takes without a store, and what is read at a time.
const BESIDES: u64 = 24 << 20;

/// Saves a snapshot of four shards.
fn save_parts(directory: &Path) {
    let (snapshot, options) = (new_snapshot_name(), SaveOptions::default());
    for number in 0..SAVED_BY {
        let (store, shard) = (store(), Shard { number, of: SAVED_BY });
        let ids: Vec<i64> = (0..ROWS).filter(|id| shard.holds(*id)).collect();
        insert(&store, open(&store, "t", DIM, CONFIG), &ids);
        store.save_part(directory, &snapshot, shard, &options).unwrap();
    }
    commit_snapshot(directory, &snapshot, SAVED_BY, &options).unwrap();
}

/// Loads a shard and tells the rows, the bytes of the store, and the most bytes that the process ever had.
fn load_and_tell(directory: &Path) -> String {
    let shard = env::var(SHARD).unwrap();
    let (number, of) = shard.split_once('/').unwrap();
    let shard = Shard { number: number.parse().unwrap(), of: of.parse().unwrap() };
    let keeps = |id| shard.holds(id);
    let mut options = LoadOptions::default();
    if shard.of > 1 {
        options.keeps = Some(&keeps);
    }
    let store: LocalStore = store();
    store.load(directory, &options).unwrap();
    let statistics = store.statistics(store.find_numbered("t").unwrap().unwrap()).unwrap();
    format!("told {} {} {}", statistics.rows, statistics.bytes, peak())
}

fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Returns what a process that loads a shard told: rows, bytes, peak.
fn told(directory: &Path, number: usize, of: usize) -> [u64; 3] {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "a_load_takes_little_more_memory_than_its_tables", "--nocapture"]);
    let output = command.env(DIRECTORY, directory).env(SHARD, format!("{number}/{of}")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, numbers) = text.split_once("told ").unwrap();
    let mut numbers = numbers.split_whitespace().map(|number| number.parse().unwrap());
    [(); 3].map(|()| numbers.next().unwrap())
}

#[test]
fn a_load_takes_little_more_memory_than_its_tables() {
    if let Some(directory) = env::var_os(DIRECTORY) {
        println!("{}", load_and_tell(Path::new(&directory)));
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    save_parts(directory.path());
    for of in [1, 3] {
        let mut rows = 0;
        for number in 0..of {
            let [own, bytes, peak] = told(directory.path(), number, of);
            rows += own;
            assert!(bytes > own * (2 * DIM * size_of::<f32>()) as u64, "{bytes} bytes of {own} rows");
            assert!(
                peak <= bytes + bytes / 5 + BESIDES,
                "{peak} bytes for a store of {bytes}, shard {number}/{of}"
            );
        }
        assert_eq!(rows, ROWS as u64);
    }
}
