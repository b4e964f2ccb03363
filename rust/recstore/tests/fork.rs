//! A process that forks with calls under way: its child reads on, and cannot lose a change unnoticed.

// tier: test

#![cfg(unix)]
#![expect(unsafe_code, reason = "fork, pthread_atfork, alarm and _exit are foreign functions")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use std::io::{PipeWriter, Read, Write, pipe};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};
use std::thread;

use numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, Executor, GradientChunk, GradientCollector, LoadOptions, LocalStore, Result,
    SaveOptions, Serial, Step, TableConfig, TableId, TableUpdate, fork,
};

const DIM: usize = 16;
/// Enough rows for a loop to run on several threads, so that a child would wait for those it does not have.
const IDS: i64 = 5000;
const FORKS: usize = 30;
const CHILD_SECONDS: u32 = 30;

extern "C" fn before() {
    fork::before();
}
extern "C" fn in_parent() {
    fork::in_parent();
}
extern "C" fn in_child() {
    fork::in_child();
}

/// What a host does once: from then on every fork of the process waits for the calls under way.
fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: 1. the three are functions of the program and neither unwind nor take arguments.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        assert_eq!(failed, 0);
    });
}

/// Runs `work` in a forked child and returns what it reported, or why it did not end well.
fn in_forked_child(
    work: impl FnOnce() -> std::result::Result<(), String>,
) -> std::result::Result<(), String> {
    register();
    let (mut reader, writer) = pipe().unwrap();
    // SAFETY:
    // 1. The child runs `work` and leaves by `_exit`: it never returns into the test's threads, which it lacks.
    // 2. glibc keeps its allocator whole across fork; the store's locks are kept by the functions registered.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        report_and_exit(work, writer);
    }
    drop(writer);
    let mut report = String::new();
    reader.read_to_string(&mut report).unwrap();
    let mut status = 0;
    // SAFETY: 1. `child` is a child of this process that was not waited for; 2. `status` lives through the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    match (report.is_empty(), status) {
        (true, 0) => Ok(()),
        (true, status) => Err(format!("the child ended with status {status:#x}")),
        (false, _) => Err(report),
    }
}

fn report_and_exit(work: impl FnOnce() -> std::result::Result<(), String>, mut writer: PipeWriter) -> ! {
    // SAFETY: 1. no handler is set, so the alarm of a child that hangs ends it.
    unsafe { libc::alarm(CHILD_SECONDS) };
    let outcome =
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("the child panicked".to_owned()));
    let written = writer.write_all(outcome.err().unwrap_or_default().as_bytes());
    // SAFETY: 1. it ends the process; nothing of the parent's is flushed or dropped twice.
    unsafe { libc::_exit(i32::from(written.is_err())) }
}

fn config() -> TableConfig {
    let text =
        r#"{"block_size": 100, "initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1}}"#;
    TableConfig::from_json(DIM, text).unwrap()
}

fn count_up(store: &LocalStore, table: TableId, ids: &[i64]) -> Result<()> {
    let gradients = vec![-1.0; ids.len() * DIM];
    let chunks = vec![GradientChunk::new(ids, &gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

fn read(store: &LocalStore, table: TableId, ids: &[i64]) -> Result<Vec<f32>> {
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    store.read(table, ids, &mut rows).map(|()| rows)
}

fn ensure(holds: bool, what: &str) -> std::result::Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// Forks over and over while two threads update and read `table` of a store on `executor`.
fn fork_under_load(
    executor: Box<dyn Executor>,
    child: impl Fn(&LocalStore, TableId, &[i64]) -> std::result::Result<(), String>,
) {
    let store = LocalStore::new(executor);
    let table = store.open_numbered("t", &config()).unwrap();
    let ids: Vec<i64> = (0..IDS).collect();
    count_up(&store, table, &ids).unwrap();
    let done = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                count_up(&store, table, &ids).unwrap();
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                read(&store, table, &ids).unwrap();
            }
        });
        let outcome = (0..FORKS).try_for_each(|_| in_forked_child(|| child(&store, table, &ids)));
        done.store(true, Ordering::Relaxed);
        outcome
    });
    assert_eq!(outcome, Ok(()));
    assert_eq!(count_up(&store, table, &ids), Ok(()));
}

