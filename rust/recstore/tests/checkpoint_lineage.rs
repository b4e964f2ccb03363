//! Jobs that share a directory, in any order: nothing of another is deleted, and nothing saved is lost.
//!
//! `PROPTEST_CASES` says how many sequences are tried.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use checkpoints::{insert, loaded, manifest, open, read, refusal, save_keeping, store};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    EmbeddingStore, InProcessStore, LoadOptions, LocalStore, Pruning, Result, SaveKind, SaveOptions,
    SaveReport, Shard, commit_snapshot, compact, new_snapshot_name, verify_checkpoint,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const TABLE: &str = "t";
const CONFIG: &str = r#"{"block_size": 2, "initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd"}}"#;
const JOBS: usize = 3;
const USUAL_CASES: u32 = 200;

const OVERTAKEN: &str = "another store has saved the newest snapshot here";
const TWO_OTHERS: &str = "it has snapshots of two other stores already";
const EMPTIED: &str = "and the store to be saved has none and never had those";
const NO_DELTA: &str = "a delta must follow the last save or load of this store";

type Rows = BTreeMap<i64, f32>;

#[derive(Debug, Clone)]
enum Op {
    Write(usize, BTreeSet<i64>),
    Delete(usize, BTreeSet<i64>),
    Load(usize),
    /// Loads the snapshots of the other store.
    LoadOther(usize),
    Save {
        job: usize,
        options: Options,
    },
    /// Ends in the middle of a save.
    Killed(usize, SaveKind),
    /// Begins anew, without a load.
    Restart(usize),
    Prune(usize),
    Compact,
}

#[derive(Debug, Clone, Copy)]
struct Options {
    kind: SaveKind,
    keep: usize,
    replace: bool,
    /// As a shard of one, whose part is committed.
    as_part: bool,
}

impl Options {
    fn save(self, store: &LocalStore, directory: &Path) -> Result<SaveReport> {
        let mut options = SaveOptions::default();
        (options.kind, options.keep, options.replace) = (self.kind, self.keep, self.replace);
        if !self.as_part {
            return store.save(directory, &options);
        }
        let snapshot = new_snapshot_name();
        let report = store.save_part(directory, &snapshot, Shard { number: 0, of: 1 }, &options)?;
        assert_eq!(commit_snapshot(directory, &snapshot, 1, &options)?, report.kept);
        Ok(report)
    }
}

fn kind() -> impl Strategy<Value = SaveKind> {
    prop::sample::select(&[SaveKind::Full, SaveKind::Delta, SaveKind::Auto, SaveKind::Auto][..])
}

fn op() -> impl Strategy<Value = Op> {
    // Mostly two jobs, so that they meet often.
    let job = || prop::sample::select(&[0, 0, 0, 1, 1, 1, JOBS - 1][..]);
    let ids = || prop::collection::btree_set(0..8i64, 1..4);
    let options = (kind(), 1..3usize, prop::bool::weighted(0.1), any::<bool>())
        .prop_map(|(kind, keep, replace, as_part)| Options { kind, keep, replace, as_part });
    prop_oneof![
        4 => (job(), ids()).prop_map(|(job, ids)| Op::Write(job, ids)),
        1 => (job(), ids()).prop_map(|(job, ids)| Op::Delete(job, ids)),
        3 => job().prop_map(Op::Load),
        1 => job().prop_map(Op::LoadOther),
        8 => (job(), options).prop_map(|(job, options)| Op::Save { job, options }),
        1 => (job(), kind()).prop_map(|(job, kind)| Op::Killed(job, kind)),
        2 => job().prop_map(Op::Restart),
        1 => (1..3usize).prop_map(Op::Prune),
        1 => Just(Op::Compact),
    ]
}

#[derive(Debug, Clone)]
struct Snapshot {
    id: String,
    lineage: usize,
    is_full: bool,
    /// The rows of its own files.
    written: usize,
    rows: Rows,
}

