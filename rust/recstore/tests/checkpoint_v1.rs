//! Checkpoints of format 1 that lie beside this file are read to the bit for ever.
//!
//! They were made once; `fixtures/checkpoint_v1/README.md` says how. `expected.json` has what the tables hold, and what
//! they hold after one more step: so optimizers, admission and eviction have really come back.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

#[path = "fixtures/checkpoint_v1/by_document.rs"]
mod by_document;
#[path = "fixtures/checkpoint_v1/make.rs"]
mod make;
mod numbered;
#[path = "fixtures/checkpoint_v1/recorded.rs"]
mod recorded;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use by_document::{TableFiles, Tensor, tables_of, tensors_of};
use make::{Gradients, make_chain, make_own, make_shards, step_of, store, take_step};
use numbered::Numbered;
use recorded::{Recorded, lines, recorded};
use recstore::{
    Compression, EmbeddingStore, LoadOptions, LocalStore, Metadata, SaveKind, SaveOptions, Serial, Shard,
    TableConfig, commit_snapshot, compact,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What is written down of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
struct Expected {
    metadata: Metadata,
    tables: BTreeMap<String, Recorded>,
    /// The tables as the document has them.
    files: BTreeMap<String, TableFiles>,
    /// One more step of each table: its ids and a gradient for each.
    step: BTreeMap<String, Gradients>,
    /// The tables after that step.
    after: BTreeMap<String, Recorded>,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint_v1").join(name)
}

/// Returns what is written down of a fixture. The compressed chain has some of the tables of the plain one.
fn expected(name: &str) -> Expected {
    if name != "zstd" {
        return serde_json::from_slice(&fs::read(fixture(&format!("{name}.json"))).unwrap()).unwrap();
    }
    let mut expected = expected("chain");
    let tables = [
        "adagrad",
        "adam of rows, ttl",
        "adamw of rows, lfu",
        "counted and lru",
        "late",
        "sgd",
        "sgd float16",
    ];
    expected.tables.retain(|name, _| tables.contains(&&**name));
    expected.step.retain(|name, _| tables.contains(&&**name));
    expected.after.retain(|name, _| tables.contains(&&**name));
    expected
}

/// Returns a store with what a directory has, and the metadata.
fn loaded(directory: &Path) -> (LocalStore, Metadata) {
    let store = store();
    let report = store.load(directory, &LoadOptions::default()).unwrap();
    (store, report.metadata)
}

fn take_recorded_step(store: &LocalStore, step: &BTreeMap<String, Gradients>) {
    for (name, (ids, gradients)) in step {
        take_step(store, store.find_numbered(name).unwrap().unwrap(), ids, gradients);
    }
}

/// Compares tables one by one, so that a difference can be read.
fn assert_same(found: &BTreeMap<String, Recorded>, expected: &BTreeMap<String, Recorded>, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (name, expected) in expected {
        let found = &found[name];
        let parsed =
            |recorded: &Recorded| TableConfig::from_json(recorded.dim, &recorded.config.to_string()).unwrap();
        assert_eq!(parsed(found), parsed(expected), "{what}: {name}");
        let without_config = |recorded: &Recorded| Recorded { config: Value::Null, ..recorded.clone() };
        assert_eq!(without_config(found), without_config(expected), "{what}: {name}");
    }
}

fn is_read_and_goes_on(directory: &Path, expected: &Expected) {
    let what = directory.display().to_string();
    let (store, metadata) = loaded(directory);
    assert_eq!(metadata, expected.metadata, "{what}");
    assert_same(&recorded(&store), &expected.tables, &what);
    take_recorded_step(&store, &expected.step);
    assert_same(&recorded(&store), &expected.after, &format!("{what}, one step on"));
}

/// Copies a fixture to where it may be written to.
fn copied(name: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture(name)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), directory.path().join(file.file_name())).unwrap();
    }
    directory
}

#[test]
fn a_chain_is_read_to_the_bit_and_goes_on() {
    is_read_and_goes_on(&fixture("chain"), &expected("chain"));
}

#[test]
fn a_compressed_chain_is_read_to_the_bit_and_goes_on() {
    is_read_and_goes_on(&fixture("zstd"), &expected("zstd"));
}

