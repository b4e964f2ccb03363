//! A file of a checkpoint whose manifest lists it: its header has a checksum that fits.
#![no_main]

use std::fs;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use recstore::{EmbeddingStore, LoadOptions, LocalStore, SaveOptions, Serial, TableConfig};
use recstore_fuzz::repair_manifest;
use serde_json::Value;

const CONFIG: &str = r#"{"optimizer": {"kind": "adam", "bias_correction": "row"}, "eviction": {"ttl": 9},
    "admission": {"kind": "count", "threshold": 2, "shared_rows": 3}}"#;

/// Returns the manifest of a checkpoint that has one table.
fn manifest() -> &'static Value {
    static MANIFEST: OnceLock<Value> = OnceLock::new();
    MANIFEST.get_or_init(|| {
        let (directory, store) = (tempfile::tempdir().unwrap(), LocalStore::new(Box::new(Serial)));
        let table = store.open_table("t", &TableConfig::from_json(2, CONFIG).unwrap()).unwrap();
        table.write(&[1, -2, 3], &[1.0; 6]).unwrap();
        store.save(directory.path(), &SaveOptions::default()).unwrap();
        serde_json::from_slice(&fs::read(directory.path().join("manifest.json")).unwrap()).unwrap()
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut manifest = manifest().clone();
    let entry = &mut manifest["snapshots"][0]["tables"][0]["shards"][0];
    entry["bytes"] = bytes.len().into();
    let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length)) as usize;
    let header = bytes.get(8..8usize.saturating_add(length)).unwrap_or_default();
    entry["checksums"]["header"] = crc32fast::hash(header).into();
    let name = entry["file"].as_str().unwrap().to_owned();
    let mut text = serde_json::to_vec_pretty(&manifest).unwrap();
    repair_manifest(&mut text);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(directory.path().join("manifest.json"), text).unwrap();
    fs::write(directory.path().join(name), bytes).unwrap();
    let store = LocalStore::new(Box::new(Serial));
    _ = store.load(directory.path(), &LoadOptions::default());
});