struct Job {
    store: LocalStore,
    rows: Rows,
    last: Option<String>,
    held: BTreeSet<String>,
    lineages: BTreeSet<usize>,
}

impl Job {
    fn new() -> Self {
        let store = store();
        open(&store, TABLE, 1, CONFIG);
        let (held, lineages) = (BTreeSet::new(), BTreeSet::new());
        Self { store, rows: Rows::new(), last: None, held, lineages }
    }

    fn note(&mut self, snapshot: &Snapshot) {
        self.last = Some(snapshot.id.clone());
        self.held.insert(snapshot.id.clone());
        self.lineages.insert(snapshot.lineage);
    }
}

/// A directory, its jobs, and what it should hold: a list of snapshots.
struct Subject {
    directory: TempDir,
    jobs: Vec<Job>,
    snapshots: Vec<Snapshot>,
    /// The lineages that were here.
    seen: BTreeSet<usize>,
    lineages: usize,
    values: f32,
}

impl Subject {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            jobs: (0..JOBS).map(|_| Job::new()).collect(),
            snapshots: Vec::new(),
            seen: BTreeSet::new(),
            lineages: 0,
            values: 0.0,
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn newest(&self) -> Option<&Snapshot> {
        self.snapshots.last()
    }

    /// The newest snapshot of the other lineage.
    fn other(&self) -> Option<&Snapshot> {
        let own = self.newest()?.lineage;
        self.snapshots.iter().rfind(|snapshot| snapshot.lineage != own)
    }

    fn follows(&self, job: &Job) -> bool {
        self.newest().is_some_and(|newest| job.held.contains(&newest.id))
    }

