//! Rules of a program's own: equal to the store's where they compute the same, and kept by name.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use std::path::Path;
use std::sync::Arc;

use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    EmbeddingStore, Error, GradientChunk, GradientCollector, LoadOptions, LocalStore, Rayon, SaveKind,
    SaveOptions, Serial, Step, TableConfig, TableId, TableUpdate, TableValidator, UpdateRule, compact,
};

const DIM: usize = 3;
const IDS: [i64; 5] = [-2, -1, 0, 1, 2];

/// SGD once more.
struct OwnSgd;

impl UpdateRule for OwnSgd {
    fn slots(&self, _: usize) -> Vec<(String, usize)> {
        vec![]
    }

    fn apply(&self, row: &mut [f32], _: &mut [f32], gradient: &[f32], _: u64, learning_rate: f64) {
        row.iter_mut().zip(gradient).for_each(|(w, g)| *w -= learning_rate as f32 * (0.0 + g));
    }
}

/// AdaGrad once more, with a slot that counts steps and one that adopts rows.
struct OwnAdaGrad;

impl UpdateRule for OwnAdaGrad {
    fn slots(&self, dim: usize) -> Vec<(String, usize)> {
        vec![("sum".into(), dim), ("last_step".into(), 1), ("adopted".into(), 1)]
    }

    fn apply(&self, row: &mut [f32], slots: &mut [f32], gradient: &[f32], step: u64, learning_rate: f64) {
        let (sums, [last_step, _]) = slots.split_last_chunk_mut().unwrap();
        *last_step = step as f32;
        for ((w, s), g) in row.iter_mut().zip(sums).zip(gradient) {
            *s += g * g;
            *w -= learning_rate as f32 * g / (*s + 1e-10).sqrt();
        }
    }

    fn adopt(&self, row: &[f32], slots: &mut [f32], _: f64) {
        slots[row.len() + 1] = row[0];
    }
}

/// Panics at gradients of one value.
struct Panicking;

const FATAL: f32 = 13.0;

impl UpdateRule for Panicking {
    fn slots(&self, dim: usize) -> Vec<(String, usize)> {
        assert!(dim != 7, "no rows of seven");
        vec![]
    }

    fn apply(&self, row: &mut [f32], _: &mut [f32], gradient: &[f32], _: u64, _: f64) {
        assert!(gradient[0] != FATAL, "a fatal gradient");
        row.copy_from_slice(gradient);
    }
}

/// Asks for slots that cannot be.
struct WithSlots(Vec<(String, usize)>);

impl UpdateRule for WithSlots {
    fn slots(&self, _: usize) -> Vec<(String, usize)> {
        self.0.clone()
    }

    fn apply(&self, _: &mut [f32], _: &mut [f32], _: &[f32], _: u64, _: f64) {}
}

fn store(parallel: bool) -> LocalStore {
    let store = LocalStore::new(if parallel { Box::new(Rayon) } else { Box::new(Serial) });
    store.register_rule("own_sgd", Arc::new(OwnSgd)).unwrap();
    store.register_rule("own_adagrad", Arc::new(OwnAdaGrad)).unwrap();
    store.register_rule("panicking", Arc::new(Panicking)).unwrap();
    store
}

fn config(dim: usize, text: &str) -> TableConfig {
    TableConfig::from_json(dim, text).unwrap()
}

