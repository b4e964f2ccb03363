//! A directory that is not what a save made of it is refused by the name of the file, and the store stays as it is.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::fs;
use std::path::{Path, PathBuf};

use checkpoints::{
    State, insert, load, loaded, manifest, manifest_path, open, refusal, save, save_keeping, signed,
    snapshots, state, store, table_files, update, write_manifest,
};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{Error, LocalStore, SaveKind};
use serde_json::{Value, json};
use tempfile::TempDir;

const USER: &str = r#"{"block_size": 10, "optimizer": {"kind": "adam", "lr": 0.1}}"#;
const ITEM: &str = r#"{"num_embeddings": 100, "dtype": "bfloat16", "optimizer": {"kind": "ftrl"}}"#;
const VISITOR: &str = r#"{"optimizer": {"kind": "sgd"}, "admission": {"kind": "count", "threshold": 2},
    "eviction": {"ttl": 1, "interval": 2, "delay": 2}}"#;

fn train(store: &LocalStore) {
    // Always two ids that are counted and have no row, and in the end some rows that are to leave.
    let visitor = open(store, "visitor", 1, VISITOR);
    let step = store.statistics(visitor).unwrap().step as i64;
    store.write(visitor, &[90 + step], &[1.0]).unwrap();
    for ids in [[step, 1000], [1001 + step, 1000]] {
        update(store, visitor, &ids, &[0.5; 2]);
    }
    let (user, item) = (open(store, "user", 3, USER), open(store, "item", 5, ITEM));
    update(store, user, &[7, -1, 8, i64::MIN], &[0.5; 12]);
    update(store, item, &[1, 2, 3, 99], &[0.25; 20]);
    store.delete(user, &[8]).unwrap();
    store.delete(item, &[3]).unwrap();
}

/// A directory with a full snapshot and a delta, what it holds, and a store that has something else.
struct Subject {
    directory: TempDir,
    saved: State,
    store: LocalStore,
    before: State,
}

impl Subject {
    fn new() -> Self {
        let (directory, saving) = (tempfile::tempdir().unwrap(), store());
        train(&saving);
        save(&saving, directory.path(), SaveKind::Full).unwrap();
        train(&saving);
        save(&saving, directory.path(), SaveKind::Delta).unwrap();
        let store = store();
        (0..3).for_each(|_| train(&store));
        Self { saved: state(&saving), before: state(&store), directory, store }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the file of a table in the full snapshot (0) or the delta (1).
    fn file(&self, snapshot: usize, table: &str) -> PathBuf {
        self.path().join(entry(&manifest(self.path()), snapshot, table)["file"].as_str().unwrap())
    }

    /// Returns which file a load refuses and why; the store that was to load it is as before.
    fn refusal(&self) -> (String, String) {
        let refusal = refusal(load(&self.store, self.path()));
        assert_eq!(state(&self.store), self.before);
        refusal
    }

    /// Checks that the change of a file is refused by that name and with those words, and takes the change back.
    fn assert_refused(&self, file: &Path, words: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
        let manifest = fs::read(manifest_path(self.path())).unwrap();
        let whole = fs::read(file).unwrap();
        fs::write(file, change(whole.clone())).unwrap();
        let (name, message) = self.refusal();
        assert_eq!(name, file.file_name().unwrap().to_string_lossy(), "{message}");
        assert!(message.contains(words), "{message}");
        fs::write(file, whole).unwrap();
        fs::write(manifest_path(self.path()), manifest).unwrap();
    }

    fn assert_manifest_refused(&self, words: &str, change: impl FnOnce(&mut Value)) {
        self.assert_refused(&manifest_path(self.path()), words, |text| {
            let mut manifest = serde_json::from_slice(&text).unwrap();
            change(&mut manifest);
            signed(manifest)
        });
    }

    /// Checks that a file is refused whose header and tensors were changed, with a manifest that agrees.
    fn assert_sealed_refused(&self, file: &Path, words: &str, change: impl FnOnce(&mut Value, &mut Vec<u8>)) {
        let directory = self.path().to_owned();
        self.assert_refused(file, words, |bytes| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let mut tensors = bytes[8 + length..].to_vec();
            change(&mut header, &mut tensors);
            seal(&directory, file, &header, &tensors)
        });
    }
}

