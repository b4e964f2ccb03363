//! Changes that are larger than a server takes at a time: each goes in pieces, and is one change all the same.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
mod proxy;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cluster::{Cluster, connect, hello};
use proxy::{Fault, Proxy};
use recstore::{
    EmbeddingStore, EmbeddingTable, Error, GradientChunk, LocalStore, Serial, Step, TableConfig, TableUpdate,
};
use recstore_ps::codec::{Frame, Header, Kind, Section};
use recstore_ps::{KeptState, RemoteStore, Server};

const DIM: usize = 8;
const LIMIT: u64 = 1 << 12;
/// A step of these takes ten times the limit of each of two servers.
const IDS: i64 = 2_000;

fn opened(store: &dyn EmbeddingStore) -> Arc<dyn EmbeddingTable> {
    let text = r#"{"optimizer": {"kind": "adam", "lr": 0.1}}"#;
    store.open_table("t", &TableConfig::from_json(DIM, text).unwrap()).unwrap()
}

fn step(store: &dyn EmbeddingStore, number: i64) -> recstore::Result<u64> {
    let ids: Vec<i64> = (0..IDS).collect();
    let gradients: Vec<f32> = (0..ids.len() * DIM).map(|at| at as f32 + number as f32).collect();
    let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
    store.update(&[TableUpdate { table: opened(store).id(), chunks, step: Step::Next }])
}

/// Returns the rows and slots of all ids, bit for bit, and the step.
fn contents(store: &dyn EmbeddingStore) -> (Vec<u32>, u64) {
    let (table, ids) = (opened(store), (0..IDS).collect::<Vec<i64>>());
    let mut values = vec![0.0; ids.len() * DIM];
    table.read(&ids, &mut values).unwrap();
    for (slot, _) in table.describe().unwrap().slots {
        values.extend(table.read_slot(&slot, &ids).unwrap().unwrap());
    }
    (values.into_iter().map(f32::to_bits).collect(), table.statistics().unwrap().step)
}

fn expected(steps: i64) -> (Vec<u32>, u64) {
    let local = LocalStore::new(Box::new(Serial));
    (1..=steps).for_each(|number| _ = step(&local, number).unwrap());
    contents(&local)
}

/// Returns the number of the last change in the log of each server.
fn last_changes(cluster: &Cluster) -> Vec<u64> {
    let last = |server: &Server| {
        let mut stream = TcpStream::connect(server.metrics_address().unwrap()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let line = text.lines().find(|line| line.starts_with("recstore_log_last_change{")).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    cluster.servers.iter().map(last).collect()
}

#[test]
fn a_large_step_is_one_change_that_a_log_repeats() {
    let data = tempfile::tempdir().unwrap();
    let start = || {
        Cluster::configured(2, |config| {
            let shard = config.shard.number;
            (config.max_frame_bytes, config.metrics_port) = (LIMIT, Some(0));
            config.kept = Some(KeptState::logged(&data.path().join(format!("shard-{shard}-of-2"))));
        })
    };
    let cluster = start();
    let store = cluster.connect();
    (1..=3).for_each(|number| _ = step(&store, number).unwrap());
    let before = last_changes(&cluster);
    step(&store, 4).unwrap();
    // The table is opened each time.
    assert_eq!(last_changes(&cluster), before.iter().map(|last| last + 2).collect::<Vec<_>>());
    assert_eq!(contents(&store), expected(4));
    drop(cluster);
    assert_eq!(contents(&start().connect()), expected(4));
}

#[test]
fn a_large_step_that_is_cut_anywhere_is_made_once_or_not_at_all() {
    for place in (0..400_000).step_by(23_456) {
        let cluster = Cluster::configured(2, |config| config.max_frame_bytes = LIMIT);
        let spoilt = |address: String| {
            let mut faults = [Fault::Cut(place), Fault::None].into_iter();
            Proxy::start(address, move || [faults.next().unwrap_or(Fault::None), Fault::None])
        };
        let proxies: Vec<_> = cluster.addresses().into_iter().map(spoilt).collect();
        let addresses = proxies.iter().map(|proxy| proxy.address.clone()).collect();
        let store = connect(addresses, Duration::from_secs(20));
        (1..=2).for_each(|number| _ = step(&store, number).unwrap());
        assert_eq!(contents(&cluster.connect()), expected(2), "cut at {place}");
    }
}

#[test]
fn a_step_beyond_any_number_of_pieces_is_refused_before_it_is_sent() {
    let cluster = Cluster::configured(2, |config| config.max_frame_bytes = 512);
    let store: RemoteStore = cluster.connect();
    let error = step(&store, 1).unwrap_err();
    assert!(matches!(error, Error::RequestTooLarge { shard: 0, limit: 32_768, .. }), "{error}");
    assert_eq!(opened(&store).statistics().unwrap().step, 0);
}

/// Pieces of eight bytes, each of which comes in time, keep no request under way for longer than a whole piece does.
#[test]
fn a_change_in_tiny_pieces_has_no_more_time_than_in_whole_ones() {
    let timeout = Duration::from_millis(200);
    let cluster = Cluster::configured(1, |config| config.transfer_timeout = timeout);
    let mut stream = TcpStream::connect(cluster.servers[0].address().tcp().unwrap()).unwrap();
    stream.write_all(&hello(4)).unwrap();
    stream.read_exact(&mut [0; 8]).unwrap();
    let mut piece = |place: i64| {
        let (head, word) = ([1 << 20, place], [0]);
        let sections = vec![Section::I64(&head), Section::I64(&word)];
        let written = Frame { header: Header::new(Kind::Piece, 1), sections }.write(&mut stream);
        thread::sleep(timeout / 10);
        written
    };
    // A server that is cut off refuses what comes next but one.
    let taken = (0..500).map(|number| piece(8 * number)).take_while(Result::is_ok).count();
    assert!(taken < 500, "{taken} pieces were taken");
}
