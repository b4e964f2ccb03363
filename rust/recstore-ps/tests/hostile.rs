//! Peers that break the rules, servers that go away, and a server that serves on.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, config, connect, hello};
use numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, SaveOptions, Serial, Shard, Step, TableConfig,
    TableUpdate,
};
use recstore_ps::{RemoteStore, Server, ServerConfig};

/// A deadline that a busy machine keeps too.
const SHORT: Duration = Duration::from_millis(1500);

/// What comes at all comes within this.
const LIVENESS: Duration = Duration::from_secs(60);

fn assert_serves(cluster: &Cluster) {
    let store = cluster.connect();
    let table = store.open_numbered("t", &TableConfig::new(2)).unwrap();
    store.write(table, &[1], &[1.0, 2.0]).unwrap();
    let mut row = [0.0; 2];
    store.read(table, &[1], &mut row).unwrap();
    assert_eq!(row, [1.0, 2.0]);
}

fn refusal(config: recstore_ps::RemoteConfig) -> String {
    RemoteStore::connect(config, Box::new(Serial)).unwrap_err().to_string()
}

#[test]
fn thousands_of_malformed_connections_leave_a_server_serving() {
    let cluster = Cluster::start(1);
    let address = cluster.servers[0].address().tcp().unwrap();
    for number in 0..2_000u32 {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut noise: Vec<u8> = (0..number % 97).map(|place| (place * number) as u8).collect();
        if number % 2 == 0 {
            noise.splice(0..0, hello(1));
        }
        _ = stream.write_all(&noise);
        if number % 500 == 0 {
            assert_serves(&cluster);
        }
    }
    assert_serves(&cluster);
}

#[test]
fn another_version_is_refused_in_words() {
    let cluster = Cluster::start(1);
    let mut stream = TcpStream::connect(cluster.servers[0].address().tcp().unwrap()).unwrap();
    stream.write_all(&hello(9)).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer[8..10], [0, 0]);
    let text = String::from_utf8_lossy(&answer[40..]).into_owned();
    assert_eq!(text, "the server speaks the versions 1 to 5 of the protocol, the client 9 to 9");
}

#[test]
fn slow_peers_are_cut_off_and_cost_nothing() {
    let cluster = Cluster::configured(1, |config| {
        config.handshake_timeout = Duration::from_millis(100);
        config.transfer_timeout = Duration::from_millis(100);
        config.idle_timeout = Duration::from_millis(300);
    });
    let address = cluster.servers[0].address().tcp().unwrap();
    let started = Instant::now();
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    let trickle = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello(1)).unwrap();
        // A byte now and then does not keep the connection.
        for _ in 0..100 {
            thread::sleep(Duration::from_millis(20));
            if stream.write_all(&[1]).is_err() {
                return;
            }
        }
    });
    assert_serves(&cluster);
    for mut stream in silent {
        let mut answer = Vec::new();
        _ = stream.read_to_end(&mut answer);
    }
    trickle.join().unwrap();
    assert!(started.elapsed() < LIVENESS, "{:?}", started.elapsed());
    // Whoever was idle too long connects again and notices nothing.
    let store = cluster.connect();
    let table = store.open_numbered("u", &TableConfig::new(1)).unwrap();
    thread::sleep(Duration::from_millis(500));
    store.write(table, &[1], &[1.0]).unwrap();
    assert_eq!(store.num_rows(table), Ok(1));
}

/// Opens connections of which each has sent the first byte of a request.
fn begin_requests(address: SocketAddr, count: usize) -> Vec<TcpStream> {
    let begin = |_| -> io::Result<_> {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(&hello(1))?;
        stream.read_exact(&mut [0; 8])?;
        stream.write_all(&[1])?;
        Ok(stream)
    };
    (0..count).filter_map(|number| begin(number).ok()).collect()
}

#[test]
fn a_full_port_closes_idle_connections_and_none_with_a_request_under_way() {
    let cluster = Cluster::configured(1, |config| config.max_connections = 2);
    let address = cluster.servers[0].address().tcp().unwrap();
    let mut silent: Vec<_> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_serves(&cluster);
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0, "the oldest of those that said nothing");
    drop(silent);
    let full = "the server has 2 connections, which is its limit, all with requests under way";
    // A request is under way when the server's thread has read of it, not when its bytes have arrived.
    let deadline = Instant::now() + LIVENESS;
    let began = loop {
        let began = begin_requests(address, 2);
        match RemoteStore::connect(config(cluster.addresses(), SHORT), Box::new(Serial)) {
            Err(refused) if refused.to_string().contains(full) => break began,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    };
    drop(began);
    // The server notices that they are closed when its threads come to it.
    let deadline = Instant::now() + LIVENESS;
    while RemoteStore::connect(config(cluster.addresses(), SHORT), Box::new(Serial)).is_err() {
        assert!(Instant::now() < deadline, "closed connections keep their seats");
        thread::sleep(Duration::from_millis(10));
    }
    assert_serves(&cluster);
}