impl Drop for Subject {
    /// After all refusals the directory is as good as before, and so is the store.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert_eq!(state(&loaded(self.path())), self.saved);
        train(&self.store);
        save(&self.store, self.path(), SaveKind::Full).unwrap();
        train(&self.store);
        save(&self.store, self.path(), SaveKind::Delta).unwrap();
        assert_eq!(state(&loaded(self.path())), state(&self.store));
    }
}

/// Returns the only shard of a table in a manifest.
fn entry<'a>(manifest: &'a Value, snapshot: usize, table: &str) -> &'a Value {
    let tables = manifest["snapshots"][snapshot]["tables"].as_array().unwrap();
    &tables.iter().find(|found| found["name"] == table).unwrap()["shards"][0]
}

/// Makes a file of a header and tensors, and the manifest agree with it.
fn seal(directory: &Path, file: &Path, header: &Value, tensors: &[u8]) -> Vec<u8> {
    let mut text = serde_json::to_vec(header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let bytes = [&(text.len() as u64).to_le_bytes()[..], &text, tensors].concat();
    let mut manifest = manifest(directory);
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    for_each_shard(&mut manifest, |shard| {
        if shard["file"] == *name {
            shard["bytes"] = json!(bytes.len());
            shard["checksums"]["header"] = json!(crc32fast::hash(&text));
            for (name, tensor) in header.as_object().into_iter().flatten() {
                let place = |end: usize| tensor["data_offsets"][end].as_u64().map(|place| place as usize);
                let range = place(0).zip(place(1)).and_then(|(start, end)| tensors.get(start..end));
                shard["checksums"][name] = json!(crc32fast::hash(range.unwrap_or_default()));
            }
        }
    });
    write_manifest(directory, &manifest);
    bytes
}

fn for_each_shard(manifest: &mut Value, mut body: impl FnMut(&mut Value)) {
    for snapshot in manifest["snapshots"].as_array_mut().unwrap() {
        for table in snapshot["tables"].as_array_mut().unwrap() {
            table["shards"].as_array_mut().unwrap().iter_mut().for_each(&mut body);
        }
    }
}

#[test]
fn a_directory_without_a_checkpoint_is_refused() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let nothing = "there is no checkpoint here".to_owned();
    assert_eq!(refusal(load(&store, directory.path())).1, nothing);
    assert_eq!(refusal(load(&store, &directory.path().join("missing"))), ("missing".to_owned(), nothing));
    let empty = json!({"format": "recstore-checkpoint", "version": 1, "snapshots": []});
    write_manifest(directory.path(), &empty);
    assert_eq!(refusal(load(&store, directory.path())).1, "there is no checkpoint here");
    let file = manifest_path(directory.path());
    assert!(refusal(load(&store, &file)).1.contains("Not a directory"));
}

#[test]
fn a_file_that_was_cut_is_refused_at_every_length() {
    let subject = Subject::new();
    for file in table_files(subject.path()) {
        let len = fs::read(&file).unwrap().len();
        for cut in 0..len {
            let words = format!("expected {len} bytes, got {cut}");
            subject.assert_refused(&file, &words, |bytes| bytes[..cut].to_vec());
        }
        let words = format!("expected {len} bytes, got {}", len + 1);
        subject.assert_refused(&file, &words, |bytes| [&bytes[..], &[0]].concat());
    }
    let manifest = manifest_path(subject.path());
    for cut in (0..fs::read(&manifest).unwrap().len()).step_by(7) {
        subject.assert_refused(&manifest, "", |bytes| bytes[..cut].to_vec());
    }
}

#[test]
fn every_byte_that_was_changed_is_noticed() {
    let subject = Subject::new();
    for file in table_files(subject.path()) {
        for place in 0..fs::read(&file).unwrap().len() {
            let is_header = place < 8 + header_length(&file);
            // An id that was changed may be out of its table's bound, or another row's; which is found first.
            let words = if is_header { "header" } else { "" };
            let flip = 1 << (place % 8);
            subject.assert_refused(&file, words, |mut bytes| {
                bytes[place] ^= flip;
                bytes
            });
        }
    }
}