    /// Why a save must be refused, if it must.
    fn expected_refusal(&self, job: &Job, options: Options) -> Option<&'static str> {
        let newest_id = self.newest().map(|newest| &newest.id);
        if options.kind == SaveKind::Delta && (newest_id.is_none() || job.last.as_ref() != newest_id) {
            return Some(NO_DELTA);
        }
        if options.replace || self.newest().is_none() || self.follows(job) {
            return None;
        }
        if !job.lineages.is_disjoint(&self.seen) {
            return Some(OVERTAKEN);
        }
        if self.other().is_some() {
            return Some(TWO_OTHERS);
        }
        (job.rows.is_empty() && self.newest()?.written > 0).then_some(EMPTIED)
    }

    fn save(&mut self, number: usize, options: Options) {
        let before = self.snapshots.clone();
        let job = &self.jobs[number];
        let saved = options.save(&job.store, self.path());
        if let Some(expected) = self.expected_refusal(job, options) {
            let (_, message) = refusal(saved);
            assert!(message.contains(expected), "expected {expected}, got {message}");
            return;
        }
        let (report, follows) = (saved.unwrap(), self.follows(job));
        let lineage = if follows { before[before.len() - 1].lineage } else { self.lineages };
        self.lineages += 1;
        let kept = before.last().filter(|_| !follows && !options.replace).map(|newest| newest.id.clone());
        assert_eq!(report.kept, kept);
        assert!(!report.is_delta || job.last == before.last().map(|newest| newest.id.clone()));
        let saved = Snapshot {
            id: report.snapshot,
            lineage,
            is_full: !report.is_delta,
            written: report.rows,
            rows: job.rows.clone(),
        };
        self.jobs[number].note(&saved);
        self.seen.insert(lineage);
        self.snapshots.push(saved);
        if options.replace {
            self.snapshots.retain(|snapshot| snapshot.lineage == lineage);
        }
        self.prune(options.keep);
    }

    /// Drops what `keep` does not keep of the newest lineage.
    fn prune(&mut self, keep: usize) {
        let Some(own) = self.newest().map(|newest| newest.lineage) else { return };
        let full = |snapshot: &Snapshot| snapshot.lineage == own && snapshot.is_full;
        let surplus = self.snapshots.iter().filter(|snapshot| full(snapshot)).count().saturating_sub(keep);
        let mut passed = 0;
        self.snapshots.retain(|snapshot| {
            passed += usize::from(full(snapshot));
            snapshot.lineage != own || passed > surplus
        });
    }

    fn load(&mut self, number: usize, of_other: bool) {
        let chosen = if of_other { self.other() } else { self.newest() }.cloned();
        let mut options = LoadOptions::default();
        if of_other {
            options.snapshot = Some(chosen.as_ref().map_or("0123456789abcdef", |chosen| &chosen.id));
        }
        let result = self.jobs[number].store.load(self.path(), &options);
        let Some(chosen) = chosen else {
            assert!(refusal(result).1.contains("there is no"));
            return;
        };
        assert_eq!(result.unwrap().snapshot, chosen.id);
        self.jobs[number].rows.clone_from(&chosen.rows);
        self.jobs[number].note(&chosen);
    }

    /// What a save wrote that did not end is no part of anything.
    fn kill(&mut self, number: usize, kind: SaveKind) {
        let mut options = SaveOptions::default();
        options.kind = kind;
        let shard = Shard { number: 0, of: 1 };
        _ = self.jobs[number].store.save_part(self.path(), &new_snapshot_name(), shard, &options);
        self.jobs[number] = Job::new();
    }

    fn compact(&mut self) {
        let Some(newest) = self.snapshots.last_mut() else { return };
        let is_chain = !newest.is_full;
        if is_chain {
            (newest.is_full, newest.written) = (true, newest.rows.len());
            let newest = self.snapshots.pop().unwrap();
            while self.snapshots.pop().is_some_and(|older| !older.is_full) {}
            self.snapshots.push(newest);
        }
        assert_eq!(compact(self.path(), None).unwrap().is_some(), is_chain);
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Write(number, ids) => {
                let job = &mut self.jobs[number];
                let table = job.store.find_numbered(TABLE).unwrap().unwrap();
                for id in ids {
                    self.values += 1.0;
                    job.store.write(table, &[id], &[self.values]).unwrap();
                    job.rows.insert(id, self.values);
                }
            }
            Op::Delete(number, ids) => {
                let job = &mut self.jobs[number];
                let table = job.store.find_numbered(TABLE).unwrap().unwrap();
                job.store.delete(table, &Vec::from_iter(ids.clone())).unwrap();
                job.rows.retain(|id, _| !ids.contains(id));
            }
            Op::Load(number) => self.load(number, false),
            Op::LoadOther(number) => self.load(number, true),
            Op::Save { job, options } => self.save(job, options),
            Op::Killed(number, kind) => self.kill(number, kind),
            Op::Restart(number) => self.jobs[number] = Job::new(),
            Op::Prune(keep) if !self.snapshots.is_empty() => {
                Pruning::plan(self.path(), keep, false).unwrap().carry_out().unwrap();
                self.prune(keep);
            }
            Op::Prune(_) => {}
            Op::Compact => self.compact(),
        }
    }

    /// The directory lists just the snapshots that it should, and the newest of each lineage is as it was saved.
    fn assert_same(&self) {
        if self.snapshots.is_empty() {
            assert!(!checkpoints::manifest_path(self.path()).exists());
            return;
        }
        let manifest = manifest(self.path());
        let found = manifest["snapshots"].as_array().unwrap();
        let ids: Vec<&str> = found.iter().map(|snapshot| snapshot["id"].as_str().unwrap()).collect();
        assert_eq!(ids, self.snapshots.iter().map(|snapshot| &*snapshot.id).collect::<Vec<_>>());
        let lineage = |place: usize| &found[place]["lineage"]["id"];
        for (place, pair) in self.snapshots.windows(2).enumerate() {
            assert_eq!(lineage(place) == lineage(place + 1), pair[0].lineage == pair[1].lineage);
        }
        for snapshot in self.newest().into_iter().chain(self.other()) {
            assert_eq!(rows_of(self.path(), &snapshot.id), snapshot.rows);
        }
    }
}

