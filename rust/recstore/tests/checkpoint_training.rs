//! A snapshot is of one moment, however many threads train while it is written.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::Duration;

use checkpoints::linked::Linked;
use checkpoints::{load, loaded, save_keeping, state, store};
use recstore::{LocalStore, SaveKind};

const TRAINERS: usize = 2;
/// Small tables would else grow by thousands of groups between two saves.
const PAUSE: Duration = Duration::from_micros(300);
const KINDS: [SaveKind; 5] =
    [SaveKind::Full, SaveKind::Delta, SaveKind::Delta, SaveKind::Auto, SaveKind::Delta];

/// Trains, deletes and makes groups again on threads of their own until `body` ends.
fn while_training(store: &LocalStore, linked: Linked, body: impl FnOnce() + Send) {
    let done = AtomicBool::new(false);
    let made = [const { AtomicI64::new(0) }; TRAINERS];
    let goes_on = || !done.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for (trainer, made) in made.iter().enumerate() {
            scope.spawn(move || {
                // One in any case: a busy machine may not let a thread run before the end.
                for group in (1..).take_while(|&group| group == 1 || goes_on()) {
                    linked.train(store, trainer, group);
                    made.store(group, Ordering::Release);
                    thread::sleep(PAUSE);
                }
            });
        }
        scope.spawn(|| {
            for turn in (0..).take_while(|_| goes_on()) {
                let trainer = turn as usize % TRAINERS;
                let newest = made[trainer].load(Ordering::Acquire);
                let groups = (newest - 6).max(1)..=newest;
                groups.for_each(|group| linked.churn(store, trainer, group, (turn + group) % 2 == 0));
            }
        });
        let body = scope.spawn(|| {
            body();
        });
        let ended = body.join();
        done.store(true, Ordering::Relaxed);
        ended.unwrap();
    });
}

fn holds_every_snapshot_to_one_moment(store: &LocalStore, shared_rows: i64, saves: usize) {
    let linked = Linked::open(store, shared_rows);
    let directory = tempfile::tempdir().unwrap();
    let mut newest = vec![0; TRAINERS];
    while_training(store, linked, || {
        for kind in KINDS.iter().cycle().take(saves) {
            save_keeping(store, directory.path(), *kind, 1).unwrap();
            let snapshot = loaded(directory.path());
            let made = Linked::open(&snapshot, shared_rows).check(&snapshot, TRAINERS);
            assert!(made.iter().zip(&newest).all(|(now, before)| now >= before), "{made:?} after {newest:?}");
            newest = made;
        }
    });
    let now = linked.check(store, TRAINERS);
    assert!(now.iter().all(|groups| *groups > 0) && now.iter().zip(&newest).all(|(now, then)| now >= then));
    save_keeping(store, directory.path(), SaveKind::Delta, 1).unwrap();
    assert_eq!(state(&loaded(directory.path())), state(store));
}

#[test]
fn snapshots_of_large_tables_are_of_one_moment() {
    // Each copy of a table takes several reads, between which it is trained on.
    holds_every_snapshot_to_one_moment(&store(), 300_000, 6);
}

#[test]
fn snapshots_of_small_tables_are_of_one_moment() {
    holds_every_snapshot_to_one_moment(&store(), 100, 25);
}

#[cfg(feature = "rayon")]
#[test]
fn snapshots_are_of_one_moment_when_steps_run_on_several_threads() {
    holds_every_snapshot_to_one_moment(&LocalStore::default(), 50_000, 15);
}

#[test]
fn others_load_whole_snapshots_while_saves_replace_them() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let linked = Linked::open(&store, 2_000);
    linked.train(&store, 0, 1);
    linked.train(&store, 1, 1);
    save_keeping(&store, directory.path(), SaveKind::Full, 1).unwrap();
    let done = AtomicBool::new(false);
    let saves = || {
        for (group, kind) in (2..60).zip(KINDS.into_iter().cycle()) {
            linked.train(&store, 0, group);
            linked.train(&store, 1, group);
            save_keeping(&store, directory.path(), kind, 1).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    };
    let loads = || {
        let mut newest = vec![1, 1];
        while !done.load(Ordering::Relaxed) {
            let snapshot = loaded(directory.path());
            let made = Linked::open(&snapshot, 2_000).check(&snapshot, TRAINERS);
            assert!(made >= newest && made[0] == made[1], "{made:?} after {newest:?}");
            newest = made;
        }
    };
    thread::scope(|scope| {
        let saver = scope.spawn(saves);
        let loader = scope.spawn(loads);
        saver.join().unwrap();
        loader.join().unwrap();
    });
}

#[test]
fn tables_may_be_loaded_while_others_read_and_train_them() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let linked = Linked::open(&store, 1_000);
    linked.train(&store, 0, 1);
    linked.train(&store, 1, 1);
    save_keeping(&store, directory.path(), SaveKind::Full, 1).unwrap();
    let saved = state(&store);
    while_training(&store, linked, || {
        (0..20).for_each(|_| _ = load(&store, directory.path()).unwrap());
    });
    load(&store, directory.path()).unwrap();
    assert_eq!(state(&store), saved);
}
