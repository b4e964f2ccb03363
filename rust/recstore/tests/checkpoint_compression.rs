//! Compressed files hold what plain ones do, and are refused by name when they are not what a save made of them.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::fs;
use std::path::{Path, PathBuf};

use checkpoints::{
    load, loaded, manifest, manifest_path, open, refusal, save, state, store, update, write_manifest,
};
use numbered::Numbered;
use recstore::{Compression, EmbeddingStore, LocalStore, Result, SaveKind, SaveOptions, SaveReport, compact};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const USER: &str = r#"{"optimizer": {"kind": "adam"}}"#;
const ITEM: &str = r#"{"dtype": "bfloat16", "optimizer": {"kind": "rowwise_adagrad"}}"#;
const ZSTD: Compression = Compression::Zstd { level: 3 };

fn train(store: &LocalStore, rows: i64) {
    let (user, item) = (open(store, "user", 3, USER), open(store, "item", 5, ITEM));
    let ids: Vec<i64> = (-rows..rows).collect();
    update(store, user, &ids, &vec![0.5; ids.len() * 3]);
    update(store, item, &ids, &vec![0.25; ids.len() * 5]);
    store.delete(user, &[0, 5]).unwrap();
}

fn save_compressed(
    store: &LocalStore,
    directory: &Path,
    kind: SaveKind,
    compression: Compression,
) -> Result<SaveReport> {
    let mut options = SaveOptions::default();
    options.kind = kind;
    options.compression = compression;
    store.save(directory, &options)
}

/// Returns the compressed files of a directory, by name.
fn files(directory: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "zst")).collect();
    files.sort_unstable();
    files
}

#[test]
fn compressed_snapshots_load_as_they_were_saved() {
    for level in [1, 3, 19] {
        let (directory, store) = (tempfile::tempdir().unwrap(), store());
        train(&store, 5_000);
        let plain = save(&store, directory.path(), SaveKind::Full).unwrap();
        let zstd = Compression::Zstd { level };
        let full = save_compressed(&store, directory.path(), SaveKind::Full, zstd).unwrap();
        assert!(full.bytes < plain.bytes / 2, "{} of {} bytes", full.bytes, plain.bytes);
        assert_eq!(state(&loaded(directory.path())), state(&store));
        train(&store, 100);
        save_compressed(&store, directory.path(), SaveKind::Delta, Compression::None).unwrap();
        train(&store, 50);
        save_compressed(&store, directory.path(), SaveKind::Delta, zstd).unwrap();
        assert_eq!(state(&loaded(directory.path())), state(&store));
        assert_eq!(files(directory.path()).len(), 4);
        compact(directory.path(), None).unwrap();
        assert_eq!(state(&loaded(directory.path())), state(&store));
        assert_eq!(files(directory.path()).len(), 2);
        let entry = &manifest(directory.path())["snapshots"][0]["tables"][0]["shards"][0];
        assert_eq!(entry["compressed"]["level"], level);
    }
}

#[test]
fn what_is_decompressed_is_the_plain_file() {
    let (directory, store) = (tempfile::tempdir().unwrap(), store());
    train(&store, 100);
    save_compressed(&store, directory.path(), SaveKind::Full, ZSTD).unwrap();
    for table in manifest(directory.path())["snapshots"][0]["tables"].as_array().unwrap() {
        let shard = &table["shards"][0];
        let file = fs::File::open(directory.path().join(shard["file"].as_str().unwrap())).unwrap();
        let plain = zstd::decode_all(file).unwrap();
        assert_eq!(json!(plain.len()), shard["compressed"]["bytes"]);
        let tensors = SafeTensors::deserialize(&plain).unwrap();
        for name in tensors.names() {
            let checksum = crc32fast::hash(tensors.tensor(name).unwrap().data());
            assert_eq!(json!(checksum), shard["checksums"][name], "{name}");
        }
    }
}

/// Checks that a load refuses with the name of `file`, and leaves the store as it is.
fn assert_refused(directory: &Path, file: &Path, store: &LocalStore) -> String {
    let before = state(store);
    let (name, message) = refusal(load(store, directory));
    assert_eq!(name, file.file_name().unwrap().to_string_lossy(), "{message}");
    assert_eq!(state(store), before);
    message
}

