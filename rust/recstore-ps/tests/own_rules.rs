//! Rules of a server's program, named by clients that do not have them.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, connect};
use numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, Serial, Step, TableConfig, TableId, TableUpdate,
    UpdateRule,
};
use recstore_ps::{KeptState, Server, ServerConfig, ServerError};

const DIM: usize = 2;
const IDS: [i64; 5] = [-3, 0, 1, 7, 8];
const FATAL: f32 = 13.0;

/// Momentum, with a count of the steps of each row.
struct Momentum;

impl UpdateRule for Momentum {
    fn slots(&self, dim: usize) -> Vec<(String, usize)> {
        vec![("velocity".into(), dim), ("steps".into(), 1)]
    }

    fn apply(&self, row: &mut [f32], slots: &mut [f32], gradient: &[f32], _: u64, learning_rate: f64) {
        assert!(gradient[0] != FATAL, "a fatal gradient");
        let (velocity, steps) = slots.split_at_mut(row.len());
        steps[0] += 1.0;
        for ((w, v), g) in row.iter_mut().zip(velocity).zip(gradient) {
            *v = 0.9 * *v + g;
            *w -= learning_rate as f32 * *v;
        }
    }
}

fn with_rule() -> Arc<LocalStore> {
    let store = LocalStore::new(Box::new(Serial));
    store.register_rule("momentum", Arc::new(Momentum)).unwrap();
    Arc::new(store)
}

fn config() -> TableConfig {
    TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "rule", "name": "momentum", "lr": 0.1}}"#).unwrap()
}

fn step(store: &dyn EmbeddingStore, table: TableId, gradients: &[f32]) -> recstore::Result<()> {
    let chunks = vec![GradientChunk::new(&IDS, gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

/// Takes three steps and returns all that can be seen of the table.
fn trained(store: &dyn EmbeddingStore, table: TableId) -> String {
    for number in 1..=3u8 {
        let gradients: Vec<f32> = (0..IDS.len() * DIM).map(|j| j as f32 * f32::from(number) - 4.0).collect();
        step(store, table, &gradients).unwrap();
    }
    seen(store, table)
}

fn seen(store: &dyn EmbeddingStore, table: TableId) -> String {
    let mut rows = vec![0.0; IDS.len() * DIM];
    store.read(table, &IDS, &mut rows).unwrap();
    let slots = ["velocity", "steps"].map(|slot| store.read_slot(table, slot, &IDS).unwrap());
    format!("{rows:?} {slots:?} {:?}", store.describe(table).unwrap())
}

#[test]
fn a_table_of_a_servers_own_rule_is_as_one_in_this_process() {
    let (cluster, local) = (Cluster::start(2), with_rule());
    for store in &cluster.stores {
        store.register_rule("momentum", Arc::new(Momentum)).unwrap();
    }
    let table = local.open_numbered("t", &config()).unwrap();
    let expected = trained(&*local, table);
    let remote = cluster.connect();
    let table = remote.open_numbered("t", &config()).unwrap();
    assert_eq!(trained(&remote, table), expected);
    let other = cluster.connect();
    let found = other.find_numbered("t").unwrap().unwrap();
    assert_eq!(seen(&other, found), expected);

    let failed = step(&remote, table, &[FATAL; IDS.len() * DIM]).unwrap_err();
    let Error::RuleFailed { table: name, rule, message } = failed else { panic!("{failed}") };
    assert_eq!([name, rule, message], ["t", "momentum", "a fatal gradient"]);
    remote.clear(table).unwrap();
    step(&remote, table, &[1.0; IDS.len() * DIM]).unwrap();
}

#[test]
fn a_rule_that_the_servers_do_not_have_is_named() {
    let cluster = Cluster::start(2);
    let unknown = Error::UnknownRule { table: "t".into(), rule: "momentum".into(), registered: vec![] };
    assert_eq!(cluster.connect().open_numbered("t", &config()), Err(unknown));
    assert_eq!(cluster.connect().table_names(), Ok(vec![]));
}

fn start(store: Arc<LocalStore>, directory: &Path) -> Result<Server, ServerError> {
    let mut config = ServerConfig::default();
    config.kept = Some(KeptState::logged(directory));
    Server::start(store, config)
}

#[test]
fn a_servers_log_is_replayed_with_its_rule_and_not_without() {
    let directory = tempfile::tempdir().unwrap();
    let mut expected = None;
    for has_checkpoint in [false, true] {
        let server = start(with_rule(), directory.path()).unwrap();
        let client = connect(vec![server.address().to_string()], Duration::from_secs(20));
        let table = client.open_numbered("t", &config()).unwrap();
        let before = expected.take().unwrap_or_else(|| trained(&client, table));
        assert_eq!(seen(&client, table), before);
        expected = Some(before);
        if has_checkpoint {
            server.handler().checkpoint().unwrap();
        }
        server.stop(Duration::from_secs(5));

        let refused = start(Arc::new(LocalStore::new(Box::new(Serial))), directory.path()).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("table \"t\": the update rule \"momentum\" is not registered"), "{text}");
    }
}
