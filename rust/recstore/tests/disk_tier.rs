//! A table whose rows do not fit into memory holds what one does whose rows do, to the bit, and keeps its limit.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;
mod pool;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use checkpoints::{insert, load, open, read, save, state, store, update};
use numbered::Numbered;
use pool::Pool;
use proptest::prelude::*;
use recstore::{
    BagInput, EmbeddingStore, Error, GradientChunk, GradientPart, InProcessStore, LocalStore, PLACES_TAG,
    PoolingMode, PrefetchRequest, Prefetches, SaveKind, Step, TableConfig, TableId, TableUpdate,
};
use tempfile::TempDir;

const DIM: usize = 12;

/// Configurations of every optimizer and row type.
const CONFIGS: [&str; 15] = [
    r#""optimizer": {"kind": "sgd", "lr": 0.1}"#,
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}, "dtype": "bfloat16""#,
    r#""optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "dtype": "float16""#,
    r#""optimizer": {"kind": "adam", "lr": 0.1, "bias_correction": "row"}"#,
    r#""optimizer": {"kind": "adamw", "lr": 0.1}"#,
    r#""optimizer": {"kind": "ftrl", "alpha": 0.1, "l1": 0.01}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "eviction": {"ttl": 2, "capacity": 60, "min_norm": 0.001, "interval": 2}"#,
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}, "admission": {"kind": "count", "threshold": 2},
       "eviction": {"capacity": 40, "policy": "lfu", "interval": 3, "delay": 2}"#,
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}, "dtype": "int8", "eviction": {"ttl": 2, "interval": 2},
       "admission": {"kind": "count", "threshold": 2, "shared_rows": 5}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "admission": {"kind": "sketch", "threshold": 2, "epsilon": 0.05}"#,
    r#""optimizer": {"kind": "sgd", "lr": 0.1}, "dtype": "bfloat16""#,
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}, "dtype": "int8""#,
    r#""optimizer": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.5, "catch_up": true}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "dtype": "float8_e4m3fn""#,
];

/// Bytes with which a table of this test has some rows in memory and most on disk.
const TINY: u64 = 26 << 10;

/// The limit of a table of the twins. Its index must fit for as many ids as there are, also after a load, which leaves the
/// id map at other sizes than growing does; what admission counts, and when rows were used, takes memory besides.
fn limit_of(config: &str) -> u64 {
    const AFTER_LOAD: u64 = 4 << 10;
    let besides = match (config.contains("admission"), config.contains("eviction")) {
        (true, _) => 16 << 10,
        (false, true) => 4 << 10,
        (false, false) => 0,
    };
    TINY + AFTER_LOAD + besides
}