#[test]
fn files_swapped_missing_or_replaced_are_refused() {
    let subject = Subject::new();
    let files = table_files(subject.path());
    for (file, other) in files.iter().zip(files.iter().cycle().skip(1)) {
        let theirs = fs::read(other).unwrap();
        subject.assert_refused(file, "", |_| theirs);
        subject.assert_refused(file, "bytes, got 0", |_| Vec::new());
        let whole = fs::read(file).unwrap();
        fs::remove_file(file).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let refused = |words: &str| {
            let (found, message) = subject.refusal();
            assert!(found == name && message.contains(words), "{found} {message}");
        };
        refused("No such file");
        fs::create_dir(file).unwrap();
        refused("it is a directory, not a regular file");
        fs::remove_dir(file).unwrap();
        fs::write(file, whole).unwrap();
    }
    let (path, aside) = (manifest_path(subject.path()), subject.path().join("aside"));
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    let (name, message) = subject.refusal();
    assert!(name == "manifest.json" && message == "it is a directory, not a regular file", "{message}");
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
}

#[test]
fn a_manifest_of_another_format_or_form_is_refused() {
    let subject = Subject::new();
    let refused = |words: &str, change: &dyn Fn(&mut Value)| subject.assert_manifest_refused(words, change);
    let format = "expected the format \"recstore-checkpoint\", got \"zip\"";
    refused(format, &|manifest| manifest["format"] = json!("zip"));
    let version = "this release reads the versions 1 to 2, the checkpoint has 3";
    refused(version, &|manifest| manifest["version"] = json!(3));
    refused("unknown field `extra`", &|manifest| manifest["extra"] = json!(2));
    refused("missing field", &|manifest| {
        manifest.as_object_mut().unwrap().remove("version").unwrap();
    });
    let newest = |manifest: &mut Value, key: &str, value: Value| manifest["snapshots"][1][key] = value;
    refused("unknown field `extra`", &|manifest| newest(manifest, "extra", json!(1)));
    refused("\"xyz\" is not the name of a snapshot", &|manifest| newest(manifest, "id", json!("xyz")));
    refused("invalid type", &|manifest| newest(manifest, "tables", json!({})));
    for name in ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "x.txt", ""] {
        let words = format!("\"{name}\" is not the name of a file of a checkpoint");
        refused(&words, &|manifest| for_each_shard(manifest, |shard| shard["file"] = json!(name)));
    }
    let tables = "/snapshots/1/tables";
    refused("has two tables \"user\"", &|manifest| {
        let user = manifest.pointer(&format!("{tables}/1")).unwrap().clone();
        manifest.pointer_mut(tables).unwrap().as_array_mut().unwrap().push(user);
    });
    refused("or one without a name", &|manifest| newest_table(manifest)["name"] = json!(""));
}

fn newest_table(manifest: &mut Value) -> &mut Value {
    &mut manifest["snapshots"][1]["tables"][1]
}

#[test]
fn what_a_manifest_says_of_a_table_is_checked() {
    let subject = Subject::new();
    let refused = |words: &str, change: &dyn Fn(&mut Value)| {
        subject.assert_manifest_refused(words, |manifest| change(newest_table(manifest)));
    };
    refused("dim", &|table| table["dim"] = json!(u64::MAX));
    refused("dim", &|table| table["dim"] = json!(0));
    refused("momentum", &|table| table["config"]["momentum"] = json!(1));
    refused("the learning rate must be finite and not negative", &|table| {
        table["progress"]["learning_rate"] = json!(-0.5);
    });
    refused("unknown field `epoch`", &|table| table["progress"]["epoch"] = json!(1));
    refused("invalid value", &|table| table["progress"]["step"] = json!(-1));
    for rows in [u64::MAX, 1 << 33] {
        refused("is full", &|table| table["shards"][0]["rows"] = json!(rows));
    }
    refused("lacks the table \"new\"", &|table| table["name"] = json!("new"));
}

