//! A process killed at any moment leaves a directory that holds the last save it completed, or the one after.

// tier: test

#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::env;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use checkpoints::linked::Linked;
use checkpoints::{loaded, save_keeping, snapshots, state, store, table_files};
use recstore::{EmbeddingStore, LoadOptions, LocalStore, SaveKind, SaveOptions, compact};
use serde_json::json;

/// The directory in which a process of the test saves; not set in the test itself.
const DIRECTORY: &str = "RECSTORE_KILL_DIRECTORY";
/// How often a process is killed, if not as often as usual.
const ROUNDS: &str = "RECSTORE_KILL_ROUNDS";
const USUAL_ROUNDS: u64 = 20;
const SHARED_ROWS: i64 = 3_000;
const TRAINER: usize = 0;
/// A process lives at most for as long as it took to start and save so many times.
const SAVES_OF_THE_LONGEST_LIFE: i64 = 16;

/// Trains and saves until it is killed; goes on from what the directory holds.
fn train_and_save(directory: &Path) {
    let store = store();
    let linked = Linked::open(&store, SHARED_ROWS);
    let (checkpoint, completed) = (directory.join("checkpoint"), directory.join("completed"));
    // The first process finds nothing.
    _ = store.load(&checkpoint, &LoadOptions::default());
    let first = linked.check(&store, 1)[0] + 1;
    let kinds = [SaveKind::Auto, SaveKind::Delta, SaveKind::Delta, SaveKind::Full, SaveKind::Delta];
    let mut file = fs::File::create(&completed).unwrap();
    for (group, kind) in (first..).zip(kinds.iter().cycle()) {
        linked.train(&store, TRAINER, group);
        (group - 4..group).for_each(|older| {
            linked.churn(&store, TRAINER, older.max(1), (group + older) % 2 == 0);
        });
        let mut options = SaveOptions::default();
        options.kind = *kind;
        options.keep = 1 + group as usize % 3;
        options.metadata = json!(group).into();
        store.save(&checkpoint, &options).unwrap();
        writeln!(file, "{group}").unwrap();
    }
}

/// Runs a test in a process of its own, with the directory that it then works in.
fn start(test: &str, directory: &Path) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DIRECTORY, directory).stdout(Stdio::null());
    command.spawn().unwrap()
}

/// How often a process is killed.
fn rounds() -> u64 {
    env::var(ROUNDS).map_or(USUAL_ROUNDS, |rounds| rounds.parse().unwrap())
}

/// How long the process of a round lives, as a part of the longest life: lives of all lengths, spread evenly by steps of
/// the golden section.
fn life(round: u64) -> f64 {
    (round as f64 * 0.618_034).fract()
}

/// Returns how long a process takes here, and now, to start and to save some times.
fn longest_life(test: &str) -> Duration {
    let directory = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut child = start(test, directory.path());
    while last_completed(directory.path()) < SAVES_OF_THE_LONGEST_LIFE {
        assert_eq!(child.try_wait().unwrap(), None, "the process ended by itself");
        thread::sleep(Duration::from_millis(5));
    }
    let life = begun.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    life
}

/// Returns the number of the last save that was reported whole.
fn last_completed(directory: &Path) -> i64 {
    let text = fs::read_to_string(directory.join("completed")).unwrap_or_default();
    let (whole, _) = text.rsplit_once('\n').unwrap_or_default();
    whole.lines().last().map_or(0, |line| line.parse().unwrap())
}

/// Loads what a killed process left, checks that it is of one moment, and returns its number.
fn check(directory: &Path) -> i64 {
    let checkpoint = directory.join("checkpoint");
    let store = LocalStore::new(Box::new(recstore::Serial));
    let report = store.load(&checkpoint, &LoadOptions::default()).unwrap();
    let made = Linked::open(&store, SHARED_ROWS).check(&store, 1)[0];
    assert_eq!(report.metadata, json!(made).into());
    made
}

