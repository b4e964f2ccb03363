//! Servers that are started again at other addresses: clients go on there as if nothing had happened.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cluster::connect;
use numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, Serial, Shard, Step, TableConfig, TableId, TableUpdate,
};
use recstore_ps::{KeptState, RemoteStore, Server, ServerConfig};

const IDS: [i64; 4] = [0, 1, 2, 7];

fn start(directory: Option<&Path>, shard: Shard) -> Server {
    let mut config = ServerConfig::default();
    (config.kept, config.shard) = (directory.map(KeptState::logged), shard);
    Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap()
}

fn addresses(servers: &[Server]) -> Vec<String> {
    servers.iter().map(|server| server.address().to_string()).collect()
}

fn config() -> TableConfig {
    TableConfig::from_json(1, r#"{"optimizer": {"kind": "adam", "lr": 0.1}}"#).unwrap()
}

fn step(store: &dyn EmbeddingStore, table: TableId) -> recstore::Result<()> {
    let chunks = vec![GradientChunk::new(&IDS, &[1.0, -2.0, 3.0, -4.0], 1)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

fn rows(store: &dyn EmbeddingStore, table: TableId) -> [f32; 4] {
    let mut rows = [0.0; 4];
    store.read(table, &IDS, &mut rows).unwrap();
    rows
}

/// The rows after some steps in one process.
fn expected(steps: usize) -> [f32; 4] {
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("t", &config()).unwrap();
    (0..steps).for_each(|_| step(&store, table).unwrap());
    rows(&store, table)
}

#[test]
fn a_call_under_way_goes_on_where_its_server_is_started_again() {
    let directories = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let shards = [0, 1].map(|number| Shard { number, of: 2 });
    let mut servers: Vec<Server> =
        shards.iter().map(|&shard| start(Some(directories[shard.number].path()), shard)).collect();
    let store: RemoteStore = connect(addresses(&servers), Duration::from_secs(30));
    let table = store.open_numbered("t", &config()).unwrap();
    for round in 0..4 {
        step(&store, table).unwrap();
        let shard = shards[round % 2];
        servers.remove(shard.number).stop(Duration::from_secs(1));
        thread::scope(|scope| {
            let under_way = scope.spawn(|| step(&store, table));
            thread::sleep(Duration::from_millis(50));
            servers.insert(shard.number, start(Some(directories[shard.number].path()), shard));
            store.move_servers(&addresses(&servers)).unwrap();
            under_way.join().unwrap().unwrap();
        });
        assert_eq!(store.addresses().unwrap(), addresses(&servers));
    }
    assert_eq!(rows(&store, table), expected(8));
    assert_eq!(store.statistics(table).unwrap().step, 8);
}

#[test]
fn a_server_that_has_lost_its_rows_is_not_trained_on() {
    let shard = Shard { number: 0, of: 1 };
    let server = start(None, shard);
    let store = connect(addresses(&[server]), Duration::from_secs(2));
    let table = store.open_numbered("t", &config()).unwrap();
    step(&store, table).unwrap();
    let other = [start(None, shard)];
    store.move_servers(&addresses(&other)).unwrap();
    let refused = step(&store, table).unwrap_err().to_string();
    let address = &addresses(&other)[0];
    assert!(refused.starts_with(&format!("emb_update: shard 0 at {address} is unavailable")), "{refused}");
    assert!(
        refused.ends_with(
            "it was started without the rows that it had: load a checkpoint, or start all servers anew"
        ),
        "{refused}"
    );
}

#[test]
fn another_number_of_servers_is_refused_and_changes_nothing() {
    let servers = [start(None, Shard { number: 0, of: 1 })];
    let store = connect(addresses(&servers), Duration::from_secs(2));
    let message = "the store has 1 shards, got 2 addresses".to_owned();
    let twice = vec![addresses(&servers)[0].clone(); 2];
    assert_eq!(store.move_servers(&twice), Err(Error::InvalidConfig { message }));
    assert_eq!(store.addresses().unwrap(), addresses(&servers));
}
