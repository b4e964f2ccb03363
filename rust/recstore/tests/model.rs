//! A table behaves like a sorted map of rows with its optimizer written out, whatever is done to it in any order.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    EmbeddingStore, GradientChunk, GradientCollector, LocalStore, Serial, Step, TableConfig, TableId,
    TableUpdate,
};

const DIM: usize = 3;
const LR: f32 = 0.5;
const EPS: f32 = 0.25;
/// Few ids, so that they meet again, and both ends of int64 among them.
const IDS: [i64; 8] = [i64::MIN, i64::MIN + 1, -1, 0, 1, 2, i64::MAX - 1, i64::MAX];

type Row = [f32; DIM];
type Batch = Vec<(i64, Row)>;

#[derive(Debug, Clone)]
enum Op {
    Write(Batch),
    Update(Vec<Batch>),
    /// Batches of several backward passes of several models, applied at once.
    Collect(Vec<Vec<Batch>>),
    Insert(Vec<i64>),
    Delete(Vec<i64>),
    Clear,
    Drop,
    Reopen,
}

fn batch() -> impl Strategy<Value = Batch> {
    let value = (-16..16i32).prop_map(|value| value as f32 * 0.25);
    prop::collection::vec((prop::sample::select(&IDS[..]), prop::array::uniform3(value)), 0..6)
}

fn op() -> impl Strategy<Value = Op> {
    let ids = || prop::collection::vec(prop::sample::select(&IDS[..]), 0..6);
    let several = || prop::collection::vec(batch(), 0..3);
    prop_oneof![
        4 => batch().prop_map(Op::Write),
        4 => several().prop_map(Op::Update),
        3 => prop::collection::vec(several(), 0..3).prop_map(Op::Collect),
        3 => ids().prop_map(Op::Insert),
        4 => ids().prop_map(Op::Delete),
        1 => Just(Op::Clear),
        1 => Just(Op::Drop),
        1 => Just(Op::Reopen),
    ]
}

/// What a table should hold: weights and AdaGrad sums by id.
struct Model {
    adagrad: bool,
    initial: BTreeMap<i64, Row>,
    rows: BTreeMap<i64, (Row, Row)>,
}

impl Model {
    fn row(&mut self, id: i64) -> &mut (Row, Row) {
        self.rows.entry(id).or_insert((self.initial[&id], [0.0; DIM]))
    }

    fn update(&mut self, chunks: &[Batch]) {
        let merged: Vec<_> = chunks.iter().map(merge).collect();
        let joined = merged.into_iter().flatten().collect();
        for (id, gradient) in merge(&joined) {
            let adagrad = self.adagrad;
            let (weights, sums) = self.row(id);
            for ((w, s), g) in weights.iter_mut().zip(sums).zip(gradient) {
                *s += if adagrad { g * g } else { 0.0 };
                *w -= if adagrad { LR * g / (*s + EPS).sqrt() } else { LR * g };
            }
        }
    }
}

/// Sums the gradients of each id in their order.
fn merge(batch: &Batch) -> BTreeMap<i64, Row> {
    let mut sums = BTreeMap::<i64, Row>::new();
    for (id, gradient) in batch {
        let sum = sums.entry(*id).or_default();
        sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
    }
    sums
}

fn split(batch: &Batch) -> (Vec<i64>, Vec<f32>) {
    (batch.iter().map(|(id, _)| *id).collect(), batch.iter().flat_map(|(_, row)| *row).collect())
}

/// A store with one table, and the table's configuration.
struct Subject {
    store: Arc<LocalStore>,
    config: TableConfig,
    table: TableId,
}

