//! Rows and gradients as bfloat16 on the wire: each rounded once, to the nearest, and nothing else.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cluster::{Cluster, config, connect, hello};
use half::bf16;
use numbered::Numbered;
use recstore::{
    BagInput, EmbeddingStore, GradientChunk, LocalStore, PoolingMode, Serial, Step, TableConfig, TableId,
    TableUpdate,
};
use recstore_ps::{Durability, KeptState, RemoteConfig, RemoteStore, Server, ServerConfig, WireDtype};

const DIM: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(20);

fn narrow_config(servers: Vec<String>) -> RemoteConfig {
    let mut config = config(servers, TIMEOUT);
    config.wire_dtype = WireDtype::Bfloat16;
    config
}

fn narrow(servers: Vec<String>) -> RemoteStore {
    RemoteStore::connect(narrow_config(servers), Box::new(Serial)).unwrap()
}

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect()
}

fn values(ids: &[i64], seed: u32) -> Vec<f32> {
    let value = |id: i64, column: usize| ((id as f32).sin() + column as f32) * 0.37 / (seed as f32 + 1.0);
    ids.iter().flat_map(|&id| (0..DIM).map(move |column| value(id, column))).collect()
}

fn adagrad() -> TableConfig {
    TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "adagrad", "lr": 0.5}}"#).unwrap()
}

fn step(store: &dyn EmbeddingStore, tables: &[TableId], ids: &[i64], gradients: &[f32]) {
    let chunks = || vec![GradientChunk::new(ids, gradients, DIM)];
    let update = |&table: &TableId| TableUpdate { table, chunks: chunks(), step: Step::Next };
    store.update(&tables.iter().map(update).collect::<Vec<_>>()).unwrap();
}

fn read(store: &dyn EmbeddingStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![0.0; ids.len() * DIM];
    store.read(table, ids, &mut rows).unwrap();
    rows
}

/// Opens two tables, writes rows and takes two steps, whose gradients are `rounds`ed before.
fn trained(store: &dyn EmbeddingStore, ids: &[i64], rounds: bool) -> [TableId; 2] {
    let tables = ["a", "b"].map(|name| store.open_numbered(name, &adagrad()).unwrap());
    store.write(tables[0], ids, &values(ids, 9)).unwrap();
    for seed in 0..2 {
        let gradients = values(ids, seed);
        step(store, &tables, ids, &if rounds { rounded(&gradients) } else { gradients });
    }
    tables
}

#[test]
fn rows_and_gradients_are_rounded_once_and_all_else_is_as_it_is() {
    let ids: Vec<i64> = (0..200).map(|id| id * 7 - 300).collect();
    for shards in [1, 3] {
        let cluster = Cluster::start(shards);
        let (remote, local) = (narrow(cluster.addresses()), LocalStore::new(Box::new(Serial)));
        let (tables, own) = (trained(&remote, &ids, false), trained(&local, &ids, true));
        let exact = connect(cluster.addresses(), TIMEOUT);
        for (&table, name) in own.iter().zip(["a", "b"]) {
            let expected = read(&local, table, &ids);
            let unrounded = exact.find_numbered(name).unwrap().unwrap();
            // Another client, which takes rows as they are, sees those of rounded gradients.
            assert_eq!(read(&exact, unrounded, &ids), expected, "{shards} servers, {name}");
            assert_eq!(read(&remote, tables[usize::from(name == "b")], &ids), rounded(&expected));
            let slot = |store: &dyn EmbeddingStore, table| store.read_slot(table, "state_sum", &ids).unwrap();
            assert_eq!(slot(&remote, tables[usize::from(name == "b")]), slot(&local, table));
        }
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * DIM]);
        remote.lookup(tables[0], &ids, false, &mut indices, &mut rows).unwrap();
        assert_eq!(rows, read(&local, own[0], &ids), "a hash table's lookup is exact");
    }
}

