//! Snapshots that several stores save together and any number of stores load; chains made one again.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use std::path::Path;
use std::sync::Barrier;
use std::thread;

use numbered::Numbered;
use recstore::{
    EmbeddingStore, GradientChunk, InProcessStore, LoadOptions, LocalStore, SaveKind, SaveOptions, Serial,
    Shard, Step, TableConfig, TableId, TableUpdate, commit_snapshot, compact, new_snapshot_name,
};

const DIM: usize = 3;
const IDS: i64 = 500;

/// Ids have a row from their second step on, and leave when one comes without them.
const CONFIG: &str = r#"{"optimizer": {"kind": "adam", "lr": 0.1}, "admission": {"kind": "count", "threshold": 2},
    "eviction": {"ttl": 1, "interval": 2, "delay": 1}}"#;

fn config() -> TableConfig {
    TableConfig::from_json(DIM, CONFIG).unwrap()
}

/// Whose row an id is. Negative ids are ids.
fn shard_of(id: i64, of: usize) -> usize {
    id.rem_euclid(of as i64) as usize
}

/// A store for each shard, each with the table and none of its rows.
fn stores(of: usize) -> Vec<(LocalStore, TableId)> {
    let open = |_| {
        let store = LocalStore::new(Box::new(Serial));
        let table = store.open_numbered("t", &config()).unwrap();
        (store, table)
    };
    (0..of).map(open).collect()
}

/// One step on every third id from `first` on, at its shard.
fn train(stores: &[(LocalStore, TableId)], first: i64, step: u64) {
    for (number, (store, table)) in stores.iter().enumerate() {
        let ids: Vec<i64> =
            (-IDS + first..IDS).step_by(3).filter(|&id| shard_of(id, stores.len()) == number).collect();
        let gradients: Vec<f32> =
            ids.iter().flat_map(|id| [*id as f32, 0.5 * step as f32, 1.0 / (step as f32)]).collect();
        let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
        store.update(&[TableUpdate { table: *table, chunks, step: Step::At(step) }]).unwrap();
    }
}

fn save(stores: &[(LocalStore, TableId)], directory: &Path, kind: SaveKind) {
    let (snapshot, of) = (new_snapshot_name(), stores.len());
    let mut options = SaveOptions::default();
    options.kind = kind;
    options.keep = 2;
    for (number, (store, _)) in stores.iter().enumerate() {
        store.save_part(directory, &snapshot, Shard { number, of }, &options).unwrap();
    }
    commit_snapshot(directory, &snapshot, of, &options).unwrap();
}

fn load(of: usize, directory: &Path) -> Vec<(LocalStore, TableId)> {
    let stores = stores(of);
    for (number, (store, _)) in stores.iter().enumerate() {
        let keeps = |id| shard_of(id, of) == number;
        let mut options = LoadOptions::default();
        options.keeps = Some(&keeps);
        options.shard = Some(Shard { number, of });
        options.without_counts = number > 0;
        store.load(directory, &options).unwrap();
    }
    stores
}

/// All rows with their slots, by id.
fn rows(stores: &[(LocalStore, TableId)]) -> Vec<(i64, Vec<u32>)> {
    let mut all = Vec::new();
    for (store, table) in stores {
        for id in store.ids(*table).unwrap() {
            let mut row = vec![0.0; DIM];
            store.read(*table, &[id], &mut row).unwrap();
            for slot in ["exp_avg", "exp_avg_sq"] {
                row.extend(store.read_slot(*table, slot, &[id]).unwrap().unwrap());
            }
            all.push((id, row.into_iter().map(f32::to_bits).collect()));
        }
    }
    all.sort_unstable();
    all
}

/// What was inserted, updated and deleted in all shards together.
fn counts(stores: &[(LocalStore, TableId)]) -> [u64; 3] {
    stores.iter().fold([0; 3], |[inserts, updates, deletes], (store, table)| {
        let counted = store.statistics(*table).unwrap();
        [inserts + counted.inserts, updates + counted.updates, deletes + counted.deletes]
    })
}

fn steps(stores: &[(LocalStore, TableId)]) -> Vec<u64> {
    stores.iter().map(|(store, table)| store.statistics(*table).unwrap().step).collect()
}

#[test]
fn any_number_of_shards_loads_into_any_other() {
    let directory = tempfile::tempdir().unwrap();
    let undisturbed = stores(1);
    let mut sharded = stores(4);
    let mut step = 0;
    for of in [1, 3, 7, 2] {
        for kind in [SaveKind::Full, SaveKind::Delta, SaveKind::Delta] {
            step += 1;
            train(&undisturbed, step as i64 % 4, step);
            train(&sharded, step as i64 % 4, step);
            for id in [step as i64, -(step as i64)] {
                undisturbed[0].0.delete(undisturbed[0].1, &[id]).unwrap();
                let (store, table) = &sharded[shard_of(id, sharded.len())];
                store.delete(*table, &[id]).unwrap();
            }
            save(&sharded, directory.path(), kind);
        }
        let counted = counts(&sharded);
        sharded = load(of, directory.path());
        assert_eq!(counts(&sharded), counted, "{of} shards");
        assert_eq!(rows(&sharded), rows(&undisturbed), "{of} shards");
        assert_eq!(steps(&sharded), vec![step; of]);
    }
    assert!(rows(&sharded).len() > 300);
    let statistics = undisturbed[0].0.statistics(undisturbed[0].1).unwrap();
    assert!(statistics.evictions > 100 && statistics.rejections > 600, "{statistics:?}");
}

