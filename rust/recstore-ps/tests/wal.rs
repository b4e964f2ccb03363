//! Servers with a log: what was acknowledged survives `kill -9`, and is there once.
//!
//! `RECSTORE_KILL_ROUNDS` says how often servers are killed, by default 10 times.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;
mod processes;
mod proxy;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cluster::{connect, hello};
use numbered::Numbered;
use processes::{Process, free_port, start};
use proxy::Random;
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, Serial, Shard, Step, TableConfig, TableId, TableUpdate,
};
use recstore_ps::codec::Request;
use recstore_ps::{KeptState, Server, ServerConfig};

const DIM: usize = 3;

fn config() -> TableConfig {
    TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "adam", "lr": 0.1}, "dtype": "bfloat16"}"#).unwrap()
}

/// Makes a change of the number `number` and returns what came of it.
fn act(store: &dyn EmbeddingStore, number: u64) -> String {
    let table = store.open_numbered("t", &config()).unwrap();
    let mut random = Random(number * 7 + 1);
    let ids: Vec<i64> = (0..1 + random.below(30)).map(|_| random.below(60) as i64 - 30).collect();
    let values: Vec<f32> = (0..ids.len() * DIM).map(|_| random.below(9) as f32 - 4.0).collect();
    match number % 8 {
        0 => format!("{:?}", store.delete(table, &ids).unwrap()),
        1 => format!("{:?}", store.write(table, &ids, &values)),
        2 => {
            let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; values.len()]);
            store.lookup(table, &ids, true, &mut indices, &mut rows).unwrap();
            format!("{rows:?}")
        }
        3 => format!("{:?}", store.set_learning_rate(table, 0.01 * (1 + random.below(9)) as f64, true)),
        4 if number % 64 == 4 => format!("{:?}", store.clear(table)),
        _ => {
            let chunks = vec![GradientChunk::new(&ids, &values, DIM)];
            format!("{:?}", store.update(&[TableUpdate { table, chunks, step: Step::Next }]))
        }
    }
}

/// All that a table has: rows and slots by id, and its counts.
fn contents(store: &dyn EmbeddingStore) -> String {
    let table = store.find_numbered("t").unwrap().unwrap();
    let mut ids = store.ids(table).unwrap();
    ids.sort_unstable();
    let mut rows = vec![0.0; ids.len() * DIM];
    store.read(table, &ids, &mut rows).unwrap();
    let bits: Vec<u32> = rows.iter().map(|value| value.to_bits()).collect();
    let slots: BTreeMap<&str, _> = ["exp_avg", "exp_avg_sq"]
        .into_iter()
        .map(|slot| (slot, store.read_slot(table, slot, &ids)))
        .collect();
    let counted = store.statistics(table).unwrap();
    format!("{ids:?} {bits:?} {slots:?} {} {} {}", counted.step, counted.updates, counted.learning_rate)
}

fn undisturbed(acts: u64) -> (String, Vec<String>) {
    let store = LocalStore::new(Box::new(Serial));
    let made = (0..acts).map(|number| act(&store, number)).collect();
    (contents(&store), made)
}

#[test]
fn a_server_that_is_started_again_goes_on_with_its_clients() {
    const ACTS: u64 = 60;
    let directory = tempfile::tempdir().unwrap();
    let (port, shard) = (free_port(), Shard { number: 0, of: 1 });
    let mut server = start(directory.path(), port, shard);
    let store = connect(vec![server.address().to_string()], Duration::from_secs(20));
    let mut made = Vec::new();
    for number in 0..ACTS {
        made.push(act(&store, number));
        if number % 9 == 5 {
            server.handler().checkpoint().unwrap();
        }
        if number % 7 == 3 {
            server.stop(Duration::from_secs(1));
            server = start(directory.path(), port, shard);
        }
    }
    assert_eq!((contents(&store), made), undisturbed(ACTS));
    let logs = fs::read_dir(directory.path().join("log")).unwrap().count();
    assert!(logs <= 4, "{logs} files");
    server.stop(Duration::ZERO);
}

/// Changes of some megabytes reach the disk another way than small ones.
/// Sends the first half of a change, and returns the connection.
fn half_a_write(port: u16, ids: &[i64], rows: &[f32]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&hello(1)).unwrap();
    let write = Request::Write { table: TableId(1), ids, rows };
    let frame = write.with_frame(1, 1, |frame| frame.to_bytes().unwrap()).unwrap();
    stream.write_all(&frame[..frame.len() / 2]).unwrap();
    stream
}

