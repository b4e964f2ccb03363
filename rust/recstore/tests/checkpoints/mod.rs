//! What the tests of checkpoints share: how a store is filled, saved, loaded and compared to the bit.

#![allow(dead_code, reason = "no test uses all of it")]

pub(crate) mod linked;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, GradientChunk, LoadOptions, LoadReport, LocalStore, Result, SaveKind, SaveOptions,
    SaveReport, Serial, Step, TableConfig, TableId, TableStatistics, TableUpdate,
};
use serde_json::Value;

pub(crate) fn store() -> LocalStore {
    LocalStore::new(Box::new(Serial))
}

pub(crate) fn open(store: &LocalStore, name: &str, dim: usize, config: &str) -> TableId {
    store.open_numbered(name, &TableConfig::from_json(dim, config).unwrap()).unwrap()
}

pub(crate) fn save(store: &LocalStore, directory: &Path, kind: SaveKind) -> Result<SaveReport> {
    save_keeping(store, directory, kind, 1)
}

pub(crate) fn save_keeping(
    store: &LocalStore,
    directory: &Path,
    kind: SaveKind,
    keep: usize,
) -> Result<SaveReport> {
    let mut options = SaveOptions::default();
    options.kind = kind;
    options.keep = keep;
    store.save(directory, &options)
}

pub(crate) fn load(store: &LocalStore, directory: &Path) -> Result<LoadReport> {
    store.load(directory, &LoadOptions::default())
}

/// Returns a store that holds what a directory does and nothing else.
pub(crate) fn loaded(directory: &Path) -> LocalStore {
    let store = store();
    load(&store, directory).unwrap();
    store
}

/// Takes one step of one table.
pub(crate) fn update(store: &LocalStore, table: TableId, ids: &[i64], gradients: &[f32]) {
    let chunks = vec![GradientChunk::new(ids, gradients, store.dim(table).unwrap())];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
}

/// Gives ids without a row one.
pub(crate) fn insert(store: &LocalStore, table: TableId, ids: &[i64]) {
    let mut rows = vec![0.0; ids.len() * store.dim(table).unwrap()];
    store.lookup(table, ids, true, &mut vec![0; ids.len()], &mut rows).unwrap();
}

pub(crate) fn read(store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![f32::NAN; ids.len() * store.dim(table).unwrap()];
    store.read(table, ids, &mut rows).unwrap();
    rows
}

/// All that can be seen of a table: its counts, and by id the bits of each row and its slots.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TableState {
    pub(crate) config: String,
    pub(crate) statistics: TableStatistics,
    pub(crate) rows: BTreeMap<i64, Vec<u32>>,
}

/// All that can be seen of a store, by the names of its tables.
pub(crate) type State = BTreeMap<String, TableState>;

pub(crate) fn state(store: &LocalStore) -> State {
    let table = |name: String| {
        let table = store.find_numbered(&name).unwrap().unwrap();
        (name, table_state(store, table))
    };
    store.table_names().unwrap().into_iter().map(table).collect()
}

fn table_state(store: &LocalStore, table: TableId) -> TableState {
    let description = store.describe(table).unwrap();
    let mut statistics = store.statistics(table).unwrap();
    // What is allocated depends on how the table came to be.
    statistics.bytes = 0;
    statistics.memory = recstore::MemoryUse::default();
    statistics.writes = 0; // No checkpoint holds it.
    let ids = store.ids(table).unwrap();
    let mut columns = vec![(description.config.dim, read(store, table, &ids))];
    for (slot, width) in &description.slots {
        columns.push((*width, store.read_slot(table, slot, &ids).unwrap().unwrap()));
    }
    let row_of = |place: usize| -> Vec<u32> {
        let values = columns.iter().flat_map(|(width, values)| &values[place * width..][..*width]);
        values.map(|value| value.to_bits()).collect()
    };
    let rows: BTreeMap<_, _> = ids.iter().enumerate().map(|(place, id)| (*id, row_of(place))).collect();
    assert_eq!(rows.len(), ids.len(), "an id has two rows");
    let config = format!("{} {}", description.config.dim, description.config.to_json().unwrap());
    TableState { config, statistics, rows }
}

/// Returns the name of the file, or of the directory, that a refusal is about, and what it says of it.
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T>) -> (String, String) {
    match result {
        Err(Error::Checkpoint { path, message }) => {
            let name = Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned());
            (name.unwrap_or(path), message)
        }
        other => panic!("expected a refusal that names a file, got {other:?}"),
    }
}

/// Returns the files of rows in a directory, by name.
pub(crate) fn table_files(directory: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors")).collect();
    files.sort_unstable();
    files
}

pub(crate) fn manifest_path(directory: &Path) -> PathBuf {
    directory.join("manifest.json")
}

pub(crate) fn manifest(directory: &Path) -> Value {
    serde_json::from_slice(&fs::read(manifest_path(directory)).unwrap()).unwrap()
}

/// Returns a manifest as text, with the checksum that it should have.
pub(crate) fn signed(mut manifest: Value) -> Vec<u8> {
    manifest["checksum"] = "00000000".into();
    let checksum = crc32fast::hash(&serde_json::to_vec_pretty(&manifest).unwrap());
    manifest["checksum"] = format!("{checksum:08x}").into();
    serde_json::to_vec_pretty(&manifest).unwrap()
}

/// Puts a manifest, with the checksum that it should have, in the place of a directory's.
pub(crate) fn write_manifest(directory: &Path, manifest: &Value) {
    fs::write(manifest_path(directory), signed(manifest.clone())).unwrap();
}

/// Returns the ids of the snapshots in a directory, the oldest first.
pub(crate) fn snapshots(directory: &Path) -> Vec<String> {
    let manifest = manifest(directory);
    let id = |snapshot: &Value| snapshot["id"].as_str().unwrap().to_owned();
    manifest["snapshots"].as_array().unwrap().iter().map(id).collect()
}
