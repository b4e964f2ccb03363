//! Changes that reached only some servers, since their program was killed or a server was down: the next program that
//! opens the table trains, saves and loads, and the servers' rows can be spread anew.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
mod proxy;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cluster::{Cluster, config as remote_config, connect};
use proxy::{Fault, Proxy};
use recstore::{
    EmbeddingStore, EmbeddingTable, Error, GradientChunk, LoadOptions, LocalStore, Result, SaveOptions,
    Serial, Shard, Step, TableConfig, TableUpdate,
};
use recstore_ps::{KeptState, RemoteStore, Server, ServerConfig, reshard};

const DIM: usize = 2;
const IDS: i64 = 20;

/// Decays idle rows by what the steps leave, and has a sweep every second step: both must be the same on all shards.
fn table_config() -> TableConfig {
    let text = r#"{"optimizer": {"kind": "adamw", "lr": 0.1, "weight_decay": 0.1, "catch_up": true},
        "eviction": {"capacity": 1000, "interval": 2, "delay": 1}}"#;
    TableConfig::from_json(DIM, text).unwrap()
}

fn step(store: &RemoteStore, number: i64) -> Result<()> {
    let table = store.open_table("t", &table_config())?;
    take_step(store, &*table, number)
}

fn take_step(store: &RemoteStore, table: &dyn EmbeddingTable, number: i64) -> Result<()> {
    let ids: Vec<i64> = (0..IDS).collect();
    let gradients = vec![number as f32; ids.len() * DIM];
    let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
    store.update(&[TableUpdate { table: table.id(), chunks, step: Step::Next }]).map(drop)
}

fn rows(store: &RemoteStore) -> BTreeMap<i64, Vec<u32>> {
    let table = store.find_table("t").unwrap().unwrap();
    let ids = table.ids().unwrap();
    let mut rows = vec![0.0; ids.len() * DIM];
    table.read(&ids, &mut rows).unwrap();
    let bits = |row: &[f32]| row.iter().map(|value| value.to_bits()).collect();
    ids.into_iter().zip(rows.chunks(DIM).map(bits)).collect()
}

fn start(data: &Path, of: usize) -> (Vec<Server>, Vec<Arc<LocalStore>>) {
    let start = |number| {
        let store = Arc::new(LocalStore::new(Box::new(Serial)));
        let (mut config, shard) = (ServerConfig::default(), Shard { number, of });
        config.shard = shard;
        config.kept = Some(KeptState::logged(&data.join(format!("shard-{number}-of-{of}"))));
        (Server::start(store.clone(), config).unwrap(), store)
    };
    (0..of).map(start).unzip()
}

fn stop(servers: Vec<Server>) {
    servers.into_iter().for_each(|server| server.stop(Duration::from_secs(5)));
}

fn client(servers: &[Server]) -> RemoteStore {
    let addresses = servers.iter().map(|server| server.address().to_string()).collect();
    connect(addresses, Duration::from_secs(20))
}

fn steps(stores: &[Arc<LocalStore>]) -> Vec<u64> {
    let step = |store: &Arc<LocalStore>| {
        store.find_table("t").unwrap().map_or(0, |table| table.statistics().unwrap().step)
    };
    stores.iter().map(step).collect()
}

/// Lets the first connection's first `bytes` through, and then nothing any more.
fn cut_off(server: &Server, bytes: usize) -> Proxy {
    let mut left = Some(bytes);
    Proxy::start(server.address().to_string(), move || {
        let there = left.take().map_or(Fault::Cut(0), Fault::Cut);
        [there, Fault::None]
    })
}

/// Kills a program that has taken a step when so many bytes have come to shard 0, and so many to shard 1.
fn killed_at(bytes: [usize; 2]) -> Vec<u64> {
    let data = tempfile::tempdir().unwrap();
    let (servers, stores) = start(data.path(), 2);
    step(&client(&servers), 1).unwrap();
    let proxies: Vec<Proxy> =
        servers.iter().zip(bytes).map(|(server, bytes)| cut_off(server, bytes)).collect();
    let addresses = proxies.iter().map(|proxy| proxy.address.clone()).collect();
    let killed = RemoteStore::connect(remote_config(addresses, Duration::from_millis(200)), Box::new(Serial));
    _ = killed.and_then(|store| (2..4).try_for_each(|number| step(&store, number)));
    let found = steps(&stores);

    let store = client(&servers);
    step(&store, 5).unwrap();
    let after = found.iter().max().unwrap() + 1;
    assert_eq!(steps(&stores), [after; 2], "killed at {bytes:?}, which left {found:?}");
    let saved = data.path().join("saved");
    store.save(&saved, &SaveOptions::default()).unwrap();
    let expected = rows(&store);
    drop(store);
    stop(servers);
    reshard(data.path(), data.path(), 3, None).unwrap();
    let (servers, stores) = start(data.path(), 3);
    let store = client(&servers);
    assert_eq!((rows(&store), steps(&stores)), (expected.clone(), vec![after; 3]), "{bytes:?}");
    step(&store, 6).unwrap();
    store.load(&saved, &LoadOptions::default()).unwrap();
    assert_eq!((rows(&store), steps(&stores)), (expected, vec![after; 3]), "{bytes:?}");
    stop(servers);
    found
}

