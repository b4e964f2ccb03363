//! Rows that ids without one of their own share: against a table without admission that is told which row each id has.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;
mod pool;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use checkpoints::{load, open, read, save, store, update};
use numbered::Numbered;
use pool::Pool;
use proptest::prelude::*;
use recstore::{
    BagInput, EmbeddingStore, Encoding, Error, Executor, FrozenSpec, GradientChunk, InProcessStore,
    LoadOptions, LocalStore, PoolingMode, PrefetchRequest, Prefetches, Publications, SaveKind, SaveOptions,
    Shard, SimdLevel, Step, TableConfig, TableId, TableUpdate, commit_snapshot, freeze, new_snapshot_name,
};

const DIM: usize = 3;
const SHARED: u64 = 3;
const THRESHOLD: u32 = 3;

/// A rule for rows of single precision, and another option of the table.
const OPTIMIZERS: [&str; 6] = [
    r#"{"kind": "sgd", "lr": 0.1}"#,
    r#"{"kind": "adagrad", "lr": 0.1}"#,
    r#"{"kind": "adam", "lr": 0.1, "bias_correction": "row"}"#,
    r#"{"kind": "ftrl", "alpha": 0.1, "l1": 0.001}"#,
    r#"{"kind": "lamb", "lr": 0.1}"#,
    r#"{"kind": "rowwise_adagrad", "lr": 0.1}, "max_grad_norm": 0.5"#,
];

const ADMISSION: &str = r#""admission": {"kind": "count", "threshold": 3, "shared_rows": 3}"#;

