//! What a server tells of itself: metrics over HTTP, and the limits of its ports.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, config, connect, hello};
use numbered::Numbered;
use recstore::{
    BagInput, EmbeddingStore, EmbeddingTable, GradientChunk, PoolingMode, PrefetchRequest, Prefetches,
    Serial, Step, TableConfig, TableId, TableUpdate,
};
use recstore_ps::codec::{Management, Request};
use recstore_ps::grpc::proto;
use recstore_ps::grpc::proto::rec_store_client::RecStoreClient;
use recstore_ps::{ClientId, Durability, KeptState, RemoteStore, Server, ServerConfig};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

const SOON: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);

fn cluster(change: impl Fn(&mut ServerConfig)) -> Cluster {
    Cluster::configured(1, |config| {
        config.metrics_port = Some(0);
        change(config);
    })
}

fn http(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn scrape(cluster: &Cluster) -> String {
    let address = cluster.servers[0].metrics_address().unwrap();
    http(address, "GET /metrics HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
}

/// Returns the value of the one line of a metric that has all these labels, if there is one.
fn value(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let is_it = |line: &&str| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| {
            rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label))
        })
    };
    let lines: Vec<&str> = text.lines().filter(is_it).collect();
    assert!(lines.len() <= 1, "{lines:?}");
    lines.first().map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

