//! Servers that loaded a part of a snapshot delete nothing of the rest; those that loaded all of it go on.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;

use std::collections::BTreeSet;
use std::path::Path;

use cluster::Cluster;
use recstore::{EmbeddingStore, LoadOptions, SaveOptions, TableConfig, checkpoint_files};
use recstore_ps::RemoteStore;

/// Makes a snapshot of two tables, by servers that are gone afterwards, and returns its name.
fn saved_elsewhere(directory: &Path) -> String {
    let cluster = Cluster::start(2);
    let store = cluster.connect();
    for name in ["item", "user"] {
        let table = store.open_table(name, &TableConfig::new(1)).unwrap();
        table.write(&[1, 2, 3, 4], &[1.0; 4]).unwrap();
    }
    store.save(directory, &SaveOptions::default()).unwrap().snapshot
}

fn load_tables(store: &RemoteStore, directory: &Path, names: &[&str]) {
    let names: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut options = LoadOptions::default();
    options.tables = Some(&names);
    store.load(directory, &options).unwrap();
}

#[test]
fn servers_that_loaded_some_tables_keep_the_snapshot() {
    for shards in [1, 2] {
        let directory = tempfile::tempdir().unwrap();
        let (snapshot, cluster) = (saved_elsewhere(directory.path()), Cluster::start(shards));
        let before = checkpoint_files(directory.path(), None).unwrap().all;
        let store = cluster.connect();
        load_tables(&store, directory.path(), &["user"]);
        let saved = store.save(directory.path(), &SaveOptions::default()).unwrap();
        assert_eq!(saved.kept, Some(snapshot.clone()), "{shards} servers");
        let after = checkpoint_files(directory.path(), Some(&snapshot)).unwrap();
        assert!(after.loaded == before && after.all.is_superset(&before));
    }
}

#[test]
fn servers_that_loaded_no_table_save_no_rows_over_rows() {
    for shards in [1, 2] {
        let directory = tempfile::tempdir().unwrap();
        let (_, cluster) = (saved_elsewhere(directory.path()), Cluster::start(shards));
        let store = cluster.connect();
        load_tables(&store, directory.path(), &[]);
        let refused = store.save(directory.path(), &SaveOptions::default()).unwrap_err().to_string();
        assert!(refused.contains("the store to be saved has none and never had those"), "{refused}");
    }
}

#[test]
fn servers_that_loaded_all_go_on() {
    for shards in [1, 2, 3] {
        let directory = tempfile::tempdir().unwrap();
        let (_, cluster) = (saved_elsewhere(directory.path()), Cluster::start(shards));
        let store = cluster.connect();
        store.load(directory.path(), &LoadOptions::default()).unwrap();
        // One table more often takes nothing away.
        load_tables(&store, directory.path(), &["user"]);
        for _ in 0..2 {
            assert_eq!(store.save(directory.path(), &SaveOptions::default()).unwrap().kept, None);
        }
        let files = checkpoint_files(directory.path(), None).unwrap();
        assert_eq!(files.all, files.loaded, "{shards} servers");
    }
}
