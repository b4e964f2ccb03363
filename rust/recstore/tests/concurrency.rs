//! Threads that update, read, delete, open and drop at once see whole updates only, and nothing is lost.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use numbered::Numbered;
use rayon::prelude::*;
use recstore::{
    EmbeddingStore, Error, Executor, GradientChunk, GradientCollector, LocalStore, Serial, Step, TableConfig,
    TableId, TableUpdate,
};

const DIM: usize = 8;
/// Rows of one update: several blocks, and enough of them for every loop to run on several threads.
const IDS: i64 = 10_000;
const WRITERS: usize = 3;
const STEPS: usize = 40;
/// Starts at zero; a gradient of -1 counts one up.
const COUNTER: &str =
    r#"{"block_size": 100, "initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1}}"#;

/// Two threads, on which whole loops of the store run.
struct Pool(rayon::ThreadPool);

impl Executor for Pool {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.install(|| (0..count).into_par_iter().for_each(body));
    }

    fn num_threads(&self) -> usize {
        self.0.current_num_threads()
    }
}

fn store() -> LocalStore {
    LocalStore::new(Box::new(Pool(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap())))
}

fn open(store: &LocalStore, name: &str) -> TableId {
    store.open_numbered(name, &TableConfig::from_json(DIM, COUNTER).unwrap()).unwrap()
}

fn count_up(store: &LocalStore, table: TableId, ids: &[i64]) -> Result<(), Error> {
    let gradients = vec![-1.0; ids.len() * DIM];
    let chunks = vec![GradientChunk::new(ids, &gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

fn read(store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    store.read(table, ids, &mut rows).unwrap();
    rows
}

fn is_uniform(rows: &[f32]) -> bool {
    rows.iter().all(|value| value == &rows[0])
}

/// Runs `work` on `WRITERS` threads, and `watch` over and over on another until they are done.
fn race(work: impl Fn(usize) + Sync, watch: impl Fn() + Sync) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                watch();
            }
        });
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn({
                    let work = &work;
                    move || work(writer)
                })
            })
            .collect();
        let finished: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        watcher.join().unwrap();
        finished.into_iter().for_each(|writer| writer.unwrap());
    });
}

#[test]
fn a_reader_sees_an_update_of_many_rows_whole_or_not_at_all() {
    let store = store();
    let table = open(&store, "t");
    let ids: Vec<i64> = (0..IDS).collect();
    let work = |_| (0..STEPS).for_each(|_| count_up(&store, table, &ids).unwrap());
    race(work, || assert!(is_uniform(&read(&store, table, &ids))));
    assert!(read(&store, table, &ids).iter().all(|&value| value == (WRITERS * STEPS) as f32));
}

#[test]
fn every_update_of_overlapping_ids_counts_once() {
    let store = store();
    let table = open(&store, "t");
    // Writer w takes every (w + 1)th id, twice each.
    let ids_of =
        |writer: usize| -> Vec<i64> { (0..IDS).step_by(writer + 1).flat_map(|id| [id, id]).collect() };
    let work = |writer| (0..STEPS).for_each(|_| count_up(&store, table, &ids_of(writer)).unwrap());
    race(work, || assert!(read(&store, table, &[0, IDS - 1]).chunks(DIM).all(is_uniform)));
    for id in 0..IDS {
        let writers = (0..WRITERS as i64).filter(|writer| id % (writer + 1) == 0).count();
        assert_eq!(read(&store, table, &[id]), [(2 * writers * STEPS) as f32; DIM]);
    }
}

#[test]
fn rows_stay_whole_while_others_delete_and_insert_them() {
    let store = store();
    let table = open(&store, "t");
    let ids: Vec<i64> = (0..IDS).collect();
    let work = |writer| {
        for step in 0..STEPS {
            match (writer + step) % 3 {
                0 => count_up(&store, table, &ids).unwrap(),
                1 => _ = store.delete(table, &ids).unwrap(),
                _ => store.write(table, &ids, &vec![step as f32; ids.len() * DIM]).unwrap(),
            }
        }
    };
    race(work, || assert!(is_uniform(&read(&store, table, &ids))));
    let statistics = store.statistics(table).unwrap();
    assert_eq!(statistics.inserts - statistics.deletes, statistics.rows as u64);
}

