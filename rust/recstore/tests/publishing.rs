//! What tables tell those who follow them, beside plain maps.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use recstore::{
    ChangedRows, EmbeddingStore, EmbeddingTable, Error, GradientChunk, LoadOptions, LocalStore, Publications,
    SaveOptions, Serial, Step, TableConfig, TableId, TableUpdate,
};

const DIM: usize = 2;

type Rows = BTreeMap<i64, Vec<f32>>;

#[derive(Debug, Clone)]
enum Change {
    Write(Vec<i64>),
    Train(Vec<i64>),
    Delete(Vec<i64>),
    Clear,
    Save,
    Tell,
    FailToTell,
}

fn change() -> impl Strategy<Value = Change> {
    let ids = || prop::collection::vec(0i64..40, 0..8);
    prop_oneof![
        3 => ids().prop_map(Change::Write),
        3 => ids().prop_map(Change::Train),
        2 => ids().prop_map(Change::Delete),
        1 => Just(Change::Clear),
        1 => Just(Change::Save),
        4 => Just(Change::Tell),
        2 => Just(Change::FailToTell),
    ]
}

fn store() -> (LocalStore, Vec<Arc<dyn EmbeddingTable>>) {
    let store = LocalStore::new(Box::new(Serial));
    let config = |json: &str| TableConfig::from_json(DIM, json).unwrap();
    let plain = config(r#"{"initializer": {"kind": "normal", "std": 1.0}}"#);
    let halved = config(r#"{"dtype": "bfloat16", "optimizer": {"kind": "adam", "lr": 0.1}}"#);
    let tables =
        vec![store.open_table("plain", &plain).unwrap(), store.open_table("halved", &halved).unwrap()];
    (store, tables)
}

fn rows_of(table: &dyn EmbeddingTable) -> Rows {
    let ids = table.ids().unwrap();
    let mut rows = vec![0.0; ids.len() * DIM];
    table.read(&ids, &mut rows).unwrap();
    ids.into_iter().zip(rows.chunks(DIM).map(<[f32]>::to_vec)).collect()
}

fn take(followed: &mut Rows, changed: &ChangedRows) {
    changed.deleted.iter().for_each(|id| _ = followed.remove(id));
    followed.extend(changed.ids.iter().copied().zip(changed.rows.chunks(DIM).map(<[f32]>::to_vec)));
}

fn apply(store: &LocalStore, tables: &[Arc<dyn EmbeddingTable>], change: &Change, place: usize) {
    match change {
        Change::Write(ids) => tables.iter().for_each(|table| {
            let rows: Vec<f32> = (0..ids.len() * DIM).map(|value| (place * 7 + value) as f32).collect();
            table.write(ids, &rows).unwrap();
        }),
        Change::Train(ids) => {
            let gradients = vec![1.0; ids.len() * DIM];
            let update = |table: &Arc<dyn EmbeddingTable>| TableUpdate {
                table: table.id(),
                chunks: vec![GradientChunk::new(ids, &gradients, DIM)],
                step: Step::Next,
            };
            store.update(&tables.iter().map(update).collect::<Vec<_>>()).unwrap();
        }
        Change::Delete(ids) => tables.iter().for_each(|table| _ = table.delete(ids).unwrap()),
        Change::Clear => tables[place % 2].clear().unwrap(),
        Change::Save => {
            let directory = tempfile::tempdir().unwrap();
            store.save(directory.path(), &SaveOptions::default()).unwrap();
        }
        Change::Tell | Change::FailToTell => {}
    }
}

proptest! {
    #[test]
    fn those_who_follow_have_the_rows_of_the_moment(changes in prop::collection::vec(change(), 0..60)) {
        let (store, tables) = store();
        let ids: Vec<TableId> = tables.iter().map(|table| table.id()).collect();
        let mut followed: Vec<Rows> = tables.iter().map(|table| rows_of(&**table)).collect();
        let publication = store.begin_publication(&ids).unwrap();
        let mut was_told = true;
        for (place, change) in changes.iter().chain([&Change::Tell]).enumerate() {
            apply(&store, &tables, change, place);
            if !matches!(change, Change::Tell | Change::FailToTell) {
                continue;
            }
            let changed = store.take_changes(&ids, publication, was_told).unwrap();
            was_told = matches!(change, Change::Tell);
            if was_told {
                followed.iter_mut().zip(&changed).for_each(|(own, changed)| take(own, changed));
                let now: Vec<Rows> = tables.iter().map(|table| rows_of(&**table)).collect();
                prop_assert_eq!(&followed, &now);
            }
        }
        let none = store.take_changes(&ids, publication, true).unwrap();
        prop_assert!(none.iter().all(|changed| changed == &ChangedRows::default()), "nothing changed since");
    }
}

#[test]
fn only_what_changed_is_told() {
    let (store, tables) = store();
    let ids: Vec<TableId> = tables.iter().map(|table| table.id()).collect();
    tables[0].write(&[1, 2, 3], &[0.0; 6]).unwrap();
    let publication = store.begin_publication(&ids).unwrap();
    tables[0].write(&[2, 9], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    tables[0].delete(&[3, 77]).unwrap();
    let changed = store.take_changes(&ids, publication, true).unwrap();
    let expected = ChangedRows { ids: vec![2, 9], rows: vec![1.0, 2.0, 3.0, 4.0], deleted: vec![3] };
    assert_eq!(changed, [expected, ChangedRows::default()]);
}

#[test]
fn what_cannot_be_told_is_an_error() {
    let (store, tables) = store();
    let ids: Vec<TableId> = tables.iter().map(|table| table.id()).collect();
    let twice = store.begin_publication(&[ids[0], ids[0]]).unwrap_err().to_string();
    assert!(twice.contains("publish: table \"plain\" is given twice"), "{twice}");
    let publication = store.begin_publication(&ids).unwrap();
    let error = store.begin_publication(&ids[1..]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "publish: table \"halved\" is published already: close the other publisher first"
    );
    let directory = tempfile::tempdir().unwrap();
    store.save(directory.path(), &SaveOptions::default()).unwrap();
    store.load(directory.path(), &LoadOptions::default()).unwrap();
    let error = store.take_changes(&ids, publication, true).unwrap_err();
    assert!(matches!(error, Error::NotPublished { .. }));
    let message = error.to_string();
    assert!(
        message.ends_with("are no longer noted: it was loaded anew, or had no memory left for them"),
        "{message}"
    );
    store.end_publication(&ids, publication).unwrap();
    let next = store.begin_publication(&ids).unwrap();
    store.end_publication(&ids, publication).unwrap();
    assert!(store.take_changes(&ids, next, true).is_ok(), "the end of another one is none of this one");
}

/// Tables are opened where dropped ones lay in memory, so that their addresses do not rise.
#[test]
fn the_error_of_several_tables_is_that_of_the_one_opened_first() {
    let (store, _) = store();
    let config = TableConfig::from_json(DIM, "{}").unwrap();
    for number in 0..64 {
        store.open_table(&format!("before {number}"), &config).unwrap();
    }
    for number in (0..64).rev() {
        store.drop_table(&format!("before {number}")).unwrap();
    }
    let opened: Vec<TableId> =
        (0..32).map(|number| store.open_table(&format!("after {number}"), &config).unwrap().id()).collect();
    let published = store.begin_publication(&opened).unwrap();
    store.end_publication(&opened, published).unwrap();
    for count in 2..opened.len() {
        let asked: Vec<TableId> = opened[opened.len() - count..].iter().rev().copied().collect();
        let error = store.take_changes(&asked, published, true).unwrap_err();
        assert_eq!(error, Error::NotPublished { table: format!("after {}", opened.len() - count) });
    }
}