fn rows_of(directory: &Path, snapshot: &str) -> Rows {
    let (store, mut options) = (store(), LoadOptions::default());
    options.snapshot = Some(snapshot);
    store.load(directory, &options).unwrap();
    let table = store.find_numbered(TABLE).unwrap().unwrap();
    let ids = store.ids(table).unwrap();
    let values = read(&store, table, &ids);
    ids.into_iter().zip(values).collect()
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(USUAL_CASES, |cases| cases.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_of_another_is_deleted_and_nothing_saved_is_lost(ops in prop::collection::vec(op(), 0..24)) {
        let mut subject = Subject::new();
        for op in ops {
            subject.act(op);
            subject.assert_same();
        }
        for snapshot in &subject.snapshots {
            assert_eq!(rows_of(subject.path(), &snapshot.id), snapshot.rows);
        }
        if !subject.snapshots.is_empty() {
            let found = verify_checkpoint(subject.path()).unwrap().findings;
            assert!(found.iter().all(|finding| finding.kind == recstore::FindingKind::Unexplained), "{found:?}");
        }
    }
}

fn filled(rows: i64) -> LocalStore {
    let store = store();
    let table = open(&store, TABLE, 1, CONFIG);
    insert(&store, table, &Vec::from_iter(0..rows));
    store
}

fn full(store: &LocalStore, directory: &Path) -> Result<SaveReport> {
    save_keeping(store, directory, SaveKind::Full, 1)
}

fn replacing() -> SaveOptions<'static> {
    let mut options = SaveOptions::default();
    options.replace = true;
    options
}

/// Of two jobs that take turns with two directories each goes on with both, also after a restart that loads one of them.
#[test]
fn a_store_goes_on_with_what_the_store_held_that_it_was_loaded_from() {
    let temporary = tempfile::tempdir().unwrap();
    let (odd, even) = (temporary.path().join("odd"), temporary.path().join("even"));
    let mut store = filled(3);
    for _ in 0..4 {
        assert_eq!(full(&store, &even).unwrap().kept, None);
        assert_eq!(full(&store, &odd).unwrap().kept, None);
        store = loaded(&odd);
        assert_eq!(full(&store, &even).unwrap().kept, None);
        assert_eq!(manifest(&even)["snapshots"].as_array().unwrap().len(), 1);
    }
    // What another has added is not what it held.
    full(&loaded(&even), &even).unwrap();
    assert!(full(&loaded(&odd), &even).unwrap().kept.is_some());
}

/// A store that was overtaken stays so when its own snapshots are gone.
#[test]
fn a_directory_remembers_who_was_part_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let (old, fresh) = (filled(3), filled(2));
    let saved = full(&old, directory.path()).unwrap().snapshot;
    fresh.save(directory.path(), &replacing()).unwrap();
    let newest = full(&fresh, directory.path()).unwrap().snapshot;
    let (_, message) = refusal(full(&old, directory.path()));
    let expected = format!(
        "another store has saved the newest snapshot here, {newest}, since this one saved or loaded {saved}: save elsewhere, load the newest one before training, or drop what is here (replace=True)"
    );
    assert_eq!(message, expected);
    assert_eq!(old.save(directory.path(), &replacing()).unwrap().kept, None);
    assert_eq!(manifest(directory.path())["snapshots"].as_array().unwrap().len(), 1);
}

/// A part that was saved before another store saved is not committed over it.
#[test]
fn a_commit_is_refused_where_another_has_saved_since_the_parts() {
    let directory = tempfile::tempdir().unwrap();
    full(&filled(3), directory.path()).unwrap();
    let (slow, other) = (loaded(directory.path()), loaded(directory.path()));
    let (snapshot, options) = (new_snapshot_name(), SaveOptions::default());
    slow.save_part(directory.path(), &snapshot, Shard { number: 0, of: 1 }, &options).unwrap();
    let is_of_part = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&snapshot);
    let files = fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path()).filter(is_of_part);
    let part: Vec<_> = files.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    let newest = full(&other, directory.path()).unwrap().snapshot;
    // The other has taken it for one of a job that was killed.
    let removed = refusal(commit_snapshot(directory.path(), &snapshot, 1, &options));
    assert_eq!(removed.1, "this shard has not been saved");
    part.iter().for_each(|(path, content)| fs::write(path, content).unwrap());
    let (_, message) = refusal(commit_snapshot(directory.path(), &snapshot, 1, &options));
    assert!(message.contains(&format!("and is {newest} now")), "{message}");
    assert!(refusal(full(&slow, directory.path())).1.contains(OVERTAKEN));
}

