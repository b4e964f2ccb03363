//! Weight decay and momentum of rows that a step leaves alone, beside a plain map of rows in double precision of which
//! every step changes each.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::collections::BTreeMap;

use checkpoints::{load, open, save, store};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    BagInput, EmbeddingStore, GradientChunk, InProcessStore, LocalStore, OptimizerState, PoolingMode,
    Publications, SaveKind, Step, TableConfig, TableId, TableUpdate,
};
use tempfile::TempDir;

const DIM: usize = 3;
const IDS: [i64; 6] = [i64::MIN, -3, 0, 7, 8, i64::MAX];
const DECAY: &str =
    r#""optimizer": {"kind": "sgd", "lr": 0.5, "weight_decay": 0.1, "catch_up": true}, "seed": 4"#;
const MOMENTUM: &str =
    r#""optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.8, "catch_up": true}, "seed": 4"#;
const NESTEROV: &str = r#""optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.8, "nesterov": true, "catch_up": true}, "seed": 4"#;

/// What is done to a table.
#[derive(Debug, Clone)]
enum Act {
    Step(Vec<usize>, f32),
    Skip(u64),
    Rate(f64),
    Write(usize, f32),
    Delete(usize),
    Reload,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => (prop::collection::vec(0..IDS.len(), 0..4), -1f32..1.0).prop_map(|(ids, by)| Act::Step(ids, by)),
        1 => (2..50u64).prop_map(Act::Skip),
        1 => prop_oneof![Just(0.0), Just(5.0), 0.0..2f64].prop_map(Act::Rate),
        1 => (0..IDS.len(), -1f32..1.0).prop_map(|(id, value)| Act::Write(id, value)),
        1 => (0..IDS.len()).prop_map(Act::Delete),
        1 => Just(Act::Reload),
    ]
}

/// Rows in double precision, each of which every step changes.
struct Model {
    optimizer: &'static str,
    rows: BTreeMap<i64, [Moving; DIM]>,
    rate: f64,
    step: u64,
    /// The greatest weight so far: errors are in proportion to it.
    greatest: f64,
}

#[derive(Clone, Copy)]
struct Moving {
    weight: f64,
    velocity: f64,
}

impl Model {
    fn new(optimizer: &'static str) -> Self {
        Self { optimizer, rows: BTreeMap::new(), rate: 0.5, step: 0, greatest: 1.0 }
    }

    /// Takes steps, of which the last gives the rows of some ids a gradient.
    fn step(&mut self, steps: u64, ids: &[i64], by: f64) {
        for step in 1..=steps {
            for (id, row) in &mut self.rows {
                let count = if step == steps { ids.iter().filter(|other| *other == id).count() } else { 0 };
                let pushed = self.rate * by * count as f64;
                row.iter_mut().for_each(|element| element.step(self.optimizer, self.rate, pushed));
                self.greatest =
                    row.iter().fold(self.greatest, |most, element| most.max(element.weight.abs()));
            }
        }
        self.step += steps;
    }
}

impl Moving {
    fn step(&mut self, optimizer: &str, rate: f64, pushed: f64) {
        self.velocity = 0.8 * self.velocity + pushed;
        self.weight -= match optimizer {
            DECAY => rate * 0.1 * self.weight + pushed,
            NESTEROV => pushed + 0.8 * self.velocity,
            _ => self.velocity,
        };
    }
}

/// A store with the table `t`, and a directory for its rows and for checkpoints.
struct Subject {
    store: LocalStore,
    table: TableId,
    directory: TempDir,
    config: String,
}

impl Subject {
    fn new(optimizer: &str, more: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let config =
            format!("{{{optimizer}{}}}", more.replace("DIRECTORY", directory.path().to_str().unwrap()));
        let store = store();
        let table = open(&store, "t", DIM, &config);
        Self { store, table, directory, config }
    }

    fn read(&self) -> Vec<f32> {
        let mut rows = vec![f32::NAN; IDS.len() * DIM];
        self.store.read(self.table, &IDS, &mut rows).unwrap();
        rows
    }

