//! Tables on servers are, to the bit, the tables of a store in this process, whatever is done to them.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use cluster::Cluster;
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    BagInput, EmbeddingStore, GradientChunk, GradientPart, LocalStore, MemoryUse, PLACES_TAG, PoolingMode,
    Serial, Step, TableConfig, TableId, TableUpdate, TableValidator,
};

const DIM: usize = 3;
const IDS: [i64; 10] = [i64::MIN, -7, -1, 0, 1, 2, 3, 40, 41, i64::MAX];
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Configurations that differ in optimizer, row type, bound and policy.
const CONFIGS: [&str; 6] = [
    r#"{"optimizer": {"kind": "adam", "lr": 0.25}, "dtype": "bfloat16"}"#,
    r#"{"optimizer": {"kind": "adagrad", "lr": 0.5}, "num_embeddings": 42}"#,
    r#"{"optimizer": {"kind": "ftrl", "alpha": 0.5, "l1": 0.125}, "nan_policy": "skip"}"#,
    r#"{"optimizer": {"kind": "sgd", "lr": 1.0}, "nan_policy": "allow", "initializer": {"kind": "uniform"}}"#,
    r#"{"optimizer": {"kind": "rmsprop", "lr": 0.25, "centered": true, "momentum": 0.5}, "dtype": "int8"}"#,
    r#"{"optimizer": {"kind": "lamb", "lr": 0.25, "bias_correction": "row"}, "dtype": "float16"}"#,
];

type Rows = Vec<(i64, [f32; DIM])>;

#[derive(Debug, Clone)]
enum Act {
    Open(usize, usize),
    Find(usize),
    Drop(usize),
    Read(i64, Vec<i64>, bool),
    Bag(Vec<i64>, Rows, PoolingMode, Option<i64>),
    Write(i64, Rows),
    Update(Vec<(i64, Vec<Rows>, Step)>),
    Weighted(i64, Rows),
    Lookup(i64, Vec<i64>, bool),
    Delete(i64, Vec<i64>),
    Clear(i64),
    Slot(i64, Vec<i64>),
    SetRate(i64, f64, bool),
}

fn ids() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(prop::sample::select(&IDS[..]), 0..8)
}

fn rows() -> impl Strategy<Value = Rows> {
    let value = prop_oneof![
        30 => (-16..16i32).prop_map(|value| value as f32 * 0.37),
        1 => Just(f32::NAN),
        1 => Just(f32::MAX),
    ];
    prop::collection::vec((prop::sample::select(&IDS[..]), prop::array::uniform3(value)), 0..8)
}

fn act() -> impl Strategy<Value = Act> {
    let table = || 1..6i64;
    let name = || 0..NAMES.len();
    let mode = prop::sample::select(vec![PoolingMode::Sum, PoolingMode::Mean, PoolingMode::Max]);
    let padding = prop::option::of(prop::sample::select(&IDS[..]));
    let step = prop_oneof![6 => Just(Step::Next), 1 => (0..9u64).prop_map(Step::At)];
    let update = (table(), prop::collection::vec(rows(), 0..3), step);
    prop_oneof![
        3 => (name(), 0..CONFIGS.len()).prop_map(|(name, config)| Act::Open(name, config)),
        1 => name().prop_map(Act::Find),
        1 => name().prop_map(Act::Drop),
        3 => (table(), ids(), any::<bool>()).prop_map(|(table, ids, places)| Act::Read(table, ids, places)),
        3 => (prop::collection::vec(table(), 1..3), rows(), mode, padding)
            .prop_map(|(tables, rows, mode, padding)| Act::Bag(tables, rows, mode, padding)),
        3 => (table(), rows()).prop_map(|(table, rows)| Act::Write(table, rows)),
        6 => prop::collection::vec(update, 0..4).prop_map(Act::Update),
        2 => (table(), rows()).prop_map(|(table, rows)| Act::Weighted(table, rows)),
        2 => (table(), ids(), any::<bool>()).prop_map(|(table, ids, insert)| Act::Lookup(table, ids, insert)),
        2 => (table(), ids()).prop_map(|(table, ids)| Act::Delete(table, ids)),
        1 => table().prop_map(Act::Clear),
        1 => (table(), ids()).prop_map(|(table, ids)| Act::Slot(table, ids)),
        1 => (table(), -1..4i32, any::<bool>())
            .prop_map(|(table, rate, explicit)| Act::SetRate(table, f64::from(rate) / 4.0, explicit)),
    ]
}

