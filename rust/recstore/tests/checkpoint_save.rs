//! A save that fails leaves the directory as it was and the store able to go on; saves clean up behind each other.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use checkpoints::{
    insert, load, loaded, manifest_path, open, refusal, save, save_keeping, snapshots, state, store,
    table_files, update,
};
use recstore::{
    EmbeddingStore, Forgetting, InProcessStore, LocalStore, SaveKind, SaveOptions, Shard, TableId, compact,
    forget_in_checkpoint,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const DIM: usize = 16;
const CONFIG: &str = r#"{"optimizer": {"kind": "adagrad", "lr": 0.1}}"#;

/// A store with rows in two tables.
fn filled(rows: i64) -> (LocalStore, [TableId; 2]) {
    let store = store();
    let tables = ["one", "two"].map(|name| open(&store, name, DIM, CONFIG));
    let ids: Vec<i64> = (0..rows).collect();
    for table in tables {
        insert(&store, table, &ids);
        step(&store, table, rows);
    }
    (store, tables)
}

/// Takes a step of the rows below `rows`.
fn step(store: &LocalStore, table: TableId, rows: i64) {
    let ids: Vec<i64> = (0..rows).collect();
    update(store, table, &ids, &vec![0.5; ids.len() * DIM]);
}

fn names(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// A file system of little room, or none where the test may not mount one.
struct SmallDisk {
    directory: TempDir,
}

impl SmallDisk {
    fn new(kibibytes: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={kibibytes}k"), "none"]).arg(directory.path());
        match mount.output() {
            Ok(output) if output.status.success() => Some(Self { directory }),
            refused => {
                eprintln!("not run: a file system cannot be mounted here: {refused:?}");
                None
            }
        }
    }

    fn checkpoint(&self) -> PathBuf {
        self.directory.path().join("checkpoint")
    }

    /// Takes all room but some.
    fn fill(&self, kibibytes_left: usize) -> PathBuf {
        let path = self.directory.path().join("filler");
        let mut len = 4096;
        while fs::write(&path, vec![1u8; len]).is_ok() {
            len += 4096;
        }
        fs::write(&path, vec![1u8; len.saturating_sub(4096 + kibibytes_left * 1024)]).unwrap();
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.directory.path()).status();
        assert!(std::thread::panicking() || unmounted.unwrap().success());
    }
}

fn assert_no_room<T: std::fmt::Debug>(result: recstore::Result<T>, ending: &str) {
    let (name, message) = refusal(result);
    assert!(name.ends_with(ending), "{name}: {message}");
    assert!(message.contains("No space left on device"), "{message}");
}

#[test]
fn a_first_save_without_room_leaves_nothing_and_the_next_one_succeeds() {
    let Some(disk) = SmallDisk::new(1024) else { return };
    let (store, _) = filled(2_000);
    let filler = disk.fill(300);
    assert_no_room(save(&store, &disk.checkpoint(), SaveKind::Auto), ".safetensors");
    assert_eq!(names(&disk.checkpoint()), [".lock"]);
    assert_eq!(refusal(load(&store, &disk.checkpoint())).1, "there is no checkpoint here");
    fs::remove_file(filler).unwrap();
    let before = state(&store);
    let report = save(&store, &disk.checkpoint(), SaveKind::Auto);
    assert!(!report.unwrap().is_delta);
    assert_eq!(state(&loaded(&disk.checkpoint())), before);
}

#[test]
fn a_full_disk_in_a_full_save_a_delta_or_a_manifest_loses_nothing() {
    let Some(disk) = SmallDisk::new(4096) else { return };
    let (store, tables) = filled(2_000);
    let directory = disk.checkpoint();
    save(&store, &directory, SaveKind::Full).unwrap();
    let saved = state(&store);
    let before = names(&directory);
    for (kind, kibibytes, ending) in [
        (SaveKind::Full, 8, "-one.safetensors"),
        (SaveKind::Full, 400, "-two.safetensors"),
        (SaveKind::Delta, 8, "-one.safetensors"),
        (SaveKind::Delta, 64, ".safetensors"),
    ] {
        tables.iter().for_each(|table| step(&store, *table, 1_000));
        let filler = disk.fill(kibibytes);
        assert_no_room(save(&store, &directory, kind), ending);
        assert_eq!((names(&directory), state(&loaded(&directory))), (before.clone(), saved.clone()));
        fs::remove_file(filler).unwrap();
    }
    // What changed since the snapshot is known as before: it can be followed.
    let report = save(&store, &directory, SaveKind::Delta).unwrap();
    assert_eq!((report.is_delta, report.rows), (true, 2_000));
    assert_eq!(state(&loaded(&directory)), state(&store));
    step(&store, tables[1], 20);
    fill_up_before_the_manifest(&disk, &store);
    let report = save(&store, &directory, SaveKind::Auto).unwrap();
    assert_eq!((report.is_delta, report.rows), (true, 20));
    step(&store, tables[0], 10);
    assert!(save(&store, &directory, SaveKind::Delta).unwrap().is_delta);
    assert_eq!(state(&loaded(&directory)), state(&store));
}

/// There is room for the rows, but not for a manifest with such metadata.
fn fill_up_before_the_manifest(disk: &SmallDisk, store: &LocalStore) {
    let directory = disk.checkpoint();
    let (before, saved) = (names(&directory), state(&loaded(&directory)));
    let filler = disk.fill(64);
    let mut options = SaveOptions::default();
    options.kind = SaveKind::Delta;
    options.metadata = json!("x".repeat(100 << 10)).into();
    assert_no_room(store.save(&directory, &options), "manifest.new");
    assert_eq!((names(&directory), state(&loaded(&directory))), (before, saved));
    fs::remove_file(filler).unwrap();
}

#[test]
fn a_directory_that_is_a_file_is_refused() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    let path = directory.path().join("file");
    fs::write(&path, "text").unwrap();
    for place in [path.clone(), path.join("below")] {
        let (_, message) = refusal(save(&store, &place, SaveKind::Full));
        assert!(message.contains("File exists") || message.contains("Not a directory"), "{message}");
    }
    assert_eq!(fs::read(&path).unwrap(), b"text");
    step(&store, tables[0], 20);
    let deep = directory.path().join("a/b/c");
    save(&store, &deep, SaveKind::Full).unwrap();
    assert_eq!(state(&loaded(&deep)), state(&store));
}