#[test]
fn large_changes_survive_kill_9() {
    const DIM: usize = 64;
    let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
    let shard = Shard { number: 0, of: 1 };
    let mut server = Process::start(directory.path(), port, shard);
    let store = connect(vec![format!("127.0.0.1:{port}")], Duration::from_secs(60));
    let local = LocalStore::new(Box::new(Serial));
    let ids: Vec<i64> = (0..20_000).map(|id| id * 7_919 % 20_000).collect();
    for round in 1..4 {
        let values: Vec<f32> = (0..ids.len() * DIM).map(|at| (at % 97) as f32 * round as f32).collect();
        // There is room in the log for a change that never comes, and others behind it.
        let silent = half_a_write(port, &ids, &values);
        for store in [&store as &dyn EmbeddingStore, &local] {
            let table = store.open_numbered("large", &TableConfig::new(DIM)).unwrap();
            let chunks = vec![GradientChunk::new(&ids, &values, DIM)];
            store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
            store.write(table, &ids[round..ids.len() / 2], &values[round * DIM..values.len() / 2]).unwrap();
        }
        // Appended before the server finds out that it is to be refused.
        let (table, mut refused) = (store.find_numbered("large").unwrap().unwrap(), values);
        refused[ids.len() * DIM - 1] = f32::NAN;
        let chunks = vec![GradientChunk::new(&ids, &refused, DIM)];
        let outcome = store.update(&[TableUpdate { table, chunks, step: Step::Next }]);
        assert!(matches!(outcome, Err(Error::NonFinite { .. })), "{outcome:?}");
        if round == 2 {
            drop(silent);
        }
        server.kill_and_start_again();
    }
    let read = |store: &dyn EmbeddingStore| {
        let mut rows = vec![0.0; ids.len() * DIM];
        store.read(store.find_numbered("large").unwrap().unwrap(), &ids, &mut rows).unwrap();
        rows
    };
    assert!(read(&store) == read(&local));
}

#[test]
fn what_was_acknowledged_survives_kill_9_once() {
    let rounds: u64 = env::var("RECSTORE_KILL_ROUNDS").map_or(10, |rounds| rounds.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let shards = [0, 1].map(|number| Shard { number, of: 2 });
    let ports = shards.map(|_| free_port());
    let mut servers = shards.map(|shard| Process::start(directory.path(), ports[shard.number], shard));
    let is_over = AtomicBool::new(false);
    let addresses = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let store = connect(addresses, Duration::from_secs(60));
    let (acts, made) = thread::scope(|scope| {
        let acting = scope.spawn(|| {
            let mut made = Vec::new();
            while !is_over.load(Ordering::Relaxed) || made.len() < 100 {
                made.push(act(&store, made.len() as u64));
            }
            made
        });
        let mut random = Random(rounds);
        for _ in 0..rounds {
            thread::sleep(Duration::from_millis(20 + random.below(100)));
            servers[random.below(2) as usize].kill_and_start_again();
        }
        is_over.store(true, Ordering::Relaxed);
        let made = acting.join().unwrap();
        (made.len() as u64, made)
    });
    let found = contents(&store);
    drop(servers);
    assert!((found, made) == undisturbed(acts), "after {acts} changes");
}

#[test]
fn what_is_loaded_survives_too() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (port, shard) = (free_port(), Shard { number: 0, of: 1 });
    let server = start(directory.path(), port, shard);
    let store = connect(vec![server.address().to_string()], Duration::from_secs(20));
    (0..20).for_each(|number| _ = act(&store, number));
    store.save(elsewhere.path(), &recstore::SaveOptions::default()).unwrap();
    let saved = contents(&store);
    (20..30).for_each(|number| _ = act(&store, number));
    store.load(elsewhere.path(), &recstore::LoadOptions::default()).unwrap();
    server.stop(Duration::from_secs(1));
    fs::remove_dir_all(elsewhere.path()).unwrap();
    let server = start(directory.path(), port, shard);
    assert_eq!(contents(&store), saved);
    server.stop(Duration::ZERO);
}

#[test]
fn a_damaged_log_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let (port, shard) = (free_port(), Shard { number: 0, of: 1 });
    let server = start(directory.path(), port, shard);
    let store = connect(vec![server.address().to_string()], Duration::from_secs(20));
    (0..20).for_each(|number| _ = act(&store, number));
    server.stop(Duration::from_secs(1));
    let path = directory.path().join("log/0000000000000001.log");
    let mut bytes = fs::read(&path).unwrap();
    bytes[100] ^= 1;
    fs::write(&path, bytes).unwrap();
    let mut config = ServerConfig::default();
    config.kept = Some(KeptState::logged(directory.path()));
    let error = Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap_err().to_string();
    assert!(error.contains("0000000000000001.log") && error.contains("damaged behind its first"), "{error}");
}