fn split(rows: &Rows) -> (Vec<i64>, Vec<f32>) {
    (rows.iter().map(|row| row.0).collect(), rows.iter().flat_map(|row| row.1).collect())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn config(number: usize) -> TableConfig {
    TableConfig::from_json(DIM, CONFIGS[number]).unwrap()
}

/// Does what `act` says and returns all that can be seen of it. `is_sharded` leaves out where rows lie.
fn perform(store: &dyn EmbeddingStore, act: &Act, is_sharded: bool) -> String {
    match act {
        Act::Open(name, number) => format!("{:?}", store.open_numbered(NAMES[*name], &config(*number))),
        Act::Find(name) => format!("{:?}", store.find_numbered(NAMES[*name])),
        Act::Drop(name) => format!("{:?}", store.drop_table(NAMES[*name])),
        Act::Read(table, ids, with_places) => {
            let mut rows = vec![0.5; ids.len() * DIM];
            let mut places = vec![0; if *with_places { ids.len() + PLACES_TAG } else { 0 }];
            let read = store.read_with_places(TableId(*table), ids, &mut rows, &mut places);
            format!("{read:?} {:?}", bits(&rows))
        }
        Act::Bag(tables, rows, mode, padding) => bag(store, tables, rows, *mode, *padding),
        Act::Write(table, rows) => {
            let (ids, values) = split(rows);
            format!("{:?}", store.write(TableId(*table), &ids, &values))
        }
        Act::Update(updates) => update(store, updates),
        Act::Weighted(table, rows) => {
            let (ids, values) = split(rows);
            let weights: Vec<f32> = (0..ids.len()).map(|place| place as f32 * 0.3).collect();
            let part = GradientPart {
                weights: &weights,
                padding_idx: Some(1),
                ..GradientPart::new(&ids, &values, DIM)
            };
            let chunks = vec![GradientChunk { parts: vec![part] }];
            format!("{:?}", store.update(&[TableUpdate { table: TableId(*table), chunks, step: Step::Next }]))
        }
        Act::Lookup(table, ids, insert) => {
            let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.5; ids.len() * DIM]);
            let found = store.lookup(TableId(*table), ids, *insert, &mut indices, &mut rows);
            if is_sharded {
                indices.iter_mut().for_each(|index| *index = (*index).clamp(-1, 0));
            }
            format!("{found:?} {indices:?} {:?}", bits(&rows))
        }
        Act::Delete(table, ids) => format!("{:?}", store.delete(TableId(*table), ids)),
        Act::Clear(table) => format!("{:?}", store.clear(TableId(*table))),
        Act::Slot(table, ids) => {
            let values = ["sum", "n", "exp_avg", "z", "none"].map(|slot| {
                store.read_slot(TableId(*table), slot, ids).map(|found| found.map(|found| bits(&found)))
            });
            format!("{values:?}")
        }
        Act::SetRate(table, rate, explicit) => {
            format!("{:?}", store.set_learning_rate(TableId(*table), *rate, *explicit))
        }
    }
}

fn bag(
    store: &dyn EmbeddingStore,
    tables: &[i64],
    rows: &Rows,
    mode: PoolingMode,
    padding_idx: Option<i64>,
) -> String {
    let (ids, weights) = (rows.iter().map(|row| row.0), rows.iter().map(|row| row.1[0]));
    let (ids, weights): (Vec<_>, Vec<_>) = (ids.collect(), weights.collect());
    let half = ids.len() as i64 / 2;
    let all = ids.len() as i64;
    // Two bags a table, the first of them empty at times.
    let mut offsets = vec![0, half / 2, half];
    offsets.extend([half, all]);
    offsets.truncate(2 * tables.len() + 1);
    let ids = &ids[..*offsets.last().unwrap() as usize];
    let weights = &weights[..ids.len()];
    let per_sample_weights = (mode != PoolingMode::Max && all % 2 == 0).then_some(weights);
    let tables: Vec<_> = tables.iter().map(|&table| TableId(table)).collect();
    let input = BagInput { ids, offsets: &offsets, mode, per_sample_weights, padding_idx };
    let mut pooled = vec![0.5; 2 * tables.len() * DIM];
    let mut positions = vec![7; if mode == PoolingMode::Max { pooled.len() } else { 0 }];
    let mut places = vec![0; ids.len() + tables.len() * PLACES_TAG];
    let pooled_result = store.bag(&tables, input, &mut pooled, &mut positions, &mut places);
    format!("{pooled_result:?} {:?} {positions:?}", bits(&pooled))
}

fn update(store: &dyn EmbeddingStore, updates: &[(i64, Vec<Rows>, Step)]) -> String {
    let chunks: Vec<Vec<(Vec<i64>, Vec<f32>)>> =
        updates.iter().map(|(_, chunks, _)| chunks.iter().map(split).collect()).collect();
    let updates: Vec<_> = updates
        .iter()
        .zip(&chunks)
        .map(|((table, _, step), chunks)| TableUpdate {
            table: TableId(*table),
            chunks: chunks.iter().map(|(ids, values)| GradientChunk::new(ids, values, DIM)).collect(),
            step: *step,
        })
        .collect();
    format!("{:?}", store.update(&updates))
}

