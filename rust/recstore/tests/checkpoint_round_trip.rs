//! What is loaded is what was saved, to the bit, whatever the optimizer and the row type; training goes on from it as if
//! nobody had saved.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;
mod rules;

use checkpoints::{insert, load, loaded, open, read, save, state, store, table_files, update};
use numbered::Numbered;
use recstore::{EmbeddingStore, LoadOptions, LocalStore, Progress, SaveKind, SaveOptions, TableId};
use rules::forms_at;
use serde_json::json;

/// Rules with other options of the table.
const MORE: [&str; 5] = [
    ADAM,
    r#"{"kind": "adam", "bias_correction": "row"}, "ema_decay": 0.9"#,
    r#"{"kind": "adam", "bias_correction": "row"}, "state_dtype": "bfloat16", "ema_decay": 0.9"#,
    r#"{"kind": "ftrl", "alpha": 0.1}, "state_dtype": "float8""#,
    r#"{"kind": "adam", "amsgrad": true}, "state_dtype": "float8""#,
];
const ADAM: &str = r#"{"kind": "adam", "lr": 0.1}"#;
const FTRL: &str = r#"{"kind": "ftrl", "alpha": 0.1, "l1": 0.01, "l2": 0.01}"#;
const DTYPES: [&str; 5] = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"];
const DIMS: [usize; 4] = [1, 3, 8, 33];

fn config(optimizer: &str, dtype: &str) -> String {
    format!(
        r#"{{"dtype": "{dtype}", "block_size": 7, "seed": 5, "nan_policy": "skip", "optimizer": {optimizer},
            "initializer": {{"kind": "normal", "std": 1}}}}"#
    )
}

/// Calls `test` with the dim and the configuration of every kind of table.
fn for_each_kind(test: impl Fn(usize, &str)) {
    const RATE: f64 = 0.1;
    for optimizer in forms_at(|_, _| RATE).into_iter().chain(MORE.map(str::to_owned)) {
        // Rows that steps change while they leave them alone are of float32 only.
        let dtypes = if optimizer.contains("catch_up") { &DTYPES[..1] } else { &DTYPES[..] };
        for dtype in dtypes {
            DIMS.iter().for_each(|dim| test(*dim, &config(&optimizer, dtype)));
        }
    }
}

/// Writes, inserts, deletes and steps, of other ids in each round, both ends of int64 among them.
fn train(store: &LocalStore, table: TableId, rounds: std::ops::Range<i64>) {
    let dim = store.dim(table).unwrap();
    for round in rounds {
        let ids: Vec<i64> =
            (round..round + 12).chain([i64::MIN + round, i64::MAX - round]).flat_map(|id| [id, id]).collect();
        let mut gradients: Vec<f32> =
            (0..ids.len() * dim).map(|place| (place as f32 * 0.7 + round as f32).sin()).collect();
        gradients[0] = f32::NAN;
        update(store, table, &ids, &gradients);
        insert(store, table, &[100 + round, 200 + round]);
        store.write(table, &[300 + round], &vec![round as f32 / 3.0; dim]).unwrap();
        store.delete(table, &[round + 2, 100 + round]).unwrap();
        store.set_learning_rate(table, 0.1 / (round + 1) as f64, round % 2 == 1).unwrap();
    }
}

#[test]
fn a_loaded_table_equals_the_saved_one_and_trains_on_as_if_nobody_had_saved() {
    for_each_kind(|dim, config| {
        let directory = tempfile::tempdir().unwrap();
        let (saving, undisturbed) = (store(), store());
        let (table, control) = (open(&saving, "t", dim, config), open(&undisturbed, "t", dim, config));
        train(&undisturbed, control, 0..6);
        train(&saving, table, 0..3);
        let saved = state(&saving);
        assert!(saved["t"].rows.len() > 20 && saved["t"].statistics.refusals == 3, "{config}");
        save(&saving, directory.path(), SaveKind::Full).unwrap();

        let other = loaded(directory.path());
        assert_eq!(state(&other), saved, "dim {dim} {config}");
        train(&saving, table, 3..6);
        assert_eq!(state(&saving), state(&undisturbed), "dim {dim} {config}");
        train(&other, other.find_numbered("t").unwrap().unwrap(), 3..6);
        assert_eq!(state(&other), state(&undisturbed), "dim {dim} {config}");
        load(&saving, directory.path()).unwrap();
        assert_eq!(state(&saving), saved, "dim {dim} {config}");
        train(&saving, table, 3..6);
        assert_eq!(state(&saving), state(&undisturbed), "dim {dim} {config}");
    });
}

