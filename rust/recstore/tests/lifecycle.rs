//! Which rows a table has by admission and eviction never depends on time, threads or a save on the way.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use checkpoints::{State, load, open, save, state, store, update};
use numbered::Numbered;
use recstore::{
    EmbeddingStore, GradientChunk, LocalStore, Rayon, SaveKind, Serial, Step, TableId, TableUpdate,
};

const DIM: usize = 2;

/// Ids of a step: some come at every one, most once or twice.
fn ids_of(step: u64) -> Vec<i64> {
    let often = (0..200).map(|id| id * 7);
    let rare = (0..3_000).map(|place| ((step * 3_000 + place) / 2 * 2_654_435_761 % 40_009) as i64);
    often.chain(rare).collect()
}

fn step(store: &LocalStore, table: TableId, number: u64) {
    let ids = ids_of(number);
    let gradients: Vec<f32> = (0..ids.len() * DIM).map(|place| (place % 13) as f32 * 0.01 - 0.05).collect();
    update(store, table, &ids, &gradients);
}

/// A table from which rows leave for each reason; the sweep has one step's time, or several.
fn config(delay: u64) -> String {
    format!(
        r#"{{"optimizer": {{"kind": "adagrad", "lr": 0.1}}, "admission": {{"kind": "count", "threshold": 2}},
            "eviction": {{"ttl": 17, "min_norm": 0.01, "capacity": 9000, "policy": "lfu", "interval": 5, "delay": {delay}}}}}"#
    )
}

fn trained(store: &LocalStore, delay: u64, steps: u64) -> State {
    let table = open(store, "t", DIM, &config(delay));
    (1..=steps).for_each(|number| step(store, table, number));
    state(store)
}

#[test]
fn equal_inputs_give_equal_rows_whatever_the_threads_and_the_time_of_a_sweep() {
    for delay in [1, 4] {
        let first = trained(&store(), delay, 60);
        assert!(first["t"].statistics.evictions > 1_000, "{:?}", first["t"].statistics);
        for _ in 0..3 {
            assert_eq!(trained(&LocalStore::new(Box::new(Rayon)), delay, 60), first);
        }
    }
}

#[test]
fn a_save_between_a_sweep_and_the_leaving_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let through = trained(&store(), 4, 60);
    let mut stopped = store();
    let mut table = open(&stopped, "t", DIM, &config(4));
    for number in 1..=60 {
        step(&stopped, table, number);
        save(&stopped, directory.path(), if number % 3 == 0 { SaveKind::Full } else { SaveKind::Auto })
            .unwrap();
        if number % 7 == 0 {
            let before = state(&stopped);
            stopped = store();
            load(&stopped, directory.path()).unwrap();
            table = stopped.find_numbered("t").unwrap().unwrap();
            assert_eq!(state(&stopped), before);
        }
    }
    assert_eq!(state(&stopped), through);
}

#[test]
fn a_dry_run_tells_what_would_leave_and_changes_nothing() {
    let store = store();
    let table = open(&store, "t", 1, r#"{"eviction": {"ttl": 2}}"#);
    for ids in [[1, 2], [2, 3], [3, 4], [4, 5]] {
        update(&store, table, &ids, &[1.0; 2]);
    }
    let before = state(&store);
    assert_eq!(store.evict(table, true), Ok(vec![1]));
    assert_eq!(state(&store), before);
    assert_eq!(store.evict(table, false), Ok(vec![1]));
    let evictions = store.statistics(table).unwrap().evictions;
    assert_eq!((store.ids(table).unwrap(), evictions), (vec![2, 3, 4, 5], 1));
    let plain = open(&store, "plain", 1, "");
    let message = store.evict(plain, true).unwrap_err().to_string();
    assert_eq!(message, "evict: table \"plain\" has no eviction");
}

#[test]
fn what_is_written_after_a_sweep_stays() {
    let store = store();
    let config = r#"{"eviction": {"ttl": 1, "interval": 3, "delay": 2}, "block_size": 4}"#;
    let table = open(&store, "t", 1, config);
    update(&store, table, &[1, 2, 3], &[1.0; 3]);
    update(&store, table, &[9], &[1.0]);
    update(&store, table, &[9], &[1.0]);
    // The sweep after step 3 chose 1, 2 and 3.
    store.write(table, &[2], &[7.0]).unwrap();
    store.delete(table, &[3]).unwrap();
    store.write(table, &[3], &[8.0]).unwrap();
    update(&store, table, &[9], &[1.0]);
    assert_eq!(store.num_rows(table), Ok(4));
    update(&store, table, &[9], &[1.0]);
    assert_eq!(store.ids(table).unwrap().len(), 3);
    assert_eq!(checkpoints::read(&store, table, &[2, 3]), [7.0, 8.0]);
}

#[test]
fn a_sweep_outlives_its_table() {
    let store = LocalStore::new(Box::new(Serial));
    for _ in 0..50 {
        let table = open(&store, "t", 1, r#"{"eviction": {"ttl": 1, "interval": 1}}"#);
        let ids: Vec<i64> = (0..20_000).collect();
        update(&store, table, &ids, &vec![1.0; ids.len()]);
        update(&store, table, &ids[..9], &[1.0; 9]);
        store.drop_table("t").unwrap();
    }
}

#[test]
fn ids_that_are_only_counted_are_held_against_the_limit() {
    const LIMIT: usize = 1 << 20;
    let (store, config) = (store(), r#""admission": {"kind": "count", "threshold": 9}"#);
    let table = open(&store, "t", DIM, &format!(r#"{{{config}, "memory_limit": {LIMIT}}}"#));
    let mut next = 0;
    let refusal = loop {
        let ids: Vec<i64> = (next..next + 2_000).collect();
        let gradients = vec![0.5; ids.len() * DIM];
        let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
        if let Err(refusal) = store.update(&[TableUpdate { table, chunks, step: Step::Next }]) {
            break refusal;
        }
        next += 2_000;
        let statistics = store.statistics(table).unwrap();
        assert_eq!((statistics.rows, statistics.candidates), (0, next as usize));
        assert!(statistics.bytes <= LIMIT, "{statistics:?}");
    };
    assert!(refusal.to_string().contains("table \"t\""), "{refusal}");
    assert!((10_000..100_000).contains(&next), "{next}");
    assert_eq!(store.statistics(table).unwrap().candidates, next as usize);
    // Those that are known are counted on.
    let known: Vec<i64> = (0..2_000).collect();
    for _ in 0..7 {
        update(&store, table, &known, &vec![0.5; known.len() * DIM]);
    }
}