fn child_reads(store: &LocalStore, table: TableId, ids: &[i64]) -> std::result::Result<(), String> {
    ensure(fork::is_child(), "is_child is false in a child")?;
    let rows = read(store, table, ids).map_err(|error| error.to_string())?;
    ensure(rows[0] >= 1.0 && rows.iter().all(|value| value == &rows[0]), "the child sees half an update")
}

fn child_is_refused(store: &LocalStore, table: TableId, ids: &[i64]) -> std::result::Result<(), String> {
    let before = store.statistics(table);
    let refused = |operation| Some(Error::ForkedChild { operation, table: "t".to_owned() });
    let lookup = store.lookup(table, &[-1], true, &mut [0], &mut [0.0; DIM]);
    ensure(count_up(store, table, ids).err() == refused("emb_update"), "emb_update")?;
    ensure(store.write(table, &[0], &[0.0; DIM]).err() == refused("emb_write"), "emb_write")?;
    ensure(store.delete(table, &[0]).err() == refused("hashtable_delete"), "hashtable_delete")?;
    ensure(store.clear(table).err() == refused("hashtable_clear"), "hashtable_clear")?;
    ensure(lookup.err() == refused("hashtable_lookup"), "hashtable_lookup")?;
    ensure(store.drop_table("t").err() == refused("drop_table"), "drop_table")?;
    ensure(
        store.set_learning_rate(table, 0.5, true).err() == refused("set_learning_rate"),
        "set_learning_rate",
    )?;
    ensure(store.statistics(table) == before, "a refused call changed the statistics")
}

fn child_trains_its_own(store: &LocalStore, _: TableId, ids: &[i64]) -> std::result::Result<(), String> {
    let train = || {
        let own = store.open_numbered("own", &config())?;
        count_up(store, own, ids)?;
        count_up(store, own, ids)?;
        read(store, own, ids)
    };
    let rows = train().map_err(|error| error.to_string())?;
    ensure(rows.iter().all(|&value| value == 2.0), "the child's own table lost an update")
}

#[test]
fn a_child_reads_whole_updates() {
    fork_under_load(Box::new(Serial), child_reads);
}

#[test]
fn a_childs_changes_of_its_parents_tables_are_refused() {
    fork_under_load(Box::new(Serial), child_is_refused);
}

#[test]
fn a_child_trains_tables_of_its_own() {
    fork_under_load(Box::new(Serial), child_trains_its_own);
}

#[cfg(feature = "rayon")]
#[test]
fn a_child_does_not_wait_for_the_threads_of_the_parents_pool() {
    fork_under_load(Box::new(recstore::Rayon), |store, table, ids| {
        child_reads(store, table, ids)?;
        child_is_refused(store, table, ids)?;
        child_trains_its_own(store, table, ids)
    });
}

#[test]
fn a_collector_of_a_child_keeps_the_gradients_that_it_cannot_apply() {
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("t", &config()).unwrap();
    let collector = GradientCollector::default();
    let outcome = in_forked_child(|| {
        let opened = store.table("accept_grad", table).unwrap();
        let accepted = collector.accept_copy(table, &*opened, &[7], &[1.0; DIM], DIM);
        ensure(accepted.is_ok(), "accept_grad")?;
        let refused = GradientCollector::apply_to(&store, &[&collector]);
        ensure(matches!(refused, Err(Error::ForkedChild { .. })), "apply_grads was not refused")?;
        ensure(collector.merged(&Serial, &table).unwrap().ids == [7], "the gradients are gone")
    });
    assert_eq!(outcome, Ok(()));
    assert!(collector.tables().is_empty());
}