#[test]
fn a_second_saver_of_a_directory_is_refused() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let other = File::open(directory.path().join(".lock")).unwrap();
    other.lock().unwrap();
    let name = directory.path().file_name().unwrap().to_string_lossy().into_owned();
    for kind in [SaveKind::Full, SaveKind::Delta, SaveKind::Auto] {
        let refused = refusal(save(&store, directory.path(), kind));
        assert_eq!(refused, (name.clone(), "another process or store is saving to it".to_owned()));
    }
    // A load needs no lock.
    assert_eq!(state(&loaded(directory.path())), state(&store));
    other.unlock().unwrap();
    step(&store, tables[0], 3);
    assert!(save(&store, directory.path(), SaveKind::Delta).unwrap().is_delta);
    assert_eq!(state(&loaded(directory.path())), state(&store));
}

/// Notes files as a save does that is about to write them.
fn note(directory: &Path, save: &str, files: &[&str]) {
    let note = json!({"format": "recstore-unfinished", "version": 1, "files": files});
    fs::write(directory.join(format!("{save}-unfinished.json")), note.to_string()).unwrap();
}

#[test]
fn what_killed_saves_noted_is_removed_and_other_files_stay() {
    let (directory, (store, _)) = (tempfile::tempdir().unwrap(), filled(10));
    let write = |name: &str| fs::write(directory.path().join(name), "x").unwrap();
    let left = ["0123456789abcdef-000-one.safetensors", "fedcba9876543210-001-two.safetensors.zst"];
    let others = ["model.safetensors", "0123456789abcdef.safetensors", "notes.txt", "0123-one.safetensors"];
    left.iter().chain(&others).for_each(|name| write(name));
    // A note says nothing of files that no save writes.
    note(
        directory.path(),
        "0123456789abcdef",
        &[left[0], "notes.txt", "../above", "ffffffffffffffff-gone.safetensors"],
    );
    note(directory.path(), "fedcba9876543210", &left[1..]);
    let nested = directory.path().join("aaaaaaaaaaaaaaaa-000-directory.safetensors");
    fs::create_dir(&nested).unwrap();
    fs::write(directory.path().join("manifest.new"), "{").unwrap();
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let found = names(directory.path());
    assert!(left.iter().all(|name| !found.contains(&(*name).to_owned())), "{found:?}");
    assert!(others.iter().all(|name| found.contains(&(*name).to_owned())), "{found:?}");
    assert!(
        nested.is_dir()
            && !found.iter().any(|name| name == "manifest.new" || name.ends_with("unfinished.json"))
    );
    // Files of a like name that no note lists are somebody else's, and so is what only has the name of a note.
    let foreign = [
        "0123456789abcdef-000-one.safetensors",
        "0123456789abcdef-unfinished.json",
        "1111111111111111-x.json",
    ];
    foreign.iter().for_each(|name| write(name));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let found = names(directory.path());
    assert!(foreign.iter().all(|name| found.contains(&(*name).to_owned())), "{found:?}");
    assert_eq!(state(&loaded(directory.path())), state(&store));
}