#[test]
fn a_lookup_that_inserts_finds_its_rows_though_others_delete_them() {
    let store = store();
    let table = open(&store, "t");
    let ids: Vec<i64> = (0..IDS).collect();
    let work = |_| {
        for _ in 0..STEPS {
            let (mut indices, mut rows) = (vec![-1; ids.len()], vec![0.0; ids.len() * DIM]);
            store.lookup(table, &ids, true, &mut indices, &mut rows).unwrap();
            assert!(!indices.contains(&-1));
            assert_eq!(HashSet::<i64>::from_iter(indices).len(), ids.len());
        }
    };
    race(work, || _ = store.delete(table, &ids).unwrap());
}

#[test]
fn one_table_comes_of_a_name_opened_by_all_at_once() {
    let store = store();
    for round in 0..STEPS {
        let barrier = Barrier::new(WRITERS);
        let open_at_once = || {
            barrier.wait();
            open(&store, &round.to_string())
        };
        let tables: HashSet<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS).map(|_| scope.spawn(open_at_once)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(tables.len(), 1);
    }
    assert_eq!(store.table_names().unwrap().len(), STEPS);
}

#[test]
fn dropping_a_table_under_its_users_refuses_them_and_leaves_others_alone() {
    let store = store();
    let kept = open(&store, "kept");
    let work = |_| {
        for _ in 0..STEPS {
            let table = open(&store, "dropped");
            match count_up(&store, table, &[1, 2, 3]) {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error, Error::UnknownHandle { operation: "emb_update", handle: table.0 });
                }
            }
            count_up(&store, kept, &[1, 2, 3]).unwrap();
        }
    };
    race(work, || _ = store.drop_table("dropped"));
    assert_eq!(read(&store, kept, &[1, 2, 3]), [(WRITERS * STEPS) as f32; 3 * DIM]);
}

#[test]
fn gradients_accepted_while_others_are_applied_are_applied_later() {
    let store = store();
    let (first, second) = (open(&store, "first"), open(&store, "second"));
    let collector = GradientCollector::default();
    let work = |_| {
        for table in [first, second].into_iter().cycle().take(2 * STEPS) {
            let opened = store.table("accept_grad", table).unwrap();
            collector.accept_copy(table, &*opened, &[7], &[-1.0; DIM], DIM).unwrap();
        }
    };
    race(work, || assert_eq!(GradientCollector::apply_to(&store, &[&collector]), Ok(0)));
    GradientCollector::apply_to(&store, &[&collector]).unwrap();
    for table in [first, second] {
        assert_eq!(read(&store, table, &[7]), [(WRITERS * STEPS) as f32; DIM]);
    }
}

#[cfg(feature = "rayon")]
#[test]
fn calls_from_within_rayon_tasks_do_not_wait_for_each_other() {
    let store = LocalStore::default();
    let table = open(&store, "t");
    let ids: Vec<i64> = (0..IDS).collect();
    let tasks = || {
        (0..200).into_par_iter().for_each(|task| match task % 4 {
            0 => assert!(is_uniform(&read(&store, table, &ids))),
            _ => count_up(&store, table, &ids).unwrap(),
        });
    };
    let (finished, wait) = std::sync::mpsc::channel();
    // Threads that wait for each other cannot be joined, so the process ends where they do.
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..STEPS).for_each(|_| count_up(&store, table, &ids).unwrap());
        });
        scope.spawn(|| {
            tasks();
            finished.send(()).unwrap();
        });
        let in_time = wait.recv_timeout(std::time::Duration::from_secs(60));
        if in_time.is_err() {
            eprintln!("calls from within rayon tasks wait for each other");
            std::process::abort();
        }
    });
    assert_eq!(read(&store, table, &[0]), [(150 + STEPS) as f32; DIM]);
}

#[test]
fn a_serial_store_is_as_safe() {
    let store = LocalStore::new(Box::new(Serial));
    let table = open(&store, "t");
    race(
        |_| (0..STEPS).for_each(|_| count_up(&store, table, &[1, 2]).unwrap()),
        || assert!(is_uniform(&read(&store, table, &[1, 2]))),
    );
    assert_eq!(read(&store, table, &[1, 2]), [(WRITERS * STEPS) as f32; 2 * DIM]);
}