#[test]
fn a_program_killed_at_any_point_of_a_step_leaves_nothing_that_stops_the_next() {
    const ALL: usize = 1 << 20;
    // A greeting, some requests about the table, and two steps of some hundred bytes.
    let points: Vec<usize> = (0..30).map(|part| part * 100 + 31).chain([ALL]).collect();
    let cases = points.iter().flat_map(|&at| [[at, ALL], [ALL, at]]).collect::<Vec<_>>();
    let mut left: Vec<Vec<u64>> = Vec::new();
    for some in cases.chunks(16) {
        thread::scope(|scope| {
            let running: Vec<_> = some.iter().map(|&bytes| scope.spawn(move || killed_at(bytes))).collect();
            left.extend(running.into_iter().map(|run| run.join().unwrap()));
        });
    }
    // Each kind of half step was among them, and none, and all.
    for kind in [[1, 1], [2, 1], [1, 2], [3, 2], [2, 3], [3, 3]] {
        assert!(left.iter().any(|steps| *steps == kind), "no {kind:?} among {left:?}");
    }
}

/// Ends the connections to a server.
fn take_down(proxy: &Proxy) {
    proxy.set_down(true);
    // What waits for bytes looks some times a second.
    thread::sleep(Duration::from_millis(200));
}

#[test]
fn a_save_of_shards_a_step_apart_names_both_steps_and_the_way_out() {
    let cluster = Cluster::start(2);
    let proxies = proxies_of(&cluster);
    let store = through(&proxies, Duration::from_millis(300));
    let directory = tempfile::tempdir().unwrap();
    let table = store.open_table("t", &table_config()).unwrap();
    take_down(&proxies[1]);
    let failed = take_step(&store, &*table, 1).unwrap_err();
    assert!(matches!(failed, Error::Unavailable { shard: 1, .. }), "{failed}");
    proxies[1].set_down(false);
    // The step may be taken again: opening the table does not count it as lost.
    store.open_table("t", &table_config()).unwrap();
    assert_eq!(steps(&cluster.stores), [1, 0]);
    take_step(&store, &*table, 1).unwrap();
    assert_eq!(steps(&cluster.stores), [1, 1]);

    take_down(&proxies[1]);
    take_step(&store, &*table, 2).unwrap_err();
    proxies[1].set_down(false);
    take_step(&store, &*table, 3).unwrap();
    let refused = store.save(directory.path(), &SaveOptions::default()).unwrap_err().to_string();
    let both = "shard 0 saved table \"t\" at step 3, shard 1 at step 2: a step reached only some shards";
    assert!(refused.contains(both) && refused.contains("the next one that opens the table"), "{refused}");
    let next = cluster.connect();
    next.open_table("t", &table_config()).unwrap();
    next.save(directory.path(), &SaveOptions::default()).unwrap();
    store.save(directory.path(), &SaveOptions::default()).unwrap();
}

#[test]
fn programs_that_open_a_table_leave_one_that_trains_it_alone() {
    let cluster = Cluster::start(2);
    let store = cluster.connect();
    let is_over = AtomicBool::new(false);
    let taken = thread::scope(|scope| {
        let opening = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                cluster.connect().open_table("t", &table_config()).unwrap();
            }
        });
        let table = store.open_table("t", &table_config()).unwrap();
        let taken = 2_000;
        (1..=taken).for_each(|number| take_step(&store, &*table, number).unwrap());
        is_over.store(true, Ordering::Relaxed);
        opening.join().unwrap();
        taken
    });
    assert_eq!(steps(&cluster.stores), [taken as u64; 2]);
}

/// Starts a proxy before each server.
fn proxies_of(cluster: &Cluster) -> Vec<Proxy> {
    let start = |address| Proxy::start(address, || [Fault::None, Fault::None]);
    cluster.addresses().into_iter().map(start).collect()
}

