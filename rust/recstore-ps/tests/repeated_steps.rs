//! A step that reached only some servers is repeated: it is taken once by each, whatever the program did meanwhile, and
//! over a restart of the server that missed it.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;
mod processes;
mod proxy;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use cluster::{Cluster, connect};
use numbered::Numbered;
use processes::{free_port, start};
use proxy::{Fault, Proxy};
use recstore::{
    EmbeddingStore, Error, GradientChunk, LoadOptions, Result, SaveOptions, Shard, Step, TableConfig,
    TableId, TableUpdate,
};
use recstore_ps::{RemoteStore, Server};

const IDS: [i64; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

/// Rows that count the steps, if gradients are -1.
fn counting() -> TableConfig {
    let text = r#"{"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}"#;
    TableConfig::from_json(1, text).unwrap()
}

/// Takes a step of a table by `height` in each row.
fn step(store: &RemoteStore, table: TableId, height: f32) -> Result<()> {
    let gradients = [-height; IDS.len()];
    let chunks = vec![GradientChunk::new(&IDS, &gradients, 1)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

fn rows(store: &RemoteStore, table: TableId) -> Vec<f32> {
    let mut rows = vec![0.0; IDS.len()];
    store.read(table, &IDS, &mut rows).unwrap();
    rows
}

/// How a step fails on the second server.
#[derive(Debug, Clone, Copy)]
enum Failure {
    /// It never comes there.
    Down,
    /// It is made, and nobody hears of it.
    Deaf,
}

/// Two servers with logs, the second one behind a proxy, and a program that trains the tables `n` and `other`.
struct Training {
    directory: tempfile::TempDir,
    servers: Vec<Server>,
    proxy: Proxy,
    store: RemoteStore,
    n: TableId,
    other: TableId,
}

impl Training {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let servers: Vec<Server> =
            (0..2).map(|number| serve(directory.path(), free_port(), number)).collect();
        let proxy = Proxy::start(servers[1].address().to_string(), || [Fault::None, Fault::None]);
        let addresses = vec![servers[0].address().to_string(), proxy.address.clone()];
        let store = connect(addresses, Duration::from_millis(400));
        let [n, other] = ["n", "other"].map(|name| store.open_numbered(name, &counting()).unwrap());
        Self { directory, servers, proxy, store, n, other }
    }

    fn fail(&self, failure: Failure, fails: impl FnOnce()) {
        let set = |is_failing| match failure {
            Failure::Down => {
                self.proxy.set_down(is_failing);
                // What waits for bytes looks some times a second.
                thread::sleep(Duration::from_millis(200));
            }
            Failure::Deaf => self.proxy.is_deaf.store(is_failing, Ordering::Relaxed),
        };
        set(true);
        fails();
        set(false);
    }

    fn assert_step_fails(&self, table: TableId, height: f32) {
        let error = step(&self.store, table, height).unwrap_err();
        assert!(matches!(error, Error::Unavailable { operation: "emb_update", shard: 1, .. }), "{error}");
    }

    /// Starts the second server again from its log.
    fn restart(&mut self) {
        let server = self.servers.pop().unwrap();
        let address: SocketAddr = server.address().to_string().parse().unwrap();
        server.stop(Duration::from_secs(1));
        self.servers.push(serve(self.directory.path(), address.port(), 1));
    }
}

impl Drop for Training {
    fn drop(&mut self) {
        self.servers.drain(..).for_each(|server| server.stop(Duration::from_secs(1)));
    }
}

fn serve(directory: &Path, port: u16, number: usize) -> Server {
    start(&directory.join(number.to_string()), port, Shard { number, of: 2 })
}

/// What a program does between a step that failed and its repetition.
type Between = fn(&Training);

const BETWEEN: [(&str, Between); 12] = [
    ("nothing", |_| {}),
    ("a read", |training| _ = rows(&training.store, training.other)),
    ("a step of another table", |training| step(&training.store, training.other, 1.0).unwrap()),
    ("another step of the table", |training| step(&training.store, training.n, 4.0).unwrap()),
    ("a write", |training| training.store.write(training.other, &IDS, &[1.0; 12]).unwrap()),
    ("a deletion", |training| _ = training.store.delete(training.other, &IDS).unwrap()),
    ("a clearing", |training| training.store.clear(training.other).unwrap()),
    ("a drop", |training| training.store.drop_table("other").unwrap()),
    ("a learning rate", |training| training.store.set_learning_rate(training.other, 0.5, true).unwrap()),
    ("a step of another thread", |training| {
        thread::scope(|scope| _ = scope.spawn(|| step(&training.store, training.other, 1.0).unwrap()));
    }),
    ("an opening", |training| _ = training.store.open_table("n", &counting()).unwrap()),
    ("a load of another table", |training| {
        let snapshot = training.directory.path().join("saved");
        let mut save = SaveOptions::default();
        save.keep = 2;
        // The shards of `n` are a step apart, so another program saves a table like the other one.
        let cluster = Cluster::start(2);
        cluster.connect().open_table("other", &counting()).unwrap();
        cluster.connect().save(&snapshot, &save).unwrap();
        let (mut load, names) = (LoadOptions::default(), BTreeSet::from(["other".to_owned()]));
        load.tables = Some(&names);
        training.store.load(&snapshot, &load).unwrap();
    }),
];

fn assert_taken_once(name: &str, between: Between, failure: Failure, is_restarted: bool) {
    let mut training = Training::start();
    step(&training.store, training.n, 1.0).unwrap();
    training.fail(failure, || {
        training.assert_step_fails(training.n, 2.0);
        training.assert_step_fails(training.n, 2.0);
    });
    if is_restarted {
        training.restart();
    }
    between(&training);
    if is_restarted {
        training.restart();
    }
    step(&training.store, training.n, 2.0).unwrap();
    let expected = if name == "another step of the table" { 7.0 } else { 3.0 };
    assert_eq!(rows(&training.store, training.n), [expected; 12], "{name} {failure:?} {is_restarted}");
    // It was repeated: one that is equal is a further one.
    step(&training.store, training.n, 2.0).unwrap();
    assert_eq!(rows(&training.store, training.n), [expected + 2.0; 12], "{name} {failure:?} {is_restarted}");
    training.store.save(&training.directory.path().join("backup"), &SaveOptions::default()).unwrap();
}

#[test]
fn a_step_is_taken_once_whatever_lies_before_its_repetition() {
    let cases: Vec<_> = [(Failure::Down, false), (Failure::Down, true), (Failure::Deaf, false)]
        .into_iter()
        .chain([(Failure::Deaf, true)])
        .flat_map(|(failure, is_restarted)| {
            BETWEEN.map(|(name, between)| (name, between, failure, is_restarted))
        })
        .collect();
    for some in cases.chunks(12) {
        thread::scope(|scope| {
            for &(name, between, failure, is_restarted) in some {
                scope.spawn(move || assert_taken_once(name, between, failure, is_restarted));
            }
        });
    }
}

#[test]
fn steps_that_failed_together_are_repeated_in_any_order() {
    for (failure, is_reversed) in
        [Failure::Down, Failure::Deaf].map(|failure| [(failure, false), (failure, true)]).concat()
    {
        let training = Training::start();
        let mut steps = [(training.n, 1.0), (training.other, 2.0)];
        training.fail(failure, || {
            steps.iter().for_each(|&(table, height)| training.assert_step_fails(table, height))
        });
        if is_reversed {
            steps.reverse();
        }
        for (table, height) in steps {
            step(&training.store, table, height).unwrap();
        }
        for (table, height) in steps {
            assert_eq!(rows(&training.store, table), [height; 12], "{failure:?} {is_reversed}");
        }
    }
}

#[test]
fn a_server_in_doubt_gets_no_other_change_before_it_is_back() {
    let training = Training::start();
    training.fail(Failure::Down, || {
        training.assert_step_fails(training.n, 1.0);
        let written = training.store.write(training.other, &IDS, &[5.0; 12]).unwrap_err();
        assert!(matches!(written, Error::Unavailable { operation: "emb_write", shard: 1, .. }), "{written}");
        // The first server, which is there, has none of it either.
        let even: Vec<f32> = vec![0.0; 6];
        let mut found = vec![1.0; 6];
        let ids: Vec<i64> = IDS.into_iter().filter(|id| id % 2 == 0).collect();
        training.store.read(training.other, &ids, &mut found).unwrap();
        assert_eq!(found, even);
    });
    training.store.write(training.other, &IDS, &[5.0; 12]).unwrap();
    step(&training.store, training.n, 1.0).unwrap();
    assert_eq!(
        (rows(&training.store, training.n), rows(&training.store, training.other)),
        (vec![1.0; 12], vec![5.0; 12])
    );
}
