//! Whatever a network does to a connection, a change is made once.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;
mod proxy;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use cluster::{Cluster, connect};
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, MemoryUse, Serial, Step, TableConfig, TableId,
    TableUpdate,
};
use recstore_ps::RemoteStore;

use numbered::Numbered;
use proxy::{Fault, Proxy, Random, some_fault};

const DIM: usize = 4;

fn config() -> TableConfig {
    TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "adam", "lr": 0.1}, "dtype": "bfloat16"}"#).unwrap()
}

fn step(store: &dyn EmbeddingStore, table: TableId, number: i64) -> recstore::Result<()> {
    let ids: Vec<i64> = (0..20).map(|place| (place * number) % 37 - 9).collect();
    let gradients: Vec<f32> =
        (0..20 * DIM).map(|value| (value as f32 - 30.0) * 0.1 + number as f32).collect();
    let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

/// Steps, writes, deletes and drops of a test, by number.
fn act(store: &dyn EmbeddingStore, table: TableId, number: i64) -> recstore::Result<usize> {
    match number % 5 {
        3 => store.write(table, &[number, -number], &[number as f32; 2 * DIM]).map(|()| 0),
        4 => store.delete(table, &[number % 37, 5, number - 1, 3]),
        _ => step(store, table, number).map(|()| 0),
    }
}

fn contents(store: &dyn EmbeddingStore, table: TableId) -> String {
    let mut ids = store.ids(table).unwrap();
    ids.sort_unstable();
    let mut rows = vec![0.0; ids.len() * DIM];
    store.read(table, &ids, &mut rows).unwrap();
    let mut statistics = store.statistics(table).unwrap();
    statistics.bytes = 0;
    statistics.memory = MemoryUse::default();
    let slots = store.read_slot(table, "exp_avg", &ids).unwrap();
    format!("{ids:?} {rows:?} {slots:?} {statistics:?}")
}

fn undisturbed(acts: std::ops::Range<i64>) -> (String, Vec<recstore::Result<usize>>) {
    let local = LocalStore::new(Box::new(Serial));
    let table = local.open_numbered("t", &config()).unwrap();
    let made = acts.map(|number| act(&local, table, number)).collect();
    (contents(&local, table), made)
}

/// A cluster behind a proxy for each server.
fn behind_proxies(
    shards: usize,
    timeout: Duration,
    mut faults: impl FnMut(usize) -> Box<dyn FnMut() -> [Fault; 2] + Send>,
) -> (Cluster, Vec<Proxy>, RemoteStore) {
    let cluster = Cluster::start(shards);
    let proxies: Vec<_> = cluster
        .addresses()
        .into_iter()
        .enumerate()
        .map(|(shard, address)| Proxy::start(address, faults(shard)))
        .collect();
    let addresses = proxies.iter().map(|proxy| proxy.address.clone()).collect();
    let store = connect(addresses, timeout);
    (cluster, proxies, store)
}

#[test]
fn changes_are_made_once_over_connections_that_break() {
    const ACTS: i64 = 150;
    for seed in 0..4 {
        let (_cluster, proxies, store) = behind_proxies(2, Duration::from_secs(60), |shard| {
            let mut random = Random(seed * 2 + shard as u64);
            // The first connection is good, so that all begin with a welcome.
            let mut first = true;
            Box::new(move || match std::mem::take(&mut first) {
                true => [Fault::Cut(2_000), Fault::None],
                false => [some_fault(&mut random, 1_200), some_fault(&mut random, 1_200)],
            })
        });
        let table = store.open_numbered("t", &config()).unwrap();
        let made: Vec<_> = (0..ACTS).map(|number| act(&store, table, number)).collect();
        assert_eq!((contents(&store, table), made), undisturbed(0..ACTS), "seed {seed}");
        let connections: u64 = proxies.iter().map(|proxy| proxy.connections.load(Ordering::Relaxed)).sum();
        assert!(connections > 10, "{connections}");
    }
}

#[test]
fn a_step_that_some_servers_have_is_repeated_on_the_others_alone() {
    let (_cluster, proxies, store) =
        behind_proxies(3, Duration::from_millis(300), |_| Box::new(|| [Fault::None, Fault::None]));
    let table = store.open_numbered("t", &config()).unwrap();
    step(&store, table, 1).unwrap();
    for (number, down) in [(2, 1), (3, 0), (4, 2)] {
        proxies[down].set_down(true);
        thread::sleep(Duration::from_millis(60));
        for _ in 0..2 {
            let error = step(&store, table, number).unwrap_err();
            let Error::Unavailable { operation, shard, address, .. } = &error else { panic!("{error}") };
            assert_eq!((*operation, *shard, address), ("emb_update", down, &proxies[down].address));
        }
        proxies[down].set_down(false);
        step(&store, table, number).unwrap();
    }
    let local = LocalStore::new(Box::new(Serial));
    let twin = local.open_numbered("t", &config()).unwrap();
    (1..5).for_each(|number| step(&local, twin, number).unwrap());
    assert_eq!(contents(&store, table), contents(&local, twin));
}

#[test]
fn an_answer_that_was_lost_does_not_make_a_failed_call_happen_twice() {
    // While a proxy is deaf the server does all it is asked, and nobody hears of it.
    let (_cluster, proxies, store) =
        behind_proxies(2, Duration::from_millis(500), |_| Box::new(|| [Fault::None, Fault::None]));
    let table = store.open_numbered("t", &config()).unwrap();
    let mut made = Vec::new();
    for number in 0..15 {
        let deaf = &proxies[number as usize % 2].is_deaf;
        deaf.store(number % 3 == 0, Ordering::Relaxed);
        if number % 3 == 0 {
            let error = act(&store, table, number).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
        deaf.store(false, Ordering::Relaxed);
        made.push(act(&store, table, number));
    }
    assert_eq!((contents(&store, table), made), undisturbed(0..15));
}

#[test]
fn several_clients_change_tables_side_by_side() {
    const STEPS: i64 = 40;
    let cluster = Cluster::start(2);
    let sgd = TableConfig::from_json(
        1,
        r#"{"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}"#,
    );
    let config = sgd.unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = cluster.connect();
                let table = store.open_numbered("t", &config).unwrap();
                for _ in 0..STEPS {
                    let chunks = vec![GradientChunk::new(&[0, 1, 2], &[-1.0; 3], 1)];
                    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
                }
            });
        }
    });
    let store = cluster.connect();
    let table = store.find_numbered("t").unwrap().unwrap();
    let mut rows = [0.0; 3];
    store.read(table, &[0, 1, 2], &mut rows).unwrap();
    assert_eq!(rows, [4.0 * STEPS as f32; 3]);
    assert_eq!(store.statistics(table).unwrap().step, 4 * STEPS as u64);
}

#[test]
fn an_eviction_whose_answer_was_lost_takes_place_once_and_tells_what_left() {
    let (_cluster, proxies, store) =
        behind_proxies(2, Duration::from_millis(500), |_| Box::new(|| [Fault::None, Fault::None]));
    let config = TableConfig::from_json(1, r#"{"eviction": {"capacity": 3, "interval": 1000000}}"#).unwrap();
    let table = store.open_numbered("t", &config).unwrap();
    store.write(table, &(0..20).collect::<Vec<_>>(), &[1.0; 20]).unwrap();
    let leaving = store.evict(table, true).unwrap();
    proxies[1].is_deaf.store(true, Ordering::Relaxed);
    let error = store.evict(table, false).unwrap_err();
    assert!(matches!(error, Error::Unavailable { operation: "evict", shard: 1, .. }), "{error}");
    proxies[1].is_deaf.store(false, Ordering::Relaxed);
    assert_eq!(store.evict(table, false), Ok(leaving.clone()));
    // Each server keeps its share, rounded up.
    assert_eq!((leaving.len(), store.num_rows(table), store.evict(table, false)), (16, Ok(4), Ok(vec![])));
}
