//! What an optimizer keeps beside each row, and whose steps it counts.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;

use numbered::Numbered;
use recstore::{
    EmbeddingStore, GradientChunk, InProcessStore, LoadOptions, LocalStore, OptimizerState, SaveKind,
    SaveOptions, Serial, Step, TableConfig, TableId, TableUpdate, optimizers,
};
use serde_json::{Value, json};

const DIM: usize = 2;

fn open(optimizer: &str) -> (LocalStore, TableId) {
    let text =
        format!(r#"{{"initializer": {{"kind": "constant", "value": 0.5}}, "optimizer": {optimizer}}}"#);
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_numbered("t", &TableConfig::from_json(DIM, &text).unwrap()).unwrap();
    (store, table)
}

fn update(store: &LocalStore, table: TableId, ids: &[i64], step: Step) {
    let gradients = vec![1.0; ids.len() * DIM];
    let chunks = vec![GradientChunk::new(ids, &gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step }]).unwrap();
}

fn read(store: &LocalStore, table: TableId, id: i64) -> [f32; DIM] {
    let mut row = [f32::NAN; DIM];
    store.read(table, &[id], &mut row).unwrap();
    row
}

fn slot(store: &LocalStore, table: TableId, name: &str, id: i64) -> Vec<f32> {
    store.read_slot(table, name, &[id]).unwrap().unwrap()
}

