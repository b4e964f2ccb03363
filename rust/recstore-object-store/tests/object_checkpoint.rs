//! Checkpoints in object stores are those that a directory would hold, whatever fails on the way.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;
mod objects;

use std::fs;
use std::path::Path as FilePath;
use std::sync::Arc;

use futures_util::TryStreamExt;
use numbered::Numbered;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use objects::{Effect, Failing};
use recstore::{
    Compression, LoadOptions, LocalStore, Metadata, Progress, SaveKind, SaveOptions, Serial, TableConfig,
};
use recstore_object_store::{Error, ObjectCheckpoint};

const DIM: usize = 3;
const PREFIX: &str = "models/one";

fn store() -> LocalStore {
    LocalStore::new(Box::new(Serial))
}

/// Gives rows the value of `value`, in two tables.
fn write(store: &LocalStore, ids: std::ops::Range<i64>, value: f32) {
    for name in ["user", "item"] {
        let table = store.open_numbered(name, &TableConfig::new(DIM)).unwrap();
        let ids: Vec<i64> = ids.clone().collect();
        store.write(table, &ids, &vec![value; ids.len() * DIM]).unwrap();
    }
}

/// All rows of both tables, sorted by id.
fn rows(store: &LocalStore) -> Vec<(i64, Vec<f32>)> {
    let mut all = Vec::new();
    for name in ["user", "item"] {
        let Some(table) = store.find_numbered(name).unwrap() else { continue };
        let mut ids = store.ids(table).unwrap();
        ids.sort_unstable();
        for id in ids {
            let mut row = vec![0.0; DIM];
            store.read(table, &[id], &mut row).unwrap();
            all.push((id, row));
        }
    }
    all
}

fn options(kind: SaveKind) -> SaveOptions<'static> {
    let mut options = SaveOptions::default();
    options.kind = kind;
    options
}

fn checkpoint(objects: impl ObjectStore) -> ObjectCheckpoint {
    ObjectCheckpoint::new(Arc::new(objects), PREFIX).unwrap()
}

fn loaded(checkpoint: &ObjectCheckpoint) -> Vec<(i64, Vec<f32>)> {
    let store = store();
    checkpoint.load(&store, &LoadOptions::default()).unwrap();
    rows(&store)
}