fn tiered(config: &str, limit: u64, directory: &Path) -> String {
    format!(r#"{{{config}, "memory_limit": {limit}, "disk": {:?}}}"#, directory.display().to_string())
}

/// A table in two stores: one that keeps few rows in memory, and one that keeps all.
struct Twins {
    directory: TempDir,
    stores: [Arc<LocalStore>; 2],
    table: TableId,
}

#[derive(Debug, Clone)]
enum Call {
    Update(Vec<i64>),
    /// A lookup that keeps places, and the step that uses them.
    Train(Vec<i64>),
    Write(Vec<i64>),
    Insert(Vec<i64>),
    Delete(Vec<i64>),
    Bag(Vec<i64>),
    Ahead(Vec<i64>),
    /// Rows read ahead for a batch, the step of another one meanwhile, and then the batch's own.
    Prefetch(Vec<i64>, Vec<i64>),
    Save(SaveKind),
    Load,
    Clear,
}

fn ids() -> impl Strategy<Value = Vec<i64>> {
    prop_oneof![
        3 => prop::collection::vec(0..30i64, 1..40),
        2 => prop::collection::vec(0..400i64, 1..300),
        1 => (0..250i64).prop_map(|start| (start..start + 150).collect()),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => ids().prop_map(Call::Update),
        6 => ids().prop_map(Call::Train),
        2 => ids().prop_map(Call::Write),
        2 => ids().prop_map(Call::Insert),
        2 => ids().prop_map(Call::Delete),
        2 => ids().prop_map(Call::Bag),
        2 => ids().prop_map(Call::Ahead),
        2 => (ids(), ids()).prop_map(|(batch, other)| Call::Prefetch(batch, other)),
        1 => prop_oneof![Just(SaveKind::Full), Just(SaveKind::Auto)].prop_map(Call::Save),
        1 => Just(Call::Load),
        1 => Just(Call::Clear),
    ]
}

fn values(ids: &[i64], salt: usize) -> Vec<f32> {
    let value = |place: usize, id: i64, column: usize| {
        ((id * 31 + (place * 7 + column * 3 + salt) as i64) % 17) as f32 / 8.0 - 1.0
    };
    let row =
        |(place, id): (usize, &i64)| (0..DIM).map(|column| value(place, *id, column)).collect::<Vec<_>>();
    ids.iter().enumerate().flat_map(row).collect()
}

/// Reads rows and their places, and takes a step of gradients that come with them.
fn train(store: &LocalStore, table: TableId, ids: &[i64], gradients: &[f32]) -> Vec<f32> {
    let (mut rows, mut places) = (vec![0.0; ids.len() * DIM], vec![0; ids.len() + PLACES_TAG]);
    store.read_with_places(table, ids, &mut rows, &mut places).unwrap();
    let part = GradientPart { places: &places, ..GradientPart::new(ids, gradients, DIM) };
    let chunk = GradientChunk { parts: vec![part] };
    store.update(&[TableUpdate { table, chunks: vec![chunk], step: Step::Next }]).unwrap();
    rows
}

fn bag(store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut pooled = vec![0.0; DIM];
    let offsets = [0, ids.len() as i64];
    let input = BagInput {
        ids,
        offsets: &offsets,
        mode: PoolingMode::Sum,
        per_sample_weights: None,
        padding_idx: None,
    };
    let mut places = vec![0; ids.len() + PLACES_TAG];
    store.bag(&[table], input, &mut pooled, &mut [], &mut places).unwrap();
    pooled
}

/// Reads the rows of a batch ahead, takes a step of others, and then that of the batch.
fn prefetch(store: &Arc<LocalStore>, table: TableId, batch: &[i64], other: &[i64], salt: usize) -> Vec<f32> {
    let prefetches = Prefetches::new(1, 4);
    let opened = store.table("emb_prefetch", table).unwrap();
    let request = PrefetchRequest { key: table, table: opened, store: store.clone(), ids: batch.to_vec() };
    let issued = prefetches.issue(vec![request]).unwrap();
    let gradients = values(other, salt);
    let chunks = vec![GradientChunk::new(other, &gradients, DIM)];
    let left = store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
    // Rows that left by eviction are none of the step's.
    let mut changed = other.iter().copied();
    prefetches.note(&table, if left > 0 { None } else { Some(&mut changed) });
    let rows = prefetches.wait(issued).unwrap().remove(0);
    update(store, table, batch, &values(batch, salt + 1));
    rows
}

impl Twins {
    fn new(config: &str, threads: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let new = || if threads == 1 { store() } else { LocalStore::new(Pool::new(threads)) };
        let stores = [new(), new()].map(Arc::new);
        let table = open(&stores[0], "t", DIM, &tiered(config, limit_of(config), directory.path()));
        assert_eq!(open(&stores[1], "t", DIM, &format!("{{{config}}}")), table);
        Self { directory, stores, table }
    }

    /// Makes a call on both and compares what it gives.
    fn call(&self, number: usize, call: &Call) {
        let table = self.table;
        let checkpoints = |which: usize| self.directory.path().join(format!("checkpoint{which}"));
        let [one, other] = [0, 1].map(|which| {
            let store = &self.stores[which];
            match call {
                Call::Update(ids) => update(store, table, ids, &values(ids, number)),
                Call::Train(ids) => return train(store, table, ids, &values(ids, number)),
                Call::Write(ids) => store.write(table, ids, &values(ids, number)).unwrap(),
                Call::Insert(ids) => insert(store, table, ids),
                Call::Delete(ids) => return vec![store.delete(table, ids).unwrap() as f32],
                Call::Bag(ids) => return bag(store, table, ids),
                Call::Ahead(ids) => {
                    let mut rows = vec![0.0; ids.len() * DIM];
                    store.table("emb_read", table).unwrap().read_ahead(ids, &mut rows).unwrap();
                    return rows;
                }
                Call::Prefetch(batch, other) => return prefetch(store, table, batch, other, number),
                Call::Save(kind) => {
                    return vec![save(store, &checkpoints(which), *kind).unwrap().rows as f32];
                }
                Call::Load if !checkpoints(which).exists() => {}
                Call::Load => return vec![load(store, &checkpoints(which)).unwrap().tables[0].1 as f32],
                Call::Clear => store.clear(table).unwrap(),
            }
            Vec::new()
        });
        assert!(one.iter().map(|v| v.to_bits()).eq(other.iter().map(|v| v.to_bits())), "{call:?}");
    }

    /// Compares all that can be seen, and holds the limit.
    fn compare(&self) {
        let [one, other] = self.stores.each_ref().map(|store| state(store).remove("t").unwrap());
        assert_eq!(one.rows, other.rows);
        let counts = |state: &checkpoints::TableState| {
            (state.statistics.rows, state.statistics.updates, state.statistics.step, state.statistics.inserts)
        };
        assert_eq!(counts(&one), counts(&other));
        let memory = self.stores[0].statistics(self.table).unwrap().memory;
        let limit = memory.memory_limit.unwrap();
        assert!(memory.bytes() <= limit.max(index_floor(memory.index_bytes)), "{memory:?}");
    }
}

/// What a table takes at least: a slab of records beside its index.
fn index_floor(index_bytes: u64) -> u64 {
    index_bytes + TINY / 32 + 256
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn rows_on_disk_change_as_rows_in_memory_do(
        config in 0..CONFIGS.len(),
        threads in prop_oneof![Just(1), Just(2), Just(8)],
        calls in prop::collection::vec(call(), 1..25),
    ) {
        let twins = Twins::new(CONFIGS[config], threads);
        for (number, call) in calls.iter().enumerate() {
            twins.call(number, call);
        }
        twins.compare();
    }
}

fn disk_of(store: &LocalStore, table: TableId) -> recstore::MemoryUse {
    store.statistics(table).unwrap().memory
}

/// A table of `rows` rows with a limit that leaves room for about a quarter of them.
fn filled(store: &LocalStore, directory: &Path, rows: i64) -> TableId {
    let limit = rows as u64 * 24 * 4 / 4 + rows as u64 * 40;
    let table = open(store, "t", DIM, &tiered(CONFIGS[1], limit, directory));
    for start in (0..rows).step_by(1000) {
        let ids: Vec<i64> = (start..(start + 1000).min(rows)).collect();
        update(store, table, &ids, &values(&ids, 1));
    }
    table
}

#[test]
fn a_limit_without_a_disk_is_an_error_that_changes_nothing() {
    let store = store();
    let table = open(&store, "user", 4, r#"{"memory_limit": 20000}"#);
    let known: Vec<i64> = (0..100).collect();
    insert(&store, table, &known);
    let before = state(&store);
    let many: Vec<i64> = (0..2_000).collect();
    let (mut rows, mut indices) = (vec![1.0; many.len() * 4], vec![0; many.len()]);
    let chunks = vec![GradientChunk::new(&many, &rows, 4)];
    let refusals = [
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop),
        store.write(table, &many, &rows),
        store.lookup(table, &many, true, &mut indices, &mut rows.clone()),
    ];
    for (refusal, name) in refusals.into_iter().zip(["emb_update", "emb_write", "hashtable_lookup"]) {
        let Err(Error::MemoryLimit { operation, table, whose, limit, in_use, requested }) = refusal else {
            panic!("{name}: {refusal:?}")
        };
        assert_eq!((operation, table.as_str(), whose, limit), (name, "user", "table's", 20_000));
        assert!(in_use < 20_000 && in_use + requested > 20_000, "{in_use} {requested}");
    }
    assert_eq!(state(&store), before);
    // However many positions there are: ids with a row need no room.
    let repeated: Vec<i64> = known.iter().cycle().take(50_000).copied().collect();
    rows.resize(repeated.len() * 4, 0.5);
    update(&store, table, &repeated, &rows);
    store.write(table, &repeated, &rows).unwrap();
}

#[test]
fn the_store_has_a_limit_of_its_own() {
    let store = store();
    let tables = ["one", "two"].map(|name| open(&store, name, 4, ""));
    let ids: Vec<i64> = (0..3_000).collect();
    insert(&store, tables[0], &ids);
    let in_use = store.memory().in_use;
    assert_eq!(in_use, disk_of(&store, tables[0]).bytes());
    store.set_memory_limit(Some(in_use + 10_000)).unwrap();
    let before = state(&store);
    let refused = store.write(tables[1], &ids, &vec![0.0; ids.len() * 4]).unwrap_err();
    let message = refused.to_string();
    assert!(message.contains("\"two\"") && message.contains("store's memory limit"), "{message}");
    // One of two tables of a call has no room: neither takes a step.
    let gradients = vec![1.0; ids.len() * 4];
    let chunk = || vec![GradientChunk::new(&ids, &gradients, 4)];
    let both = tables.map(|table| TableUpdate { table, chunks: chunk(), step: Step::Next });
    assert!(matches!(store.update(&both), Err(Error::MemoryLimit { .. })));
    assert_eq!((state(&store), store.memory().in_use), (before, in_use));
    update(&store, tables[0], &ids, &gradients);
    store.drop_table("one").unwrap();
    assert_eq!(store.memory().in_use, 0);
    store.write(tables[1], &ids[..50], &[0.0; 200]).unwrap();
    store.set_memory_limit(None).unwrap();
    insert(&store, tables[1], &ids);
    assert!(matches!(store.set_memory_limit(Some(0)), Err(Error::InvalidConfig { .. })));
}

#[test]
fn a_limit_that_has_no_room_for_the_index_is_an_error_with_a_disk_too() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let table = open(&store, "t", DIM, &tiered(CONFIGS[0], 8_000, directory.path()));
    let ids: Vec<i64> = (0..5_000).collect();
    let refused = store.write(table, &ids, &values(&ids, 0)).unwrap_err();
    assert!(refused.to_string().contains("table's memory limit of 8000 bytes"), "{refused}");
    assert_eq!(store.num_rows(table), Ok(0));
}