/// Waits until a metric has a value.
fn until(cluster: &Cluster, name: &str, labels: &[&str], expected: f64) {
    let began = Instant::now();
    while value(&scrape(cluster), name, labels) != Some(expected) {
        assert!(began.elapsed() < SOON, "{name} {labels:?} is not {expected}: {}", scrape(cluster));
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn all_tables_of_a_lookup_a_prefetch_and_a_step_are_one_request_each() {
    let cluster = cluster(|_| {});
    let store = Arc::new(cluster.connect());
    let ids: Vec<i64> = (0..40).collect();
    let tables = ["a", "b", "c"].map(|name| store.open_numbered(name, &TableConfig::new(2)).unwrap());
    let opened = tables.map(|table| store.table("t", table).unwrap());
    let requests = |verb: &str| {
        value(&scrape(&cluster), "recstore_requests_total", &[&format!("\"{verb}\""), "\"ok\""]).unwrap()
    };
    let sums = [1.0; 80];
    let chunk = || vec![GradientChunk::new(&ids, &sums, 2)];
    let step = || {
        let updates = tables.map(|table| TableUpdate { table, chunks: chunk(), step: Step::Next });
        store.update(&updates).unwrap();
    };
    step();
    let prefetches = Prefetches::new(1, 4);
    let request = |(key, table): (TableId, &Arc<dyn EmbeddingTable>)| PrefetchRequest {
        key,
        table: Arc::clone(table),
        store: store.clone(),
        ids: ids.clone(),
    };
    let issued = prefetches.issue(tables.into_iter().zip(&opened).map(request).collect()).unwrap();
    until(&cluster, "recstore_requests_total", &["\"read\"", "\"ok\""], 1.0);
    step();
    for table in &tables[..2] {
        prefetches.note(table, Some(&mut ids.iter().copied().filter(|id| id % 3 == 0)));
    }
    let found = prefetches.wait(issued).unwrap();
    assert_eq!((requests("read"), requests("update")), (2.0, 2.0));
    for (number, (table, rows)) in opened.iter().zip(found).enumerate() {
        let mut now = vec![0.0; 80];
        table.read(&ids, &mut now).unwrap();
        for (&id, (row, now)) in ids.iter().zip(rows.chunks(2).zip(now.chunks(2))) {
            assert_eq!(row == now, number < 2 && id % 3 == 0, "table {number}, id {id}");
        }
    }
    let offsets: Vec<i64> = (0..=120).collect();
    let bagged = [&ids[..], &ids, &ids].concat();
    let input = BagInput {
        ids: &bagged,
        offsets: &offsets,
        mode: PoolingMode::Sum,
        per_sample_weights: None,
        padding_idx: None,
    };
    let before = requests("read");
    store.bag(&tables, input, &mut vec![0.0; 40 * 6], &mut [], &mut []).unwrap();
    assert_eq!(requests("read") - before, 1.0);
}

#[test]
fn requests_rows_bytes_and_tables_are_counted() {
    let cluster = cluster(|_| {});
    let store = cluster.connect();
    let table = store.open_numbered("a \"b\"\n", &TableConfig::new(2)).unwrap();
    store.write(table, &[1, 2, 3], &[1.0; 6]).unwrap();
    store.read(table, &[1, 2], &mut [0.0; 4]).unwrap();
    let chunks = vec![GradientChunk::new(&[3, 4, 5, 3], &[1.0; 8], 2)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    let drop_table = Request::Manage(Management::DropTable { name: "another".to_owned() });
    assert!(cluster.servers[0].handler().handle(ClientId(1), 1, &drop_table).is_err());
    let text = scrape(&cluster);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{text}");
    let requests = |verb: &str, outcome: &str| {
        let labels = [format!("verb=\"{verb}\""), format!("outcome=\"{outcome}\"")];
        value(&text, "recstore_requests_total", &labels.each_ref().map(String::as_str)).unwrap()
    };
    assert_eq!(["write", "read", "update", "delete"].map(|verb| requests(verb, "ok")), [1.0, 1.0, 1.0, 0.0]);
    assert_eq!((requests("drop_table", "refused"), requests("drop_table", "ok")), (1.0, 0.0));
    let rows = |verb| value(&text, "recstore_rows_total", &[verb]).unwrap();
    assert_eq!([rows("\"write\""), rows("\"read\""), rows("\"update\"")], [3.0, 2.0, 3.0]);
    let moved = |name| value(&text, name, &["shard=\"0\""]).unwrap();
    assert!(moved("recstore_received_bytes_total") > 300.0 && moved("recstore_sent_bytes_total") > 200.0);
    assert_eq!(value(&text, "recstore_requests_in_flight", &[]), Some(0.0));
    let of_table = ["table=\"a \\\"b\\\"\\n\"", "shard=\"0\""];
    assert_eq!(value(&text, "recstore_table_rows", &of_table), Some(5.0));
    let bytes = value(&text, "recstore_table_bytes", &of_table).unwrap();
    let local = &cluster.stores[0];
    let statistics = local.statistics(local.find_numbered("a \"b\"\n").unwrap().unwrap()).unwrap();
    assert_eq!(bytes, statistics.bytes as f64);
    assert_eq!(value(&text, "recstore_build_info", &[env!("CARGO_PKG_VERSION")]), Some(1.0));
    assert_eq!(value(&text, "recstore_log_bytes", &[]), None);
}

#[test]
fn times_lie_in_classes_up_to_their_number() {
    let cluster = cluster(|_| {});
    let store = cluster.connect();
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    (0..20).for_each(|id| store.read(table, &[id], &mut [0.0]).unwrap());
    let text = scrape(&cluster);
    let class = |bound| value(&text, "recstore_request_seconds_bucket", &["verb=\"read\"", bound]).unwrap();
    assert_eq!((class("le=\"60\""), class("le=\"+Inf\"")), (20.0, 20.0));
    assert!(class("le=\"0.001\"") <= class("le=\"0.1\""));
    assert_eq!(value(&text, "recstore_request_seconds_count", &["verb=\"read\""]), Some(20.0));
    assert!(value(&text, "recstore_request_seconds_sum", &["verb=\"read\""]).unwrap() > 0.0);
}

#[test]
fn log_and_checkpoints_are_told() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(|config| config.kept = Some(KeptState::logged(directory.path())));
    let store = cluster.connect();
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    store.write(table, &[1], &[1.0]).unwrap();
    let before = scrape(&cluster);
    assert!(value(&before, "recstore_log_bytes", &[]).unwrap() > 100.0);
    assert_eq!(value(&before, "recstore_log_pending_changes", &[]), Some(0.0));
    assert_eq!(value(&before, "recstore_last_checkpoint_timestamp_seconds", &[]), None);
    cluster.servers[0].handler().checkpoint().unwrap();
    let after = scrape(&cluster);
    assert_eq!(value(&after, "recstore_log_bytes", &[]), Some(0.0));
    assert_eq!(value(&after, "recstore_checkpoints_total", &["outcome=\"ok\""]), Some(1.0));
    assert_eq!(value(&after, "recstore_checkpoints_total", &["outcome=\"failed\""]), Some(0.0));
    assert!(value(&after, "recstore_last_checkpoint_timestamp_seconds", &[]).unwrap() > 1.7e9);
    assert!(value(&after, "recstore_last_checkpoint_duration_seconds", &[]).unwrap() > 0.0);
}

#[test]
fn a_save_that_fails_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let kept = KeptState {
        directory: directory.path().to_owned(),
        durability: Durability::Checkpoint,
        follows: None,
    };
    let cluster = cluster(|config| config.kept = Some(kept.clone()));
    let in_the_way = directory.path().join("manifest.new");
    std::fs::create_dir(&in_the_way).unwrap();
    assert!(cluster.servers[0].handler().checkpoint().is_err());
    std::fs::remove_dir(&in_the_way).unwrap();
    cluster.servers[0].handler().checkpoint().unwrap();
    let text = scrape(&cluster);
    let made = |outcome| value(&text, "recstore_checkpoints_total", &[outcome]).unwrap();
    assert_eq!((made("\"ok\""), made("\"failed\"")), (1.0, 1.0));
}

#[test]
fn refused_peers_of_the_bulk_port_are_counted_by_reason() {
    let cluster = cluster(|config| {
        (config.max_connections, config.token) = (1, Some("open sesame".to_owned()));
    });
    let refused = |reason: &str, count| {
        until(&cluster, "recstore_refused_connections_total", &["\"bulk\"", reason], count);
    };
    let open = |count| until(&cluster, "recstore_connections", &["port=\"bulk\""], count);
    let mut stranger = TcpStream::connect(cluster.servers[0].address().tcp().unwrap()).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    refused("handshake", 1.0);
    open(0.0);
    // Whoever only tries whether somebody listens is no stranger.
    let curious = TcpStream::connect(cluster.servers[0].address().tcp().unwrap()).unwrap();
    open(1.0);
    drop(curious);
    open(0.0);
    let quick = config(cluster.addresses(), Duration::from_millis(300));
    assert!(RemoteStore::connect(quick.clone(), Box::new(Serial)).is_err());
    refused("token", 1.0);
    open(0.0);
    let mut knows = quick.clone();
    knows.token = Some("open sesame".to_owned());
    let store = RemoteStore::connect(knows.clone(), Box::new(Serial)).unwrap();
    assert_eq!(store.table_names(), Ok(vec![]));
    open(1.0);
    // The first one is idle and gives way.
    let other = RemoteStore::connect(knows.clone(), Box::new(Serial)).unwrap();
    refused("evicted", 1.0);
    assert_eq!(store.table_names(), Ok(vec![]));
    drop((store, other));
    open(0.0);
    // A request is under way once the server has read of it, which takes it a while on a busy machine.
    let began = Instant::now();
    let busy = loop {
        let mut busy = TcpStream::connect(cluster.servers[0].address().tcp().unwrap()).unwrap();
        busy.write_all(&hello_with(b"open sesame")).unwrap();
        assert_eq!(busy.read(&mut [0; 8]).unwrap(), 8);
        busy.write_all(&[1]).unwrap();
        match RemoteStore::connect(knows.clone(), Box::new(Serial)) {
            Err(error) if error.to_string().contains("the server has 1 connections, which is its limit") => {
                break busy;
            }
            other => assert!(began.elapsed() < SOON, "{other:?}"),
        }
        drop(busy);
        open(0.0);
    };
    let text = scrape(&cluster);
    assert!(value(&text, "recstore_refused_connections_total", &["\"bulk\"", "\"limit\""]) >= Some(1.0));
    assert_eq!(value(&text, "recstore_refused_connections_total", &["\"bulk\"", "handshake"]), Some(1.0));
    drop(busy);
    open(0.0);
}

fn endpoint(cluster: &Cluster) -> Endpoint {
    let address = cluster.servers[0].grpc_address().unwrap();
    Channel::from_shared(format!("http://{address}")).unwrap()
}

#[test]
fn the_grpc_port_takes_as_many_connections_as_it_may() {
    let cluster = cluster(|config| (config.grpc_port, config.max_connections) = (Some(0), 2));
    let open = |count| until(&cluster, "recstore_connections", &["port=\"grpc\""], count);
    Runtime::new().unwrap().block_on(async {
        let mut clients = Vec::new();
        for _ in 0..2 {
            let mut client = RecStoreClient::new(endpoint(&cluster).connect().await.unwrap());
            client.table_names(proto::TableNamesRequest {}).await.unwrap();
            clients.push(client);
        }
        open(2.0);
        // The one that is idle for longest gives way, and its client connects again.
        let mut third = RecStoreClient::new(endpoint(&cluster).connect().await.unwrap());
        third.table_names(proto::TableNamesRequest {}).await.unwrap();
        let text = scrape(&cluster);
        assert_eq!(
            value(&text, "recstore_refused_connections_total", &["\"grpc\"", "\"evicted\""]),
            Some(1.0)
        );
        drop(third);
        for client in &mut clients {
            client.table_names(proto::TableNamesRequest {}).await.unwrap();
        }
        drop(clients);
        open(0.0);
        let mut next = RecStoreClient::new(endpoint(&cluster).connect().await.unwrap());
        next.table_names(proto::TableNamesRequest {}).await.unwrap();
    });
    let text = scrape(&cluster);
    assert_eq!(value(&text, "recstore_requests_total", &["\"table_names\"", "\"ok\""]), Some(6.0));
}

/// A greeting with a token.
fn hello_with(token: &[u8]) -> Vec<u8> {
    let mut bytes = hello(1);
    bytes[12..16].copy_from_slice(&(token.len() as u32).to_le_bytes());
    bytes.extend(token);
    bytes
}

#[test]
fn silent_peers_of_every_port_are_closed_in_time_and_counted() {
    let cluster = cluster(|config| {
        (config.grpc_port, config.health_port) = (Some(0), Some(0));
        (config.handshake_timeout, config.idle_timeout) = (SHORT, 2 * SHORT);
    });
    let server = &cluster.servers[0];
    let ports = [
        ("bulk", server.address().tcp().unwrap()),
        ("grpc", server.grpc_address().unwrap()),
        ("health", server.health_address().unwrap()),
        ("metrics", server.metrics_address().unwrap()),
    ];
    // The preface of HTTP/2 and half a head of HTTP/1.1 identify nobody.
    let words: [&[u8]; 3] = [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /metrics HT"];
    let mut peers = Vec::new();
    for (_, address) in ports {
        let mut peer = TcpStream::connect(address).unwrap();
        peer.set_read_timeout(Some(SOON)).unwrap();
        let said = words[if address == ports[1].1 {
            1
        } else if address == ports[3].1 {
            2
        } else {
            0
        }];
        peer.write_all(said).unwrap();
        peers.push(peer);
    }
    for mut peer in peers {
        _ = peer.read_to_end(&mut Vec::new());
    }
    for (port, _) in ports {
        let port = format!("port=\"{port}\"");
        until(&cluster, "recstore_refused_connections_total", &[&port, "\"silent\""], 1.0);
    }
    // A client that has asked is closed later, and notices nothing.
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::new(endpoint(&cluster).connect().await.unwrap());
        for _ in 0..2 {
            // A first call that comes late, as on a busy machine, is that of one more silent peer.
            let began = Instant::now();
            while let Err(error) = client.table_names(proto::TableNamesRequest {}).await {
                assert!(began.elapsed() < SOON, "{error}");
            }
            until(&cluster, "recstore_connections", &["port=\"grpc\""], 0.0);
        }
    });
}