/// A server that keeps its rows by a log is known when it comes back, though it loads nothing.
#[test]
fn a_store_that_comes_back_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = SaveOptions::default();
    options.writer = Some(new_snapshot_name());
    for rows in [3, 4, 5] {
        assert_eq!(filled(rows).save(directory.path(), &options).unwrap().kept, None);
        assert_eq!(manifest(directory.path())["snapshots"].as_array().unwrap().len(), 1);
    }
    assert!(full(&filled(1), directory.path()).unwrap().kept.is_some());
}

#[test]
fn a_lineage_that_is_none_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    full(&filled(3), directory.path()).unwrap();
    let whole = manifest(directory.path());
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut changed = whole.clone();
        change(&mut changed);
        checkpoints::write_manifest(directory.path(), &changed);
        refusal(checkpoints::load(&store(), directory.path())).1
    };
    let lineage =
        |manifest: &mut Value, key: &str, value: Value| manifest["snapshots"][0]["lineage"][key] = value;
    assert!(
        refused(&|manifest| lineage(manifest, "id", json!("x"))).contains("is not the name of a snapshot")
    );
    assert!(refused(&|manifest| lineage(manifest, "more", json!(1))).contains("unknown field `more`"));
    assert!(refused(&|manifest| manifest["version"] = json!(1)).contains("unknown field `ended`"));
    let removed =
        refused(&|manifest| _ = manifest["snapshots"][0].as_object_mut().unwrap().remove("lineage"));
    assert!(removed.contains("missing field `lineage`"), "{removed}");
}

type ChangeOfManifest = (&'static str, fn(&mut Value));

#[test]
fn figures_and_names_outside_the_format_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    full(&filled(3), directory.path()).unwrap();
    let whole = manifest(directory.path());
    let changes: [ChangeOfManifest; 15] = [
        ("step must be at most 2^53, got 9007199254740993", |all| {
            all["snapshots"][0]["tables"][0]["progress"]["step"] = json!((1_u64 << 53) + 1);
        }),
        ("updates must be at most 2^53, got 18446744073709551615", |all| {
            all["snapshots"][0]["tables"][0]["progress"]["updates"] = json!(u64::MAX);
        }),
        ("table \"t\": sweep.began must be at most 2^53, got 9007199254740993", |all| {
            let sweep = json!({"began": (1_u64 << 53) + 1, "leaves": u64::MAX});
            all["snapshots"][0]["tables"][0]["progress"]["sweep"] = sweep;
        }),
        ("table \"t\": sweep.leaves must be beyond sweep.began, 4, got 4", |all| {
            all["snapshots"][0]["tables"][0]["progress"]["sweep"] = json!({"began": 4, "leaves": 4});
        }),
        ("there are two snapshots", |all| {
            let first = all["snapshots"][0].clone();
            all["snapshots"].as_array_mut().unwrap().push(first);
        }),
        ("it has 3 lineages that have snapshots, expected at most 2", |all| {
            let first = all["snapshots"][0].clone();
            all["snapshots"] = ["1", "2", "3"]
                .map(|digit| {
                    let (mut snapshot, name) = (first.clone(), digit.repeat(16));
                    snapshot["id"] = json!(name);
                    snapshot["lineage"]["id"] = json!(name);
                    snapshot
                })
                .into();
        }),
        ("it holds 17 other lineages, expected at most 16", |all| {
            let held = json!({"lineage": "0".repeat(16), "save": "0".repeat(16)});
            all["snapshots"][0]["lineage"]["held"] = vec![held; 17].into();
        }),
        ("the writer \"zzz\" is not sixteen hexadecimal digits", |all| {
            all["snapshots"][0]["lineage"]["writers"] = json!(["zzz"]);
        }),
        ("\"../../y\" is not the name of a snapshot", |all| all["ended"] = json!(["../../y"])),
        ("it has 65 lineages that ended, expected at most 64", |all| {
            all["ended"] = vec![json!("0".repeat(16)); 65].into();
        }),
        ("\"x\" is not the name of a snapshot", |all| all["snapshots"][0]["id"] = json!("x")),
        ("\"x\" is not the name of a snapshot", |all| all["snapshots"][0]["parent"] = json!("x")),
        ("missing field `parent`", |all| _ = all["snapshots"][0].as_object_mut().unwrap().remove("parent")),
        ("missing field `ended`", |all| _ = all.as_object_mut().unwrap().remove("ended")),
        ("unknown field `ended`", |all| {
            all["version"] = json!(1);
            all["snapshots"][0].as_object_mut().unwrap().remove("lineage");
        }),
    ];
    for (expected, change) in changes {
        let mut changed = whole.clone();
        change(&mut changed);
        checkpoints::write_manifest(directory.path(), &changed);
        let (_, message) = refusal(checkpoints::load(&store(), directory.path()));
        assert!(message.contains(expected), "{expected}: {message}");
    }
    checkpoints::write_manifest(directory.path(), &whole);
    checkpoints::load(&store(), directory.path()).unwrap();
}