#[test]
fn a_directory_that_is_not_there_is_named() {
    let config = TableConfig::from_json(DIM, r#"{"memory_limit": 9999, "disk": "/no/such/place"}"#).unwrap();
    let refused = store().open_numbered("user", &config).unwrap_err().to_string();
    assert!(refused.contains("\"user\"") && refused.contains("/no/such/place"), "{refused}");
}

#[test]
fn a_lookup_that_keeps_places_and_a_prefetch_bring_rows_into_memory() {
    let (local, directory) = (Arc::new(store()), tempfile::tempdir().unwrap());
    let table = filled(&local, directory.path(), 8_000);
    let memory = disk_of(&local, table);
    assert!(memory.resident_rows < 5_000 && memory.disk_bytes > 0, "{memory:?}");
    let ids: Vec<i64> = (0..500).collect();
    let expected = read(&local, table, &ids);
    let (mut rows, mut places) = (vec![0.0; expected.len()], vec![0; ids.len() + PLACES_TAG]);
    local.read_with_places(table, &ids, &mut rows, &mut places).unwrap();
    assert!(rows == expected);
    let before = disk_of(&local, table).rows_fetched;
    update(&local, table, &ids, &values(&ids, 2));
    assert_eq!(disk_of(&local, table).rows_fetched, before);
    let ids: Vec<i64> = (3_000..3_500).collect();
    let prefetches = Prefetches::new(1, 4);
    let opened = local.table("emb_prefetch", table).unwrap();
    let request = PrefetchRequest { key: table, table: opened, store: local.clone(), ids: ids.clone() };
    let rows = prefetches.wait(prefetches.issue(vec![request]).unwrap()).unwrap();
    assert!(rows[0] == read(&local, table, &ids));
    let before = disk_of(&local, table).rows_fetched;
    update(&local, table, &ids, &values(&ids, 2));
    assert_eq!(disk_of(&local, table).rows_fetched, before);
}

#[test]
fn large_steps_are_the_same_over_threads() {
    const ROWS: i64 = 12_000;
    let trained = [0, 1, 2, 8].map(|threads| {
        let directory = tempfile::tempdir().unwrap();
        let store = LocalStore::new(Pool::new(threads.max(1)));
        let limit = ROWS as u64 * (24 * 4 / 4 + 44);
        let text = match threads {
            0 => format!("{{{}}}", CONFIGS[2]),
            _ => tiered(CONFIGS[2], limit, directory.path()),
        };
        let table = open(&store, "t", DIM, &text);
        let mut seen = Vec::new();
        for step in 0..12 {
            let ids: Vec<i64> = (0..3_000).map(|place| (place * 7_919 + step * 4_111) % ROWS).collect();
            seen.extend(train(&store, table, &ids, &values(&ids, step as usize)));
        }
        let memory = disk_of(&store, table);
        assert!(threads == 0 || memory.rows_fetched > 5_000 && memory.rows_spilled > 5_000, "{memory:?}");
        seen.extend(read(&store, table, &(0..ROWS).collect::<Vec<_>>()));
        seen.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert!(trained[1..].iter().all(|one| *one == trained[0]));
}

#[test]
fn rows_read_ahead_stay_until_their_step_and_unchanged_ones_are_not_written_again() {
    let (local, directory) = (store(), tempfile::tempdir().unwrap());
    let table = filled(&local, directory.path(), 8_000);
    let expected: Vec<i64> = (3_000..3_500).collect();
    let mut rows = vec![0.0; expected.len() * DIM];
    local.table("emb_read", table).unwrap().read_ahead(&expected, &mut rows).unwrap();
    let look = |ids: &[i64]| {
        let (mut rows, mut places) = (vec![0.0; ids.len() * DIM], vec![0; ids.len() + PLACES_TAG]);
        local.read_with_places(table, ids, &mut rows, &mut places).unwrap();
    };
    // The hand goes round several times.
    for _ in 0..4 {
        for start in (4_000..8_000).step_by(250) {
            look(&(start..start + 250).collect::<Vec<_>>());
        }
    }
    let before = disk_of(&local, table);
    update(&local, table, &expected, &values(&expected, 2));
    assert_eq!(disk_of(&local, table).rows_fetched, before.rows_fetched);
    // All rows in memory but those are as in the file by now.
    let spilled = |from: i64| {
        let before = disk_of(&local, table).rows_spilled;
        look(&(from..from + 250).collect::<Vec<_>>());
        disk_of(&local, table).rows_spilled - before
    };
    assert!((4_000..8_000).step_by(250).map(spilled).sum::<u64>() <= expected.len() as u64);
    assert_eq!((4_000..8_000).step_by(250).map(spilled).sum::<u64>(), 0);
}

/// Runs tests of this file with a setting of the environment and returns their output.
fn run_with(setting: &str, tests: &[&str]) -> String {
    let own = std::env::current_exe().unwrap();
    let output = Command::new(own).env("RECSTORE_IO_URING", setting).args(tests).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn plain_reads_give_the_same() {
    let output = run_with("off", &["rows_on_disk_change", "large_steps", "rows_that_cannot_be_read"]);
    assert!(output.contains("3 passed"), "{output}");
}

#[test]
fn a_setting_of_the_environment_that_makes_no_sense_is_refused() {
    if std::env::var("RECSTORE_IO_URING").as_deref() != Ok("maybe") {
        let output = run_with("maybe", &["a_setting_of_the_environment"]);
        return assert!(output.contains("1 passed"), "{output}");
    }
    let directory = tempfile::tempdir().unwrap();
    let config = TableConfig::from_json(DIM, &tiered(CONFIGS[0], TINY, directory.path())).unwrap();
    let refused = store().open_numbered("user", &config).unwrap_err().to_string();
    assert!(refused.contains("RECSTORE_IO_URING must be \"on\" or \"off\", got \"maybe\""), "{refused}");
    assert!(recstore::reading_way().contains("must be"), "{}", recstore::reading_way());
}

#[test]
fn readers_beside_a_trainer_see_whole_rows() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let limit = 26 << 10;
    let text = tiered(
        r#""initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1}"#,
        limit,
        directory.path(),
    );
    let table = open(&store, "t", DIM, &text);
    let ids: Vec<i64> = (0..400).collect();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    for row in read(&store, table, &ids).chunks_exact(DIM) {
                        assert!(row.iter().all(|value| *value == row[0]), "{row:?}");
                    }
                }
            });
        }
        for step in 0..300 {
            let some: Vec<i64> = ids.iter().copied().filter(|id| (id * 7 + step) % 3 == 0).collect();
            update(&store, table, &some, &vec![-1.0; some.len() * DIM]);
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert!(read(&store, table, &ids).iter().all(|value| *value == 100.0));
    assert!(disk_of(&store, table).rows_spilled > 0);
}