/// All that a store holds.
fn contents(store: &dyn EmbeddingStore) -> String {
    let mut text = format!("{:?}", store.table_names());
    for name in store.table_names().unwrap() {
        let table = store.find_numbered(&name).unwrap().unwrap();
        let mut ids = store.ids(table).unwrap();
        ids.sort_unstable();
        let mut rows = vec![0.0; ids.len() * DIM];
        store.read(table, &ids, &mut rows).unwrap();
        let description = store.describe(table).unwrap();
        let slots: Vec<_> =
            description.slots.iter().map(|(slot, _)| store.read_slot(table, slot, &ids).unwrap()).collect();
        let mut statistics = store.statistics(table).unwrap();
        statistics.bytes = 0;
        statistics.memory = MemoryUse::default();
        let (dim, count) = (store.dim(table).unwrap(), store.num_rows(table).unwrap());
        text += &format!(
            "\n{table:?} {ids:?} {:?} {slots:?} {statistics:?} {dim} {count} {description:?}",
            bits(&rows)
        );
    }
    text
}

fn agree(shards: usize, acts: &[Act]) -> Result<(), TestCaseError> {
    let cluster = Cluster::start(shards);
    let (remote, local) = (cluster.connect(), LocalStore::new(Box::new(Serial)));
    for (number, name) in NAMES.iter().enumerate() {
        remote.open_numbered(name, &config(number)).unwrap();
        local.open_numbered(name, &config(number)).unwrap();
    }
    for act in acts {
        prop_assert_eq!(perform(&remote, act, shards > 1), perform(&local, act, shards > 1), "{:?}", act);
    }
    prop_assert_eq!(contents(&remote), contents(&local));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn one_server_is_as_a_store_in_this_process(acts in prop::collection::vec(act(), 0..40)) {
        agree(1, &acts)?;
    }

    #[test]
    fn three_servers_are_as_a_store_in_this_process(acts in prop::collection::vec(act(), 0..40)) {
        agree(3, &acts)?;
    }
}

#[test]
fn an_index_tells_the_shard() {
    let cluster = Cluster::start(3);
    let store = cluster.connect();
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    let (mut indices, mut rows) = ([0; 4], [0.0; 4]);
    store.lookup(table, &[4, 2, 9, 7], true, &mut indices, &mut rows).unwrap();
    assert_eq!(indices, [1 << 48, 2 << 48, 0, (1 << 48) + 1]);
    assert_eq!(store.ids(table).unwrap(), [9, 4, 7, 2]);
}

#[test]
fn what_is_too_much_for_a_frame_goes_in_several() {
    let cluster = Cluster::configured(2, |config| config.max_frame_bytes = 1 << 16);
    let (remote, local) = (cluster.connect(), LocalStore::new(Box::new(Serial)));
    let ids: Vec<i64> = (0..20_000).map(|place| place % 9_000).collect();
    let rows: Vec<f32> = (0..20_000 * DIM).map(|value| value as f32).collect();
    let stores: [&dyn EmbeddingStore; 2] = [&remote, &local];
    let [of_remote, of_local] = stores.map(|store| {
        let table = store.open_numbered("t", &TableConfig::new(DIM)).unwrap();
        store.write(table, &ids, &rows).unwrap();
        let (mut read, mut found, mut indices) =
            (vec![0.0; rows.len()], vec![0.0; rows.len()], vec![0; ids.len()]);
        store.read(table, &ids, &mut read).unwrap();
        store.lookup(table, &ids, false, &mut indices, &mut found).unwrap();
        (bits(&read), bits(&found))
    });
    assert_eq!(of_remote, of_local);
    assert_eq!(of_remote.0, of_remote.1);

    let table = remote.find_numbered("t").unwrap().unwrap();
    let chunks = vec![GradientChunk::new(&ids, &rows, DIM)];
    for store in [&remote as &dyn EmbeddingStore, &local] {
        let table = store.find_numbered("t").unwrap().unwrap();
        store.update(&[TableUpdate { table, chunks: chunks.clone(), step: Step::Next }]).unwrap();
        assert_eq!(store.statistics(table).unwrap().step, 1);
    }
    assert!(remote.ids(table).is_ok_and(|ids| ids.len() == 9_000));
    assert_eq!(contents(&cluster.connect()), contents(&local));
    let deleted: Vec<i64> = (0..18_000).collect();
    assert_eq!(remote.delete(table, &deleted).unwrap(), 9_000);
}

#[test]
fn a_rowless_table_refuses_what_the_table_would() {
    let config = config(1);
    let (rowless, store) = (TableValidator::new("t", &config).unwrap(), LocalStore::new(Box::new(Serial)));
    let table = store.open_numbered("t", &config).unwrap();
    for (ids, values) in
        [(vec![1, 50], vec![0.0; 6]), (vec![1], vec![0.0; 4]), (vec![2], vec![f32::INFINITY; 3])]
    {
        assert_eq!(rowless.check_write(&ids, &values), store.write(table, &ids, &values));
    }
    assert_eq!(rowless.refusals(), 1);
    assert_eq!(rowless.description(), store.describe(table).unwrap());
    assert!(TableValidator::new("", &config).is_err());
    assert!(TableValidator::new("t", &TableConfig::new(0)).is_err());
}
