//! Training while servers are killed and connections break: it ends with the rows of training that nothing disturbs.
//!
//! Servers are processes of their own, behind proxies that cut connections, delay them, and lose and double bytes.
//! `RECSTORE_KILL_ROUNDS` says how often a server is killed in each test, by default 8 times.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;
mod processes;
mod proxy;

use std::collections::BTreeMap;
use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::config;
use numbered::Numbered;
use processes::{Process, free_port, run_test};
use proxy::{Fault, Proxy, Random, some_fault};
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, Result, Serial, Shard, Step, TableConfig, TableId,
    TableUpdate,
};
use recstore_ps::RemoteStore;

const DIM: usize = 4;
const SHARDS: usize = 2;
/// Longer than any server is down; whoever waits longer hangs.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Tells a child that it is a worker: its servers.
const WORKER: &str = "RECSTORE_TEST_WORKER";

fn rounds() -> u64 {
    env::var("RECSTORE_KILL_ROUNDS").map_or(8, |rounds| rounds.parse().unwrap())
}

/// Servers in processes, and a proxy before each.
struct Shards {
    servers: Vec<Process>,
    proxies: Vec<Proxy>,
    _directory: tempfile::TempDir,
}

impl Shards {
    fn start(faults: impl Fn(u64) -> Box<dyn FnMut() -> [Fault; 2] + Send>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let start = |number| Process::start(directory.path(), free_port(), Shard { number, of: SHARDS });
        let servers: Vec<_> = (0..SHARDS).map(start).collect();
        let proxies =
            (0..).zip(&servers).map(|(shard, server)| Proxy::start(server.address(), faults(shard)));
        Self { proxies: proxies.collect(), servers, _directory: directory }
    }

    /// Servers whose connections all break sooner or later.
    fn behind_bad_connections() -> Self {
        Self::start(|shard| {
            let mut random = Random(rounds() + shard);
            Box::new(move || [any_fault(&mut random), any_fault(&mut random)])
        })
    }

    fn addresses(&self) -> Vec<String> {
        self.proxies.iter().map(|proxy| proxy.address.clone()).collect()
    }

    /// Kills a server now and then, and starts it again.
    fn kill(&mut self, rounds: u64) {
        let mut random = Random(rounds);
        for _ in 0..rounds {
            thread::sleep(Duration::from_millis(20 + random.below(100)));
            self.servers[random.below(SHARDS as u64) as usize].kill_and_start_again();
        }
    }
}

fn any_fault(random: &mut Random) -> Fault {
    match random.below(4) {
        0 => Fault::Drop(random.below(6_000) as usize),
        _ => some_fault(random, 6_000),
    }
}

/// A client that gives calls up soon, for behind a lost byte nothing comes.
fn connected(addresses: &[String]) -> RemoteStore {
    repeated(|| {
        RemoteStore::connect(config(addresses.to_vec(), Duration::from_millis(250)), Box::new(Serial))
    })
}

/// Repeats a call until the servers can be reached.
fn repeated<T>(call: impl Fn() -> Result<T>) -> T {
    let started = Instant::now();
    loop {
        match call() {
            Ok(done) => return done,
            Err(Error::Unavailable { .. }) if started.elapsed() < TIMEOUT => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn opened(store: &dyn EmbeddingStore, optimizer: &str) -> TableId {
    let json =
        format!(r#"{{"optimizer": {optimizer}, "initializer": {{"kind": "constant", "value": 0.5}}}}"#);
    let config = TableConfig::from_json(DIM, &json).unwrap();
    repeated(|| store.open_numbered("t", &config))
}

fn step(store: &dyn EmbeddingStore, table: TableId, ids: &[i64], gradients: &[f32]) {
    repeated(|| {
        let chunks = vec![GradientChunk::new(ids, gradients, DIM)];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }])
    });
}

/// Makes change `number` of worker `worker` and returns what came of it. Gradients are multiples of 2^-10.
fn act(store: &dyn EmbeddingStore, table: TableId, worker: u64, number: u64, has_others: bool) -> usize {
    let mut random = Random(worker << 32 | number);
    let ids: Vec<i64> = (0..1 + random.below(20)).map(|_| random.below(50) as i64 - 25).collect();
    let mut gradient = || (random.below(2_049) as f32 - 1_024.0) / 1_024.0;
    let gradients: Vec<f32> = (0..ids.len() * DIM).map(|_| gradient()).collect();
    match number % 8 {
        3 if !has_others => repeated(|| store.delete(table, &ids)),
        5 if !has_others => repeated(|| store.write(table, &ids, &gradients).map(|()| 0)),
        _ => {
            step(store, table, &ids, &gradients);
            0
        }
    }
}

/// The bits of all rows and of `slot`, the step, and how many rows were updated.
fn contents(store: &dyn EmbeddingStore, table: TableId, slot: &str) -> impl PartialEq + std::fmt::Debug {
    let mut ids = repeated(|| store.ids(table));
    ids.sort_unstable();
    let rows = repeated(|| {
        let mut rows = vec![0.0; ids.len() * DIM];
        store.read(table, &ids, &mut rows).map(|()| rows)
    });
    let slot = repeated(|| store.read_slot(table, slot, &ids)).unwrap_or_default();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let counted = repeated(|| store.statistics(table));
    (ids, bits(rows), bits(slot), counted.step, counted.updates)
}

#[test]
fn one_worker_ends_with_the_rows_of_an_undisturbed_run() {
    const ADAGRAD: &str = r#"{"kind": "adagrad", "lr": 0.1}"#;
    let mut shards = Shards::behind_bad_connections();
    let store = connected(&shards.addresses());
    let table = opened(&store, ADAGRAD);
    let is_over = AtomicBool::new(false);
    let made = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut made = Vec::new();
            while !is_over.load(Ordering::Relaxed) || made.len() < 100 {
                made.push(act(&store, table, 0, made.len() as u64, false));
            }
            made
        });
        shards.kill(rounds());
        is_over.store(true, Ordering::Relaxed);
        worker.join().unwrap()
    });
    let local = LocalStore::new(Box::new(Serial));
    let twin = opened(&local, ADAGRAD);
    let expected: Vec<_> = (0..made.len() as u64).map(|number| act(&local, twin, 0, number, false)).collect();
    assert_eq!((contents(&store, table, "state_sum"), made), (contents(&local, twin, "state_sum"), expected));
}