#[test]
fn a_full_disk_is_an_error_that_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(directory.path());
    if !mount.output().is_ok_and(|output| output.status.success()) {
        eprintln!("not run: a file system cannot be mounted here");
        return;
    }
    let [store, twin] = [(); 2].map(|()| store());
    let table = open(&store, "user", DIM, &tiered(CONFIGS[1], 150_000, directory.path()));
    assert_eq!(open(&twin, "user", DIM, &format!("{{{}}}", CONFIGS[1])), table);
    let refused = (0..100).find_map(|batch| {
        let ids: Vec<i64> = (batch * 100..batch * 100 + 300).collect();
        let gradients = values(&ids, 1);
        let chunks = || vec![GradientChunk::new(&ids, &gradients, DIM)];
        let stepped = store.update(&[TableUpdate { table, chunks: chunks(), step: Step::Next }]);
        if stepped.is_ok() {
            update(&twin, table, &ids, &gradients);
        }
        stepped.err()
    });
    let Some(Error::Disk { table: name, path, message }) = refused else { panic!("{refused:?}") };
    assert_eq!((name, path), ("user".to_owned(), directory.path().display().to_string()));
    assert!(message.contains("space"), "{message}");
    let [rows, twin_rows] = [&store, &twin].map(|store| state(store).remove("user").unwrap());
    assert!(rows.rows == twin_rows.rows && rows.statistics.step == twin_rows.statistics.step);
    drop(store);
    Command::new("umount").arg("-l").arg(directory.path()).status().unwrap();
}