#[test]
fn rows_without_their_manifest_are_refused_and_stay() {
    let (directory, (store, _)) = (tempfile::tempdir().unwrap(), filled(10));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    fs::remove_file(directory.path().join("manifest.json")).unwrap();
    let before = names(directory.path());
    let first = before.iter().find(|name| name.ends_with(".safetensors")).unwrap();
    let expected = format!(
        "there is no manifest.json here, but 2 files of rows, such as {first}: copy the manifest that they belong to, or choose another directory"
    );
    for kind in [SaveKind::Full, SaveKind::Delta, SaveKind::Auto] {
        assert_eq!(refusal(save(&store, directory.path(), kind)).1, expected);
        let part = (recstore::new_snapshot_name(), Shard { number: 0, of: 1 });
        let refused = store.save_part(directory.path(), &part.0, part.1, &SaveOptions::default());
        assert_eq!(refusal(refused).1, expected);
    }
    assert_eq!(refusal(load(&store, directory.path())).1, expected);
    assert_eq!(names(directory.path()), before);
}

#[test]
fn rows_are_not_replaced_by_those_of_an_empty_store_unless_that_is_meant() {
    let (directory, (store, _)) = (tempfile::tempdir().unwrap(), filled(10));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let (empty, without_tables) = (filled(0).0, LocalStore::default());
    for (other, kind) in [&empty, &without_tables]
        .into_iter()
        .flat_map(|other| [SaveKind::Full, SaveKind::Auto].map(|kind| (other, kind)))
    {
        let (_, message) = refusal(save(other, directory.path(), kind));
        let expected =
            "the newest snapshot here has 20 rows, and the store to be saved has none and never had those";
        assert!(message.starts_with(expected), "{message}");
        assert_eq!(state(&loaded(directory.path())), state(&store));
    }
    let snapshot = recstore::new_snapshot_name();
    empty
        .save_part(directory.path(), &snapshot, Shard { number: 0, of: 1 }, &SaveOptions::default())
        .unwrap();
    let committed = recstore::commit_snapshot(directory.path(), &snapshot, 1, &SaveOptions::default());
    assert!(refusal(committed).1.starts_with("the newest snapshot here has 20 rows"));
    // The store that has had them may have none now, and so may another one that says so.
    let (kept, mut options) = (loaded(directory.path()), SaveOptions::default());
    options.replace = true;
    kept.table_names().unwrap().iter().for_each(|name| kept.drop_table(name).unwrap());
    save(&kept, directory.path(), SaveKind::Full).unwrap();
    store.save(directory.path(), &options).unwrap();
    empty.save(directory.path(), &options).unwrap();
    assert_eq!(state(&loaded(directory.path())), state(&empty));
}