const SHARES: usize = 2;

fn load_share(store: &LocalStore, directory: &Path, number: usize, tables: Option<&BTreeSet<String>>) {
    let shard = Shard { number, of: SHARES };
    let keeps = |id| shard.holds(id);
    let mut options = LoadOptions::default();
    options.keeps = Some(&keeps);
    (options.shard, options.tables) = (Some(shard), tables);
    store.load(directory, &options).unwrap();
}

fn load_tables(store: &LocalStore, directory: &Path, names: &[&str]) {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let mut options = LoadOptions::default();
    options.tables = Some(&names);
    store.load(directory, &options).unwrap();
}

/// Makes a directory of two tables of 40 rows each.
fn two_tables(directory: &Path) -> LocalStore {
    let store = filled(40);
    let other = open(&store, "other", 1, CONFIG);
    insert(&store, other, &Vec::from_iter(0..40));
    full(&store, directory).unwrap();
    store
}

/// A load that leaves something out, and the rows that the store then has.
type PartialLoad = (fn(&Path) -> LocalStore, bool);

#[test]
fn a_store_that_loaded_a_part_alone_deletes_nothing_of_the_rest() {
    let partial: [PartialLoad; 5] = [
        (
            |directory| {
                let own = store();
                load_tables(&own, directory, &[TABLE]);
                own
            },
            true,
        ),
        (
            |directory| {
                let own = store();
                load_tables(&own, directory, &[]);
                own
            },
            false,
        ),
        (
            |directory| {
                let own = store();
                load_share(&own, directory, 0, None);
                own
            },
            true,
        ),
        // It had all before: its share took the place of that.
        (
            |directory| {
                let own = loaded(directory);
                load_share(&own, directory, 1, None);
                own
            },
            true,
        ),
        (
            |directory| {
                let own = loaded(directory);
                load_share(&own, directory, 1, Some(&BTreeSet::from([TABLE.to_owned()])));
                own
            },
            true,
        ),
    ];
    for (number, (load, has_rows)) in partial.into_iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        two_tables(directory.path());
        let before = manifest(directory.path())["snapshots"][0].clone();
        let own = load(directory.path());
        let delta = save_keeping(&own, directory.path(), SaveKind::Delta, 1);
        assert!(refusal(delta).1.contains(NO_DELTA), "{number}");
        let saved = full(&own, directory.path());
        let snapshots = manifest(directory.path())["snapshots"].clone();
        assert_eq!(snapshots[0], before, "{number}: the snapshot of the other store stays");
        if has_rows {
            assert_eq!(saved.unwrap().kept.as_deref(), before["id"].as_str(), "{number}");
            // From here on it goes on with its own.
            assert_eq!(full(&own, directory.path()).unwrap().kept, None, "{number}");
        } else {
            assert!(refusal(saved).1.contains(EMPTIED), "{number}");
        }
        assert!(verify_checkpoint(directory.path()).unwrap().findings.is_empty(), "{number}");
    }
}