#[test]
fn a_checkpoint_says_nothing_of_the_disk_and_loads_into_any_table() {
    let (one, directory) = (store(), tempfile::tempdir().unwrap());
    let table = filled(&one, directory.path(), 6_000);
    let saved = directory.path().join("checkpoint");
    save(&one, &saved, SaveKind::Full).unwrap();
    let ids: Vec<i64> = (100..300).collect();
    update(&one, table, &ids, &values(&ids, 5));
    one.delete(table, &[7, 8]).unwrap();
    save(&one, &saved, SaveKind::Delta).unwrap();
    let whole = checkpoints::loaded(&saved);
    let text = state(&whole)["t"].config.clone();
    assert!(!text.contains("disk") && !text.contains("memory_limit"), "{text}");
    let other = store();
    let limit = disk_of(&one, table).memory_limit.unwrap() + 30_000;
    let again = open(&other, "t", DIM, &tiered(CONFIGS[1], limit, directory.path()));
    load(&other, &saved).unwrap();
    let memory = disk_of(&other, again);
    assert!(memory.bytes() <= limit && memory.rows_spilled > 1_000, "{memory:?}");
    let rows = |store: &LocalStore| state(store).remove("t").unwrap().rows;
    assert!(rows(&other) == rows(&one) && rows(&whole) == rows(&one));
    let small = store();
    open(&small, "t", DIM, &format!("{{{}, \"memory_limit\": {limit}}}", CONFIGS[1]));
    assert!(matches!(load(&small, &saved), Err(Error::MemoryLimit { operation: "load", .. })));
    assert_eq!((small.memory().in_use, state(&small)["t"].rows.len()), (0, 0));
}