#[test]
fn a_delta_holds_every_kind_of_change_to_the_bit() {
    for_each_kind(|dim, config| {
        let directory = tempfile::tempdir().unwrap();
        let saving = store();
        let table = open(&saving, "t", dim, config);
        for (rounds, kind) in [(0..2, SaveKind::Full), (2..4, SaveKind::Delta), (4..5, SaveKind::Delta)] {
            train(&saving, table, rounds);
            save(&saving, directory.path(), kind).unwrap();
            assert_eq!(state(&loaded(directory.path())), state(&saving), "dim {dim} {config}");
        }
    });
}

#[test]
fn values_that_are_no_numbers_come_back_with_all_their_bits() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    let table = open(&saving, "t", 4, r#"{"nan_policy": "allow"}"#);
    let odd = [0x7FC0_1234, 0xFF80_0000, 0x8000_0000, 1].map(f32::from_bits);
    saving.write(table, &[7], &odd).unwrap();
    save(&saving, directory.path(), SaveKind::Full).unwrap();
    let other = loaded(directory.path());
    let row = read(&other, other.find_numbered("t").unwrap().unwrap(), &[7]);
    assert_eq!(row.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), odd.map(f32::to_bits));
}

#[test]
fn rows_that_take_several_reads_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    let table = open(&saving, "t", 33, &config(ADAM, "float32"));
    let ids: Vec<i64> = (0..25_000).map(|number| number * 7_919).collect();
    insert(&saving, table, &ids);
    update(&saving, table, &ids[..20_000], &vec![0.5; 20_000 * 33]);
    save(&saving, directory.path(), SaveKind::Full).unwrap();
    assert_eq!(state(&loaded(directory.path())), state(&saving));
    saving.clear(table).unwrap();
    let report = save(&saving, directory.path(), SaveKind::Delta).unwrap();
    assert_eq!((report.rows, report.deleted), (0, ids.len()));
    assert_eq!(state(&loaded(directory.path())), state(&saving));
}

#[test]
fn a_delta_tells_what_changed_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    let table = open(&saving, "t", 2, "");
    insert(&saving, table, &(0..1000).collect::<Vec<_>>());
    let full = save(&saving, directory.path(), SaveKind::Full).unwrap();
    assert_eq!((full.is_delta, full.rows, full.deleted), (false, 1000, 0));
    update(&saving, table, &[3, 4, 5, 2000], &[1.0; 8]);
    // A row made and deleted since is no longer there, but is told to be deleted: it might have been saved.
    insert(&saving, table, &[3000]);
    saving.delete(table, &[5, 9, 3000, 777_777]).unwrap();
    read(&saving, table, &[500, 501]);
    insert(&saving, table, &[600]);
    let delta = save(&saving, directory.path(), SaveKind::Delta).unwrap();
    assert_eq!((delta.is_delta, delta.rows, delta.deleted), (true, 3, 3));
    assert!(delta.bytes * 10 < full.bytes);
    let nothing = save(&saving, directory.path(), SaveKind::Auto).unwrap();
    assert_eq!((nothing.is_delta, nothing.rows, nothing.deleted), (true, 0, 0));
    assert_eq!(state(&loaded(directory.path())), state(&saving));
}