    fn step(&self, ids: &[i64], by: f32, step: Step) {
        let gradients = vec![by; ids.len() * DIM];
        let chunks = vec![GradientChunk::new(ids, &gradients, DIM)];
        self.store.update(&[TableUpdate { table: self.table, chunks, step }]).unwrap();
    }

    fn reload(&mut self) {
        let saved = self.directory.path().join("saved");
        save(&self.store, &saved, SaveKind::Full).unwrap();
        let other = store();
        let table = open(&other, "t", DIM, &self.config);
        load(&other, &saved).unwrap();
        (self.store, self.table) = (other, table);
    }

    fn act(&mut self, act: &Act, model: &mut Model) {
        let initial = |id: i64| {
            let mut row = [0.0; DIM];
            let fresh = store();
            let table = open(&fresh, "t", DIM, &self.config);
            fresh.read(table, &[id], &mut row).unwrap();
            row.map(|weight| Moving { weight: weight.into(), velocity: 0.0 })
        };
        match act {
            Act::Step(places, by) => {
                let ids: Vec<i64> = places.iter().map(|place| IDS[*place]).collect();
                self.step(&ids, *by, Step::Next);
                for id in &ids {
                    model.rows.entry(*id).or_insert_with(|| initial(*id));
                }
                model.step(1, &ids, (*by).into());
            }
            Act::Skip(steps) => {
                self.step(&[], 0.0, Step::At(model.step + steps));
                model.step(*steps, &[], 0.0);
            }
            Act::Rate(rate) => {
                self.store.set_learning_rate(self.table, *rate, true).unwrap();
                model.rate = *rate;
            }
            Act::Write(place, value) => {
                self.store.write(self.table, &[IDS[*place]], &[*value; DIM]).unwrap();
                let none = [Moving { weight: 0.0, velocity: 0.0 }; DIM];
                let row = model.rows.entry(IDS[*place]).or_insert(none);
                row.iter_mut().for_each(|element| element.weight = (*value).into());
            }
            Act::Delete(place) => {
                self.store.delete(self.table, &[IDS[*place]]).unwrap();
                model.rows.remove(&IDS[*place]);
            }
            Act::Reload => self.reload(),
        }
    }