#[test]
fn a_table_with_a_rule_of_its_own_is_read_to_the_bit_and_goes_on() {
    is_read_and_goes_on(&fixture("own"), &expected("own"));
}

#[test]
fn what_two_stores_saved_together_is_read_to_the_bit_and_goes_on() {
    is_read_and_goes_on(&fixture("shards"), &expected("shards"));
}

#[test]
fn parts_that_were_saved_and_not_committed_can_be() {
    let directory = copied("shards");
    let part = fs::read_dir(directory.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .find(|name| name.ends_with("-part-0-of-2.json"));
    let snapshot = part.unwrap()[..16].to_owned();
    let expected = expected("shards_committed");
    let mut options = SaveOptions::default();
    options.metadata = expected.metadata.clone();
    commit_snapshot(directory.path(), &snapshot, 2, &options).unwrap();
    is_read_and_goes_on(directory.path(), &expected);
}

#[test]
fn shards_are_shared_by_any_number_of_stores() {
    let expected = expected("shards");
    let rows = |tables: &BTreeMap<String, Recorded>| -> BTreeMap<(String, i64), Vec<String>> {
        let of_table = |(name, table): (&String, &Recorded)| {
            let name = name.clone();
            table.rows.clone().into_iter().map(move |(id, row)| ((name.clone(), id), row))
        };
        tables.iter().flat_map(of_table).collect()
    };
    for of in [2, 3] {
        let (mut found, mut inserts) = (BTreeMap::new(), 0);
        for number in 0..of {
            let (store, keeps) = (store(), |id| Shard { number, of }.holds(id));
            let mut options = LoadOptions::default();
            options.keeps = Some(&keeps);
            options.without_counts = number > 0;
            store.load(&fixture("shards"), &options).unwrap();
            let tables = recorded(&store);
            inserts += tables["adam counted"].statistics["inserts"].as_u64().unwrap();
            found.extend(rows(&tables));
        }
        assert_eq!(found, rows(&expected.tables), "{of} stores");
        assert_eq!(Value::from(inserts), expected.tables["adam counted"].statistics["inserts"]);
    }
}

#[test]
fn the_document_and_the_crate_safetensors_are_enough_to_read_them() {
    for name in ["chain", "own", "shards"] {
        let (expected, found) = (expected(name), tables_of(&fixture(name)));
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.tables.keys().collect::<Vec<_>>(), "{name}");
        for (table, found) in found {
            assert_eq!(found.rows, expected.tables[&table].rows, "{name}: {table}");
            let without_rows = TableFiles { rows: BTreeMap::new(), ..found };
            assert_eq!(without_rows, expected.files[&table], "{name}: {table}");
        }
    }
}

#[test]
fn a_delta_follows_what_was_loaded() {
    for name in ["chain", "zstd", "own", "shards"] {
        let (directory, expected) = (copied(name), expected(name));
        let (store, _) = loaded(directory.path());
        take_recorded_step(&store, &expected.step);
        let mut options = SaveOptions::default();
        options.kind = SaveKind::Delta;
        assert!(store.save(directory.path(), &options).unwrap().is_delta);
        assert_same(&recorded(&loaded(directory.path()).0), &expected.after, name);
    }
}

#[test]
fn a_chain_that_was_compacted_is_read_as_before() {
    for name in ["chain", "zstd", "own", "shards"] {
        let (directory, expected) = (copied(name), expected(name));
        assert!(!compact(directory.path(), None).unwrap().unwrap().is_delta);
        is_read_and_goes_on(directory.path(), &expected);
    }
}

#[test]
fn a_table_that_is_open_already_takes_what_is_loaded() {
    let expected = expected("chain");
    let store = LocalStore::new(Box::new(Serial));
    for recorded in expected.tables.values().take(5) {
        let config = TableConfig::from_json(recorded.dim, &recorded.config.to_string()).unwrap();
        let name = expected.tables.iter().find(|(_, other)| *other == recorded).unwrap().0;
        let table = store.open_numbered(name, &config).unwrap();
        store.write(table, &[7], &vec![1.0; recorded.dim]).unwrap();
    }
    store.load(&fixture("chain"), &LoadOptions::default()).unwrap();
    assert_same(&recorded(&store), &expected.tables, "over open tables");
}