fn rule(dim: usize, name: &str) -> TableConfig {
    config(dim, &format!(r#"{{"optimizer": {{"kind": "rule", "name": "{name}", "lr": 0.5}}}}"#))
}

fn step(store: &LocalStore, table: TableId, ids: &[i64], gradients: &[f32]) -> recstore::Result<()> {
    let dim = store.dim(table)?;
    let chunks = vec![GradientChunk::new(ids, gradients, dim)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

fn rows(store: &LocalStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![0.0; ids.len() * store.dim(table).unwrap()];
    store.read(table, ids, &mut rows).unwrap();
    rows
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn load(store: &LocalStore, directory: &Path) -> recstore::Result<()> {
    store.load(directory, &LoadOptions::default()).map(drop)
}

fn batches() -> impl Strategy<Value = Vec<Vec<(i64, [f32; DIM])>>> {
    let gradient = prop::array::uniform3(prop_oneof![Just(0.0f32), -2.0..2.0f32]);
    prop::collection::vec(prop::collection::vec((-2..3i64, gradient), 0..20), 1..6)
}

/// Trains a table from rows that do not depend on its name, and gives it.
fn trained(
    store: &LocalStore,
    name: &str,
    config: &TableConfig,
    batches: &[Vec<(i64, [f32; DIM])>],
) -> TableId {
    let table = store.open_numbered(name, config).unwrap();
    let first: Vec<f32> = (0..IDS.len() * DIM).map(|number| number as f32 * 0.125 - 3.0).collect();
    store.write(table, &IDS, &first).unwrap();
    for batch in batches {
        let (ids, gradients): (Vec<i64>, Vec<[f32; DIM]>) = batch.iter().copied().unzip();
        step(store, table, &ids, gradients.as_flattened()).unwrap();
    }
    table
}

proptest! {
    #[test]
    fn a_rule_that_does_what_a_built_in_one_does_gives_the_same_bits(
        batches in batches(),
        dtype in prop::sample::select(vec!["float32", "bfloat16", "int8"]),
        parallel: bool,
        on_disk: bool,
    ) {
        let (store, disk) = (store(parallel), tempfile::tempdir().unwrap());
        let limit = format!(r#", "memory_limit": 400000, "disk": {:?}"#, disk.path());
        let place = if on_disk { limit } else { String::new() };
        let config = |optimizer: &str| {
            let optimizer = format!(r#""optimizer": {{{optimizer}, "lr": 0.1}}"#);
            config(DIM, &format!(r#"{{"dtype": "{dtype}", {optimizer}{place}}}"#))
        };
        for (own, built_in) in [("own_sgd", "sgd"), ("own_adagrad", "adagrad")] {
            let own = config(&format!(r#""kind": "rule", "name": "{own}""#));
            let own = trained(&store, "own", &own, &batches);
            let built_in = trained(&store, "built in", &config(&format!(r#""kind": "{built_in}""#)), &batches);
            // The noise that 16-bit rows are rounded with depends on the table's name; sums of gradients do not.
            if dtype == "float32" {
                prop_assert_eq!(bits(&rows(&store, own, &IDS)), bits(&rows(&store, built_in, &IDS)));
            }
            if let Some(sums) = store.read_slot(own, "sum", &IDS).unwrap() {
                prop_assert_eq!(Some(sums), store.read_slot(built_in, "state_sum", &IDS).unwrap());
            }
            store.drop_table("own").unwrap();
            store.drop_table("built in").unwrap();
        }
    }
}

#[test]
fn a_rule_gets_the_step_and_adopts_rows_that_are_made_or_written() {
    let store = store(false);
    let table = store.open_numbered("t", &rule(DIM, "own_adagrad")).unwrap();
    let slots = [("sum".to_owned(), DIM), ("last_step".to_owned(), 1), ("adopted".to_owned(), 1)];
    assert_eq!(store.describe(table).unwrap().slots, slots);
    let initial = rows(&store, table, &[5])[0];
    let slot = |name: &str, id| store.read_slot(table, name, &[id]).unwrap().unwrap()[0];
    step(&store, table, &[5], &[1.0; DIM]).unwrap();
    assert_eq!((slot("adopted", 5), slot("last_step", 5)), (initial, 1.0));
    store.write(table, &[5, 6], &[[2.0; DIM], [3.0; DIM]].concat()).unwrap();
    step(&store, table, &[6], &[1.0; DIM]).unwrap();
    assert_eq!([slot("adopted", 5), slot("adopted", 6)], [2.0, 3.0]);
    assert_eq!([slot("last_step", 5), slot("last_step", 6)], [1.0, 2.0]);
    store.set_learning_rate(table, 0.0, true).unwrap();
    let before = rows(&store, table, &[6]);
    step(&store, table, &[6], &[1.0; DIM]).unwrap();
    assert_eq!(rows(&store, table, &[6]), before);
}

#[test]
fn a_rule_comes_back_with_a_checkpoint_where_it_is_registered_and_is_named_where_not() {
    let (directory, saving) = (tempfile::tempdir().unwrap(), store(false));
    let table = saving.open_numbered("t", &rule(DIM, "own_adagrad")).unwrap();
    step(&saving, table, &[1, 2], &[1.0; 2 * DIM]).unwrap();
    saving.save(directory.path(), &SaveOptions::default()).unwrap();
    let loaded = store(false);
    load(&loaded, directory.path()).unwrap();
    let again = loaded.find_numbered("t").unwrap().unwrap();
    assert_eq!(loaded.describe(again).unwrap(), saving.describe(table).unwrap());
    for (store, table) in [(&saving, table), (&loaded, again)] {
        step(store, table, &[1, 3], &[0.5; 2 * DIM]).unwrap();
    }
    let state = |store: &LocalStore, table| {
        (rows(store, table, &[1, 2, 3]), store.read_slot(table, "sum", &[1, 2, 3]).unwrap())
    };
    assert_eq!(state(&saving, table), state(&loaded, again));

    let without = LocalStore::new(Box::new(Serial));
    without.register_rule("other", Arc::new(OwnSgd)).unwrap();
    let unknown = Error::UnknownRule {
        table: "t".into(),
        rule: "own_adagrad".into(),
        registered: vec!["other".into()],
    };
    assert_eq!(load(&without, directory.path()), Err(unknown.clone()));
    assert_eq!(without.open_numbered("t", &rule(DIM, "own_adagrad")), Err(unknown.clone()));
    assert_eq!(
        unknown.to_string(),
        r#"table "t": the update rule "own_adagrad" is not registered with this store, which has ["other"]"#
    );
    assert_eq!(without.table_names().unwrap(), Vec::<String>::new());
}

#[test]
fn a_table_that_is_loaded_without_its_rule_is_read_and_saved_and_takes_no_step() {
    let (directory, saving) = (tempfile::tempdir().unwrap(), store(false));
    let table = saving.open_numbered("t", &rule(DIM, "own_adagrad")).unwrap();
    step(&saving, table, &[1, 2], &[1.0; 2 * DIM]).unwrap();
    saving.save(directory.path(), &SaveOptions::default()).unwrap();
    let without = LocalStore::new(Box::new(Serial));
    let mut options = LoadOptions::default();
    options.without_rules = true;
    without.load(directory.path(), &options).unwrap();
    let read = without.find_numbered("t").unwrap().unwrap();
    let state =
        |store: &LocalStore, table| (rows(store, table, &[1, 2]), store.read_slot(table, "sum", &[1, 2]));
    assert_eq!(state(&without, read), state(&saving, table));
    let again = tempfile::tempdir().unwrap();
    without.save(again.path(), &SaveOptions::default()).unwrap();
    let loaded = store(false);
    load(&loaded, again.path()).unwrap();
    assert_eq!(state(&loaded, loaded.find_numbered("t").unwrap().unwrap()), state(&saving, table));
    let refused = step(&without, read, &[1], &[1.0; DIM]).unwrap_err().to_string();
    assert!(refused.contains("the table was loaded without its rule, to be read"), "{refused}");
}

#[test]
fn averages_lie_behind_the_slots_of_a_rule_wherever_it_is() {
    let text = r#"{"optimizer": {"kind": "rule", "name": "own_adagrad"}, "ema_decay": 0.5}"#;
    let (directory, saving) = (tempfile::tempdir().unwrap(), store(false));
    let table = saving.open_numbered("t", &config(DIM, text)).unwrap();
    step(&saving, table, &[1, 2], &[1.0; 2 * DIM]).unwrap();
    let slots = saving.describe(table).unwrap().slots;
    let names: Vec<&str> = slots.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["sum", "last_step", "adopted", "ema", "ema_step"]);
    saving.save(directory.path(), &SaveOptions::default()).unwrap();
    let without = LocalStore::new(Box::new(Serial));
    let mut options = LoadOptions::default();
    options.without_rules = true;
    without.load(directory.path(), &options).unwrap();
    let read = without.find_numbered("t").unwrap().unwrap();
    assert_eq!(without.describe(read).unwrap().slots, slots);
    for name in names {
        assert_eq!(without.read_slot(read, name, &[1, 2]), saving.read_slot(table, name, &[1, 2]));
    }
    let rowless = TableValidator::with_slots("t", &config(DIM, text), slots.clone()).unwrap();
    assert_eq!(rowless.description().slots, slots);
}

#[test]
fn a_rule_with_a_slot_of_the_averages_name_is_refused_beside_them() {
    let store = LocalStore::new(Box::new(Serial));
    store.register_rule("ema", Arc::new(WithSlots(vec![("ema".into(), DIM)]))).unwrap();
    let text = r#"{"optimizer": {"kind": "rule", "name": "ema"}"#;
    store.open_numbered("alone", &config(DIM, &format!("{text}}}"))).unwrap();
    let refused =
        store.open_numbered("t", &config(DIM, &format!(r#"{text}, "ema_decay": 0.5}}"#))).unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("has a slot \"ema\", which is where ema_decay keeps the average"), "{refused}");
}

#[test]
fn other_slots_than_those_saved_are_refused() {
    let (directory, saving) = (tempfile::tempdir().unwrap(), store(false));
    let table = saving.open_numbered("t", &rule(DIM, "own_adagrad")).unwrap();
    step(&saving, table, &[1], &[1.0; DIM]).unwrap();
    saving.save(directory.path(), &SaveOptions::default()).unwrap();
    let changed = LocalStore::new(Box::new(Serial));
    changed.register_rule("own_adagrad", Arc::new(WithSlots(vec![("sum".into(), DIM + 1)]))).unwrap();
    let refused = load(&changed, directory.path()).unwrap_err().to_string();
    assert!(refused.starts_with("checkpoint: ") && refused.contains("slot."), "{refused}");
    assert_eq!(changed.find_numbered("t"), Ok(None));
}

#[test]
fn after_a_panic_of_a_rule_no_table_takes_the_same_gradients_twice() {
    let store = store(true);
    let plain = store
        .open_numbered(
            "plain",
            &config(DIM, r#"{"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}"#),
        )
        .unwrap();
    let own = store
        .open_numbered("own", &config(DIM, r#"{"optimizer": {"kind": "rule", "name": "panicking"}}"#))
        .unwrap();
    let collector = GradientCollector::default();
    for (table, gradient) in [(plain, 1.0), (own, FATAL)] {
        let opened = store.table("accept_grad", table).unwrap();
        collector.accept_copy(table, &*opened, &[1], &[gradient; DIM], DIM).unwrap();
    }
    let failed = GradientCollector::apply_to(&store, &[&collector]).unwrap_err();
    assert!(matches!(failed, Error::StepCutShort(_)), "{failed}");
    assert_eq!(collector.tables(), []);
    assert_eq!(rows(&store, plain, &[1]), [-1.0; DIM]);
    store.clear(own).unwrap();
    collector.accept_copy(own, &*store.table("accept_grad", own).unwrap(), &[1], &[2.0; DIM], DIM).unwrap();
    GradientCollector::apply_to(&store, &[&collector]).unwrap();
    assert_eq!(rows(&store, plain, &[1]), [-1.0; DIM]);
    assert_eq!(rows(&store, own, &[1]), [2.0; DIM]);
}

#[test]
fn after_a_panic_of_its_rule_a_table_is_refused_until_it_is_cleared() {
    for text in ["", r#", "memory_limit": 400000, "disk": "/tmp""#] {
        let store = store(true);
        let optimizer = r#"{"optimizer": {"kind": "rule", "name": "panicking"}"#;
        let table = store.open_numbered("t", &config(DIM, &format!("{optimizer}{text}}}"))).unwrap();
        step(&store, table, &[1], &[2.0; DIM]).unwrap();
        let failed = Error::RuleFailed {
            table: "t".into(),
            rule: "panicking".into(),
            message: "a fatal gradient".into(),
        };
        let cut_short = Error::StepCutShort(Box::new(failed.clone()));
        let stepped = step(&store, table, &[1, 2], &[[3.0; DIM], [FATAL; DIM]].concat());
        assert_eq!(stepped, Err(cut_short.clone()));
        let directory = tempfile::tempdir().unwrap();
        for refused in [
            store.read(table, &[1], &mut [0.0; DIM]),
            store.write(table, &[1], &[0.0; DIM]),
            step(&store, table, &[1], &[2.0; DIM]),
            store.delete(table, &[1]).map(drop),
            store.save(directory.path(), &SaveOptions::default()).map(drop),
        ] {
            assert_eq!(refused, Err(failed.clone()));
        }
        let text = cut_short.to_string();
        assert!(text.contains("\"panicking\" panicked") && text.contains("(a fatal gradient)"), "{text}");
        store.clear(table).unwrap();
        step(&store, table, &[1], &[2.0; DIM]).unwrap();
        assert_eq!(rows(&store, table, &[1]), [2.0; DIM]);
    }
}

#[test]
fn names_and_slots_that_cannot_be_are_refused() {
    let store = store(false);
    let message = |result: recstore::Result<()>| result.unwrap_err().to_string();
    let refused = message(store.register_rule("", Arc::new(OwnSgd)));
    assert!(refused.ends_with("the name of an update rule must not be empty"), "{refused}");
    let refused = message(store.register_rule("own_sgd", Arc::new(OwnSgd)));
    assert!(refused.ends_with("an update rule \"own_sgd\" is registered already"), "{refused}");
    let refused = TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "rule", "name": ""}}"#).unwrap_err();
    assert!(refused.to_string().ends_with("the update rule, must not be empty"), "{refused}");
    let slots =
        |slots: &[(&str, usize)]| slots.iter().map(|&(name, width)| (name.to_owned(), width)).collect();
    for (number, (slots, expected)) in [
        (slots(&[("", 1)]), "has a slot \"\" that is empty or comes twice"),
        (slots(&[("a", 1), ("a", 2)]), "has a slot \"a\" that is empty or comes twice"),
        (slots(&[("a", 0)]), "has a slot \"a\" of width 0"),
        (slots(&[("a", usize::MAX)]), "a block of 10240 rows exceeds 1 GiB; lower block_size"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = number.to_string();
        store.register_rule(&name, Arc::new(WithSlots(slots))).unwrap();
        let refused = message(store.open_numbered("t", &rule(DIM, &name)).map(drop));
        assert!(
            refused.contains(&format!("\"{number}\" of table \"t\"")) && refused.ends_with(expected),
            "{refused}"
        );
    }
    let refused = message(store.open_numbered("t", &rule(7, "panicking")).map(drop));
    assert!(refused.contains("no rows of seven"), "{refused}");
}

#[test]
fn deltas_are_compacted_by_who_does_not_know_the_rule() {
    let (directory, saving) = (tempfile::tempdir().unwrap(), store(false));
    let table = saving.open_numbered("t", &rule(DIM, "own_adagrad")).unwrap();
    step(&saving, table, &[1, 2], &[1.0; 2 * DIM]).unwrap();
    saving.save(directory.path(), &SaveOptions::default()).unwrap();
    step(&saving, table, &[2, 3], &[0.5; 2 * DIM]).unwrap();
    let mut options = SaveOptions::default();
    options.kind = SaveKind::Delta;
    assert!(saving.save(directory.path(), &options).unwrap().is_delta);
    assert!(compact(directory.path(), None).unwrap().is_some());
    let loaded = store(false);
    load(&loaded, directory.path()).unwrap();
    let again = loaded.find_numbered("t").unwrap().unwrap();
    let state = |store: &LocalStore, table| {
        let slots =
            ["sum", "last_step", "adopted"].map(|slot| store.read_slot(table, slot, &[1, 2, 3]).unwrap());
        (rows(store, table, &[1, 2, 3]), slots)
    };
    assert_eq!(state(&saving, table), state(&loaded, again));
}
