//! A table whose ids lie in pages gives what the same table without pages does, to the bit, whatever is done to it.
//!
//! `PROPTEST_CASES` says how many sequences are tried.

use std::collections::HashSet;
use std::sync::LazyLock;

use proptest::prelude::*;
use rayon::prelude::*;
use tempfile::TempDir;

use super::embedding_store::EmbeddingStore;
use super::embedding_table::EmbeddingTable;
use super::local_store::LocalStore;
use crate::kernel::hash::mix;
use crate::rows::gradient::GradientPart;
use crate::table::without_pages;
use crate::{
    BagInput, Error, Executor, GradientChunk, InProcessStore, LoadOptions, OptimizerState, PLACES_TAG,
    PoolingMode, Result, SaveOptions, Serial, SimdLevel, Step, TableConfig, TableStatistics, TableUpdate,
};

const USUAL_CASES: u32 = 32;
const IDS_PER_PAGE: i64 = 1_024;

const OPTIMIZERS: [&str; 4] = ["sgd", "adagrad", "adam", "rowwise_adagrad"];
const BESIDES: [&str; 5] = [
    "",
    r#", "eviction": {"capacity": 900, "interval": 2, "delay": 1}"#,
    r#", "admission": {"kind": "count", "threshold": 2}"#,
    r#", "admission": {"kind": "count", "threshold": 2}, "eviction": {"ttl": 2, "interval": 3}"#,
    r#", "num_embeddings": 4000"#,
];

/// What becomes of a row for which there is no room.
#[derive(Debug, Clone, Copy)]
enum Overflow {
    Unlimited,
    /// It is refused.
    Refused(u64),
    /// Others leave for it.
    Displacing(u64),
    OnDisk(u64),
}

/// A table, and how its store goes about it.
#[derive(Debug, Clone)]
struct Setting {
    optimizer: usize,
    besides: usize,
    room: Overflow,
    dim: usize,
    block_size: usize,
    threads: usize,
    simd: usize,
}

/// Ids as they come: some may come twice.
#[derive(Debug, Clone)]
enum Ids {
    /// From the first on, each so far behind the one before; past the greatest the least one comes.
    Even(i64, usize, i64),
    Shuffled(i64, usize),
    Sparse(u8, usize),
    Edges,
    Mixed(Box<Ids>, Box<Ids>),
}

#[derive(Debug, Clone)]
enum Op {
    Write(Ids, bool),
    Insert(Ids),
    Update(Ids, Ids),
    /// A lookup that keeps places, and the step that uses them.
    Train(Ids),
    Delete(Ids),
    /// Deletes most rows, so that few are left of each page.
    Thin,
    Evict(bool),
    Clear,
    /// Each goes on with what the other one saved.
    SaveAndLoad,
    /// Each goes on with the state of the other one's optimizer.
    Exchange,
}

fn setting() -> impl Strategy<Value = Setting> {
    let limit = || 30_000..700_000u64;
    let room = prop_oneof![
        5 => Just(Overflow::Unlimited),
        2 => limit().prop_map(Overflow::Refused),
        1 => limit().prop_map(Overflow::Displacing),
        2 => limit().prop_map(Overflow::OnDisk),
    ];
    let table = (0..OPTIMIZERS.len(), 0..BESIDES.len(), room, prop::sample::select(&[3usize, 24][..]));
    (table, prop::sample::select(&[64usize, 10_240][..]), 1..3usize, 0..8usize).prop_map(
        |((optimizer, besides, room, dim), block_size, threads, simd)| {
            let besides = match room {
                Overflow::Displacing(_) => 0,
                // With an eviction, rows would leave for others.
                Overflow::Refused(_) | Overflow::OnDisk(_) if BESIDES[besides].contains("eviction") => 0,
                _ => besides,
            };
            Setting { optimizer, besides, room, dim, block_size, threads, simd }
        },
    )
}