fn block_on<F: Future>(work: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn names(objects: &dyn ObjectStore) -> Vec<String> {
    let listed = objects.list(Some(&Path::from(PREFIX)));
    let mut names: Vec<String> =
        block_on(listed.map_ok(|object| object.location.filename().unwrap().to_owned()).try_collect())
            .unwrap();
    names.sort_unstable();
    names
}

fn files(objects: &dyn ObjectStore) -> Vec<String> {
    names(objects).into_iter().filter(|name| name.contains(".safetensors")).collect()
}

/// Saves full snapshots and deltas to some object store and loads each.
fn save_and_load(objects: Arc<dyn ObjectStore>) {
    let (store, staging) = (store(), tempfile::tempdir().unwrap());
    let checkpoint = ObjectCheckpoint::new(Arc::clone(&objects), PREFIX).unwrap().staged_in(staging.path());
    write(&store, 0..2_000, 1.0);
    let report = checkpoint.save(&store, &options(SaveKind::Full)).unwrap();
    assert_eq!((report.is_delta, report.rows), (false, 4_000));
    assert_eq!(loaded(&checkpoint), rows(&store));
    let full = files(&*objects);
    for value in [2.0, 3.0] {
        write(&store, 10..20, value);
        let mut options = options(SaveKind::Auto);
        let metadata = Metadata::parse(&format!("{value:?}")).unwrap();
        options.metadata = metadata.clone();
        let report = checkpoint.save(&store, &options).unwrap();
        assert_eq!((report.is_delta, report.rows), (true, 20));
        let progress = Progress::default();
        let (other, mut options) = (self::store(), LoadOptions::default());
        options.progress = Some(&progress);
        let found = checkpoint.load(&other, &options).unwrap();
        assert_eq!((found.metadata, rows(&other)), (metadata, rows(&store)));
        assert_eq!(progress.bytes().0, progress.bytes().1);
    }
    // The full snapshot's files were uploaded once.
    assert_eq!(files(&*objects).len(), 6);
    assert!(full.iter().all(|name| files(&*objects).contains(name)));
    let mut compressed = options(SaveKind::Full);
    compressed.compression = Compression::Zstd { level: 3 };
    checkpoint.save(&store, &compressed).unwrap();
    assert_eq!(files(&*objects).len(), 2, "what the newest does not need is gone");
    assert_eq!(loaded(&checkpoint), rows(&store));
    assert_eq!(fs::read_dir(staging.path()).unwrap().count(), 0);
}

#[test]
fn snapshots_in_memory_load_as_they_were_saved() {
    save_and_load(Arc::new(InMemory::new()));
}

#[test]
fn snapshots_in_a_file_system_load_as_they_were_saved() {
    let directory = tempfile::tempdir().unwrap();
    save_and_load(Arc::new(LocalFileSystem::new_with_prefix(directory.path()).unwrap()));
}

#[test]
fn large_files_are_uploaded_in_pieces_or_not_at_all() {
    let objects = Arc::new(InMemory::new());
    let saved = store();
    let table = saved.open_numbered("user", &TableConfig::new(64)).unwrap();
    let ids: Vec<i64> = (0..40_000).collect();
    saved.write(table, &ids, &vec![1.0; ids.len() * 64]).unwrap();
    // The list, and what begins the upload.
    for at in [1, usize::MAX - 1] {
        let failing = Failing::new(Arc::clone(&objects), at, Effect::None);
        let is_whole = at > 1;
        assert_eq!(checkpoint(failing).save(&saved, &SaveOptions::default()).is_ok(), is_whole);
        assert_eq!(files(&*objects).len(), usize::from(is_whole));
    }
    let other = store();
    let report = checkpoint(Failing::never(&objects)).load(&other, &LoadOptions::default()).unwrap();
    assert_eq!(report.tables, [("user".to_owned(), ids.len())]);
}

#[test]
fn a_checkpoint_can_be_saved_within_a_runtime() {
    let checkpoint = checkpoint(InMemory::new());
    write(&store(), 0..3, 1.0);
    block_on(async { checkpoint.save(&store(), &SaveOptions::default()) }).unwrap();
}

#[test]
fn a_save_that_fails_at_any_operation_leaves_what_was_saved() {
    for effect in [Effect::None, Effect::Whole] {
        for at in 0.. {
            let objects = Arc::new(InMemory::new());
            let store = store();
            write(&store, 0..50, 1.0);
            checkpoint(Failing::never(&objects)).save(&store, &options(SaveKind::Full)).unwrap();
            let (before, files_before) = (rows(&store), files(&*objects));
            write(&store, 0..50, 2.0);
            let failing = Failing::new(Arc::clone(&objects), at, effect);
            let saved = checkpoint(failing.clone()).save(&store, &options(SaveKind::Full));
            let sound = checkpoint(Failing::never(&objects));
            let counts = saved.is_ok();
            if let Err(error) = saved {
                let message = error.to_string();
                assert!(message.starts_with("checkpoint: failing:/models/one: the object \""), "{message}");
                assert!(message.contains("as it was told to"), "{message}");
                assert_eq!(files(&*objects), files_before, "operation {at}");
            }
            assert_eq!(loaded(&sound), if counts { rows(&store) } else { before }, "operation {at}");
            // The next save goes on, and cleans up.
            let report = sound.save(&store, &options(SaveKind::Auto)).unwrap();
            // Nothing was cut from the tables yet where the newest manifest could not be read.
            let was_begun = at >= 2;
            assert_eq!(report.is_delta, counts || !was_begun, "operation {at}");
            assert_eq!(loaded(&sound), rows(&store));
            if !failing.has_failed() {
                assert!(at >= 4, "a save has {at} operations");
                break;
            }
        }
    }
}

#[test]
fn a_load_that_fails_at_any_operation_leaves_the_store() {
    let objects = Arc::new(InMemory::new());
    let store = store();
    write(&store, 0..50, 1.0);
    checkpoint(Failing::never(&objects)).save(&store, &SaveOptions::default()).unwrap();
    write(&store, 0..50, 2.0);
    let before = rows(&store);
    for at in 0.. {
        let failing = Failing::new(Arc::clone(&objects), at, Effect::None);
        let result = checkpoint(failing.clone()).load(&store, &LoadOptions::default());
        if !failing.has_failed() {
            assert!(result.is_ok() && at >= 4);
            break;
        }
        assert!(matches!(result, Err(Error::Object { .. })), "{result:?}");
        assert_eq!(rows(&store), before);
    }
}

#[test]
fn of_two_that_save_at_once_one_is_refused() {
    let objects = Arc::new(InMemory::new());
    let (first, second) = (store(), store());
    write(&first, 0..50, 1.0);
    write(&second, 0..50, 2.0);
    let save = |store: &LocalStore| {
        let saves =
            (0..10).map(|_| checkpoint(Failing::never(&objects)).save(store, &options(SaveKind::Full)));
        saves.filter(Result::is_ok).count()
    };
    let outcomes = std::thread::scope(|scope| {
        let other = scope.spawn(|| save(&first));
        (save(&second), other.join().unwrap())
    });
    let manifests = names(&*objects).into_iter().filter(|name| name.starts_with("manifest-")).count();
    assert_eq!(outcomes.0 + outcomes.1, manifests);
    let left = loaded(&checkpoint(Failing::never(&objects)));
    assert!(left == rows(&first) || left == rows(&second));
}

#[test]
fn a_number_that_was_taken_meanwhile_is_a_conflict() {
    let objects = Arc::new(InMemory::new());
    let store = store();
    write(&store, 0..5, 1.0);
    // Whoever lists sees nothing, as if the other manifest had been put just then.
    block_on(objects.put(&Path::from("models/one/manifest-0000000001.json"), "another".into())).unwrap();
    let error = checkpoint(Failing::blind(&objects)).save(&store, &SaveOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("somebody else has saved there meanwhile, as \"manifest-0000000001.json\"")
    );
    assert_eq!(files(&*objects), [""; 0]);
}

#[test]
fn errors_name_the_url_and_the_object() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}/deep/model", directory.path().display());
    let checkpoint = ObjectCheckpoint::from_url(&url, []).unwrap();
    let (saved, other) = (store(), store());
    let error = checkpoint.load(&other, &LoadOptions::default()).unwrap_err().to_string();
    assert_eq!(error, format!("checkpoint: {url}: there is no checkpoint here"));
    let error = checkpoint.save(&saved, &options(SaveKind::Delta)).unwrap_err().to_string();
    assert!(error.starts_with(&format!("checkpoint: {url}: a delta must follow")), "{error}");
    write(&saved, 0..5, 1.0);
    checkpoint.save(&saved, &SaveOptions::default()).unwrap();
    let path = directory.path().join("deep/model");
    let file = file_of_rows(&path);
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    let whole = fs::read(&file).unwrap();
    let load = || checkpoint.load(&other, &LoadOptions::default()).unwrap_err().to_string();
    fs::write(&file, &whole[1..]).unwrap();
    assert!(load().starts_with(&format!("checkpoint: {url}/{name}: expected ")), "{}", load());
    fs::remove_file(&file).unwrap();
    assert!(load().starts_with(&format!("checkpoint: {url}: the object \"{name}\": ")), "{}", load());
    assert_eq!(rows(&other), []);
    let absent = ObjectCheckpoint::from_url(&url, []).unwrap().staged_in(FilePath::new("/absent"));
    let error = absent.save(&saved, &SaveOptions::default()).unwrap_err().to_string();
    assert!(error.contains("the temporary file /absent: "), "{error}");
}