fn splitmix64(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The seed of a table by name and configured seed, as the format of checkpoints documents it.
fn table_seed(name: &str, seed: u64) -> u64 {
    let fnv = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let mut z = fnv ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn shared_of(id: i64) -> i64 {
    (splitmix64(id as u64 ^ table_seed("t", 0)) % SHARED) as i64
}

#[derive(Debug, Clone)]
enum Call {
    Update(Vec<(i64, f32)>),
    Write(i64),
    Insert(i64),
    Delete(i64),
    Clear,
    SaveAndLoad(SaveKind),
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        12 => prop::collection::vec((0..12i64, -2f32..2.0), 0..20).prop_map(Call::Update),
        1 => (0..12i64).prop_map(Call::Write),
        1 => (0..12i64).prop_map(Call::Insert),
        1 => (0..12i64).prop_map(Call::Delete),
        1 => Just(Call::Clear),
        2 => prop_oneof![Just(SaveKind::Full), Just(SaveKind::Auto)].prop_map(Call::SaveAndLoad),
    ]
}

/// A table with shared rows, and one without admission in which the shared row `r` is the row of the id `-1 - r`.
struct Twins {
    config: String,
    store: LocalStore,
    table: TableId,
    plain: LocalStore,
    of_plain: TableId,
    counts: BTreeMap<i64, u32>,
    with_row: Vec<i64>,
}

impl Twins {
    fn new(optimizer: &str) -> Self {
        let plain_config =
            format!(r#"{{"initializer": {{"kind": "normal", "std": 1}}, "optimizer": {optimizer}}}"#);
        let config = plain_config.replacen('{', &format!("{{{ADMISSION}, "), 1);
        let (store, plain) = (store(), store());
        let (table, of_plain) = (open(&store, "t", DIM, &config), open(&plain, "t", DIM, &plain_config));
        Self { config, store, table, plain, of_plain, counts: BTreeMap::new(), with_row: Vec::new() }
    }

    fn has_row(&self, id: i64) -> bool {
        self.with_row.contains(&id)
    }

    /// The id by which the plain table knows the row of an id.
    fn row_of(&self, id: i64) -> i64 {
        if self.has_row(id) { id } else { -1 - shared_of(id) }
    }

    fn call(&mut self, call: &Call, directory: &Path) {
        match call {
            Call::Update(gradients) => self.update(gradients),
            Call::Write(id) => {
                self.store.write(self.table, &[*id], &[0.5, *id as f32, 2.0]).unwrap();
                self.plain.write(self.of_plain, &[*id], &[0.5, *id as f32, 2.0]).unwrap();
                self.counts.remove(id);
                self.with_row.push(*id);
            }
            Call::Insert(id) => {
                checkpoints::insert(&self.store, self.table, &[*id]);
                self.admit(*id);
            }
            Call::Delete(id) => {
                self.store.delete(self.table, &[*id]).unwrap();
                self.plain.delete(self.of_plain, &[*id]).unwrap();
                self.counts.remove(id);
                self.with_row.retain(|other| other != id);
            }
            Call::Clear => {
                self.store.clear(self.table).unwrap();
                self.plain.clear(self.of_plain).unwrap();
                self.counts.clear();
                self.with_row.clear();
            }
            Call::SaveAndLoad(kind) => {
                save(&self.store, directory, *kind).unwrap();
                if *kind == SaveKind::Full {
                    self.store = store();
                }
                load(&self.store, directory).unwrap();
                self.table = open(&self.store, "t", DIM, &self.config);
            }
        }
    }

    /// Gives an id a row that starts from its shared one.
    fn admit(&mut self, id: i64) {
        if !self.has_row(id) {
            let weights = read(&self.plain, self.of_plain, &[self.row_of(id)]);
            self.plain.write(self.of_plain, &[id], &weights).unwrap();
            self.counts.remove(&id);
            self.with_row.push(id);
        }
    }

    fn update(&mut self, gradients: &[(i64, f32)]) {
        let row = |value: f32| [value, -0.5 * value, 0.25];
        let ids: Vec<i64> = gradients.iter().map(|(id, _)| *id).collect();
        let values: Vec<f32> = gradients.iter().flat_map(|(_, value)| row(*value)).collect();
        update(&self.store, self.table, &ids, &values);
        let mut sums: BTreeMap<i64, [f32; DIM]> = BTreeMap::new();
        for (id, value) in gradients {
            let sum = sums.entry(*id).or_default();
            sum.iter_mut().zip(row(*value)).for_each(|(sum, value)| *sum += value);
        }
        for &id in sums.keys().filter(|id| !self.with_row.contains(id)).copied().collect::<Vec<_>>().iter() {
            let count = self.counts.entry(id).or_default();
            *count += 1;
            if *count >= THRESHOLD {
                self.admit(id);
            }
        }
        let rows: Vec<i64> = sums.keys().map(|id| self.row_of(*id)).collect();
        update(&self.plain, self.of_plain, &rows, &sums.into_values().flatten().collect::<Vec<_>>());
    }

    /// What ids read, and bags of them.
    fn read(&self, store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<u32> {
        let mut values = read(store, table, ids);
        for mode in [PoolingMode::Sum, PoolingMode::Mean, PoolingMode::Max] {
            let mut pooled = vec![0.0; 2 * DIM];
            let mut positions = vec![0; if mode == PoolingMode::Max { 2 * DIM } else { 0 }];
            let offsets = [0, 5, ids.len() as i64];
            let bags = BagInput { ids, offsets: &offsets, mode, per_sample_weights: None, padding_idx: None };
            store.bag(&[table], bags, &mut pooled, &mut positions, &mut []).unwrap();
            values.extend(pooled);
        }
        values.into_iter().map(f32::to_bits).collect()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let ids: Vec<i64> = (0..13).collect();
        let rows: Vec<i64> = ids.iter().map(|id| self.row_of(*id)).collect();
        let expected = self.read(&self.plain, self.of_plain, &rows);
        prop_assert_eq!(self.read(&self.store, self.table, &ids), expected);
        let mut with_row = self.store.ids(self.table).unwrap();
        with_row.sort_unstable();
        let expected: Vec<i64> = ids.iter().copied().filter(|id| self.has_row(*id)).collect();
        prop_assert_eq!(with_row, expected);
        for (slot, _) in self.plain.describe(self.of_plain).unwrap().slots {
            let slots = |store: &LocalStore, table| store.read_slot(table, &slot, &self.with_row).unwrap();
            prop_assert_eq!(slots(&self.store, self.table), slots(&self.plain, self.of_plain));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn shared_rows_are_rows_that_several_ids_have(which in 0..OPTIMIZERS.len(), calls in prop::collection::vec(call(), 0..24)) {
        let (mut twins, directory) = (Twins::new(OPTIMIZERS[which]), tempfile::tempdir().unwrap());
        twins.check()?;
        for call in calls {
            twins.call(&call, directory.path());
            twins.check()?;
        }
    }
}

/// Ids that come once to thrice in a step, and most in few steps.
fn ids_of(step: i64) -> Vec<i64> {
    (0..6_000).map(|place| (place * 7 + step * 1_000) % 5_000 * 2_654_435_761).collect()
}

fn values(count: usize, salt: usize) -> Vec<f32> {
    (0..count).map(|place| ((place * 31 + salt * 17) % 1009) as f32 / 301.0 - 1.7).collect()
}

/// Configurations of every row type, and a rule and options with each.
const KINDS: [&str; 6] = [
    r#""optimizer": {"kind": "adagrad", "lr": 0.1}"#,
    r#""dtype": "bfloat16", "optimizer": {"kind": "adam", "lr": 0.1}"#,
    r#""dtype": "float16", "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}"#,
    r#""dtype": "int8", "optimizer": {"kind": "adagrad", "lr": 0.1}, "max_grad_norm": 2"#,
    r#""dtype": "float8_e4m3fn", "optimizer": {"kind": "ftrl", "alpha": 0.1}"#,
    r#""optimizer": {"kind": "adam", "lr": 0.1}, "ema_decay": 0.9"#,
];

const FEW_SHARED: &str = r#""admission": {"kind": "count", "threshold": 3, "shared_rows": 50}"#;

/// Returns what all ids read after some steps, by the ids that each step gets.
fn trained(store: &LocalStore, kind: &str, step: impl Fn(&LocalStore, TableId, i64)) -> Vec<u32> {
    let table = open(store, "t", DIM, &format!(r#"{{"block_size": 7, {FEW_SHARED}, {kind}}}"#));
    (0..4).for_each(|number| step(store, table, number));
    assert_eq!(store.statistics(table).unwrap().shared_rows, 50);
    let ids: Vec<i64> = (0..5_001).map(|id| id * 2_654_435_761).collect();
    read(store, table, &ids).into_iter().map(f32::to_bits).collect()
}

fn take_step(store: &LocalStore, table: TableId, number: i64) {
    let ids = ids_of(number);
    update(store, table, &ids, &values(ids.len() * DIM, number as usize));
}

#[test]
fn every_thread_count_simd_level_and_order_gives_the_same_bits() {
    /// The ids of a step in another order, with equal ones in theirs, and their sums.
    fn merged(store: &LocalStore, table: TableId, number: i64) {
        let ids = ids_of(number);
        let mut sums: BTreeMap<i64, [f32; DIM]> = BTreeMap::new();
        for (id, row) in ids.iter().zip(values(ids.len() * DIM, number as usize).chunks(DIM)) {
            sums.entry(*id).or_default().iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
        let (ids, sums): (Vec<i64>, Vec<_>) = sums.into_iter().rev().unzip();
        update(store, table, &ids, sums.as_flattened());
    }
    for kind in KINDS {
        let expected = trained(&store(), kind, take_step);
        assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{kind}");
        assert_eq!(trained(&store(), kind, merged), expected, "{kind}, merged");
        for level in SimdLevel::available() {
            for threads in [1, 2, 8] {
                let executor: Box<dyn Executor> = Pool::new(threads);
                let store = LocalStore::new(executor).with_simd(level).unwrap();
                let same = trained(&store, kind, take_step) == expected;
                assert!(same, "{kind}, {level}, {threads} threads");
            }
        }
    }
}

#[test]
fn steps_of_several_tables_are_those_of_each() {
    let config = format!("{{{FEW_SHARED}}}");
    let (together, apart) = (LocalStore::new(Pool::new(4)), store());
    let open_both = |store: &LocalStore| ["a", "b"].map(|name| open(store, name, DIM, &config));
    let (of_together, of_apart) = (open_both(&together), open_both(&apart));
    for number in 0..4 {
        let ids = ids_of(number);
        let gradients = values(ids.len() * DIM, number as usize);
        let step = |table| {
            let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
            TableUpdate { table, chunks, step: Step::Next }
        };
        together.update(&of_together.map(step)).unwrap();
        for table in of_apart {
            apart.update(&[step(table)]).unwrap();
        }
    }
    for (one, other) in of_together.into_iter().zip(of_apart) {
        assert_eq!(read(&together, one, &ids_of(0)), read(&apart, other, &ids_of(0)));
    }
}

/// A table whose ids never get a row.
fn open_shared(store: &LocalStore, kind: &str) -> TableId {
    let admission = r#""admission": {"kind": "probability", "probability": 0, "shared_rows": 5}"#;
    open(store, "t", DIM, &format!("{{{admission}, {kind}}}"))
}

#[test]
fn a_checkpoint_holds_shared_rows_and_training_goes_on_alike() {
    for kind in KINDS {
        let (directory, through) = (tempfile::tempdir().unwrap(), store());
        let table = open_shared(&through, kind);
        save(&through, directory.path(), SaveKind::Full).unwrap();
        assert_eq!(store_of(directory.path()).statistics(table).unwrap().shared_rows, 0);
        for number in 0..4 {
            take_step(&through, table, number);
            let report = save(&through, directory.path(), SaveKind::Auto).unwrap();
            assert_eq!((report.is_delta, report.rows), (true, 0));
            let (stopped, ids) = (store_of(directory.path()), ids_of(0));
            assert_eq!(checkpoints::state(&stopped), checkpoints::state(&through));
            assert_eq!(read(&stopped, table, &ids), read(&through, table, &ids), "{kind}");
            take_step(&stopped, table, number + 1);
            let twin = through.copy_table(table, "copy").unwrap().id();
            take_step(&through, twin, number + 1);
            assert_eq!(read(&stopped, table, &ids), read(&through, twin, &ids), "{kind}");
            through.drop_table("copy").unwrap();
        }
    }
}

fn store_of(directory: &Path) -> LocalStore {
    checkpoints::loaded(directory)
}

/// Loads the shard `number` of `of`.
fn load_shard(directory: &Path, number: usize, of: usize) -> (LocalStore, TableId) {
    let (store, shard) = (store(), Shard { number, of });
    let keeps = |id| shard.holds(id);
    let mut options = LoadOptions::default();
    options.keeps = Some(&keeps);
    options.shard = Some(shard);
    store.load(directory, &options).unwrap();
    let table = store.find_numbered("t").unwrap().unwrap();
    (store, table)
}

#[test]
fn as_many_stores_load_their_own_shared_rows_and_others_the_mean() {
    for kind in KINDS {
        let (directory, snapshot) = (tempfile::tempdir().unwrap(), new_snapshot_name());
        let stores = [store(), store()];
        let table = open_shared(&stores[0], kind);
        open_shared(&stores[1], kind);
        stores.iter().zip(0..).for_each(|(store, number)| take_step(store, table, number));
        for (number, store) in stores.iter().enumerate() {
            let shard = Shard { number, of: 2 };
            store.save_part(directory.path(), &snapshot, shard, &SaveOptions::default()).unwrap();
        }
        commit_snapshot(directory.path(), &snapshot, 2, &SaveOptions::default()).unwrap();
        let ids: Vec<i64> = (0..40).collect();
        let own = stores.each_ref().map(|store| read(store, table, &ids));
        for number in [0, 1] {
            let (loaded, table) = load_shard(directory.path(), number, 2);
            assert_eq!(read(&loaded, table, &ids), own[number], "{kind}");
        }
        let mean: Vec<f32> =
            own[0].iter().zip(&own[1]).map(|(one, other)| f32::midpoint(*one, *other)).collect();
        let greatest = mean.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (number, of) in [(0, 1), (2, 3)] {
            let (loaded, table) = load_shard(directory.path(), number, of);
            let near = |(one, other): (&f32, &f32)| (one - other).abs() <= greatest / 16.0;
            assert!(read(&loaded, table, &ids).iter().zip(&mean).all(near), "{kind}");
            if !kind.contains("dtype") {
                assert_eq!(read(&loaded, table, &ids), mean, "{kind}");
            }
        }
    }
}

#[test]
fn a_prefetch_sees_steps_of_other_ids_that_share_a_row() {
    let store = Arc::new(store());
    let table = open_shared(&store, KINDS[0]);
    let prefetches = Prefetches::new(1, 4);
    let opened = store.table("emb_prefetch", table).unwrap();
    let request = PrefetchRequest { key: table, table: opened, store: store.clone(), ids: (0..20).collect() };
    let issued = prefetches.issue(vec![request]).unwrap();
    let others: Vec<i64> = (20..40).collect();
    update(&store, table, &others, &values(20 * DIM, 1));
    prefetches.note(&table, Some(&mut others.iter().copied()));
    let rows = prefetches.wait(issued).unwrap().remove(0);
    assert_eq!(rows, read(&store, table, &(0..20).collect::<Vec<_>>()));
}

#[test]
fn shared_rows_take_memory_from_the_first_step_that_trains_one() {
    let (store, plain) = (store(), store());
    let config = |more: &str| {
        format!(
            r#"{{"admission": {{"kind": "sketch", "threshold": 9, "epsilon": 0.1{more}}}, "optimizer": {{"kind": "adagrad"}}}}"#
        )
    };
    let table = open(&store, "t", 16, &config(r#", "shared_rows": 1000"#));
    let of_plain = open(&plain, "t", 16, &config(""));
    let use_of = |store: &LocalStore, table| store.statistics(table).unwrap().memory;
    assert_eq!(use_of(&store, table), use_of(&plain, of_plain));
    update(&store, table, &[1], &[1.0; 16]);
    update(&plain, of_plain, &[1], &[1.0; 16]);
    let (with, without) = (use_of(&store, table), use_of(&plain, of_plain));
    assert_eq!((with.row_bytes, with.slot_bytes), (64_000, 64_000));
    assert_eq!((without.row_bytes, without.slot_bytes, with.resident_rows), (0, 0, 0));
    assert_eq!(with.index_bytes, without.index_bytes);
    let statistics = store.statistics(table).unwrap();
    assert_eq!((statistics.rows, statistics.shared_rows, statistics.rejections), (0, 1000, 1));
    store.clear(table).unwrap();
    plain.clear(of_plain).unwrap();
    assert_eq!(use_of(&store, table), use_of(&plain, of_plain));
}

#[test]
fn a_limit_that_leaves_no_room_for_shared_rows_refuses_the_step() {
    let store = store();
    let admission = r#""admission": {"kind": "count", "threshold": 2, "shared_rows": 10000}"#;
    let config = TableConfig::from_json(16, &format!(r#"{{{admission}, "memory_limit": 500000}}"#)).unwrap();
    let refusal = store.open_table("t", &config).unwrap_err().to_string();
    assert!(refusal.contains("would take 640000 bytes at once, more than the limit of 500000"), "{refusal}");
    let table = open(&store, "t", 16, &format!(r#"{{{admission}, "memory_limit": 640001}}"#));
    let before = read(&store, table, &[1]);
    let chunks = vec![GradientChunk::new(&[1], &[1.0; 16], 16)];
    let refusal = store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap_err();
    assert!(matches!(refusal, Error::MemoryLimit { .. }), "{refusal}");
    assert_eq!((read(&store, table, &[1]), store.statistics(table).unwrap().step), (before, 0));
}

#[test]
fn a_row_that_leaves_gives_its_id_the_shared_row_again() {
    let store = store();
    let config =
        r#"{"admission": {"kind": "count", "threshold": 2, "shared_rows": 1}, "eviction": {"ttl": 1}}"#;
    let table = open(&store, "t", 1, config);
    update(&store, table, &[1, 2], &[1.0, 2.0]);
    let shared = read(&store, table, &[9]);
    assert_eq!(read(&store, table, &[1, 2]), [shared[0]; 2]);
    update(&store, table, &[1], &[1.0]);
    assert_ne!(read(&store, table, &[1]), shared);
    (0..3).for_each(|_| update(&store, table, &[], &[]));
    assert_eq!(store.evict(table, false), Ok(vec![1]));
    assert_eq!(read(&store, table, &[1, 9]), [shared[0]; 2]);
}

#[test]
fn sums_beyond_float32_are_left_out_and_counted() {
    let store = store();
    let admission = r#""admission": {"kind": "count", "threshold": 9, "shared_rows": 1}"#;
    let table = open(&store, "t", 1, &format!(r#"{{{admission}, "nan_policy": "skip"}}"#));
    let before = read(&store, table, &[7]);
    update(&store, table, &[1, 2], &[3e38, 3e38]);
    assert_eq!((read(&store, table, &[7]), store.statistics(table).unwrap().refusals), (before, 2));
}

#[test]
fn what_cannot_have_shared_rows_refuses_them_by_name() {
    let (store, directory) = (store(), tempfile::tempdir().unwrap());
    let table = open_shared(&store, KINDS[0]);
    let config = store.describe(table).unwrap().config;
    let spec = FrozenSpec { name: "t", config: &config, encoding: Encoding::Float32 };
    let path = directory.path().join("t.safetensors");
    let refusal = freeze(&path, spec, &[], |_, _| Ok(())).unwrap_err().to_string();
    let ends = "table \"t\" has admission.shared_rows, which a frozen table cannot have";
    assert!(refusal.ends_with(ends) && !path.exists(), "{refusal}");
    let refusal = store.begin_publication(&[table]).unwrap_err().to_string();
    assert!(
        refusal
            .ends_with("table \"t\" has admission.shared_rows, which those who follow a table cannot have"),
        "{refusal}"
    );
}

#[test]
fn counts_out_of_range_are_refused() {
    let refusal = |value: &str| {
        let text = format!(r#"{{"admission": {{"kind": "count", "threshold": 1, "shared_rows": {value}}}}}"#);
        TableConfig::from_json(1, &text).unwrap_err().to_string()
    };
    for (value, message) in [
        ("0", "admission.shared_rows must lie in [1, 1073741824], got 0"),
        ("1073741825", "admission.shared_rows must lie in [1, 1073741824], got 1073741825"),
        ("-1", "invalid value: integer `-1`, expected u32"),
        ("1.5", "invalid type: floating point `1.5`, expected u32"),
        ("true", "invalid type: boolean `true`, expected u32"),
    ] {
        assert!(refusal(value).contains(message), "{}", refusal(value));
    }
    let without = TableConfig::from_json(1, r#"{"admission": {"kind": "count", "threshold": 1}}"#).unwrap();
    assert!(!without.to_json().unwrap().contains("shared_rows"));
    assert_eq!(without.shared_rows(), None);
}