#[test]
fn every_optimizer_names_its_slots_and_their_widths() {
    for (optimizer, slots) in [
        (r#"{"kind": "sgd"}"#, &[][..]),
        (r#"{"kind": "adagrad"}"#, &[("state_sum", DIM)]),
        (r#"{"kind": "rowwise_adagrad"}"#, &[("state_sum", 1)]),
        (r#"{"kind": "adam"}"#, &[("exp_avg", DIM), ("exp_avg_sq", DIM)]),
        (
            r#"{"kind": "adamw", "bias_correction": "row"}"#,
            &[("exp_avg", DIM), ("exp_avg_sq", DIM), ("step", 1)],
        ),
        (r#"{"kind": "ftrl"}"#, &[("n", DIM), ("z", DIM), ("alpha", 1)]),
        (r#"{"kind": "sgd", "momentum": 0.9}"#, &[("momentum_buffer", DIM)]),
        (r#"{"kind": "rmsprop"}"#, &[("square_avg", DIM)]),
        (
            r#"{"kind": "rmsprop", "centered": true, "momentum": 0.9}"#,
            &[("square_avg", DIM), ("grad_avg", DIM), ("momentum_buffer", DIM)],
        ),
        (r#"{"kind": "adadelta"}"#, &[("square_avg", DIM), ("acc_delta", DIM)]),
        (
            r#"{"kind": "adam", "amsgrad": true}"#,
            &[("exp_avg", DIM), ("exp_avg_sq", DIM), ("max_exp_avg_sq", DIM)],
        ),
        (
            r#"{"kind": "rowwise_adam", "bias_correction": "row"}"#,
            &[("exp_avg", DIM), ("exp_avg_sq", 1), ("step", 1)],
        ),
        (r#"{"kind": "lamb"}"#, &[("exp_avg", DIM), ("exp_avg_sq", DIM)]),
        (r#"{"kind": "lion"}"#, &[("exp_avg", DIM)]),
        (r#"{"kind": "sgd", "momentum": 0.9, "catch_up": true}"#, &[("velocity", DIM), ("idle_step", 2)]),
        (r#"{"kind": "ftrl"}, "state_dtype": "float8""#, &[("n", DIM), ("z", DIM), ("alpha", 1)]),
        (r#"{"kind": "lion", "catch_up": true}"#, &[("exp_avg", DIM), ("idle_kept", 2)]),
        (
            r#"{"kind": "adam", "bias_correction": "row"}, "ema_decay": 0.9"#,
            &[("exp_avg", DIM), ("exp_avg_sq", DIM), ("step", 1), ("ema", DIM), ("ema_step", 1)],
        ),
    ] {
        let (store, table) = open(optimizer);
        let owned: Vec<(String, usize)> =
            slots.iter().map(|&(name, width)| (name.to_owned(), width)).collect();
        assert_eq!(store.describe(table).unwrap().slots, owned, "{optimizer}");
        for (name, width) in slots {
            assert_eq!(slot(&store, table, name, 7), vec![0.0; *width], "{optimizer}");
        }
        assert_eq!(store.read_slot(table, "momentum", &[7]), Ok(None), "{optimizer}");
    }
}

#[test]
fn the_registry_describes_the_slots_of_every_optimizer() {
    for rule in optimizers() {
        let described = |optimizer: Value, with: Option<&str>| {
            let (store, table) = open(&optimizer.to_string());
            let slots = rule["slots"].as_array().unwrap().iter();
            let kept = slots.filter(|slot| slot["with"].is_null() || slot["with"].as_str() == with);
            let width = |slot: &Value| slot["width"].as_u64().map_or(DIM, |width| width as usize);
            let kept: Vec<_> =
                kept.map(|slot| (slot["name"].as_str().unwrap().to_owned(), width(slot))).collect();
            assert_eq!(store.describe(table).unwrap().slots, kept, "{optimizer}");
        };
        described(json!({"kind": rule["kind"]}), None);
        for name in rule["slots"].as_array().unwrap().iter().filter_map(|slot| slot["with"].as_str()) {
            let options = rule["options"].as_array().unwrap();
            let option = options.iter().find(|option| option["name"] == name).unwrap();
            let value = match &option["default"] {
                Value::Bool(_) => json!(true),
                Value::String(_) => option["choices"][1].clone(),
                _ => json!(0.5),
            };
            described(json!({"kind": rule["kind"], name: value}), Some(name));
        }
    }
}

#[test]
fn z_of_ftrl_agrees_with_the_weights_of_a_new_or_overwritten_row() {
    // z = -w * ((beta + sqrt(n)) / alpha + l2) - sign(w) * l1
    let (store, table) = open(r#"{"kind": "ftrl", "alpha": 0.5, "beta": 1, "l1": 0.25, "l2": 2}"#);
    store.lookup(table, &[1], true, &mut [0], &mut [0.0; DIM]).unwrap();
    assert_eq!(slot(&store, table, "z", 1), [-0.5 * (1.0 / 0.5 + 2.0) - 0.25; DIM]);
    update(&store, table, &[1], Step::Next);
    store.write(table, &[1], &[-1.0, 0.0]).unwrap();
    assert_eq!(slot(&store, table, "n", 1), [1.0; DIM]);
    assert_eq!(slot(&store, table, "z", 1), [1.0 * (2.0 / 0.5 + 2.0) + 0.25, 0.0]);
}

#[test]
fn a_row_overwritten_keeps_its_accumulator() {
    let (store, table) = open(r#"{"kind": "adagrad"}"#);
    update(&store, table, &[1], Step::Next);
    store.write(table, &[1], &[3.0, 4.0]).unwrap();
    assert_eq!(slot(&store, table, "state_sum", 1), [1.0; DIM]);
}

#[test]
fn a_row_deleted_and_created_again_starts_as_it_first_did() {
    let (store, table) = open(r#"{"kind": "adam", "bias_correction": "row"}"#);
    update(&store, table, &[1], Step::Next);
    let first = read(&store, table, 1);
    update(&store, table, &[1], Step::Next);
    store.delete(table, &[1]).unwrap();
    assert_eq!(read(&store, table, 1), [0.5; DIM]);
    update(&store, table, &[1], Step::Next);
    assert_eq!((read(&store, table, 1), slot(&store, table, "step", 1)), (first, vec![1.0]));
}

#[test]
fn an_empty_update_counts_as_a_step_of_the_table() {
    let (store, table) = open(r#"{"kind": "adam"}"#);
    let (other, same) = open(r#"{"kind": "adam"}"#);
    (0..4).for_each(|_| update(&store, table, &[], Step::Next));
    update(&store, table, &[1], Step::Next);
    update(&other, same, &[1], Step::At(5));
    assert_eq!(store.statistics(table).unwrap().step, 5);
    assert_eq!(read(&store, table, 1), read(&other, same, 1));
}

#[test]
fn bias_is_corrected_by_the_steps_of_the_table_or_of_the_row() {
    let first_move_at = |correction: &str, step| {
        let (store, table) = open(&format!(r#"{{"kind": "adam", "bias_correction": "{correction}"}}"#));
        update(&store, table, &[1], Step::At(step));
        0.5 - read(&store, table, 1)[0]
    };
    assert_eq!(first_move_at("row", 1), first_move_at("row", 1000));
    // sqrt(1 - 0.999^1000) / (1 - 0.9^1000) * 0.1 / sqrt(0.001), times the learning rate.
    assert!((first_move_at("table", 1) - 0.01).abs() < 1e-6);
    assert!((first_move_at("table", 1000) - 0.025_145).abs() < 1e-6);
}

fn state<'a>(table: TableId, ids: &'a [i64], slots: Vec<&'a [f32]>) -> OptimizerState<'a> {
    OptimizerState {
        table,
        ids,
        slots,
        step: 7,
        learning_rate: 0.25,
        learning_rate_was_set: true,
        idle_kept: None,
    }
}

#[test]
fn a_state_put_is_what_the_optimizer_goes_on_with() {
    let (store, table) = open(r#"{"kind": "adam"}"#);
    update(&store, table, &[5, -1, 9], Step::Next);
    let rows = [5, -1, 9].map(|id| read(&store, table, id));
    let (means, squares) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5; 6]);
    store.put_optimizer_states(&[state(table, &[9, 5, -1], vec![&means, &squares])]).unwrap();
    assert_eq!(slot(&store, table, "exp_avg", 5), [3.0, 4.0]);
    assert_eq!(slot(&store, table, "exp_avg", 9), [1.0, 2.0]);
    assert_eq!(slot(&store, table, "exp_avg_sq", -1), [0.5, 0.5]);
    assert_eq!([5, -1, 9].map(|id| read(&store, table, id)), rows);
    let statistics = store.statistics(table).unwrap();
    assert_eq!((statistics.step, statistics.learning_rate), (7, 0.25));
    assert!(statistics.learning_rate_was_set);
    update(&store, table, &[5], Step::Next);
    assert_eq!(slot(&store, table, "exp_avg", 5), [2.8, 3.7]);
    assert_eq!(store.statistics(table).unwrap().step, 8);
}

#[test]
fn a_state_put_goes_into_the_next_delta_and_not_into_the_save_before() {
    let directory = tempfile::tempdir().unwrap();
    let (store, table) = open(r#"{"kind": "adagrad"}"#);
    update(&store, table, &[1, 2], Step::Next);
    let mut options = SaveOptions::default();
    store.save(directory.path(), &options).unwrap();
    store.put_optimizer_states(&[state(table, &[1, 2], vec![&[8.0; 4]])]).unwrap();
    options.kind = SaveKind::Delta;
    let report = store.save(directory.path(), &options).unwrap();
    assert_eq!((report.is_delta, report.rows), (true, 2));
    let (loaded, table) = open(r#"{"kind": "adagrad"}"#);
    loaded.load(directory.path(), &LoadOptions::default()).unwrap();
    assert_eq!(slot(&loaded, table, "state_sum", 2), [8.0, 8.0]);
    assert_eq!(loaded.statistics(table).unwrap().step, 7);
}

#[test]
fn a_state_that_does_not_fit_changes_no_table() {
    let (store, table) = open(r#"{"kind": "adagrad"}"#);
    let plain = store.open_numbered("plain", &TableConfig::new(DIM)).unwrap();
    update(&store, table, &[1, 2], Step::Next);
    let before = (store.statistics(table).unwrap(), slot(&store, table, "state_sum", 1));
    let (good, values) = (state(plain, &[], vec![]), [8.0; 4]);
    let zero_rate = OptimizerState { learning_rate: f64::NAN, ..state(table, &[1, 2], vec![&values]) };
    for (bad, expected) in [
        (state(table, &[1, 2], vec![]), "\"t\": expected 1 slots, got 0"),
        (state(table, &[1, 2], vec![&values[1..]]), "expected 4 values of slot \"state_sum\", got 3"),
        (state(table, &[1], vec![&values[2..]]), "expected the ids of its 2 rows, got 1"),
        (state(table, &[1, 3], vec![&values]), "the id 3 at position 1 has no row"),
        (state(table, &[2, 2], vec![&values]), "the id 2 at position 1 comes twice"),
        (state(plain, &[], vec![]), "\"plain\": it is given two states"),
        (zero_rate, "the learning rate must be finite"),
        (state(TableId(99), &[], vec![]), "table handle 99 is unknown"),
    ] {
        let error = store.put_optimizer_states(&[good.clone(), bad]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!((store.statistics(table).unwrap(), slot(&store, table, "state_sum", 1)), before);
        assert_eq!(store.statistics(plain).unwrap().step, 0);
    }
    store.put_optimizer_states(&[good]).unwrap();
    assert_eq!(store.statistics(plain).unwrap().step, 7);
}