    fn check(&self, model: &Model) {
        let read = self.read();
        for (id, row) in IDS.iter().zip(read.chunks_exact(DIM)) {
            let Some(expected) = model.rows.get(id) else { continue };
            for (got, expected) in row.iter().zip(expected) {
                let error = (f64::from(*got) - expected.weight).abs();
                assert!(error <= 1e-5 * model.greatest, "{id}: {row:?}, expected {}", expected.weight);
            }
        }
        let bags = |mode| {
            let (mut pooled, mut positions) =
                (vec![0.0; DIM], vec![0; if mode == PoolingMode::Max { DIM } else { 0 }]);
            let offsets = [0, IDS.len() as i64];
            let bags =
                BagInput { ids: &IDS, offsets: &offsets, mode, per_sample_weights: None, padding_idx: None };
            self.store.bag(&[self.table], bags, &mut pooled, &mut positions, &mut []).unwrap();
            pooled
        };
        let columns = |fold: fn(f32, f32) -> f32, start: f32| -> Vec<f32> {
            (0..DIM).map(|column| read.iter().skip(column).step_by(DIM).copied().fold(start, fold)).collect()
        };
        assert_eq!(bags(PoolingMode::Sum), columns(|sum, value| sum + value, 0.0));
        assert_eq!(bags(PoolingMode::Max), columns(f32::max, f32::NEG_INFINITY));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn all_rows_are_as_if_every_step_had_changed_each(acts in prop::collection::vec(act(), 1..60), on_disk: bool, optimizer in prop::sample::select(vec![DECAY, MOMENTUM, NESTEROV])) {
        let disk = r#", "memory_limit": 20000, "disk": "DIRECTORY", "block_size": 2"#;
        let mut subject = Subject::new(optimizer, if on_disk { disk } else { "" });
        let mut model = Model::new(optimizer);
        for act in &acts {
            subject.act(act, &mut model);
            subject.check(&model);
        }
    }
}

#[test]
fn many_idle_steps_are_right_though_nothing_is_left_of_the_product() {
    let subject = Subject::new(DECAY, "");
    subject.store.write(subject.table, &IDS, &[1.0; IDS.len() * DIM]).unwrap();
    subject.step(&[], 0.0, Step::At(10_000));
    assert_eq!(subject.read(), [0.0; IDS.len() * DIM]);
    subject.store.write(subject.table, &[7], &[1.0; DIM]).unwrap();
    subject.step(&[0], 0.0, Step::Next);
    let row = &subject.read()[3 * DIM..4 * DIM];
    assert!(row.iter().all(|weight| (weight - 0.95).abs() < 1e-6), "{row:?}");
}

#[test]
fn reading_changes_nothing_and_a_row_of_this_step_reads_as_it_was_written() {
    let subject = Subject::new(DECAY, "");
    subject.step(&[0, 7], 0.25, Step::Next);
    subject.step(&[7], 0.25, Step::Next);
    let first = subject.read();
    assert_eq!(subject.read(), first);
    subject.store.write(subject.table, &[8], &[0.1; DIM]).unwrap();
    assert_eq!(subject.read()[4 * DIM..5 * DIM], [0.1; DIM]);
}

#[test]
fn rows_whose_norm_decays_below_the_least_leave() {
    let more = r#", "eviction": {"min_norm": 0.1, "interval": 2, "delay": 1}"#;
    let subject = Subject::new(DECAY, more);
    subject.store.write(subject.table, &[1, 2], &[0.5; 2 * DIM]).unwrap();
    for _ in 0..60 {
        subject.step(&[2], 0.0, Step::Next);
        subject.store.write(subject.table, &[2], &[0.5; DIM]).unwrap();
    }
    assert_eq!(subject.store.table("ids", subject.table).unwrap().ids().unwrap(), [2]);
}

#[test]
fn a_state_put_goes_on_as_before_and_one_without_the_product_is_refused() {
    let subject = Subject::new(DECAY, "");
    subject.step(&IDS, 0.5, Step::Next);
    subject.store.set_learning_rate(subject.table, 0.2, true).unwrap();
    subject.step(&IDS[..2], 0.5, Step::Next);
    let twin = Subject::new(DECAY, "");
    twin.step(&[], 0.0, Step::At(77));
    let statistics = subject.store.statistics(subject.table).unwrap();
    let slot = subject.store.read_slot(subject.table, "idle_kept", &IDS).unwrap().unwrap();
    twin.store.write(twin.table, &IDS, &subject.read()).unwrap();
    let state = |idle_kept| OptimizerState {
        table: twin.table,
        ids: &IDS,
        slots: vec![&slot],
        step: statistics.step,
        learning_rate: statistics.learning_rate,
        learning_rate_was_set: true,
        idle_kept,
    };
    for wrong in [None, Some([2.0, 0.0]), Some([0.75, 1.0])] {
        let refused = twin.store.put_optimizer_states(&[state(wrong)]).unwrap_err().to_string();
        assert!(refused.contains("expected a fraction and an exponent as idle_kept, got"), "{refused}");
    }
    twin.store.put_optimizer_states(&[state(statistics.idle_kept)]).unwrap();
    assert_eq!(twin.store.statistics(twin.table).unwrap().idle_kept, statistics.idle_kept);
    assert_eq!(twin.read(), subject.read());
    for each in [&subject, &twin] {
        each.step(&IDS[1..3], 0.5, Step::Next);
    }
    assert!(twin.read().iter().zip(subject.read()).all(|(one, other)| (one - other).abs() < 1e-6));
}

#[test]
fn a_momentum_put_goes_on_as_before() {
    for optimizer in [MOMENTUM, NESTEROV] {
        let (subject, twin) = (Subject::new(optimizer, ""), Subject::new(optimizer, ""));
        subject.step(&IDS, 0.5, Step::Next);
        subject.step(&IDS[..2], 0.5, Step::Next);
        subject.step(&[], 0.0, Step::At(5));
        twin.step(&[], 0.0, Step::At(77));
        let statistics = subject.store.statistics(subject.table).unwrap();
        let slot = |name| subject.store.read_slot(subject.table, name, &IDS).unwrap().unwrap();
        let slots = [slot("velocity"), slot("idle_step")];
        twin.store.write(twin.table, &IDS, &subject.read()).unwrap();
        let state = OptimizerState {
            table: twin.table,
            ids: &IDS,
            slots: slots.iter().map(|slot| &slot[..]).collect(),
            step: statistics.step,
            learning_rate: statistics.learning_rate,
            learning_rate_was_set: true,
            idle_kept: statistics.idle_kept,
        };
        twin.store.put_optimizer_states(&[state]).unwrap();
        assert_eq!(twin.read(), subject.read());
        for each in [&subject, &twin] {
            each.step(&IDS[1..3], 0.5, Step::At(9));
        }
        let near = |(one, other): (&f32, f32)| (one - other).abs() < 1e-5;
        assert!(twin.read().iter().zip(subject.read()).all(near), "{:?} {:?}", twin.read(), subject.read());
    }
}

#[test]
fn rows_of_every_dim_are_caught_up_with() {
    // Records of some dims have words behind their last slot.
    for optimizer in
        [DECAY, MOMENTUM, NESTEROV, r#""optimizer": {"kind": "lion", "catch_up": true, "weight_decay": 0.1}"#]
    {
        let config = format!(r#"{{{optimizer}, "initializer": {{"kind": "constant", "value": 1}}}}"#);
        let mut first = None;
        for dim in 1..=70 {
            let store = store();
            let table = open(&store, "t", dim, &config);
            for ids in [&[1, 2][..], &[2], &[2]] {
                let gradients = vec![0.5; ids.len() * dim];
                let chunks = vec![GradientChunk::new(ids, &gradients, dim)];
                store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
            }
            let mut rows = vec![0.0; 2 * dim];
            store.read(table, &[1, 2], &mut rows).unwrap();
            let expected = *first.get_or_insert([rows[0], rows[1]]);
            assert!(expected[0] != expected[1] && expected[0] != 1.0, "{optimizer}: {expected:?}");
            for (row, expected) in rows.chunks_exact(dim).zip(expected) {
                assert_eq!(row, vec![expected; dim], "{optimizer}, dim {dim}");
            }
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused_by_name() {
    for (text, expected) in [
        (
            r#"{"optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.1, "catch_up": true}}"#,
            "both are not caught up with, got 0.9 and 0.1",
        ),
        (
            r#"{"optimizer": {"kind": "sgd", "momentum": 0.9, "catch_up": true}, "state_dtype": "bfloat16"}"#,
            "optimizer.catch_up needs a state_dtype of float32",
        ),
        (
            r#"{"optimizer": {"kind": "sgd", "catch_up": true}, "dtype": "bfloat16"}"#,
            "optimizer.catch_up needs rows of float32",
        ),
        (
            r#"{"optimizer": {"kind": "adamw", "catch_up": true}, "ema_decay": 0.9}"#,
            "optimizer.catch_up and ema_decay",
        ),
        (
            r#"{"optimizer": {"kind": "sgd", "catch_up": true}, "admission": {"kind": "count", "threshold": 2, "shared_rows": 4}}"#,
            "optimizer.catch_up and admission.shared_rows",
        ),
        (r#"{"optimizer": {"kind": "adagrad", "catch_up": true}}"#, "catch_up"),
    ] {
        let refused = TableConfig::from_json(DIM, text).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let subject = Subject::new(DECAY, "");
    let published = subject.store.begin_publication(&[subject.table]).unwrap_err().to_string();
    assert!(published.contains("rows of table \"t\" change with every step"), "{published}");
    let lasting = TableConfig::from_json(
        DIM,
        r#"{"optimizer": {"kind": "sgd", "lr": 0.5, "weight_decay": 0.1}, "seed": 4}"#,
    );
    assert!(subject.store.open_table("t", &lasting.unwrap()).is_err());
}