fn ids() -> impl Strategy<Value = Ids> {
    let edge = (-2..5i64, -3..4i64).prop_map(|(page, offset)| page * IDS_PER_PAGE + offset);
    let start = prop_oneof![
        3 => Just(0),
        2 => edge,
        2 => -2_000..6_000i64,
        1 => (0..2_500i64).prop_map(|offset| i64::MIN + offset),
        1 => (0..2_500i64).prop_map(|offset| i64::MAX - offset),
    ];
    let count = prop_oneof![2 => 1..40usize, 3 => 40..1_500usize];
    let step = prop_oneof![4 => Just(1i64), 1 => 2..9i64, 1 => Just(-1i64)];
    let even =
        (start.clone(), count.clone(), step).prop_map(|(start, count, step)| Ids::Even(start, count, step));
    let plain = prop_oneof![
        4 => even,
        3 => (start, count.clone()).prop_map(|(start, count)| Ids::Shuffled(start, count)),
        1 => (any::<u8>(), count).prop_map(|(salt, count)| Ids::Sparse(salt % 4, count)),
        1 => Just(Ids::Edges),
    ]
    .boxed();
    let mixed =
        (plain.clone(), plain.clone()).prop_map(|(one, other)| Ids::Mixed(Box::new(one), Box::new(other)));
    prop_oneof![4 => plain, 1 => mixed]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (ids(), prop::bool::weighted(0.1)).prop_map(|(ids, is_refused)| Op::Write(ids, is_refused)),
        3 => ids().prop_map(Op::Insert),
        5 => (ids(), ids()).prop_map(|(one, other)| Op::Update(one, other)),
        4 => ids().prop_map(Op::Train),
        4 => ids().prop_map(Op::Delete),
        1 => Just(Op::Thin),
        1 => any::<bool>().prop_map(Op::Evict),
        1 => Just(Op::Clear),
        1 => Just(Op::SaveAndLoad),
        1 => Just(Op::Exchange),
    ]
}

impl Ids {
    fn list(&self) -> Vec<i64> {
        let mut ids = match self {
            Self::Even(start, count, step) => {
                return (0..*count as i64)
                    .map(|place| start.wrapping_add(place.wrapping_mul(*step)))
                    .collect();
            }
            Self::Shuffled(start, count) => {
                (0..*count as i64).map(|place| start.wrapping_add(place)).collect()
            }
            Self::Sparse(salt, count) => {
                (0..*count as i64).map(|place| mix(place + (i64::from(*salt) << 32)) as i64).collect()
            }
            Self::Edges => {
                (-3..6).flat_map(|page| (-2..2).map(move |offset| page * IDS_PER_PAGE + offset)).collect()
            }
            Self::Mixed(one, other) => [one.list(), other.list()].concat(),
        };
        ids.sort_by_key(|id| mix(*id));
        ids
    }
}

/// Two threads, for all stores that want some.
struct Pair;

impl Executor for Pair {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        static POOL: LazyLock<rayon::ThreadPool> =
            LazyLock::new(|| rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        POOL.install(|| (0..count).into_par_iter().for_each(body));
    }

    fn num_threads(&self) -> usize {
        2
    }
}