#[test]
fn a_store_that_loads_a_table_back_has_the_others_still() {
    let directory = tempfile::tempdir().unwrap();
    let own = two_tables(directory.path());
    load_tables(&own, directory.path(), &[TABLE]);
    assert_eq!(full(&own, directory.path()).unwrap().kept, None);
    load_tables(&own, directory.path(), &["other", TABLE]);
    assert_eq!(save_keeping(&own, directory.path(), SaveKind::Delta, 1).unwrap().kept, None);
    load_tables(&store(), directory.path(), &["other", TABLE]);
}

/// Saves the parts of `stores` together, and returns the newest snapshot that stays though another store saved it.
fn save_together(stores: &[LocalStore], directory: &Path) -> Result<Option<String>> {
    let (snapshot, options, of) = (new_snapshot_name(), SaveOptions::default(), stores.len());
    for (number, store) in stores.iter().enumerate() {
        store.save_part(directory, &snapshot, Shard { number, of }, &options)?;
    }
    commit_snapshot(directory, &snapshot, of, &options)
}

#[test]
fn stores_that_loaded_all_shares_go_on_together_and_no_one_alone() {
    let directory = tempfile::tempdir().unwrap();
    two_tables(directory.path());
    let shares = || {
        [0, 1].map(|number| {
            let own = store();
            load_share(&own, directory.path(), number, None);
            own
        })
    };
    let stores = shares();
    assert_eq!(save_together(&stores, directory.path()).unwrap(), None);
    assert_eq!(save_together(&stores, directory.path()).unwrap(), None);
    assert_eq!(manifest(directory.path())["snapshots"].as_array().unwrap().len(), 1);
    let newest = manifest(directory.path())["snapshots"][0]["id"].as_str().unwrap().to_owned();
    // In another order the parts are those of other rows.
    let [first, second] = shares();
    assert_eq!(save_together(&[second, first], directory.path()).unwrap(), Some(newest.clone()));
    // A share alone is not the whole: to that store both lineages are those of others.
    assert!(refusal(full(&stores[0], directory.path())).1.contains(TWO_OTHERS));
}

/// Makes a directory of two lineages: a snapshot of a store with a log, which has dropped a first one, and a chain of a
/// store that had saved elsewhere before.
fn make_specimen(directory: &Path) {
    full(&filled(2), directory).unwrap();
    let mut logged = replacing();
    logged.writer = Some("0123456789abcdef".to_owned());
    filled(3).save(directory, &logged).unwrap();
    let (store, elsewhere) = (filled(4), tempfile::tempdir().unwrap());
    full(&store, elsewhere.path()).unwrap();
    full(&store, directory).unwrap();
    store.write(store.find_numbered(TABLE).unwrap().unwrap(), &[9], &[0.5]).unwrap();
    save_keeping(&store, directory, SaveKind::Delta, 1).unwrap();
}

fn specimen() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint_v2/two_lineages")
}

/// Returns what two such directories have in common: names become numbers, and what depends on time or names goes.
fn form(directory: &Path) -> Value {
    let mut manifest = manifest(directory);
    manifest["checksum"] = Value::Null;
    for snapshot in manifest["snapshots"].as_array_mut().unwrap() {
        snapshot["created"] = Value::Null;
        for table in snapshot["tables"].as_array_mut().unwrap() {
            for file in table["shards"].as_array_mut().unwrap() {
                file["file"] = file["file"].as_str().unwrap()[16..].into();
            }
        }
    }
    number_names(&mut manifest, &mut Vec::new());
    manifest
}