#[test]
fn counts_that_a_file_cannot_have_are_refused_by_its_name() {
    let subject = Subject::new();
    let whole = fs::read(manifest_path(subject.path())).unwrap();
    for (key, value, words) in [
        ("rows", json!(4_000_000_000u64), "it cannot hold 4000000000 rows"),
        ("rows", json!(1_000), "it cannot hold 1000 rows"),
        ("rows", json!(2), "expected the tensor"),
        ("deleted", json!(u64::MAX), "it cannot hold"),
        ("deleted", json!(1u64 << 40), "it cannot hold"),
        ("deleted", json!(0), "expected the tensor \"deleted_ids\""),
        ("bytes", json!(u64::MAX), "expected 18446744073709551615 bytes"),
        ("bytes", json!(0), "expected 0 bytes"),
        ("checksums", json!({}), "the manifest has no checksum of \"header\""),
    ] {
        let mut manifest = manifest(subject.path());
        newest_table(&mut manifest)["shards"][0][key] = value;
        write_manifest(subject.path(), &manifest);
        let (name, message) = subject.refusal();
        fs::write(manifest_path(subject.path()), &whole).unwrap();
        assert_eq!(subject.path().join(name), subject.file(1, "user"));
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn chains_with_a_gap_or_a_loop_are_refused() {
    let subject = Subject::new();
    let missing = snapshots(subject.path())[0].clone();
    subject.assert_manifest_refused("the chain has a gap", |manifest| {
        manifest["snapshots"].as_array_mut().unwrap().remove(0);
    });
    subject.assert_manifest_refused(&format!("{missing}, which is missing"), |manifest| {
        manifest["snapshots"][0]["id"] = json!("0123456789abcdef");
    });
    subject.assert_manifest_refused("follows itself", |manifest| {
        manifest["snapshots"][1]["parent"] = manifest["snapshots"][1]["id"].clone();
    });
    subject.assert_manifest_refused("follows itself", |manifest| {
        manifest["snapshots"][0]["parent"] = manifest["snapshots"][1]["id"].clone();
    });
    let lacks = format!("the snapshot {missing} lacks the table \"user\"");
    subject.assert_manifest_refused(&lacks, |manifest| {
        manifest["snapshots"][0]["tables"].as_array_mut().unwrap().remove(1);
    });
    subject.assert_manifest_refused("there is no full snapshot of the table \"item\"", |manifest| {
        manifest["snapshots"][1]["parent"] = Value::Null;
    });
}

#[test]
fn headers_that_disagree_with_the_table_are_refused_though_checksums_agree() {
    let subject = Subject::new();
    let (user, item) = (subject.file(0, "user"), subject.file(1, "item"));
    let refused = |file: &Path, words: &str, change: &dyn Fn(&mut Value)| {
        subject.assert_sealed_refused(file, words, |header, _| change(header));
    };
    refused(&user, "expected the tensor \"ids\" as I64 [3], got U64 [3]", &|header| {
        header["ids"]["dtype"] = json!("U64");
    });
    refused(&user, "expected the tensor \"rows\" as F32 [3, 3], got F32 [9, 1]", &|header| {
        header["rows"]["shape"] = json!([9, 1]);
    });
    refused(&item, "expected the tensor \"rows\" as BF16 [3, 5], got F16 [3, 5]", &|header| {
        header["rows"]["dtype"] = json!("F16");
    });
    for (file, tensor) in [(&user, "slot.exp_avg"), (&item, "deleted_ids"), (&item, "slot.z")] {
        refused(file, &format!("the tensor \"{tensor}\" is missing"), &|header| rename(header, tensor, None));
        refused(file, "the tensor \"extra\" does not belong there", &|header| {
            rename(header, tensor, Some("extra"));
        });
    }
    let huge =
        |rows: u64| json!({"dtype": "I64", "shape": [rows], "data_offsets": [0, rows.wrapping_mul(8)]});
    for rows in [1 << 60, 1 << 61, u64::MAX] {
        refused(&user, "", &|header| header["ids"] = huge(rows));
    }
    refused(&user, "", &|header| *header = json!([1, 2]));
    refused(&user, "is missing", &|header| *header = json!({}));
}

fn header_length(file: &Path) -> usize {
    let bytes = fs::read(file).unwrap();
    u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// Gives a tensor of a header another name, or turns it into one that has no name and takes its room.
fn rename(header: &mut Value, tensor: &str, name: Option<&str>) {
    let object = header.as_object_mut().unwrap();
    let found = object.remove(tensor).unwrap();
    match name {
        Some(name) => _ = object.insert(name.to_owned(), found),
        None => {
            // Tensors must lie side by side: the room is given to none by moving the others.
            let (start, end) = (offset(&found, 0), offset(&found, 1));
            for other in object.values_mut().filter(|other| offset(other, 0) >= end) {
                other["data_offsets"] =
                    json!([offset(other, 0) - (end - start), offset(other, 1) - (end - start)]);
            }
        }
    }
}

fn offset(tensor: &Value, end: usize) -> u64 {
    tensor["data_offsets"][end].as_u64().unwrap()
}

#[test]
fn lengths_of_headers_out_of_range_are_refused() {
    let subject = Subject::new();
    for file in table_files(subject.path()) {
        let len = fs::read(&file).unwrap().len() as u64;
        for length in [1 << 63, u64::MAX, u64::MAX - 7, len - 7, 1 << 32] {
            let words = format!("the header cannot have {length} bytes");
            subject.assert_refused(&file, &words, |mut bytes| {
                bytes[..8].copy_from_slice(&length.to_le_bytes());
                bytes
            });
        }
    }
}

#[test]
fn an_id_that_comes_twice_is_refused() {
    let subject = Subject::new();
    for (snapshot, table) in [(0, "user"), (1, "user"), (0, "item"), (1, "item")] {
        let file = subject.file(snapshot, table);
        subject.assert_sealed_refused(&file, "comes twice", |header, tensors| {
            let start = offset(&header["ids"], 0) as usize;
            tensors.copy_within(start..start + 8, start + 8);
        });
    }
}

#[test]
fn counts_of_admission_that_do_not_fit_are_refused() {
    let subject = Subject::new();
    let file = subject.file(1, "visitor");
    let ids = offset(&header(&file)["admission.ids"], 0) as usize;
    subject.assert_sealed_refused(&file, "the id 0 without a row is counted twice", |_, tensors| {
        let first = tensors[ids..ids + 8].to_vec();
        tensors[ids + 8..ids + 16].copy_from_slice(&first);
    });
    let words = "expected 4 ids and 4 counts of ids without a row, got 4 and 3";
    subject.assert_refused(&file, words, |bytes| {
        let mut header = header(&file);
        let end = offset(&header["admission.counts"], 1);
        header["admission.counts"]["shape"] = json!([3]);
        header["admission.counts"]["data_offsets"][1] = json!(end - 4);
        header["rows"]["data_offsets"][0] = json!(end - 4);
        header["rows"]["data_offsets"][1] = json!(offset(&header["rows"], 1) - 4);
        let mut manifest = manifest(subject.path());
        for_each_shard(&mut manifest, |shard| {
            if file.ends_with(shard["file"].as_str().unwrap()) {
                shard["state"]["admission.counts"] = json!(3);
            }
        });
        write_manifest(subject.path(), &manifest);
        let mut tensors = bytes[8 + header_length(&file)..].to_vec();
        tensors.drain(end as usize - 4..end as usize);
        seal(subject.path(), &file, &header, &tensors)
    });
}

fn header(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()[8..8 + header_length(file)]).unwrap()
}

#[test]
fn an_id_out_of_the_bound_of_its_table_is_refused() {
    let subject = Subject::new();
    for (snapshot, id) in [(0, 100i64), (1, -1), (1, i64::MIN)] {
        let words =
            format!("id {id} at position 1 is out of range for table \"item\" with num_embeddings 100");
        subject.assert_sealed_refused(&subject.file(snapshot, "item"), &words, |header, tensors| {
            let start = offset(&header["ids"], 0) as usize + 8;
            tensors[start..start + 8].copy_from_slice(&id.to_le_bytes());
        });
    }
}

#[test]
fn a_table_of_another_configuration_is_refused_before_anything_changes() {
    let subject = Subject::new();
    let mismatches = [
        ("user", 4, USER),
        ("user", 3, ""),
        ("item", 5, r#"{"num_embeddings": 101, "dtype": "bfloat16", "optimizer": {"kind": "ftrl"}}"#),
    ];
    for (name, dim, config) in mismatches {
        let other = store();
        let table = open(&other, name, dim, config);
        insert(&other, table, &[5]);
        let before = state(&other);
        let error = load(&other, subject.path()).unwrap_err();
        assert!(matches!(&error, Error::ConfigMismatch { table, .. } if table == name), "{error}");
        assert_eq!(state(&other), before);
    }
}

#[test]
fn a_store_does_not_save_over_a_manifest_it_cannot_read() {
    let subject = Subject::new();
    let path = manifest_path(subject.path());
    let whole = fs::read(&path).unwrap();
    fs::write(&path, "{").unwrap();
    let (name, message) = refusal(save(&subject.store, subject.path(), SaveKind::Full));
    assert!(name == "manifest.json" && message.contains("EOF while parsing"), "{message}");
    assert_eq!(fs::read(&path).unwrap(), b"{");
    assert_eq!(table_files(subject.path()).len(), 6);
    fs::write(&path, whole).unwrap();
}

#[test]
fn shards_of_one_table_in_several_files_are_read_together() {
    let subject = Subject::new();
    let (full, path) = (subject.file(0, "user"), manifest_path(subject.path()));
    let whole = fs::read(&path).unwrap();
    let mut manifest = manifest(subject.path());
    let shard = entry(&manifest, 0, "user").clone();
    manifest["snapshots"][0]["tables"][1]["shards"].as_array_mut().unwrap().push(shard);
    write_manifest(subject.path(), &manifest);
    let (name, message) = subject.refusal();
    fs::write(&path, whole).unwrap();
    assert_eq!(subject.path().join(name), full);
    assert!(message.contains("comes twice"), "{message}");
}

/// Changes of a file: bytes at places, then a cut.
fn changes() -> impl Strategy<Value = (Vec<(prop::sample::Index, u8)>, Option<prop::sample::Index>)> {
    let byte = (any::<prop::sample::Index>(), any::<u8>());
    (prop::collection::vec(byte, 1..5), prop::option::weighted(0.2, any::<prop::sample::Index>()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_changes_of_files_of_rows_never_change_what_is_loaded(
        changes in prop::collection::vec((any::<prop::sample::Index>(), changes()), 300)
    ) {
        let subject = Subject::new();
        let files = table_files(subject.path());
        for (file, (bytes, cut)) in changes {
            let file = file.get(&files);
            let whole = fs::read(file).unwrap();
            let mut changed = whole.clone();
            bytes.iter().for_each(|(place, byte)| changed[place.index(whole.len())] = *byte);
            changed.truncate(cut.map_or(whole.len(), |cut| cut.index(whole.len())));
            fs::write(file, &changed).unwrap();
            if changed == whole {
                prop_assert_eq!(&state(&loaded(subject.path())), &subject.saved);
            } else {
                let (name, _) = subject.refusal();
                prop_assert_eq!(&subject.path().join(name), file);
            }
            fs::write(file, &whole).unwrap();
        }
    }

    #[test]
    fn random_changes_of_a_manifest_never_give_other_rows(
        changes in prop::collection::vec(changes(), 300)
    ) {
        let subject = Subject::new();
        let path = manifest_path(subject.path());
        let whole = fs::read(&path).unwrap();
        for (bytes, cut) in changes {
            let mut changed = whole.clone();
            bytes.iter().for_each(|(place, byte)| changed[place.index(whole.len())] = *byte);
            changed.truncate(cut.map_or(whole.len(), |cut| cut.index(whole.len())));
            fs::write(&path, &changed).unwrap();
            let other = store();
            if load(&other, subject.path()).is_ok() {
                prop_assert_eq!(&state(&other), &subject.saved);
            } else {
                prop_assert_eq!(state(&other), State::new());
            }
        }
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn what_is_kept_of_older_snapshots_does_not_matter_to_a_load() {
    let subject = Subject::new();
    let saving = loaded(subject.path());
    save_keeping(&saving, subject.path(), SaveKind::Full, 2).unwrap();
    let old = [subject.file(0, "user"), subject.file(1, "item")];
    let whole = old.clone().map(|file| fs::read(file).unwrap());
    old.iter().for_each(|file| fs::write(file, "broken").unwrap());
    assert_eq!(state(&loaded(subject.path())), subject.saved);
    old.iter().zip(whole).for_each(|(file, bytes)| fs::write(file, bytes).unwrap());
}