/// Values that tell ids, places and calls apart.
fn values(ids: &[i64], dim: usize, salt: usize) -> Vec<f32> {
    let value = |place: usize, id: i64, column: usize| {
        (mix(id.wrapping_mul(31).wrapping_add((place * 7 + column * 3 + salt) as i64)) % 17) as f32 / 8.0
            - 1.0
    };
    let row =
        |(place, id): (usize, &i64)| (0..dim).map(|column| value(place, *id, column)).collect::<Vec<_>>();
    ids.iter().enumerate().flat_map(row).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What a call gives: ids, indices or counts, and bits of rows.
type Answer = Result<(Vec<i64>, Vec<u32>)>;

/// A store with one table.
struct Side {
    store: LocalStore,
    table: std::sync::Arc<dyn EmbeddingTable>,
}

impl Side {
    fn new(store: LocalStore, config: &TableConfig) -> Self {
        let table = store.open_table("t", config).unwrap();
        Self { store, table }
    }

    fn call(&self, op: &Op, number: usize) -> Answer {
        let dim = self.table.dim();
        match op {
            Op::Write(ids, is_refused) => {
                let mut rows = values(&ids.list(), dim, number);
                rows[0] = if *is_refused { f32::INFINITY } else { rows[0] };
                self.table.write(&ids.list(), &rows)?;
            }
            Op::Insert(ids) => {
                let ids = ids.list();
                let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * dim]);
                self.table.lookup(&ids, true, &mut indices, &mut rows)?;
                return Ok((indices, bits(&rows)));
            }
            Op::Update(one, other) => {
                let [one, other] = [one.list(), other.list()];
                let [of_one, of_other] = [values(&one, dim, number), values(&other, dim, number + 1)];
                let chunks =
                    vec![GradientChunk::new(&one, &of_one, dim), GradientChunk::new(&other, &of_other, dim)];
                return Ok((vec![self.step(chunks)? as i64], Vec::new()));
            }
            Op::Train(ids) => {
                let ids = ids.list();
                let (mut rows, mut places) = (vec![0.0; ids.len() * dim], vec![0; ids.len() + PLACES_TAG]);
                self.table.read_with_places(&ids, &mut rows, &mut places)?;
                let gradients = values(&ids, dim, number);
                let part = GradientPart { places: &places, ..GradientPart::new(&ids, &gradients, dim) };
                let left = self.step(vec![GradientChunk { parts: vec![part] }])?;
                return Ok((vec![left as i64], bits(&rows)));
            }
            Op::Delete(ids) => return Ok((vec![self.table.delete(&ids.list())? as i64], Vec::new())),
            Op::Thin => {
                let most: Vec<i64> =
                    self.table.ids()?.into_iter().filter(|id| !mix(*id).is_multiple_of(40)).collect();
                return Ok((vec![self.table.delete(&most)? as i64], Vec::new()));
            }
            Op::Evict(dry_run) => return Ok((self.table.evict(None, *dry_run)?, Vec::new())),
            Op::Clear => self.table.clear()?,
            Op::SaveAndLoad | Op::Exchange => unreachable!("both sides take part in it"),
        }
        Ok((Vec::new(), Vec::new()))
    }

    fn step(&self, chunks: Vec<GradientChunk<'_>>) -> Result<u64> {
        self.store.update(&[TableUpdate { table: self.table.id(), chunks, step: Step::Next }])
    }

    /// Returns the optimizer's slots of some ids.
    fn slots(&self, ids: &[i64]) -> Vec<Vec<f32>> {
        let names = self.table.describe().unwrap().slots;
        names.iter().map(|(name, _)| self.table.read_slot(name, ids).unwrap().unwrap()).collect()
    }

    /// Puts in what the optimizer of another side keeps, in the descending order of the ids.
    fn put_state_of(&self, other: &Self) {
        let mut ids = other.table.ids().unwrap();
        ids.sort_unstable_by(|one, other| other.cmp(one));
        let (slots, counts) = (other.slots(&ids), self.counts());
        let state = OptimizerState {
            table: self.table.id(),
            ids: &ids,
            slots: slots.iter().map(Vec::as_slice).collect(),
            step: counts.step,
            learning_rate: counts.learning_rate,
            learning_rate_was_set: counts.learning_rate_was_set,
            idle_kept: counts.idle_kept,
        };
        self.store.put_optimizer_states(&[state]).unwrap();
    }

    /// Returns what the table counts, without what depends on how its ids lie.
    fn counts(&self) -> TableStatistics {
        TableStatistics { bytes: 0, memory: Default::default(), ..self.table.statistics().unwrap() }
    }

    /// Returns bags of some ids, pooled in each way.
    fn bags(&self, ids: &[i64]) -> Answer {
        let mut pooled = vec![0.0; 3 * self.table.dim()];
        let (mut all, mut positions) = (Vec::new(), vec![0; pooled.len()]);
        let end = ids.len() as i64;
        for mode in [PoolingMode::Sum, PoolingMode::Mean, PoolingMode::Max] {
            let input = BagInput {
                ids,
                offsets: &[0, end / 3, end / 2, end],
                mode,
                per_sample_weights: None,
                padding_idx: None,
            };
            let positions = if mode == PoolingMode::Max { &mut positions[..] } else { &mut [] };
            let mut places = vec![0; ids.len() + PLACES_TAG];
            self.store.bag(&[self.table.id()], input, &mut pooled, positions, &mut places)?;
            all.extend(bits(&pooled));
        }
        Ok((positions, all))
    }

    /// Returns rows and indices of some ids.
    fn rows(&self, ids: &[i64]) -> Answer {
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * self.table.dim()]);
        self.table.lookup(ids, false, &mut indices, &mut rows)?;
        Ok((indices, bits(&rows)))
    }
}

/// A table under test, and one that has all ids in lines and no limit: it is given what the first one did not refuse.
struct Both {
    setting: Setting,
    subject: Side,
    reference: Side,
    /// Whether the ids of the subject lie in pages.
    has_pages: bool,
    directory: TempDir,
}

impl Both {
    fn new(setting: &Setting, has_pages: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let make = || Self::subject(setting, &directory);
        let subject = if has_pages { make() } else { without_pages(make) };
        let reference = without_pages(|| Self::reference(setting));
        Self { setting: setting.clone(), subject, reference, has_pages, directory }
    }

    fn config(setting: &Setting, room: &str) -> TableConfig {
        let text = format!(
            r#"{{"block_size": {}, "optimizer": {{"kind": "{}", "lr": 0.1}}{}{room}}}"#,
            setting.block_size, OPTIMIZERS[setting.optimizer], BESIDES[setting.besides],
        );
        TableConfig::from_json(setting.dim, &text).unwrap()
    }

