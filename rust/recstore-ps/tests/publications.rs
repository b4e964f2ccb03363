//! Publications of tables on servers: whatever a network does to a connection, those who follow have all rows.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
mod proxy;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, connect};
use recstore::{
    ChangedRows, EmbeddingStore, EmbeddingTable, Error, GradientChunk, LoadOptions, Publications,
    SaveOptions, Step, TableConfig, TableId, TableUpdate,
};
use recstore_ps::RemoteStore;

use proxy::{Proxy, Random, some_fault};

const DIM: usize = 2;

type Rows = BTreeMap<i64, Vec<f32>>;
type Tables = Vec<Arc<dyn EmbeddingTable>>;

fn opened(store: &RemoteStore) -> (Tables, Vec<TableId>) {
    let config = |json: &str| TableConfig::from_json(DIM, json).unwrap();
    let plain = config(r#"{"initializer": {"kind": "normal", "std": 1.0}}"#);
    let halved = config(r#"{"dtype": "bfloat16", "optimizer": {"kind": "adam", "lr": 0.1}}"#);
    let tables =
        vec![store.open_table("plain", &plain).unwrap(), store.open_table("halved", &halved).unwrap()];
    let ids = tables.iter().map(|table| table.id()).collect();
    (tables, ids)
}

fn rows_of(tables: &Tables) -> Vec<Rows> {
    let rows = |table: &Arc<dyn EmbeddingTable>| {
        let ids = table.ids().unwrap();
        let mut rows = vec![0.0; ids.len() * DIM];
        table.read(&ids, &mut rows).unwrap();
        ids.into_iter().zip(rows.chunks(DIM).map(<[f32]>::to_vec)).collect()
    };
    tables.iter().map(rows).collect()
}

fn follow(followed: &mut [Rows], changed: &[ChangedRows]) {
    for (rows, ChangedRows { ids, rows: values, deleted }) in followed.iter_mut().zip(changed) {
        deleted.iter().for_each(|id| _ = rows.remove(id));
        rows.extend(ids.iter().copied().zip(values.chunks(DIM).map(<[f32]>::to_vec)));
    }
}

/// Writes, steps and deletes of a test, by number.
fn act(store: &RemoteStore, tables: &Tables, number: i64) {
    let ids: Vec<i64> = (0..number % 9).map(|place| (place * number) % 40).collect();
    match number % 4 {
        0 => tables[0].write(&ids, &vec![number as f32; ids.len() * DIM]).unwrap(),
        1 => tables.iter().for_each(|table| _ = table.delete(&ids).unwrap()),
        _ => {
            let gradients = vec![1.0; ids.len() * DIM];
            let update = |table: &Arc<dyn EmbeddingTable>| TableUpdate {
                table: table.id(),
                chunks: vec![GradientChunk::new(&ids, &gradients, DIM)],
                step: Step::Next,
            };
            _ = store.update(&tables.iter().map(update).collect::<Vec<_>>()).unwrap();
        }
    }
}

#[test]
fn those_who_follow_have_all_rows_over_connections_that_break() {
    for (shards, seed) in [(1, 1), (3, 2)] {
        let cluster = Cluster::start(shards);
        let spoilt = |(shard, address): (u64, String)| {
            let mut random = Random(seed + shard);
            Proxy::start(address, move || [some_fault(&mut random, 9_000), some_fault(&mut random, 9_000)])
        };
        let proxies: Vec<_> = (0..).zip(cluster.addresses()).map(spoilt).collect();
        let addresses = proxies.iter().map(|proxy| proxy.address.clone()).collect();
        let store = connect(addresses, Duration::from_secs(20));
        let (tables, ids) = opened(&store);
        let mut followed = rows_of(&tables);
        let publication = store.begin_publication(&ids).unwrap();
        let (mut was_told, mut random) = (true, Random(seed));
        for number in 0..200 {
            act(&store, &tables, number);
            if random.below(3) > 0 && number < 199 {
                continue;
            }
            let changed = store.take_changes(&ids, publication, was_told).unwrap();
            was_told = number == 199 || random.below(3) > 0;
            if was_told {
                follow(&mut followed, &changed);
                assert_eq!(followed, rows_of(&tables), "step {number} on {shards} servers");
            }
        }
        assert!(proxies.iter().all(|proxy| proxy.connections.load(std::sync::atomic::Ordering::Relaxed) > 3));
    }
}

#[test]
fn a_publication_that_begins_ends_the_one_before() {
    let cluster = Cluster::start(2);
    let (first, second) = (cluster.connect(), cluster.connect());
    let (tables, ids) = opened(&first);
    let before = first.begin_publication(&ids).unwrap();
    let (_, same) = opened(&second);
    let publication = second.begin_publication(&same).unwrap();
    tables[0].write(&[7], &[1.0, 2.0]).unwrap();
    let error = first.take_changes(&ids, before, true).unwrap_err();
    assert_eq!(error, Error::Published { table: "plain".to_owned() });
    let changed = second.take_changes(&same, publication, true).unwrap();
    assert_eq!((&changed[0].ids[..], &changed[0].rows[..]), (&[7][..], &[1.0, 2.0][..]));
    first.end_publication(&ids, before).unwrap();
    tables[0].write(&[8], &[1.0, 2.0]).unwrap();
    assert_eq!(second.take_changes(&same, publication, true).unwrap()[0].ids, [8], "the end of another one");
}

#[test]
fn what_is_no_longer_noted_is_said() {
    let cluster = Cluster::configured(2, |config| config.max_frame_bytes = 4096);
    let store = cluster.connect();
    let (tables, ids) = opened(&store);
    let unknown = Error::NotPublished { table: "plain".to_owned() };
    assert_eq!(store.take_changes(&ids, 99, true).unwrap_err(), unknown);

    let publication = store.begin_publication(&ids).unwrap();
    for start in (0..1_000).step_by(100) {
        let many: Vec<i64> = (start..start + 100).collect();
        tables[0].write(&many, &[1.0; 100 * DIM]).unwrap();
    }
    assert_eq!(store.take_changes(&ids, publication, true).unwrap_err(), unknown, "more than a frame takes");

    let publication = store.begin_publication(&ids).unwrap();
    let directory = tempfile::tempdir().unwrap();
    store.save(directory.path(), &SaveOptions::default()).unwrap();
    store.load(directory.path(), &LoadOptions::default()).unwrap();
    assert_eq!(store.take_changes(&ids, publication, true).unwrap_err(), unknown, "loaded");

    let publication = store.begin_publication(&ids).unwrap();
    store.end_publication(&ids, publication).unwrap();
    assert_eq!(store.take_changes(&ids, publication, true).unwrap_err(), unknown, "ended");
    store.end_publication(&ids, publication).unwrap();
}