#[test]
fn cut_and_changed_files_are_refused_by_name() {
    let (directory, store) = (tempfile::tempdir().unwrap(), store());
    let directory = directory.path();
    train(&store, 40);
    save_compressed(&store, directory, SaveKind::Full, ZSTD).unwrap();
    let expected = state(&store);
    for (place, file) in files(directory).into_iter().enumerate() {
        let (whole, text) = (fs::read(&file).unwrap(), fs::read(manifest_path(directory)).unwrap());
        for length in (0..whole.len()).step_by(13) {
            fs::write(&file, &whole[..length]).unwrap();
            assert!(assert_refused(directory, &file, &store).starts_with("expected "));
            // With a manifest that agrees the frames are found to be cut.
            change_shard(directory, place, |shard| shard["bytes"] = json!(length));
            assert_refused(directory, &file, &store);
            fs::write(manifest_path(directory), &text).unwrap();
        }
        let mut unnoticed = 0;
        for byte in 0..whole.len() {
            let mut changed = whole.clone();
            changed[byte] ^= 0x10;
            fs::write(&file, &changed).unwrap();
            // Some bits of a frame mean nothing: then what is loaded is right.
            match load(&store, directory) {
                Ok(_) => unnoticed += 1,
                refused => assert_eq!(refusal(refused).0, file.file_name().unwrap().to_string_lossy()),
            }
            assert_eq!(state(&store), expected, "byte {byte}");
        }
        assert!(unnoticed < whole.len() / 10, "{unnoticed} of {} changes", whole.len());
        fs::write(&file, &whole).unwrap();
    }
    assert_eq!(state(&loaded(directory)), expected);
}

fn change_shard(directory: &Path, table: usize, change: impl FnOnce(&mut Value)) {
    let mut changed = manifest(directory);
    change(&mut changed["snapshots"][0]["tables"][table]["shards"][0]);
    write_manifest(directory, &changed);
}

#[test]
fn a_manifest_that_tells_of_compression_what_cannot_be_is_refused() {
    let (directory, store) = (tempfile::tempdir().unwrap(), store());
    let directory = directory.path();
    train(&store, 10);
    save_compressed(&store, directory, SaveKind::Full, ZSTD).unwrap();
    let text = fs::read(manifest_path(directory)).unwrap();
    let file = &files(directory)[0];
    for (words, is_of_manifest, change) in [
        (
            "bytes cannot be",
            false,
            Box::new(|shard: &mut Value| shard["compressed"]["bytes"] = json!(1_u64 << 60))
                as Box<dyn Fn(&mut Value)>,
        ),
        ("it cannot hold", false, Box::new(|shard| shard["rows"] = json!(1_u64 << 31))),
        (
            "no frame of \"ids\"",
            false,
            Box::new(|shard| {
                shard["compressed"]["frames"].as_object_mut().unwrap().remove("ids");
            }),
        ),
        ("", false, Box::new(|shard| shard["compressed"]["frames"]["rows"] = json!(1_u64 << 50))),
        (
            "is not the name of a file",
            true,
            Box::new(|shard| {
                shard.as_object_mut().unwrap().remove("compressed");
            }),
        ),
        ("unknown variant `lz4`", true, Box::new(|shard| shard["compressed"]["kind"] = json!("lz4"))),
        ("unknown field `dictionary`", true, Box::new(|shard| shard["compressed"]["dictionary"] = json!(1))),
    ] {
        change_shard(directory, 0, &change);
        let about = if is_of_manifest { manifest_path(directory) } else { file.clone() };
        let message = assert_refused(directory, &about, &store);
        assert!(message.contains(words), "{message}");
        fs::write(manifest_path(directory), &text).unwrap();
    }
}

#[test]
fn a_level_that_there_is_not_is_refused_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    for level in [0, 20, -5] {
        let saved = save_compressed(&store(), directory.path(), SaveKind::Full, Compression::Zstd { level });
        let expected = format!("the level of zstd must be from 1 to 19, got {level}");
        assert_eq!(refusal(saved).1, expected);
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}