#[test]
fn a_client_whose_idle_connection_was_closed_notices_nothing() {
    let cluster = Cluster::configured(1, |config| config.max_connections = 3);
    let address = cluster.servers[0].address().tcp().unwrap();
    let store = cluster.connect();
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    for round in 0..20u8 {
        // More clients than there is room for, which all say who they are.
        let others: Vec<_> = (0..4)
            .map(|_| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(&hello(1)).unwrap();
                assert_eq!(stream.read(&mut [0; 8]).unwrap(), 8);
                stream
            })
            .collect();
        store.write(table, &[1], &[f32::from(round)]).unwrap();
        let mut row = [0.0];
        store.read(table, &[1], &mut row).unwrap();
        assert_eq!(row, [f32::from(round)]);
        drop(others);
    }
    assert_eq!(store.statistics(table).unwrap().updates, 0);
}

#[test]
fn a_token_is_wanted_where_there_is_one() {
    let cluster = Cluster::configured(1, |config| config.token = Some("open sesame".to_owned()));
    for token in [None, Some("open barley".to_owned())] {
        let mut wrong = config(cluster.addresses(), SHORT);
        wrong.token = token;
        assert!(refusal(wrong).contains("the server refused: the token is not the server's"));
    }
    let mut right = config(cluster.addresses(), SHORT);
    right.token = Some("open sesame".to_owned());
    assert!(RemoteStore::connect(right, Box::new(Serial)).is_ok());
}

#[test]
fn servers_in_another_order_or_number_are_refused() {
    let cluster = Cluster::start(2);
    let mut addresses = cluster.addresses();
    addresses.reverse();
    let refused = refusal(config(addresses.clone(), SHORT));
    assert!(refused.contains("the server there is shard 1 of 2, expected shard 0 of 2"), "{refused}");
    addresses.truncate(1);
    assert!(refusal(config(addresses, SHORT)).contains("shard 1 of 2, expected shard 0 of 1"));
    assert!(refusal(config(vec![], SHORT)).contains("needs at least one server"));
}

#[test]
fn a_server_that_is_gone_is_named_within_the_deadline() {
    let cluster = Cluster::start(1);
    let other = LocalStore::new(Box::new(Serial));
    let shard = |number| Shard { number, of: 2 };
    let mut of_two = ServerConfig::default();
    of_two.shard = shard(1);
    let gone = Server::start(Arc::new(other), of_two.clone()).unwrap();
    of_two.shard = shard(0);
    let stays = Server::start(cluster.stores[0].clone(), of_two).unwrap();
    let addresses = vec![stays.address().to_string(), gone.address().to_string()];
    let store = connect(addresses.clone(), SHORT);
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    gone.stop(Duration::from_secs(1));
    let started = Instant::now();
    let error = store.read(table, &[0, 1], &mut [0.0; 2]).unwrap_err();
    assert!(started.elapsed() < LIVENESS, "{:?}", started.elapsed());
    let Error::Unavailable { operation, shard, address, .. } = &error else { panic!("{error}") };
    assert_eq!((*operation, *shard, address), ("emb_read", 1, &addresses[1]));
    assert_eq!(store.read(table, &[0, 2], &mut [0.0; 2]), Ok(()));
    assert!(store.table_names().is_err() && store.find_numbered("t").is_err());
    stays.stop(Duration::from_secs(1));
}

#[test]
fn a_server_that_answers_nothing_is_given_up_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let started = Instant::now();
    let mut silent = config(vec![listener.local_addr().unwrap().to_string()], SHORT);
    silent.connect_timeout = Duration::from_millis(100);
    let error = refusal(silent);
    assert!(
        error.contains("connect: shard 0 at 127.0.0.1:") && error.contains("no answer in time"),
        "{error}"
    );
    assert!(started.elapsed() < LIVENESS, "{:?}", started.elapsed());
}