#[test]
fn bags_are_sums_of_rounded_rows() {
    let ids: Vec<i64> = (0..64).collect();
    let cluster = Cluster::start(2);
    let remote = narrow(cluster.addresses());
    let tables = trained(&remote, &ids, false);
    let bagged = [ids.clone(), ids.clone()].concat();
    let offsets: Vec<i64> = (0..=64).map(|bag| bag * 2).collect();
    let (mode, per_sample_weights, padding_idx) = (PoolingMode::Sum, None, None);
    let input = BagInput { ids: &bagged, offsets: &offsets, mode, per_sample_weights, padding_idx };
    let mut pooled = vec![0.0; 32 * 2 * DIM];
    remote.bag(&tables, input, &mut pooled, &mut [], &mut []).unwrap();
    for (number, &table) in tables.iter().enumerate() {
        let rows = read(&remote, table, &ids);
        assert_eq!(rows, rounded(&rows));
        for bag in 0..32 {
            let sum: Vec<f32> = (0..DIM)
                .map(|column| rows[2 * bag * DIM + column] + rows[(2 * bag + 1) * DIM + column])
                .collect();
            assert_eq!(pooled[(bag * 2 + number) * DIM..][..DIM], sum, "bag {bag}");
        }
    }
}

#[test]
fn a_value_that_is_not_finite_is_still_refused_and_a_large_one_is_not() {
    let cluster = Cluster::start(2);
    let remote = narrow(cluster.addresses());
    let table = remote.open_numbered("t", &adagrad()).unwrap();
    let update = |gradients: &[f32]| {
        let chunks = vec![GradientChunk::new(&[4, 5], gradients, DIM)];
        remote.update(&[TableUpdate { table, chunks, step: Step::Next }]).map_err(|error| error.to_string())
    };
    let refused = update(&[1.0, 1.0, 1.0, f32::NAN, 1.0, 1.0]).unwrap_err();
    assert!(refused.contains("gradient of id 5 at position 1 of table \"t\" holds NaN"), "{refused}");
    update(&[f32::MAX, 1.0, 1.0, -f32::MAX, 1.0, 1.0]).unwrap();
}

fn kept(directory: &Path) -> (Server, Arc<LocalStore>) {
    let store = Arc::new(LocalStore::new(Box::new(Serial)));
    let mut config = ServerConfig::default();
    config.kept =
        Some(KeptState { directory: directory.to_owned(), durability: Durability::Wal, follows: None });
    (Server::start(store.clone(), config).unwrap(), store)
}

#[test]
fn a_log_of_rounded_gradients_gives_the_same_rows() {
    let directory = tempfile::tempdir().unwrap();
    let ids: Vec<i64> = (0..3_000).collect();
    let (server, store) = kept(directory.path());
    let remote = narrow(vec![server.address().to_string()]);
    trained(&remote, &ids, false);
    let rows = |store: &LocalStore| read(store, store.find_numbered("b").unwrap().unwrap(), &ids);
    let before = rows(&store);
    drop(remote);
    server.stop(TIMEOUT);
    drop(store);
    let (server, store) = kept(directory.path());
    assert_eq!(rows(&store), before);
    server.stop(TIMEOUT);
}

#[test]
fn a_server_of_an_older_protocol_is_refused_in_words() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let cluster = Cluster::start(1);
    let real = cluster.addresses()[0].clone();
    let serving = thread::spawn(move || {
        // Greets as a client of version 2 would, and hands the welcome on.
        let (mut client, _) = listener.accept().unwrap();
        client.read_exact(&mut [0; 32]).unwrap();
        let mut server = TcpStream::connect(real).unwrap();
        server.write_all(&hello(2)).unwrap();
        let mut welcome = [0; 44];
        server.read_exact(&mut welcome).unwrap();
        client.write_all(&welcome).unwrap();
        _ = client.shutdown(Shutdown::Write);
        _ = client.read(&mut [0]);
    });
    let mut config = narrow_config(vec![address]);
    config.timeout = Duration::from_secs(2);
    let refused = RemoteStore::connect(config, Box::new(Serial)).unwrap_err().to_string();
    serving.join().unwrap();
    let expected = "the server speaks version 2 of the protocol, and bfloat16 goes over the wire since version 3: choose wire_dtype float32";
    assert!(refused.contains(expected), "{refused}");
    let unknown = "float16".parse::<WireDtype>().unwrap_err().to_string();
    assert!(unknown.contains("wire_dtype must be float32 or bfloat16, got \"float16\""), "{unknown}");
}
