//! A refused call says which table, id and position it is about, what was expected and what came, and changes nothing.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test, unless it is the one that should be")]

mod numbered;

use std::sync::Arc;

use ndarray::{Array1, Array2, array};
use numbered::Numbered;
use recstore::{
    BagInput, EmbeddingStore, Error, GradientChunk, GradientCollector, GradientPart, LocalStore, MAX_STEP,
    PoolingMode, Result, Serial, SimdLevel, Step, TableConfig, TableHandle, TableId, TableStatistics,
    TableUpdate,
};

const DIM: usize = 2;
/// Ids that have a row in every table of a test, and some that have none.
const IDS: [i64; 5] = [0, 1, 2, 3, 9];

fn store() -> LocalStore {
    LocalStore::new(Box::new(Serial))
}

/// Opens a table of ten ids and gives the first two a row with some state.
fn open(store: &LocalStore, name: &str, more: &str) -> TableId {
    let text = format!(r#"{{"num_embeddings": 10, "optimizer": {{"kind": "adagrad"}}{more}}}"#);
    let table = store.open_numbered(name, &TableConfig::from_json(DIM, &text).unwrap()).unwrap();
    update(store, table, &[0, 1], &[1.0; 4]).unwrap();
    table
}

fn update(store: &LocalStore, table: TableId, ids: &[i64], gradients: &[f32]) -> Result<()> {
    store
        .update(&[TableUpdate {
            table,
            chunks: vec![GradientChunk::new(ids, gradients, DIM)],
            step: Step::Next,
        }])
        .map(drop)
}

/// All that can be seen of a table.
fn seen(store: &LocalStore, table: TableId) -> (TableStatistics, Vec<i64>, Vec<f32>, Option<Vec<f32>>) {
    let mut rows = vec![0.0; IDS.len() * DIM];
    store.read(table, &IDS, &mut rows).unwrap();
    let state = store.read_slot(table, "state_sum", &IDS).unwrap();
    (store.statistics(table).unwrap(), store.ids(table).unwrap(), rows, state)
}

/// Holds the message against its parts and the table `t` against what it was before.
fn refuses(call: impl FnOnce(&LocalStore, TableId) -> Result<()>, parts: &[&str]) {
    let store = store();
    let table = open(&store, "t", "");
    let before = seen(&store, table);
    let message = call(&store, table).unwrap_err().to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    assert_eq!(seen(&store, table), before, "{message}");
}

fn lookup(store: &LocalStore, table: TableId, ids: &[i64], insert: bool) -> Result<()> {
    store.lookup(table, ids, insert, &mut vec![0; ids.len()], &mut vec![0.0; ids.len() * DIM])
}

fn bags<'a>(ids: &'a [i64], offsets: &'a [i64], mode: PoolingMode) -> BagInput<'a> {
    BagInput { ids, offsets, mode, per_sample_weights: None, padding_idx: None }
}

#[test]
fn an_id_out_of_range_is_named_with_position_and_bound() {
    let parts = |operation| [operation, "id 10 at position 2", "\"t\"", "num_embeddings 10"];
    let ids = [0, 9, 10, -1];
    refuses(|store, table| store.read(table, &ids, &mut [0.0; 8]), &parts("emb_read"));
    refuses(|store, table| store.write(table, &ids, &[0.0; 8]), &parts("emb_write"));
    refuses(|store, table| update(store, table, &ids, &[0.0; 8]), &parts("emb_update"));
    refuses(|store, table| lookup(store, table, &ids, true), &parts("hashtable_lookup"));
    let bag = bags(&ids, &[0, 4], PoolingMode::Sum);
    refuses(|store, table| store.bag(&[table], bag, &mut [0.0; 2], &mut [], &mut []), &parts("emb_bag"));
    refuses(|store, table| store.read(table, &[-1], &mut [0.0; 2]), &["id -1 at position 0"]);
}

#[test]
fn a_position_counts_through_all_chunks_of_an_update() {
    let apply = |second: [i64; 2], gradients: [f32; 4]| {
        move |store: &LocalStore, table| {
            let chunks = vec![
                GradientChunk::new(&[5, 6, 5], &[f32::MAX; 6], DIM),
                GradientChunk::new(&second, &gradients, DIM),
            ];
            store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
        }
    };
    refuses(apply([3, 77], [0.0; 4]), &["id 77 at position 4"]);
    let refused_and_counted = |second, gradients: [f32; 4], part| {
        let store = store();
        let table = open(&store, "t", "");
        let message = apply(second, gradients)(&store, table).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    refused_and_counted(
        [3, 4],
        [0.0, 0.0, f32::NAN, 0.0],
        "gradient of id 4 at position 4 of table \"t\" holds NaN",
    );
    refused_and_counted([3, 4], [0.0; 4], "summed gradient of id 5 at position 0 of table \"t\" holds inf");
    refused_and_counted([6, 4], [0.0; 4], "summed gradient of id 5 at position 0 of table \"t\" holds inf");
}

#[test]
fn rows_of_another_width_are_refused_with_both_widths() {
    let parts = |operation, actual| [operation, "\"t\" has dim 2", actual];
    refuses(|store, table| store.read(table, &[1], &mut [0.0; 3]), &parts("emb_read", "got rows of 3"));
    refuses(|store, table| store.write(table, &[1], &[0.0; 3]), &parts("emb_write", "got rows of 3"));
    refuses(
        |store, table| update(store, table, &[1], &[0.0; 3]),
        &parts("emb_update", "got gradient rows of 3"),
    );
    refuses(|store, table| store.write(table, &[], &[0.0]), &parts("emb_write", "got 1 values for 0 rows"));
    let bag = bags(&[1, 2], &[0, 2], PoolingMode::Sum);
    refuses(
        |store, table| store.bag(&[table], bag, &mut [0.0; 4], &mut [], &mut []),
        &parts("emb_bag", "got pooled rows of 4"),
    );
    refuses(
        |store, table| store.lookup(table, &[1], true, &mut [0], &mut [0.0]),
        &parts("hashtable_lookup", "got rows of 1"),
    );
}

#[test]
fn room_for_another_number_of_results_is_refused() {
    refuses(
        |store, table| store.lookup(table, &[7, 8], true, &mut [0], &mut [0.0; 4]),
        &["hashtable_lookup", "expected 2 indices", "\"t\"", "got 1"],
    );
    let bag = |mode, positions: usize| {
        move |store: &LocalStore, table| {
            store.bag(&[table], bags(&[1], &[0, 1], mode), &mut [0.0; DIM], &mut vec![0; positions], &mut [])
        }
    };
    refuses(bag(PoolingMode::Max, 0), &["emb_bag", "expected 2 positions of maxima", "\"t\"", "got 0"]);
    refuses(bag(PoolingMode::Sum, 2), &["emb_bag", "expected 0 positions of maxima", "\"t\"", "got 2"]);
}

#[test]
fn bags_that_do_not_fit_their_ids_are_refused() {
    let bag = |offsets: &'static [i64], weights: Option<&'static [f32]>, mode| {
        move |store: &LocalStore, table| {
            let bags = BagInput { per_sample_weights: weights, ..bags(&[1, 2, 3], offsets, mode) };
            store.bag(&[table], bags, &mut vec![0.0; offsets.len().saturating_sub(1) * DIM], &mut [], &mut [])
        }
    };
    refuses(bag(&[], None, PoolingMode::Sum), &["emb_bag", "got none"]);
    refuses(bag(&[1, 3], None, PoolingMode::Sum), &["emb_bag", "start at 0, got 1"]);
    refuses(bag(&[0, 2, 1], None, PoolingMode::Mean), &["emb_bag", "got 1 after 2 at position 2"]);
    refuses(bag(&[0, 4], None, PoolingMode::Mean), &["emb_bag", "offsets must end at the 3 ids, got 4"]);
    refuses(bag(&[0, 3], Some(&[1.0; 3]), PoolingMode::Max), &["emb_bag", "not with max"]);
    refuses(bag(&[0, 3], Some(&[1.0; 2]), PoolingMode::Sum), &["emb_bag", "expected 3", "got 2"]);
}

#[test]
fn the_policy_error_refuses_values_that_are_not_finite_and_counts_the_refusal() {
    let write = |store: &LocalStore, table| store.write(table, &[4, 5], &[0.0, 0.0, 1.0, f32::NEG_INFINITY]);
    let step = |store: &LocalStore, table| update(store, table, &[4, 5], &[0.0, 0.0, 1.0, f32::NAN]);
    for (call, part) in [
        (&write as &dyn Fn(&LocalStore, TableId) -> Result<()>, "emb_write: row of id 5"),
        (&step, "emb_update: gradient of id 5"),
    ] {
        let store = store();
        let table = open(&store, "t", "");
        let mut before = seen(&store, table);
        let message = call(&store, table).unwrap_err().to_string();
        assert!(
            message.contains(part) && message.contains("at position 1 of table \"t\" holds"),
            "{message}"
        );
        before.0.refusals = 1;
        assert_eq!(seen(&store, table), before);
    }
}

#[test]
fn the_policy_skip_leaves_out_and_counts_what_is_not_finite() {
    let store = store();
    let table = open(&store, "t", r#", "nan_policy": "skip""#);
    store.write(table, &[2, 2, 3], &[0.5, 0.5, f32::NAN, 0.0, 0.0, f32::INFINITY]).unwrap();
    update(&store, table, &[4, 4, 5, 6, 6], &[1.0, 1.0, 1.0, f32::NAN, f32::NAN, 1.0, 3e38, 0.0, 3e38, 0.0])
        .unwrap();
    let (statistics, ids, _, state) = seen(&store, table);
    assert_eq!(statistics.refusals, 2 + 3);
    assert_eq!(ids, [0, 1, 2]);
    assert_eq!(state.unwrap()[4..6], [0.0, 0.0]);
    assert_eq!(store.read_slot(table, "state_sum", &[4]), Ok(Some(vec![0.0, 0.0])));
}

#[test]
fn the_policy_allow_takes_values_as_they_are() {
    let store = store();
    let table = open(&store, "t", r#", "nan_policy": "allow""#);
    store.write(table, &[2], &[f32::INFINITY, 1.0]).unwrap();
    update(&store, table, &[3], &[f32::NAN, 1.0]).unwrap();
    let (statistics, ids, rows, _) = seen(&store, table);
    assert_eq!((statistics.refusals, ids), (0, vec![0, 1, 2, 3]));
    assert_eq!(rows[4..6], [f32::INFINITY, 1.0]);
    assert!(rows[6].is_nan() && rows[7].is_finite());
}

#[test]
fn a_table_that_was_dropped_is_unknown_to_every_call() {
    let store = store();
    let table = open(&store, "t", "");
    store.drop_table("t").unwrap();
    assert_eq!(
        store.drop_table("t"),
        Err(Error::UnknownTable { operation: "drop_table", table: "t".to_owned() })
    );
    let unknown = |operation| Some(Error::UnknownHandle { operation, handle: table.0 });
    assert_eq!(store.read(table, &[1], &mut [0.0; 2]).err(), unknown("emb_read"));
    assert_eq!(store.write(table, &[1], &[0.0; 2]).err(), unknown("emb_write"));
    assert_eq!(update(&store, table, &[1], &[0.0; 2]).err(), unknown("emb_update"));
    assert_eq!(lookup(&store, table, &[1], true).err(), unknown("hashtable_lookup"));
    let bag = bags(&[1], &[0, 1], PoolingMode::Sum);
    assert_eq!(store.bag(&[table], bag, &mut [0.0; 2], &mut [], &mut []).err(), unknown("emb_bag"));
    assert_eq!(store.delete(table, &[1]).err(), unknown("hashtable_delete"));
    assert_eq!(store.clear(table).err(), unknown("hashtable_clear"));
    assert_eq!(store.ids(table).err(), unknown("hashtable_ids"));
    assert_eq!(store.num_rows(table).err(), unknown("hashtable_size"));
    assert_eq!(store.read_slot(table, "state_sum", &[1]).err(), unknown("read_slot"));
    assert_eq!(store.set_learning_rate(table, 0.1, true).err(), unknown("set_learning_rate"));
    assert_eq!(store.statistics(table).err(), unknown("statistics"));
    assert_eq!(store.describe(table).err(), unknown("describe"));
}

#[test]
fn opening_a_table_with_another_configuration_shows_both() {
    refuses(
        |store, _| store.open_numbered("t", &TableConfig::new(3)).map(|_| ()),
        &["\"t\"", "dim 2", "dim 3", "\"kind\":\"adagrad\"", "\"kind\":\"sgd\"", "\"num_embeddings\":10"],
    );
}

#[test]
fn a_table_opens_again_with_another_learning_rate_and_keeps_its_own() {
    let store = store();
    let open = |lr| {
        let text = format!(r#"{{"optimizer": {{"kind": "sgd", "lr": {lr}}}}}"#);
        store.open_numbered("t", &TableConfig::from_json(DIM, &text).unwrap())
    };
    assert_eq!(open(0.5), open(0.25));
    let table = store.find_numbered("t").unwrap().unwrap();
    assert_eq!(store.statistics(table).unwrap().learning_rate, 0.5);
}

#[test]
fn an_invalid_configuration_opens_no_table() {
    let refused = |name: &str, config: TableConfig, part: &str| {
        let store = store();
        let message = store.open_numbered(name, &config).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
        assert!(store.table_names().unwrap().is_empty());
    };
    refused("", TableConfig::new(DIM), "name must not be empty");
    refused("t", TableConfig::new(0), "dim must be at least 1, got 0");
    refused("t", TableConfig { block_size: 0, ..TableConfig::new(DIM) }, "block_size");
    refused("t", TableConfig { block_size: usize::MAX, ..TableConfig::new(DIM) }, "block_size");
    refused("t", TableConfig::new(usize::MAX), "dim");
    refused("t", TableConfig { num_embeddings: Some(0), ..TableConfig::new(DIM) }, "num_embeddings");
}

#[test]
fn a_learning_rate_or_step_out_of_range_is_refused_with_its_value() {
    for (lr, shown) in
        [(-0.5, "got -0.5"), (f64::NAN, "got NaN"), (f64::INFINITY, "got inf"), (1e300, "got 1")]
    {
        refuses(|store, table| store.set_learning_rate(table, lr, true), &["\"t\"", "learning rate", shown]);
    }
    refuses(
        |store, table| store.update(&[TableUpdate { table, chunks: vec![], step: Step::At(0) }]).map(drop),
        &["emb_update", "\"t\"", "from 1 to 2^53"],
    );
}

#[test]
fn ftrl_refuses_a_learning_rate_that_is_zero_in_single_precision() {
    let store = store();
    let config = TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "ftrl"}}"#).unwrap();
    let table = store.open_numbered("t", &config).unwrap();
    for lr in [0.0, 1e-60] {
        let message = store.set_learning_rate(table, lr, true).unwrap_err().to_string();
        assert!(message.contains("for ftrl positive"), "{message}");
    }
    assert_eq!(store.statistics(table).unwrap().learning_rate, 0.01);
}

#[test]
fn a_step_at_the_end_of_its_range_is_not_passed() {
    let store = store();
    let table = open(&store, "t", "");
    store.update(&[TableUpdate { table, chunks: vec![], step: Step::At(MAX_STEP) }]).unwrap();
    update(&store, table, &[1], &[1.0; 2]).unwrap();
    assert_eq!(store.statistics(table).unwrap().step, MAX_STEP);
}

#[test]
fn an_update_of_two_tables_changes_neither_when_the_second_fails() {
    let store = store();
    let (first, second) = (open(&store, "first", r#", "nan_policy": "skip""#), open(&store, "second", ""));
    let before = (seen(&store, first), seen(&store, second));
    let one = |table, ids, gradients| TableUpdate {
        table,
        chunks: vec![GradientChunk::new(ids, gradients, DIM)],
        step: Step::Next,
    };
    let good = one(first, &[0, 7], &[1.0, 1.0, f32::NAN, 0.0]);
    let refused = store.update(&[good.clone(), one(second, &[0, 10], &[1.0; 4])]);
    assert!(refused.unwrap_err().to_string().contains("table \"second\""));
    let unknown = store.update(&[good, one(TableId(99), &[0], &[1.0; 2])]);
    assert_eq!(unknown, Err(Error::UnknownHandle { operation: "emb_update", handle: 99 }));
    assert_eq!((seen(&store, first), seen(&store, second)), before);
}

#[test]
fn of_tables_that_share_a_matrix_each_answers_for_its_own_columns() {
    let store = store();
    let (first, second) = (open(&store, "first", ""), open(&store, "second", r#", "nan_policy": "skip""#));
    // Two rows: the columns of `first`, those of `second`, and two that nobody uses.
    let step = |matrix: &[f32]| {
        let of = |table, first_column| {
            let part =
                GradientPart { stride: 3 * DIM, first_column, ..GradientPart::new(&[3, 1], matrix, DIM) };
            TableUpdate { table, chunks: vec![GradientChunk { parts: vec![part] }], step: Step::Next }
        };
        store.update(&[of(first, 0), of(second, DIM)])
    };
    let mut matrix = [1.0; 6 * DIM];
    matrix[5] = f32::NAN;
    step(&matrix).unwrap();
    assert_eq!((store.ids(first), store.ids(second)), (Ok(vec![0, 1, 3]), Ok(vec![0, 1, 3])));
    let rows = || [first, second].map(|table| (seen(&store, table).2, seen(&store, table).3));
    let before = rows();
    matrix[3 * DIM + 1] = f32::NAN;
    let refused = step(&matrix).unwrap_err().to_string();
    assert!(refused.contains("gradient of id 1 at position 1 of table \"first\" holds NaN"), "{refused}");
    assert_eq!(rows(), before);
    (matrix[3 * DIM + 1], matrix[3 * DIM + 2]) = (1.0, f32::INFINITY);
    step(&matrix).unwrap();
    assert_eq!(store.statistics(second).unwrap().refusals, 1);
    assert!(seen(&store, second).2.iter().all(|value| value.is_finite()));
}

#[test]
fn collectors_keep_their_gradients_when_applying_them_fails() {
    let store = store();
    let (first, second) = (open(&store, "first", ""), open(&store, "second", ""));
    let before = (seen(&store, first), seen(&store, second));
    let collectors = [GradientCollector::default(), GradientCollector::default()];
    let accept = |collector: &GradientCollector<TableId>, table, ids: &[i64]| {
        let gradients = vec![1.0; ids.len() * DIM];
        let opened = store.table("accept_grad", table).unwrap();
        collector.accept_copy(table, &*opened, ids, &gradients, DIM).unwrap();
    };
    accept(&collectors[0], first, &[3, 3]);
    accept(&collectors[1], second, &[-5]);
    let applied = GradientCollector::apply_to(&store, &[&collectors[0], &collectors[1]]);
    assert!(applied.unwrap_err().to_string().contains("id -5 at position 0"));
    assert_eq!(collectors[0].merged(&Serial, &first).unwrap().sums, [2.0, 2.0]);
    assert_eq!(collectors[1].merged(&Serial, &second).unwrap().ids, [-5]);
    assert_eq!((seen(&store, first), seen(&store, second)), before);
    collectors[1].clear();
    GradientCollector::apply_to(&store, &[&collectors[0], &collectors[1]]).unwrap();
    assert_eq!(store.ids(first), Ok(vec![0, 1, 3]));
}

#[test]
fn a_collector_refuses_gradients_that_do_not_fit_and_keeps_none() {
    let store = store();
    let table = open(&store, "t", "");
    let collector = GradientCollector::default();
    let opened = store.table("accept_grad", table).unwrap();
    let message = |table, ids: &[i64], gradients: &[f32], dim| {
        collector.accept_copy(table, &*opened, ids, gradients, dim).unwrap_err().to_string()
    };
    assert_eq!(
        message(table, &[1], &[0.0; 3], 3),
        "accept_grad: table \"t\" has dim 2, got gradient rows of 3"
    );
    let short = message(table, &[1, 2], &[0.0; 3], DIM);
    assert!(
        short.contains("expected 4 gradient values") && short.contains("table \"t\" of dim 2, got 3"),
        "{short}"
    );
    store.drop_table("t").unwrap();
    let dropped = format!("accept_grad: table handle {} is unknown", table.0);
    assert!(message(table, &[], &[], DIM).contains(&dropped));
    assert!(collector.tables().is_empty());
}

#[test]
fn a_handle_refuses_arrays_of_another_shape() {
    let store = Arc::new(store());
    let table = open(&store, "t", "");
    let before = seen(&store, table);
    let config = store.describe(table).unwrap().config;
    let handle = TableHandle::open(Arc::clone(&store), "t", &config).unwrap();
    let ids: Array1<i64> = array![1, 2];
    let error = |rows: Array2<f32>| {
        let written = handle.write(ids.view(), rows.view()).unwrap_err().to_string();
        let updated = handle.update(ids.view(), rows.view()).unwrap_err().to_string();
        (written, updated)
    };
    let (written, updated) = error(Array2::zeros((3, DIM)));
    assert_eq!(written, "emb_write: expected 2 rows for the ids of table \"t\", got 3");
    assert_eq!(updated, "emb_update: expected 2 gradient rows for the ids of table \"t\", got 3");
    let (written, updated) = error(Array2::zeros((2, 3)));
    assert_eq!(written, "emb_write: table \"t\" has dim 2, got rows of 3");
    assert_eq!(updated, "emb_update: table \"t\" has dim 2, got gradient rows of 3");
    assert_eq!(seen(&store, table), before);
}

#[test]
fn a_simd_level_that_this_machine_lacks_is_refused_by_name() {
    let unavailable = [SimdLevel::Baseline, SimdLevel::Avx2, SimdLevel::Avx512]
        .into_iter()
        .filter(|level| !SimdLevel::available().contains(level));
    for level in unavailable {
        let message = store().with_simd(level).unwrap_err().to_string();
        assert!(message.contains(&level.to_string()), "{message}");
    }
    let message = "sse9".parse::<SimdLevel>().unwrap_err().to_string();
    assert_eq!(message.contains("\"sse9\""), message.contains("baseline"), "{message}");
}