#[test]
fn a_grandchild_may_not_change_its_parents_tables_either() {
    let store = LocalStore::new(Box::new(Serial));
    let outcome = in_forked_child(|| {
        let own = store.open_numbered("own", &config()).map_err(|error| error.to_string())?;
        in_forked_child(|| {
            let refused = count_up(&store, own, &[1]);
            ensure(
                matches!(refused, Err(Error::ForkedChild { .. })),
                "the grandchild's update was not refused",
            )
        })
    });
    assert_eq!(outcome, Ok(()));
}

#[test]
fn a_child_may_save_its_own_store_and_not_its_parents() {
    let directory = tempfile::tempdir().unwrap();
    let store = LocalStore::new(Box::new(Serial));
    store.open_numbered("t", &config()).unwrap();
    let options = SaveOptions::default();
    let save = |store: &LocalStore| store.save(directory.path(), &options).map_err(|error| error.to_string());
    let outcome = in_forked_child(|| {
        ensure(
            save(&store).is_err_and(|error| error.starts_with("save: table \"t\"")),
            "the save was not refused",
        )?;
        let own = LocalStore::new(Box::new(Serial));
        own.open_numbered("own", &config()).map_err(|error| error.to_string())?;
        save(&own).map(drop)
    });
    assert_eq!(outcome, Ok(()));
    assert!(
        store.load(directory.path(), &LoadOptions::default()).is_ok_and(|loaded| loaded.tables.len() == 1)
    );
}

#[test]
fn a_child_neither_waits_for_its_parents_save_nor_disturbs_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("t", &config()).unwrap();
    let ids: Vec<i64> = (0..50_000).collect();
    store.write(table, &ids, &vec![1.0; ids.len() * DIM]).unwrap();
    let (options, has_ended) = (SaveOptions::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                store.save(directory.path(), &options).unwrap();
            }
        });
        for _ in 0..20 {
            let outcome = in_forked_child(|| {
                let refused = store.save(directory.path(), &options);
                ensure(matches!(refused, Err(Error::ForkedChild { .. })), "the save was not refused")
            });
            assert_eq!(outcome, Ok(()));
        }
        has_ended.store(true, Ordering::Relaxed);
    });
}

#[test]
fn the_saves_of_a_childs_threads_wait_for_each_other() {
    let store = LocalStore::new(Box::new(Serial));
    let outcome = in_forked_child(|| {
        let own = store.open_numbered("own", &config()).map_err(|error| error.to_string())?;
        let ids: Vec<i64> = (0..5_000).collect();
        store.write(own, &ids, &vec![1.0; ids.len() * DIM]).map_err(|error| error.to_string())?;
        thread::scope(|scope| {
            let saving = || {
                let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
                let save = || store.save(directory.path(), &SaveOptions::default());
                (0..20).try_for_each(|_| save().map(drop)).map_err(|error| error.to_string())
            };
            let threads = [(); 3].map(|()| scope.spawn(saving));
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
        })
    });
    assert_eq!(outcome, Ok(()));
}

#[test]
fn a_child_does_not_load_while_its_parent_saves() {
    let directory = tempfile::tempdir().unwrap();
    let store = LocalStore::new(Box::new(Serial));
    store.open_numbered("t", &config()).unwrap();
    store.save(directory.path(), &SaveOptions::default()).unwrap();
    let outcome = OnceLock::new();
    let fork = || {
        let loaded = in_forked_child(|| {
            let refused = store.load(directory.path(), &LoadOptions::default()).unwrap_err().to_string();
            let message = "the parent of this forked process was saving or loading when it was forked";
            ensure(refused.contains(message), &refused)
        });
        outcome.set(loaded).unwrap();
    };
    let mut options = SaveOptions::default();
    options.on_cut = Some(&fork);
    store.save(directory.path(), &options).unwrap();
    assert_eq!(outcome.get(), Some(&Ok(())));
}
