//! The manifest of a checkpoint, with a checksum that fits.
#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use recstore::{LoadOptions, LocalStore, EmbeddingStore, Serial, checkpoint_files, checkpoint_metadata, compact};
use recstore_fuzz::repair_manifest;

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    repair_manifest(&mut bytes);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(directory.path().join("manifest.json"), bytes).unwrap();
    _ = (checkpoint_files(directory.path()).is_ok(), checkpoint_metadata(directory.path()).is_ok());
    _ = LocalStore::new(Box::new(Serial)).load(directory.path(), &LoadOptions::default());
    _ = compact(directory.path(), None);
});