#[test]
fn as_many_full_snapshots_stay_as_asked_for_with_their_deltas() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    use SaveKind::{Auto, Delta, Full};
    for (kind, keep, left) in [
        (Full, 1, "F"),
        (Delta, 1, "Fd"),
        (Full, 2, "FdF"),
        (Auto, 2, "FdFd"),
        (Delta, 2, "FdFdd"),
        (Full, 2, "FddF"),
        (Full, 3, "FddFF"),
        (Delta, 3, "FddFFd"),
        (Delta, 1, "Fdd"),
        (Full, 0, "F"),
    ] {
        step(&store, tables[0], 3);
        save_keeping(&store, directory.path(), kind, keep).unwrap();
        assert_eq!(kinds(directory.path()), left);
        // Only one of the two tables has changed.
        let files = |letter| if letter == 'F' { 2 } else { 1 };
        assert_eq!(table_files(directory.path()).len(), left.chars().map(files).sum::<usize>());
        assert_eq!(state(&loaded(directory.path())), state(&store));
    }
}

/// Returns a letter for each snapshot: F for a full one, d for a delta.
fn kinds(directory: &Path) -> String {
    let manifest = checkpoints::manifest(directory);
    let kind = |snapshot: &Value| if snapshot["parent"].is_null() { 'F' } else { 'd' };
    manifest["snapshots"].as_array().unwrap().iter().map(kind).collect()
}

#[test]
fn a_delta_that_can_follow_nothing_is_refused() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    let refused = |store: &LocalStore, place: &Path| {
        let (_, message) = refusal(save(store, place, SaveKind::Delta));
        assert!(message.contains("a delta must follow the last save or load of this store"), "{message}");
    };
    let (one, two) = (directory.path().join("one"), directory.path().join("two"));
    refused(&store, &one);
    save(&store, &one, SaveKind::Full).unwrap();
    save(&store, &two, SaveKind::Full).unwrap();
    refused(&store, &one);
    let other = loaded(&two);
    save(&other, &two, SaveKind::Auto).unwrap();
    // The directory has gone on without this store.
    refused(&store, &two);
    step(&store, tables[1], 5);
    for kind in [SaveKind::Full, SaveKind::Auto] {
        let (_, message) = refusal(save(&store, &two, kind));
        assert!(message.starts_with("another store has saved the newest snapshot here"), "{message}");
    }
    assert_eq!(state(&loaded(&two)), state(&other));
    assert_eq!(snapshots(&one).len(), 1);
}

#[test]
fn metadata_nested_too_deeply_to_be_read_are_refused() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let (whole, saved) = (fs::read(manifest_path(directory.path())).unwrap(), state(&store));
    let mut options = SaveOptions::default();
    options.metadata = (0..126).fold(json!(1), |inner, _| json!([inner])).into();
    step(&store, tables[0], 5);
    let (name, message) = refusal(store.save(directory.path(), &options));
    assert!(
        name == "manifest.json" && message.contains("metadata must be nested at most 124 deep, got 126"),
        "{message}"
    );
    assert_eq!(fs::read(manifest_path(directory.path())).unwrap(), whole);
    assert_eq!(state(&loaded(directory.path())), saved);
    assert_eq!(table_files(directory.path()).len(), 2);
}

#[test]
fn a_compaction_that_was_killed_does_not_stand_in_the_way_of_the_next() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    step(&store, tables[0], 5);
    let newest = save(&store, directory.path(), SaveKind::Delta).unwrap().snapshot;
    for (number, name) in ["one", "two"].iter().enumerate() {
        let left = format!("{newest}-{number:03}-{name}-compacted.safetensors");
        fs::write(directory.path().join(&left), "x").unwrap();
        note(directory.path(), &format!("{newest}-{number}"), &[&left]);
    }
    assert_eq!(compact(directory.path(), None).unwrap().unwrap().snapshot, newest);
    assert_eq!((kinds(directory.path()).as_str(), table_files(directory.path()).len()), ("F", 2));
    assert_eq!(state(&loaded(directory.path())), state(&store));
}