#[test]
fn a_restarted_server_is_not_taken_for_the_one_before_until_it_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let first = Cluster::start(1);
    let address = first.servers[0].address().tcp().unwrap();
    let store = connect(first.addresses(), SHORT);
    let [table, other] = ["t", "u"].map(|name| store.open_numbered(name, &TableConfig::new(1)).unwrap());
    store.write(table, &[5], &[2.5]).unwrap();
    store.save(directory.path(), &SaveOptions::default()).unwrap();
    drop(first);

    let second = Cluster::configured(1, |config| config.port = address.port());
    let error = store.read(table, &[5], &mut [0.0]).unwrap_err().to_string();
    let lost = "it was started without the rows that it had: load a checkpoint, or start all servers anew";
    assert!(error.contains(lost), "{error}");
    let chunks = vec![GradientChunk::new(&[5], &[1.0], 1)];
    assert!(store.update(&[TableUpdate { table, chunks, step: Step::Next }]).is_err());
    assert!(store.open_numbered("u", &TableConfig::new(1)).unwrap_err().to_string().contains(lost));
    // Another table opened there first, by a client that knows of no rows: numbers of the run before must not reach it.
    let newcomer = connect(second.addresses(), SHORT);
    newcomer.open_numbered("u", &TableConfig::new(1)).unwrap();
    assert!(store.read(table, &[5], &mut [0.0]).is_err());
    assert!(store.read(other, &[5], &mut [0.0]).is_err());
    store.load(directory.path(), &recstore::LoadOptions::default()).unwrap();
    let mut row = [0.0];
    store.read(table, &[5], &mut row).unwrap();
    assert_eq!((row, store.find_numbered("t")), ([2.5], Ok(Some(table))));
    drop(second);
}

#[test]
fn any_number_of_servers_loads_what_others_saved() {
    let directory = tempfile::tempdir().unwrap();
    let ids: Vec<i64> = (-300..300).collect();
    let rows: Vec<f32> = ids.iter().map(|id| *id as f32 / 3.0).collect();
    let mut expected = None;
    for shards in [2, 3, 1] {
        let cluster = Cluster::start(shards);
        let store = cluster.connect();
        if expected.is_none() {
            let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
            store.write(table, &ids, &rows).unwrap();
            store.write(table, &[1_000, 1_001], &[1.0, 2.0]).unwrap();
            store.delete(table, &[1_000, 1_001]).unwrap();
            store.update(&[TableUpdate { table, chunks: vec![], step: Step::At(9) }]).unwrap();
        } else {
            let report = store.load(directory.path(), &recstore::LoadOptions::default()).unwrap();
            assert_eq!(report.tables, [("t".to_owned(), ids.len())]);
            assert!(report.bytes > 0);
        }
        let table = store.find_numbered("t").unwrap().unwrap();
        let mut read = vec![0.0; ids.len()];
        store.read(table, &ids, &mut read).unwrap();
        let statistics = store.statistics(table).unwrap();
        let counts = [statistics.step, statistics.inserts, statistics.updates, statistics.deletes];
        let now = (read, store.num_rows(table), counts);
        assert_eq!(&now, expected.get_or_insert_with(|| now.clone()), "{shards} shards");
        let progress = recstore::Progress::default();
        let mut options = SaveOptions::default();
        options.metadata = serde_json::json!({"epoch": shards}).into();
        options.progress = Some(&progress);
        let report = store.save(directory.path(), &options).unwrap();
        assert_eq!((report.rows, progress.bytes()), (ids.len(), (report.bytes, report.bytes)));
    }
}

#[test]
fn what_servers_cannot_do_is_refused() {
    let (cluster, directory) = (Cluster::start(1), tempfile::tempdir().unwrap());
    let store = cluster.connect();
    assert!(store.in_process().is_none());
    let keeps = |_| true;
    let mut some_rows = recstore::LoadOptions::default();
    some_rows.keeps = Some(&keeps);
    let mut no_counts = recstore::LoadOptions::default();
    no_counts.without_counts = true;
    for options in [some_rows, no_counts] {
        let load = store.load(directory.path(), &options).unwrap_err().to_string();
        assert!(load.contains("load: servers load the rows that are routed to them"), "{load}");
    }
    let none = store.load(directory.path(), &recstore::LoadOptions::default()).unwrap_err();
    assert!(matches!(none, Error::Checkpoint { .. }), "{none}");
}