/// Every kind of state is there to be read.
#[test]
fn the_fixtures_have_what_they_are_to_show() {
    let expected = expected("chain");
    let sum = |counter: &str| -> u64 {
        expected.tables.values().map(|table| table.statistics[counter].as_u64().unwrap()).sum()
    };
    for counter in ["inserts", "updates", "deletes", "rejections", "evictions", "candidates", "refusals"] {
        assert!(sum(counter) > 0, "no {counter}");
    }
    let has = |name: &str, state: &str| !expected.files[name].state[state].is_empty();
    for name in ["adam of rows, ttl", "adamw of rows, lfu", "ftrl, min_norm", "counted and lru"] {
        assert!(has(name, "eviction.ids"), "no row is about to leave \"{name}\"");
        let evictions = |tables: &BTreeMap<String, Recorded>| tables[name].statistics["evictions"].as_u64();
        assert!(evictions(&expected.after) > evictions(&expected.tables), "{name}");
    }
    for name in ["adam counted", "counted and lru"] {
        assert!(has(name, "admission.ids"), "no id is counted of \"{name}\"");
    }
    assert!(expected.files["adam of rows, ttl"].state["admission.counts"].iter().any(|count| *count > 0));
}

/// A table of a snapshot: what the manifest says of it, but for what differs from one save to the next, and its tensors.
#[derive(Debug, PartialEq)]
struct Written {
    entry: Value,
    files: Vec<Vec<Tensor>>,
}