#[test]
fn a_delta_may_follow_a_load_into_other_shards() {
    let directory = tempfile::tempdir().unwrap();
    let sharded = stores(2);
    train(&sharded, 0, 1);
    save(&sharded, directory.path(), SaveKind::Full);
    let more = load(3, directory.path());
    train(&more, 1, 2);
    save(&more, directory.path(), SaveKind::Delta);
    assert_eq!(rows(&load(1, directory.path())), rows(&more));
}

#[test]
fn a_compacted_chain_loads_as_before_and_can_be_followed() {
    let directory = tempfile::tempdir().unwrap();
    let store = stores(1);
    for place in [directory.path(), &directory.path().join("absent")] {
        assert_eq!(compact_error(place), "there is no checkpoint here");
    }
    assert_eq!(directory.path().read_dir().unwrap().count(), 0, "not even a lock");
    let mut options = SaveOptions::default();
    for (step, kind) in [(1, SaveKind::Full), (2, SaveKind::Delta), (3, SaveKind::Delta)] {
        train(&store, step as i64, step);
        options.kind = kind;
        store[0].0.save(directory.path(), &options).unwrap();
    }
    let before = files(directory.path());
    let report = compact(directory.path(), None).unwrap().unwrap();
    assert!(!report.is_delta);
    assert_eq!((before, files(directory.path())), (3, 1));
    assert_eq!(rows(&load(1, directory.path())), rows(&store));
    assert_eq!(compact(directory.path(), None).unwrap(), None);
    train(&store, 0, 4);
    store[0].0.delete(store[0].1, &[0, 3]).unwrap();
    assert!(store[0].0.save(directory.path(), &options).unwrap().is_delta);
    assert_eq!(rows(&load(1, directory.path())), rows(&store));
}

fn compact_error(directory: &Path) -> String {
    let error = compact(directory, None).unwrap_err().to_string();
    error.rsplit(": ").next().unwrap().to_owned()
}

fn files(directory: &Path) -> usize {
    let names = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().ends_with(".safetensors")).count()
}

#[test]
fn shards_that_do_not_fit_together_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (sharded, options) = (stores(2), SaveOptions::default());
    train(&sharded, 0, 1);
    let refused = |snapshot: &str, of| {
        commit_snapshot(directory.path(), snapshot, of, &options).unwrap_err().to_string()
    };
    let part = |number, snapshot: &str, shard| {
        sharded[number as usize].0.save_part(directory.path(), snapshot, shard, &options)
    };

    let snapshot = new_snapshot_name();
    part(0, &snapshot, Shard { number: 0, of: 2 }).unwrap();
    assert!(refused(&snapshot, 2).contains("part-1-of-2.json: this shard has not been saved"));
    assert!(refused(&snapshot, 0).contains("of no shard"));
    train(&sharded[1..], 0, 7);
    part(1, &snapshot, Shard { number: 1, of: 2 }).unwrap();
    let apart = refused(&snapshot, 2);
    assert!(
        apart.contains("shard 0 saved table \"t\" at step 1, shard 1 at step 7: a step reached only some"),
        "{apart}"
    );
    sharded[1].0.open_numbered("u", &config()).unwrap();
    let other = new_snapshot_name();
    part(0, &other, Shard { number: 0, of: 2 }).unwrap();
    part(1, &other, Shard { number: 1, of: 2 }).unwrap();
    assert!(refused(&other, 2).contains("shard 1 saved other changes or tables than shard 0"));

    let error = part(0, "xyz", Shard { number: 0, of: 2 }).unwrap_err().to_string();
    assert!(error.contains("\"xyz\" is not the name of a snapshot"), "{error}");
    let error = part(0, &other, Shard { number: 2, of: 2 }).unwrap_err().to_string();
    assert!(error.contains("there is no shard 2 of 2"), "{error}");
    assert!(sharded[0].0.load(directory.path(), &LoadOptions::default()).is_err());
}

/// A shard that begins to save finds files of another that has begun a moment before, and both are of one snapshot.
#[test]
fn shards_begin_to_save_into_a_new_directory_at_once() {
    let stores = stores(2);
    train(&stores, 0, 1);
    train(&stores, 0, 2);
    for _ in 0..50 {
        let directory = tempfile::tempdir().unwrap();
        let snapshot = new_snapshot_name();
        let begin = Barrier::new(stores.len());
        thread::scope(|scope| {
            for (number, (store, _)) in stores.iter().enumerate() {
                let (begin, snapshot, directory) = (&begin, &snapshot, directory.path());
                let of = stores.len();
                scope.spawn(move || {
                    begin.wait();
                    let options = SaveOptions::default();
                    store.save_part(directory, snapshot, Shard { number, of }, &options).unwrap();
                });
            }
        });
        commit_snapshot(directory.path(), &snapshot, stores.len(), &SaveOptions::default()).unwrap();
    }
}