#[test]
fn a_load_keeps_other_tables_and_the_numbers_of_tables() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    let kept = open(&saving, "kept", 2, "");
    insert(&saving, kept, &[1]);
    save(&saving, directory.path(), SaveKind::Full).unwrap();
    let other = open(&saving, "other", 3, "");
    insert(&saving, other, &[7, 8]);
    saving.delete(kept, &[1]).unwrap();
    let before = state(&saving)["other"].clone();
    let report = load(&saving, directory.path()).unwrap();
    assert_eq!(report.tables, [("kept".to_owned(), 1)]);
    assert_eq!((saving.num_rows(kept), saving.find_numbered("kept")), (Ok(1), Ok(Some(kept))));
    assert_eq!(state(&saving)["other"], before);
}

#[test]
fn learning_rate_and_weight_decay_of_the_configuration_may_differ() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    let table = open(&saving, "t", 2, r#"{"optimizer": {"kind": "sgd", "lr": 0.5}}"#);
    insert(&saving, table, &[1]);
    save(&saving, directory.path(), SaveKind::Full).unwrap();
    let other = store();
    let table = open(&other, "t", 2, r#"{"optimizer": {"kind": "sgd", "lr": 0.25, "weight_decay": 0.5}}"#);
    load(&other, directory.path()).unwrap();
    assert_eq!(other.statistics(table).unwrap().learning_rate, 0.5);
    let config = other.describe(table).unwrap().config.to_json().unwrap();
    assert!(config.contains(r#""weight_decay":0.5"#), "{config}");
}

#[test]
fn a_store_without_tables_and_tables_without_rows_are_saved_too() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    save(&saving, directory.path(), SaveKind::Full).unwrap();
    assert_eq!(load(&store(), directory.path()).unwrap().tables, []);
    open(&saving, "empty", 3, &config(FTRL, "float16"));
    save(&saving, directory.path(), SaveKind::Delta).unwrap();
    assert_eq!(state(&loaded(directory.path())), state(&saving));
}

#[test]
fn names_of_tables_need_not_be_names_of_files() {
    let directory = tempfile::tempdir().unwrap();
    let saving = store();
    for name in ["default/8", "../up", "nul\0", "größe", "a b", &"long".repeat(100), "a_b", "a/b"] {
        let table = open(&saving, name, 1, "");
        insert(&saving, table, &[name.len() as i64]);
    }
    save(&saving, directory.path(), SaveKind::Full).unwrap();
    assert_eq!(table_files(directory.path()).len(), 8);
    assert_eq!(state(&loaded(directory.path())), state(&saving));
}

#[test]
fn metadata_come_back_and_progress_counts_every_byte() {
    let directory = tempfile::tempdir().unwrap();
    let (saving, progress) = (store(), Progress::default());
    let table = open(&saving, "t", 2, "");
    insert(&saving, table, &[1, 2, 3]);
    let metadata = json!({"epoch": 3, "loss": 0.1, "list": [null, true, "ä"], "large": u64::MAX});
    let mut options = SaveOptions::default();
    options.metadata = metadata.clone().into();
    options.progress = Some(&progress);
    let bytes = saving.save(directory.path(), &options).unwrap().bytes;
    assert_eq!(progress.bytes(), (3 * (8 + 8), 3 * (8 + 8)));
    let progress = Progress::default();
    let mut options = LoadOptions::default();
    options.progress = Some(&progress);
    let report = store().load(directory.path(), &options).unwrap();
    assert_eq!(report.metadata, metadata.into());
    assert_eq!(progress.bytes(), (bytes, bytes));
}

#[test]
fn every_tensor_is_aligned_to_its_elements() {
    for_each_kind(|dim, config| {
        let directory = tempfile::tempdir().unwrap();
        let saving = store();
        let table = open(&saving, "t", dim, config);
        for kind in [SaveKind::Full, SaveKind::Delta] {
            insert(&saving, table, &[1, 2, 3]);
            saving.delete(table, &[2]).unwrap();
            insert(&saving, table, &[4]);
            save(&saving, directory.path(), kind).unwrap();
        }
        for file in table_files(directory.path()) {
            let bytes = std::fs::read(&file).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (name, tensor) in tensors.tensors() {
                let place = tensor.data().as_ptr().addr() - bytes.as_ptr().addr();
                assert_eq!(place * 8 % tensor.dtype().bitsize(), 0, "{name} of dim {dim} {config}");
            }
        }
    });
}