impl Subject {
    fn new(adagrad: bool) -> Self {
        let optimizer = match adagrad {
            true => format!(r#"{{"kind": "adagrad", "lr": {LR}, "eps": {EPS}}}"#),
            false => format!(r#"{{"kind": "sgd", "lr": {LR}}}"#),
        };
        let text = format!(
            r#"{{"block_size": 2, "initializer": {{"kind": "normal", "std": 1}}, "optimizer": {optimizer}}}"#
        );
        let config = TableConfig::from_json(DIM, &text).unwrap();
        let store = Arc::new(LocalStore::new(Box::new(Serial)));
        let table = store.open_numbered("t", &config).unwrap();
        Self { store, config, table }
    }

    fn read(&self, ids: &[i64]) -> Vec<f32> {
        let mut rows = vec![f32::NAN; ids.len() * DIM];
        self.store.read(self.table, ids, &mut rows).unwrap();
        rows
    }

    fn update(&self, chunks: &[Batch]) {
        let split: Vec<_> = chunks.iter().map(split).collect();
        let chunks = split.iter().map(|(ids, gradients)| GradientChunk::new(ids, gradients, DIM)).collect();
        self.store.update(&[TableUpdate { table: self.table, chunks, step: Step::Next }]).unwrap();
    }

    fn collect_and_apply(&self, models: &[Vec<Batch>]) {
        let collectors: Vec<_> = models.iter().map(|_| GradientCollector::default()).collect();
        for (collector, (ids, gradients)) in
            collectors.iter().zip(models).flat_map(|(c, passes)| passes.iter().map(move |b| (c, split(b))))
        {
            let opened = self.store.table("accept_grad", self.table).unwrap();
            collector.accept_copy(self.table, &*opened, &ids, &gradients, DIM).unwrap();
        }
        GradientCollector::apply_to(&*self.store, &collectors.iter().collect::<Vec<_>>()).unwrap();
        assert!(collectors.iter().all(|collector| collector.tables().is_empty()));
    }

    fn insert(&self, ids: &[i64]) {
        let (mut indices, mut rows) = (vec![-2; ids.len()], vec![0.0; ids.len() * DIM]);
        self.store.lookup(self.table, ids, true, &mut indices, &mut rows).unwrap();
        assert!(indices.iter().all(|&index| index >= 0));
        assert_eq!(rows, self.read(ids));
    }

    fn reopen(&mut self, drop_first: bool) {
        let before = self.table;
        if drop_first {
            self.store.drop_table("t").unwrap();
        }
        self.table = self.store.open_numbered("t", &self.config).unwrap();
        assert_eq!(self.table != before, drop_first);
    }
}

/// Does `op` to both.
fn act(subject: &mut Subject, model: &mut Model, op: &Op) {
    match op {
        Op::Write(batch) => {
            let (ids, rows) = split(batch);
            subject.store.write(subject.table, &ids, &rows).unwrap();
            batch.iter().for_each(|(id, row)| model.row(*id).0 = *row);
        }
        Op::Update(chunks) => {
            subject.update(chunks);
            model.update(chunks);
        }
        Op::Collect(models) => {
            subject.collect_and_apply(models);
            model.update(&models.concat());
        }
        Op::Insert(ids) => {
            subject.insert(ids);
            ids.iter().for_each(|id| _ = model.row(*id));
        }
        Op::Delete(ids) => {
            let deleted = subject.store.delete(subject.table, ids).unwrap();
            assert_eq!(deleted, ids.iter().filter(|id| model.rows.remove(id).is_some()).count());
        }
        Op::Clear => {
            subject.store.clear(subject.table).unwrap();
            model.rows.clear();
        }
        Op::Drop => {
            subject.reopen(true);
            model.rows.clear();
        }
        Op::Reopen => subject.reopen(false),
    }
}

/// Holds all that can be seen of the table against the model.
fn assert_same(subject: &Subject, model: &Model) {
    let store = &subject.store;
    let weights = |id: &i64| model.rows.get(id).map_or(model.initial[id], |row| row.0);
    assert_eq!(subject.read(&IDS), IDS.iter().flat_map(weights).collect::<Vec<_>>());
    let ids = store.ids(subject.table).unwrap();
    assert_eq!(BTreeSet::from_iter(&ids), model.rows.keys().collect());
    let statistics = store.statistics(subject.table).unwrap();
    assert_eq!((statistics.rows, ids.len()), (model.rows.len(), model.rows.len()));
    assert_eq!(statistics.inserts - statistics.deletes, statistics.rows as u64);
    let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * DIM]);
    store.lookup(subject.table, &ids, false, &mut indices, &mut rows).unwrap();
    assert!(
        indices.is_sorted_by(|a, b| a < b)
            && indices.iter().all(|index| (0..IDS.len() as i64).contains(index))
    );
    if let Some(sums) = store.read_slot(subject.table, "state_sum", &IDS).unwrap() {
        let expected = |id: &i64| model.rows.get(id).map_or([0.0; DIM], |row| row.1);
        assert_eq!(sums, IDS.iter().flat_map(expected).collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn a_table_agrees_with_a_map_after_every_call(
        adagrad in any::<bool>(),
        ops in prop::collection::vec(op(), 0..30),
    ) {
        let mut subject = Subject::new(adagrad);
        let initial = IDS.iter().map(|id| (*id, subject.read(&[*id]).try_into().unwrap())).collect();
        let mut model = Model { adagrad, initial, rows: BTreeMap::new() };
        for op in &ops {
            act(&mut subject, &mut model, op);
            assert_same(&subject, &model);
        }
    }
}