fn file_of_rows(directory: &FilePath) -> std::path::PathBuf {
    let mut files = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    files.find(|file| file.extension().is_some_and(|end| end == "safetensors")).unwrap()
}

#[test]
fn urls_and_options_that_are_not_understood_are_refused() {
    for (url, options, words) in [
        ("models", vec![], "this is no URL"),
        ("gs://bucket/models", vec![], "expected a URL of s3:// or file://, got gs://"),
        ("memory:///models", vec![], "got memory://"),
        ("file:///models", vec![("region", "x")], "file:// has no storage option \"region\""),
        ("s3://bucket/models", vec![("regoin", "x")], "s3:// has no storage option \"regoin\""),
    ] {
        let error = ObjectCheckpoint::from_url(url, options).unwrap_err().to_string();
        assert!(error.starts_with(&format!("checkpoint: {url}: ")) && error.contains(words), "{error}");
    }
    let keys = [("access_key_id", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
    let options = [("region", "eu-west-1"), ("endpoint", "https://localhost:1")].into_iter().chain(keys);
    ObjectCheckpoint::from_url("s3://bucket/models", options).unwrap();
}

/// Another store's snapshots stay in an object store as in a directory, and can be loaded by their name.
#[test]
fn snapshots_of_another_store_stay_until_they_are_dropped() {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let checkpoint = ObjectCheckpoint::new(Arc::clone(&objects), PREFIX).unwrap();
    let (old, fresh) = (store(), store());
    write(&old, 0..1_000, 1.0);
    let before = checkpoint.save(&old, &options(SaveKind::Full)).unwrap().snapshot;
    write(&fresh, 0..1, 2.0);
    assert_eq!(checkpoint.save(&fresh, &options(SaveKind::Auto)).unwrap().kept, Some(before.clone()));
    write(&fresh, 1..2, 2.0);
    assert!(checkpoint.save(&fresh, &options(SaveKind::Delta)).unwrap().is_delta);
    assert_eq!(loaded(&checkpoint), rows(&fresh));
    let refused = checkpoint.save(&old, &options(SaveKind::Full)).unwrap_err().to_string();
    assert!(refused.contains(&format!("since this one saved or loaded {before}")), "{refused}");
    let (restored, mut chosen) = (store(), LoadOptions::default());
    chosen.snapshot = Some(&before);
    checkpoint.load(&restored, &chosen).unwrap();
    assert_eq!(rows(&restored), rows(&old));
    let mut replacing = options(SaveKind::Full);
    replacing.replace = true;
    assert_eq!(checkpoint.save(&restored, &replacing).unwrap().kept, None);
    assert_eq!((loaded(&checkpoint), files(&*objects).len()), (rows(&old), 2));
}