#[test]
fn a_peer_that_sends_no_message_holds_no_place_of_the_grpc_port() {
    let cluster = cluster(|config| {
        (config.grpc_port, config.transfer_timeout) = (Some(0), SHORT);
    });
    Runtime::new().unwrap().block_on(async {
        let connection = endpoint(&cluster).connect().await.unwrap();
        let mut silent = tonic::client::Grpc::new(connection.clone());
        silent.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<proto::TableNamesRequest, proto::TableNamesReply>::default();
        let path = "/recstore.v1.RecStore/TableNames".parse().unwrap();
        let never = tonic::Request::new(tokio_stream::pending());
        let refused = silent.client_streaming(never, path, codec).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::DeadlineExceeded, "{refused}");
        assert!(refused.message().starts_with("the request did not arrive within 0.3"), "{refused}");
        until(&cluster, "recstore_refused_connections_total", &["\"grpc\"", "\"slow\""], 1.0);
        RecStoreClient::new(connection).table_names(proto::TableNamesRequest {}).await.unwrap();
    });
}

#[test]
fn calls_over_grpc_are_counted_and_those_without_the_token_refused() {
    let cluster = cluster(|config| {
        (config.grpc_port, config.token) = (Some(0), Some("open sesame".to_owned()));
    });
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::new(endpoint(&cluster).connect().await.unwrap());
        assert!(client.table_names(proto::TableNamesRequest {}).await.is_err());
    });
    let text = scrape(&cluster);
    assert_eq!(value(&text, "recstore_refused_connections_total", &["\"grpc\"", "\"token\""]), Some(1.0));
    assert_eq!(value(&text, "recstore_requests_total", &["\"table_names\"", "\"ok\""]), Some(0.0));
}