#[test]
fn a_killed_process_loses_no_completed_save() {
    if let Some(directory) = env::var_os(DIRECTORY) {
        return train_and_save(Path::new(&directory));
    }
    let rounds = rounds();
    let longest_life = longest_life("a_killed_process_loses_no_completed_save");
    let directory = tempfile::tempdir().unwrap();
    let mut newest = 0;
    for round in 0..rounds {
        fs::write(directory.path().join("completed"), "").unwrap();
        let mut child = start("a_killed_process_loses_no_completed_save", directory.path());
        thread::sleep(longest_life.mul_f64(life(round)));
        assert_eq!(child.try_wait().unwrap(), None, "the process ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        let completed = last_completed(directory.path()).max(newest);
        if completed > 0 || directory.path().join("checkpoint/manifest.json").exists() {
            newest = check(directory.path());
            assert!(newest >= completed, "the directory holds {newest}, but {completed} was completed");
        }
    }
    println!("{rounds} kills, {newest} saves");
    assert!(newest as u64 > rounds, "only {newest} saves in {rounds} lives");
    clean_up_after_the_killed(&directory.path().join("checkpoint"));
}

/// What killed saves left is gone after the next one.
fn clean_up_after_the_killed(checkpoint: &Path) {
    let store = loaded(checkpoint);
    save_keeping(&store, checkpoint, SaveKind::Full, 1).unwrap();
    let names: Vec<_> = table_files(checkpoint);
    assert_eq!((names.len(), snapshots(checkpoint).len()), (2, 1), "{names:?}");
    assert_eq!(state(&loaded(checkpoint)), state(&store));
}

/// Saves a full snapshot and deltas of enough rows that compacting them takes a while.
fn save_chain(checkpoint: &Path) {
    let store = store();
    let linked = Linked::open(&store, 20 * SHARED_ROWS);
    for group in 1..=3 {
        linked.train(&store, TRAINER, group);
        save_keeping(&store, checkpoint, if group == 1 { SaveKind::Full } else { SaveKind::Delta }, 1)
            .unwrap();
    }
}

/// Copies the files of a directory to a new one.
fn copied(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

#[test]
fn a_killed_compaction_leaves_the_directory_as_before_or_as_after() {
    if let Some(directory) = env::var_os(DIRECTORY) {
        compact(Path::new(&directory), None).unwrap();
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let chain = directory.path().join("chain");
    save_chain(&chain);
    let expected = state(&loaded(&chain));
    let longest = {
        let whole = directory.path().join("whole");
        copied(&chain, &whole);
        let began = Instant::now();
        start("a_killed_compaction_leaves_the_directory_as_before_or_as_after", &whole).wait().unwrap();
        assert_eq!(snapshots(&whole).len(), 1);
        began.elapsed()
    };
    let (mut before, mut after) = (0, 0);
    for round in 0..rounds() {
        let checkpoint = directory.path().join(format!("killed-{round}"));
        copied(&chain, &checkpoint);
        let mut child = start("a_killed_compaction_leaves_the_directory_as_before_or_as_after", &checkpoint);
        thread::sleep(longest.mul_f64(life(round)));
        child.kill().unwrap();
        child.wait().unwrap();
        match snapshots(&checkpoint).len() {
            3 => before += 1,
            1 => after += 1,
            other => panic!("{other} snapshots"),
        }
        assert!(state(&loaded(&checkpoint)) == expected, "another state after round {round}");
        // What the killed one left is in nobody's way.
        compact(&checkpoint, None).unwrap();
        assert!(state(&loaded(&checkpoint)) == expected, "another state when compacted after round {round}");
        let store = loaded(&checkpoint);
        save_keeping(&store, &checkpoint, SaveKind::Delta, 1).unwrap();
        // Nothing has changed since: the delta needs no files.
        assert_eq!(table_files(&checkpoint).len(), 2);
        fs::remove_dir_all(&checkpoint).unwrap();
    }
    println!("{before} killed before and {after} after the moment that counts");
    assert!(before > 0, "no compaction was killed");
}