/// Cuts the slot files in a directory, which have no names there, to a part of their length.
#[cfg(target_os = "linux")]
fn cut_slot_files(directory: &Path, numerator: u64, denominator: u64) {
    let opened = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let opened: Vec<_> = opened.collect();
    let is_own = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| {
            target.starts_with(directory) && target.to_string_lossy().ends_with("(deleted)")
        })
    };
    for path in opened.into_iter().filter(is_own) {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() * numerator / denominator).unwrap();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn rows_that_cannot_be_read_are_an_error_and_a_step_cut_short_is_never_forgotten() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let table = open(&store, "user", DIM, &tiered(CONFIGS[1], TINY, directory.path()));
    let ids: Vec<i64> = (0..400).collect();
    let gradients = values(&ids, 1);
    update(&store, table, &ids, &gradients);
    cut_slot_files(directory.path(), 3, 4);
    let is_disk_error = |result: recstore::Result<()>, what: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("table \"user\"") && message.contains(what), "{message}");
        assert!(message.contains(&directory.path().display().to_string()), "{message}");
    };
    let mut rows = vec![0.0; gradients.len()];
    is_disk_error(store.read(table, &ids, &mut rows), "fill whole buffer");
    is_disk_error(store.read_slot(table, "state_sum", &ids).map(drop), "fill whole buffer");
    is_disk_error(
        save(&store, &directory.path().join("saved"), SaveKind::Full).map(drop),
        "fill whole buffer",
    );
    // Rows in memory are as they were.
    let resident: Vec<i64> =
        ids.iter().copied().filter(|id| store.read(table, &[*id], &mut rows[..DIM]).is_ok()).collect();
    assert!(resident.len() > 100 && resident.len() < 400);
    let step = || {
        let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
    };
    is_disk_error(step(), "fill whole buffer");
    is_disk_error(step(), "a step was cut short");
    is_disk_error(store.read(table, &ids[..1], &mut rows[..DIM]), "a step was cut short");
    is_disk_error(store.write(table, &ids, &gradients), "a step was cut short");
    is_disk_error(
        save(&store, &directory.path().join("saved"), SaveKind::Full).map(drop),
        "a step was cut short",
    );
    store.clear(table).unwrap();
    step().unwrap();
    assert_eq!(store.num_rows(table), Ok(400));
}