/// Returns the tables of all snapshots, by the snapshot's metadata and the table's name.
fn written(directory: &Path) -> BTreeMap<(String, String), Written> {
    let manifest: Value =
        serde_json::from_slice(&fs::read(directory.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["format"], "recstore-checkpoint");
    // What is written today is of version 2, which has lineages beside the tables of version 1.
    assert!([1, 2].map(Value::from).contains(&manifest["version"]));
    let (mut tables, mut parent) = (BTreeMap::new(), &Value::Null);
    for snapshot in manifest["snapshots"].as_array().unwrap() {
        assert_eq!(&snapshot["parent"], parent);
        parent = &snapshot["id"];
        for entry in snapshot["tables"].as_array().unwrap() {
            let place = (snapshot["metadata"].to_string(), entry["name"].as_str().unwrap().to_owned());
            assert!(tables.insert(place, written_table(directory, entry.clone())).is_none());
        }
    }
    tables
}

fn written_table(directory: &Path, mut entry: Value) -> Written {
    let mut files = Vec::new();
    for shard in entry["shards"].as_array_mut().unwrap() {
        let name = shard["file"].as_str().unwrap().to_owned();
        files.push(tensors_of(&fs::read(directory.join(&name)).unwrap()));
        shard["file"] = name[16..].into();
        // How the header is written is a matter of the crate; deleted ids come in any order.
        (shard["bytes"], shard["checksums"]["header"]) = (Value::Null, Value::Null);
        (shard["checksums"]["deleted_ids"], shard["checksums"]["eviction.ids"]) = (Value::Null, Value::Null);
        if let Some(count) = shard.pointer_mut("/state/eviction.ids") {
            *count = Value::Null;
        }
    }
    let began = entry["progress"]["sweep"]["began"].as_i64().unwrap_or(0);
    files.iter_mut().for_each(|file| leave_what_counts(file, began));
    Written { entry, files }
}

/// Leaves those rows that a sweep chose and that were not deleted or changed since it `began`. Whether it saw the others
/// before that is chance, for it goes on beside training, and they stay in any case.
fn leave_what_counts(file: &mut [Tensor], began: i64) {
    let words = |name: &str| -> Vec<[u8; 8]> {
        let found = file.iter().find(|tensor| tensor.0 == name);
        found.map_or(Vec::new(), |tensor| tensor.3.as_chunks().0.to_vec())
    };
    let mut gone = words("deleted_ids");
    gone.sort_unstable();
    let steps = words("usage.step").into_iter().map(i64::from_le_bytes);
    let changed = words("ids").into_iter().zip(steps).filter(|(_, step)| *step > began).map(|(id, _)| id);
    let stay: BTreeSet<[u8; 8]> = gone.iter().copied().chain(changed).collect();
    let mut chosen = words("eviction.ids");
    chosen.retain(|id| !stay.contains(id));
    for (name, _, shape, content) in file {
        match name.as_str() {
            "deleted_ids" => *content = gone.concat(),
            "eviction.ids" => (*shape, *content) = (vec![chosen.len()], chosen.concat()),
            _ => {}
        }
    }
}

#[test]
fn the_same_training_writes_the_same_checkpoints() {
    let directory = tempfile::tempdir().unwrap();
    let made = |name: &str| directory.path().join(name);
    make_chain(&made("chain"), Compression::None);
    make_own(&made("own"));
    make_shards(&made("shards"));
    for name in ["chain", "own", "shards"] {
        let (written, recorded) = (written(&made(name)), written(&fixture(name)));
        assert_eq!(written.keys().collect::<Vec<_>>(), recorded.keys().collect::<Vec<_>>(), "{name}");
        for (table, recorded) in recorded {
            assert_eq!(written[&table], without_silent_files(recorded), "{name}: {table:?}");
        }
    }
}

/// Files of deltas that tell nothing are not written any more: a table without files says the same.
fn without_silent_files(mut written: Written) -> Written {
    let shards = written.entry["shards"].as_array().unwrap();
    let tells_nothing = |shard: &Value| {
        shard["rows"] == 0
            && shard["deleted"] == 0
            && shard["state"].as_object().is_some_and(|state| state.is_empty())
    };
    if written.entry["is_delta"] == true && shards.iter().all(tells_nothing) {
        written.entry["shards"] = json!([]);
        written.files.clear();
    }
    written
}

fn written_down(directory: &Path) -> Expected {
    let (store, metadata) = loaded(directory);
    let tables = recorded(&store);
    let step = |name: &String| {
        let table = store.find_numbered(name).unwrap().unwrap();
        (name.clone(), step_of(&store, table, 10))
    };
    let step = tables.keys().map(step).collect();
    take_recorded_step(&store, &step);
    Expected { metadata, tables, files: tables_of(directory), step, after: recorded(&store) }
}

fn write_down(to: &Path, name: &str, directory: &Path) {
    let text = lines(&serde_json::to_value(written_down(directory)).unwrap());
    fs::write(to.join(format!("{name}.json")), text).unwrap();
}

/// Makes such fixtures in the directory that `RECSTORE_FIXTURES` names: how those of this format were made, and how
/// those of a format to come can be. They are never made again for this one.
#[test]
fn fixtures_are_made_where_a_variable_says() {
    let temporary = tempfile::tempdir().unwrap();
    let asked_for = env::var_os("RECSTORE_FIXTURES").map(|to| PathBuf::from(to).join("checkpoint_v1"));
    let to = asked_for.unwrap_or_else(|| temporary.path().to_owned());
    make_chain(&to.join("chain"), Compression::None);
    make_chain(&to.join("zstd"), Compression::Zstd { level: 3 });
    make_own(&to.join("own"));
    let uncommitted = make_shards(&to.join("shards"));
    for name in ["chain", "own", "shards"] {
        write_down(&to, name, &to.join(name));
    }
    let committed = tempfile::tempdir().unwrap();
    for file in fs::read_dir(to.join("shards")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), committed.path().join(file.file_name())).unwrap();
    }
    let mut options = SaveOptions::default();
    options.metadata = serde_json::json!({"snapshot": 3}).into();
    commit_snapshot(committed.path(), &uncommitted, 2, &options).unwrap();
    write_down(&to, "shards_committed", committed.path());
    let (plain, compressed) = (loaded(&to.join("chain")).0, loaded(&to.join("zstd")).0);
    let mut tables = recorded(&plain);
    tables.retain(|name, _| compressed.find_numbered(name).unwrap().is_some());
    assert_same(&recorded(&compressed), &tables, "zstd");
}