    fn subject(setting: &Setting, directory: &TempDir) -> Side {
        let executor: Box<dyn Executor> =
            if setting.threads == 1 { Box::new(Serial) } else { Box::new(Pair) };
        let levels = SimdLevel::available();
        let store = LocalStore::new(executor).with_simd(levels[setting.simd % levels.len()]).unwrap();
        let room = match setting.room {
            Overflow::Unlimited => String::new(),
            Overflow::Refused(limit) => format!(r#", "memory_limit": {limit}"#),
            Overflow::Displacing(limit) => {
                format!(r#", "memory_limit": {limit}, "eviction": {{"capacity": 1000000}}"#)
            }
            Overflow::OnDisk(limit) => {
                format!(r#", "memory_limit": {limit}, "disk": {:?}"#, directory.path())
            }
        };
        Side::new(store, &Self::config(setting, &room))
    }

    fn reference(setting: &Setting) -> Side {
        Side::new(LocalStore::new(Box::new(Serial)), &Self::config(setting, ""))
    }

    fn make(&mut self, op: &Op, number: usize) {
        match op {
            Op::SaveAndLoad => return self.save_and_load(),
            Op::Exchange => {
                self.subject.put_state_of(&self.reference);
                return self.reference.put_state_of(&self.subject);
            }
            // The sides have evictions of their own then.
            Op::Evict(_) if matches!(self.setting.room, Overflow::Displacing(_)) => return,
            _ => {}
        }
        let given = if self.has_pages {
            self.subject.call(op, number)
        } else {
            without_pages(|| self.subject.call(op, number))
        };
        if let (Err(Error::MemoryLimit { .. }), false) =
            (&given, matches!(self.setting.room, Overflow::Unlimited))
        {
            return;
        }
        if let (Overflow::Displacing(_), Op::Write(..) | Op::Insert(_) | Op::Update(..) | Op::Train(_)) =
            (self.setting.room, op)
        {
            self.take_displaced();
            // Other indices, and rows that left are counted.
            without_pages(|| self.reference.call(op, number)).unwrap_or_default();
            return;
        }
        assert_eq!(given, without_pages(|| self.reference.call(op, number)));
    }

    /// Deletes the rows that left the subject for others.
    fn take_displaced(&self) {
        let left: HashSet<i64> = self.subject.table.ids().unwrap().into_iter().collect();
        let displaced: Vec<i64> =
            self.reference.table.ids().unwrap().into_iter().filter(|id| !left.contains(id)).collect();
        self.reference.table.delete(&displaced).unwrap();
    }

    fn save_and_load(&mut self) {
        if let Overflow::Displacing(_) = self.setting.room {
            return;
        }
        let saved = tempfile::tempdir().unwrap();
        let paths = ["subject", "reference"].map(|name| saved.path().join(name));
        self.subject.store.save(&paths[0], &SaveOptions::default()).unwrap();
        self.reference.store.save(&paths[1], &SaveOptions::default()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let make = || {
            let side = Self::subject(&self.setting, &directory);
            side.store.load(&paths[1], &LoadOptions::default()).map(|_| side)
        };
        match if self.has_pages { make() } else { without_pages(make) } {
            Ok(side) => {
                self.subject = side;
                self.directory = directory;
            }
            // A map that was loaded may have room that one which grew has not.
            Err(Error::MemoryLimit { .. }) if !matches!(self.setting.room, Overflow::Unlimited) => return,
            Err(error) => panic!("{error}"),
        }
        self.reference = without_pages(|| {
            let side = Self::reference(&self.setting);
            side.store.load(&paths[0], &LoadOptions::default()).unwrap();
            side
        });
    }

    /// Compares all that can be seen.
    fn compare(&self) {
        let [ids, expected] = [&self.subject, &self.reference].map(|side| side.table.ids().unwrap());
        let displaces = matches!(self.setting.room, Overflow::Displacing(_));
        let sorted = |mut ids: Vec<i64>| {
            ids.sort_unstable();
            ids
        };
        if displaces {
            assert_eq!(sorted(ids.clone()), sorted(expected));
        } else {
            assert_eq!(ids, expected);
            assert_eq!(self.subject.counts(), self.reference.counts());
        }
        let mut all = ids;
        let near: Vec<i64> =
            all.iter().step_by(7).flat_map(|id| [id.wrapping_sub(1), id.wrapping_add(1)]).collect();
        all.extend(near);
        all.extend(Ids::Edges.list());
        all.sort_by_key(|id| mix(*id));
        let [mut rows, mut expected] = [&self.subject, &self.reference].map(|side| side.rows(&all));
        if displaces {
            rows = rows.map(|(_, rows)| (Vec::new(), rows));
            expected = expected.map(|(_, rows)| (Vec::new(), rows));
        }
        assert_eq!(rows, expected);
        let some = &all[..all.len() / 4];
        assert_eq!(self.subject.bags(some), self.reference.bags(some));
        let held = self.reference.table.ids().unwrap();
        let [slots, expected] =
            [&self.subject, &self.reference].map(|side| bits(&side.slots(&held).concat()));
        assert_eq!(slots, expected);
        self.check_memory();
    }

    fn check_memory(&self) {
        let [memory, of_reference] =
            [&self.subject, &self.reference].map(|side| side.table.statistics().unwrap().memory);
        assert_eq!(of_reference.linear_ids + of_reference.array_ids, 0);
        assert!(self.has_pages || memory.linear_ids + memory.array_ids == 0);
        match self.setting.room {
            Overflow::Refused(limit) | Overflow::Displacing(limit) => {
                assert!(memory.bytes() <= limit, "{memory:?}")
            }
            // One slab of frames stays whatever the index takes.
            Overflow::OnDisk(limit) => {
                let least = memory.index_bytes + limit / 16 + 4_096;
                assert!(memory.bytes() <= limit.max(least), "{limit} bytes: {memory:?}");
            }
            Overflow::Unlimited => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(std::env::var("PROPTEST_CASES").map_or(USUAL_CASES, |cases| cases.parse().unwrap()))
    })]
    #[test]
    fn pages_change_no_result(setting in setting(), ops in prop::collection::vec(op(), 1..14)) {
        let is_limited = !matches!(setting.room, Overflow::Unlimited);
        let mut all = vec![Both::new(&setting, true)];
        all.extend(is_limited.then(|| Both::new(&setting, false)));
        for both in &mut all {
            for (number, op) in ops.iter().enumerate() {
                both.make(op, number);
                both.compare();
            }
        }
    }
}

const PLAIN: Setting = Setting {
    optimizer: 1,
    besides: 0,
    room: Overflow::Unlimited,
    dim: 3,
    block_size: 64,
    threads: 1,
    simd: 0,
};

#[test]
fn what_is_compared_lies_in_pages_and_in_lines() {
    let mut both = Both::new(&PLAIN, true);
    for (number, ids) in [Ids::Even(0, 3_000, 1), Ids::Sparse(0, 700)].into_iter().enumerate() {
        both.make(&Op::Train(ids), number);
    }
    for start in (10_000..20_000).step_by(500) {
        both.make(&Op::Insert(Ids::Shuffled(start, 600)), 2);
    }
    both.compare();
    let memory = both.subject.table.statistics().unwrap().memory;
    assert!(memory.linear_ids >= 3_000 && memory.hash_ids >= 700, "{memory:?}");
}

#[test]
fn a_table_on_disk_keeps_its_limit_while_ids_go_to_pages() {
    const LIMIT: u64 = 24 << 20;
    let directory = tempfile::tempdir().unwrap();
    let setting = Setting { dim: 16, ..PLAIN };
    let room = format!(r#", "memory_limit": {LIMIT}, "disk": {:?}"#, directory.path());
    let side = Side::new(LocalStore::new(Box::new(Serial)), &Both::config(&setting, &room));
    let ids = Ids::Shuffled(0, 600_000).list();
    for (number, ids) in ids.chunks(2_000).enumerate() {
        let gradients = values(ids, setting.dim, number);
        side.step(vec![GradientChunk::new(ids, &gradients, setting.dim)]).unwrap();
        let memory = side.table.statistics().unwrap().memory;
        assert!(memory.bytes() <= LIMIT, "batch {number}: {memory:?}");
    }
    let memory = side.table.statistics().unwrap().memory;
    assert!(memory.array_ids >= 500_000 && memory.rows_spilled > 0, "{memory:?}");
}

#[test]
fn a_table_keeps_its_limit_when_its_rows_are_deleted_after_a_save() {
    // As many rows as just fit, so that no notes of the deleted ones do.
    for limit in (101_000..103_000).step_by(100) {
        let setting = Setting { optimizer: 0, room: Overflow::Refused(limit), block_size: 10_240, ..PLAIN };
        let mut both = Both::new(&setting, false);
        let sparse = Op::Update(Ids::Even(0, 1, 1), Ids::Sparse(0, 1_059));
        for op in [Op::SaveAndLoad, sparse, Op::Insert(Ids::Even(i64::MAX - 691, 419, 1)), Op::Thin] {
            both.make(&op, 0);
            both.compare();
        }
    }
}