#[test]
fn a_snapshot_that_another_follows_does_not_go_alone() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    let full = save(&store, directory.path(), SaveKind::Full).unwrap().snapshot;
    step(&store, tables[0], 5);
    let delta = save(&store, directory.path(), SaveKind::Delta).unwrap().snapshot;
    let (tables, ids) = (["one".to_owned()], [3]);
    let forget = |snapshots: &[String], holding: &[String]| {
        let forgetting = Forgetting { tables: &tables, ids: &ids, snapshots, holding };
        forget_in_checkpoint(directory.path(), &forgetting, None)
    };
    let both = [full.clone(), delta.clone()];
    let (_, message) = refusal(forget(&both, &[full]));
    assert_eq!(message, format!("the snapshot {delta} follows one that is to go"));
    let (_, message) = refusal(forget(&both[..1], &[]));
    assert_eq!(message, "somebody has saved to it meanwhile: begin again");
    assert_eq!(state(&loaded(directory.path())), state(&store));
    let forgotten = forget(&both, &both).unwrap();
    assert_eq!((forgotten.rows, kinds(directory.path()).as_str()), (1, "F"));
    assert_eq!(store.forget("one", &[3, 99]).unwrap(), [3]);
    assert_eq!(store.forget("none", &[3]).unwrap(), [0; 0]);
    assert_eq!(state(&loaded(directory.path())), state(&store));
}

#[test]
fn a_directory_is_made_with_those_above_it() {
    let (above, (store, _)) = (tempfile::tempdir().unwrap(), filled(3));
    let directory = above.path().join("some/where/deep");
    save(&store, &directory, SaveKind::Full).unwrap();
    assert_eq!(state(&loaded(&directory)), state(&store));
    let below_a_file = manifest_path(&directory).join("deeper");
    let (name, message) = refusal(save(&store, &below_a_file, SaveKind::Full));
    assert_eq!(name, "deeper");
    assert!(message.contains("Not a directory"), "{message}");
}

#[test]
fn a_delta_after_failed_saves_has_all_that_changed_since_the_last_good_one() {
    let Some(disk) = SmallDisk::new(4096) else { return };
    let (store, tables) = filled(500);
    let directory = disk.checkpoint();
    save(&store, &directory, SaveKind::Full).unwrap();
    for (round, kind) in [SaveKind::Delta, SaveKind::Full, SaveKind::Auto].into_iter().enumerate() {
        let start = 100 * round as i64;
        step(&store, tables[0], start + 3);
        delete(&store, tables[1], &[start, start + 1]);
        insert(&store, tables[1], &[9_000 + start]);
        let filler = disk.fill(4);
        refusal(save(&store, &directory, kind));
        fs::remove_file(filler).unwrap();
        // Its index may be another row's by now, and a row that came back is both deleted and there.
        delete(&store, tables[1], &[9_000 + start]);
        insert(&store, tables[1], &[start + 1, 8_000 + start]);
    }
    let report = save(&store, &directory, SaveKind::Delta).unwrap();
    assert!(report.is_delta && report.rows < 300, "{report:?}");
    assert_eq!(state(&loaded(&directory)), state(&store));
}

fn delete(store: &LocalStore, table: TableId, ids: &[i64]) {
    store.table("hashtable_delete", table).unwrap().delete(ids).unwrap();
}

#[test]
fn a_delta_writes_files_of_changed_tables_alone_and_is_compacted_with_the_others() {
    let (directory, (store, tables)) = (tempfile::tempdir().unwrap(), filled(10));
    save(&store, directory.path(), SaveKind::Full).unwrap();
    let report = save(&store, directory.path(), SaveKind::Delta).unwrap();
    assert_eq!((report.is_delta, report.rows, report.bytes), (true, 0, 0));
    assert_eq!(table_files(directory.path()).len(), 2);
    step(&store, tables[1], 3);
    let report = save(&store, directory.path(), SaveKind::Delta).unwrap();
    assert_eq!((report.is_delta, report.rows), (true, 3));
    assert_eq!(table_files(directory.path()).len(), 3);
    assert_eq!(state(&loaded(directory.path())), state(&store));
    compact(directory.path(), None).unwrap().unwrap();
    assert_eq!(state(&loaded(directory.path())), state(&store));
}