fn number_names(value: &mut Value, names: &mut Vec<String>) {
    let is_name = |text: &str| text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match value {
        Value::String(text) if is_name(text) => {
            let known = names.iter().position(|name| name == text);
            let number = known.unwrap_or(names.len());
            names.push(text.clone());
            *value = number.into();
        }
        Value::Array(values) => values.iter_mut().for_each(|value| number_names(value, names)),
        Value::Object(values) => values.values_mut().for_each(|value| number_names(value, names)),
        _ => {}
    }
}

/// `RECSTORE_FIXTURES` names where to make it, which was done once for this version.
#[test]
fn the_specimen_of_version_2_is_what_is_written_today() {
    let temporary = tempfile::tempdir().unwrap();
    let asked_for =
        std::env::var_os("RECSTORE_FIXTURES").map(|to| PathBuf::from(to).join("checkpoint_v2/two_lineages"));
    let made = asked_for.unwrap_or_else(|| temporary.path().to_owned());
    make_specimen(&made);
    assert_eq!(form(&made), form(&specimen()));
}

#[test]
fn the_specimen_of_version_2_is_read_and_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    for file in fs::read_dir(specimen()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), directory.path().join(file.file_name())).unwrap();
    }
    let manifest = manifest(directory.path());
    let snapshots = manifest["snapshots"].as_array().unwrap();
    let names: Vec<&str> = snapshots.iter().map(|snapshot| snapshot["id"].as_str().unwrap()).collect();
    let rows = |of: std::ops::Range<i64>| -> Rows { of.map(|id| (id, 0.0)).collect() };
    let changed = rows(0..4).into_iter().chain([(9, 0.5)]).collect();
    let found: Vec<Rows> = names.iter().map(|name| rows_of(directory.path(), name)).collect();
    assert_eq!(found, [rows(0..3), rows(0..4), changed]);
    let newest = loaded(directory.path());
    assert!(save_keeping(&newest, directory.path(), SaveKind::Delta, 1).unwrap().is_delta);
    assert!(refusal(full(&filled(1), directory.path())).1.contains(TWO_OTHERS));
    let (other, mut options) = (store(), LoadOptions::default());
    options.snapshot = Some(names[0]);
    other.load(directory.path(), &options).unwrap();
    assert!(refusal(full(&other, directory.path())).1.contains(OVERTAKEN));
}

/// A directory of before goes on as one lineage, of which the stores that loaded it are part.
#[test]
fn a_directory_of_version_1_goes_on_as_one_lineage() {
    let directory = tempfile::tempdir().unwrap();
    let store = filled(3);
    full(&store, directory.path()).unwrap();
    insert(&store, store.find_numbered(TABLE).unwrap().unwrap(), &[7]);
    save_keeping(&store, directory.path(), SaveKind::Delta, 1).unwrap();
    let mut before = manifest(directory.path());
    before["version"] = json!(1);
    before.as_object_mut().unwrap().remove("ended").unwrap();
    for snapshot in before["snapshots"].as_array_mut().unwrap() {
        snapshot.as_object_mut().unwrap().remove("lineage").unwrap();
    }
    checkpoints::write_manifest(directory.path(), &before);
    let (old, new) = (loaded(directory.path()), loaded(directory.path()));
    assert!(save_keeping(&new, directory.path(), SaveKind::Auto, 1).unwrap().is_delta);
    assert!(refusal(full(&old, directory.path())).1.contains(OVERTAKEN));
    assert!(full(&filled(1), directory.path()).unwrap().kept.is_some());
    let after = manifest(directory.path());
    assert_eq!((&after["version"], after["snapshots"].as_array().unwrap().len()), (&json!(2), 4));
}