#[test]
fn three_workers_end_with_the_rows_of_an_undisturbed_run() {
    // Of steps by multiples of 2^-13 no sum is rounded, so their order does not matter.
    const SGD: &str = r#"{"kind": "sgd", "lr": 0.125}"#;
    let mut shards = Shards::behind_bad_connections();
    let addresses = shards.addresses();
    let is_over = AtomicBool::new(false);
    let made = thread::scope(|scope| {
        let work = |worker| {
            let store = connected(&addresses);
            let (table, mut made) = (opened(&store, SGD), 0);
            while !is_over.load(Ordering::Relaxed) || made < 50 {
                act(&store, table, worker, made, true);
                made += 1;
            }
            (worker, made)
        };
        let workers: Vec<_> = (0..3).map(|worker| scope.spawn(move || work(worker))).collect();
        shards.kill(rounds());
        is_over.store(true, Ordering::Relaxed);
        workers.into_iter().map(|worker| worker.join().unwrap()).collect::<BTreeMap<_, _>>()
    });
    let local = LocalStore::new(Box::new(Serial));
    let twin = opened(&local, SGD);
    for (worker, made) in made {
        (0..made).for_each(|number| _ = act(&local, twin, worker, number, true));
    }
    let store = connected(&addresses);
    let table = opened(&store, SGD);
    assert_eq!(contents(&store, table, ""), contents(&local, twin, ""));
}

const COUNTING: &str = r#"{"kind": "sgd", "lr": 1.0}"#;

/// Adds one to the rows of the ids `2 * number` and `2 * number + 1`, which lie on different servers.
fn count(store: &dyn EmbeddingStore, table: TableId, number: i64) {
    step(store, table, &[2 * number, 2 * number + 1], &[-1.0; 2 * DIM]);
}

/// Is a worker, in a process of its own, until it is killed.
#[test]
fn work() {
    let Ok(addresses) = env::var(WORKER) else { return };
    let store = connected(&addresses.split(' ').map(str::to_owned).collect::<Vec<_>>());
    let table = opened(&store, COUNTING);
    count(&store, table, 0);
    println!("working");
    loop {
        count(&store, table, 0);
    }
}

#[test]
fn workers_go_on_when_one_is_killed() {
    let shards = Shards::start(|_| Box::new(|| [Fault::None; 2]));
    let addresses = shards.addresses();
    for _ in 0..rounds().min(10) {
        let (mut victim, _) = run_test("work", WORKER, &addresses.join(" "), "working");
        let is_gone = AtomicBool::new(false);
        let made = thread::scope(|scope| {
            let work = |number| {
                let store = connected(&addresses);
                let (table, mut made) = (opened(&store, COUNTING), 0);
                // What is made when the other one is gone.
                let mut afterwards = 0;
                while afterwards < 20 {
                    count(&store, table, number);
                    made += 1;
                    afterwards += i32::from(is_gone.load(Ordering::Relaxed));
                }
                made
            };
            let workers: Vec<_> = [1, 2].map(|number| scope.spawn(move || work(number))).into();
            thread::sleep(Duration::from_millis(100));
            victim.kill().unwrap();
            victim.wait().unwrap();
            is_gone.store(true, Ordering::Relaxed);
            workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
        });
        let store = connected(&addresses);
        let table = opened(&store, COUNTING);
        let mut rows = vec![0.0; 6 * DIM];
        store.read(table, &[0, 1, 2, 3, 4, 5], &mut rows).unwrap();
        let counts: Vec<f32> = rows.chunks(DIM).map(|row| row[0] - 0.5).collect();
        assert_eq!(counts[2..], [made[0], made[0], made[1], made[1]].map(|made: i32| made as f32));
        // The last step of the one killed may have reached one server.
        assert!(counts[0] > 0.0 && (counts[0] - counts[1]).abs() <= 1.0, "{counts:?}");
        store.clear(table).unwrap();
    }
}