fn through(proxies: &[Proxy], timeout: Duration) -> RemoteStore {
    connect(proxies.iter().map(|proxy| proxy.address.clone()).collect(), timeout)
}

/// Another program opens the table and saves it, which is refused while `steps` are those of a step that may go on.
fn open_and_save_elsewhere(cluster: &Cluster, expected: [u64; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let other = cluster.connect();
    other.open_table("t", &table_config()).unwrap();
    assert_eq!(steps(&cluster.stores), expected, "an opening has no part in the step of another program");
    let refused = other.save(directory.path(), &SaveOptions::default()).unwrap_err().to_string();
    let told =
        format!("the shards of table \"t\" are at the steps {expected:?}: a step reached only some shards");
    assert!(refused.contains(&told) && refused.contains("is still connected"), "{refused}");
}

#[test]
fn a_step_on_its_way_over_a_slow_line_is_counted_once() {
    let cluster = Cluster::start(2);
    let proxies = proxies_of(&cluster);
    let store = through(&proxies, Duration::from_secs(20));
    let table = store.open_table("t", &table_config()).unwrap();
    thread::scope(|scope| {
        proxies[1].is_slow.store(true, Ordering::Relaxed);
        let step = scope.spawn(|| take_step(&store, &*table, 1));
        while steps(&cluster.stores) != [1, 0] {
            thread::sleep(Duration::from_millis(5));
        }
        open_and_save_elsewhere(&cluster, [1, 0]);
        proxies[1].is_slow.store(false, Ordering::Relaxed);
        step.join().unwrap().unwrap();
    });
    take_step(&store, &*table, 2).unwrap();
    assert_eq!(steps(&cluster.stores), [2, 2]);
    store.save(tempfile::tempdir().unwrap().path(), &SaveOptions::default()).unwrap();
}

#[test]
fn a_step_that_is_repeated_after_an_error_is_counted_once_though_others_open_the_table_and_step_it() {
    let cluster = Cluster::start(2);
    let proxies = proxies_of(&cluster);
    let (store, worker) = (through(&proxies, Duration::from_millis(300)), cluster.connect());
    let table = store.open_table("t", &table_config()).unwrap();
    take_down(&proxies[1]);
    take_step(&store, &*table, 1).unwrap_err();
    proxies[1].set_down(false);
    // An asynchronous worker goes on, so that the last step of both shards is its own.
    step(&worker, 2).unwrap();
    open_and_save_elsewhere(&cluster, [2, 1]);
    take_step(&store, &*table, 1).unwrap();
    assert_eq!(steps(&cluster.stores), [2, 2]);
    worker.save(tempfile::tempdir().unwrap().path(), &SaveOptions::default()).unwrap();
}

#[test]
fn a_step_whose_program_has_gone_is_levelled_beside_workers_that_stay() {
    let cluster = Cluster::start(2);
    let proxies = proxies_of(&cluster);
    let (store, worker) = (through(&proxies, Duration::from_millis(300)), cluster.connect());
    let table = store.open_table("t", &table_config()).unwrap();
    take_down(&proxies[1]);
    take_step(&store, &*table, 1).unwrap_err();
    step(&worker, 2).unwrap();
    assert_eq!(steps(&cluster.stores), [2, 1]);
    drop((table, store));
    let next = cluster.connect();
    step(&next, 3).unwrap();
    step(&worker, 4).unwrap();
    assert_eq!(steps(&cluster.stores), [4, 4]);
    next.save(tempfile::tempdir().unwrap().path(), &SaveOptions::default()).unwrap();
}

#[test]
fn tables_that_only_some_servers_have_stop_no_save() {
    let cluster = Cluster::start(2);
    let directory = tempfile::tempdir().unwrap();
    step(&cluster.connect(), 1).unwrap();
    // Of an opening, or a drop, that was cut off.
    cluster.stores[1].open_table("half", &TableConfig::new(DIM)).unwrap();
    let ahead = cluster.stores[0].find_table("t").unwrap().unwrap();
    let chunks = vec![GradientChunk::new(&[], &[], DIM)];
    cluster.stores[0].update(&[TableUpdate { table: ahead.id(), chunks, step: Step::Next }]).unwrap();
    let store = cluster.connect();
    store.save(directory.path(), &SaveOptions::default()).unwrap();
    assert_eq!(steps(&cluster.stores), [2, 2]);
    assert!(cluster.stores[0].find_table("half").unwrap().is_some());
}