#[test]
fn the_port_of_metrics_answers_nothing_else() {
    let cluster = cluster(|_| {});
    let address = cluster.servers[0].metrics_address().unwrap();
    let ask =
        |line: &str| http(address, &format!("{line} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"));
    let elsewhere = ask("GET /");
    assert!(elsewhere.starts_with("HTTP/1.1 404") && elsewhere.ends_with("the metrics are at /metrics\n"));
    let posted = ask("POST /metrics");
    assert!(posted.starts_with("HTTP/1.1 405") && posted.ends_with("asked for by GET\n"), "{posted}");
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut noisy = TcpStream::connect(address).unwrap();
    _ = noisy.write_all(&[0xff; 4096]);
    drop((silent, noisy));
    let began = Instant::now();
    while !http_or_nothing(address).starts_with("HTTP/1.1 200") {
        assert!(began.elapsed() < SOON);
        thread::sleep(Duration::from_millis(10));
    }
}

/// Asks for metrics where connections may be turned away.
fn http_or_nothing(address: SocketAddr) -> String {
    let mut answer = Vec::new();
    let mut stream = TcpStream::connect(address).unwrap();
    _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n");
    _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_port_of_metrics_that_is_taken_is_named_and_one_not_asked_for_is_not_there() {
    let taken = cluster(|_| {});
    let mut config = ServerConfig::default();
    config.metrics_port = taken.servers[0].metrics_address().map(|address| address.port());
    let expected = format!("cannot listen on 127.0.0.1:{}: ", config.metrics_port.unwrap());
    let error = Server::start(taken.stores[0].clone(), config).unwrap_err().to_string();
    assert!(error.starts_with(&expected), "{error}");
    let mut config = ServerConfig::default();
    (config.metrics_host, config.metrics_port) = ("no such host".to_owned(), Some(0));
    let error = Server::start(taken.stores[0].clone(), config).unwrap_err().to_string();
    assert!(error.starts_with("cannot listen on no such host:0: "), "{error}");
    assert_eq!(Cluster::start(1).servers[0].metrics_address(), None);
}

#[test]
fn each_shard_has_metrics_of_its_own() {
    let cluster = Cluster::configured(2, |config| config.metrics_port = Some(0));
    let store = connect(cluster.addresses(), SOON);
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    store.write(table, &[0, 1, 2, 4], &[0.0; 4]).unwrap();
    let rows = cluster.servers.iter().enumerate().map(|(shard, server)| {
        let text = http_or_nothing(server.metrics_address().unwrap());
        value(&text, "recstore_table_rows", &[&format!("shard=\"{shard}\""), "table=\"t\""])
    });
    assert_eq!(rows.collect::<Vec<_>>(), [Some(3.0), Some(1.0)]);
}
