//! A memory limit kept by eviction: rows leave for new ones, and nothing but what the policy says.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod checkpoints;
mod numbered;

use std::collections::BTreeMap;

use checkpoints::{open, save, store, update};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{Error, LocalStore, SaveKind, TableId};

const DIM: usize = 16;
/// Room for some thousands of rows.
const LIMIT: usize = 1 << 20;

fn config(more: &str) -> String {
    format!(
        r#"{{"optimizer": {{"kind": "adagrad", "lr": 0.1}}, "memory_limit": {LIMIT},
            "eviction": {{"ttl": 1000000, "interval": 1000000{more}}}}}"#
    )
}

/// Takes a step of the ids, without duplicates.
fn step(store: &LocalStore, table: TableId, ids: &[i64]) {
    update(store, table, ids, &vec![0.5; ids.len() * DIM]);
}

fn is_there(store: &LocalStore, table: TableId, id: i64) -> bool {
    let (mut index, mut row) = ([0], [0.0; DIM]);
    store.lookup(table, &[id], false, &mut index, &mut row).unwrap();
    index[0] >= 0
}

#[test]
fn ids_come_for_ever_and_the_limit_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let store = store();
    let table = open(&store, "t", DIM, &config(""));
    let mut rows = Vec::new();
    for number in 0..400 {
        let ids: Vec<i64> = (number * 500..(number + 1) * 500).collect();
        step(&store, table, &ids);
        let statistics = store.statistics(table).unwrap();
        assert!(statistics.bytes <= LIMIT, "step {number}: {statistics:?}");
        assert!(ids.iter().all(|id| is_there(&store, table, *id)), "step {number}");
        assert_eq!(statistics.rows as u64, statistics.inserts - statistics.evictions);
        rows.push(statistics.rows);
        if number == 100 {
            // From here on the ids that leave are noted for a delta, which cannot go on for ever.
            save(&store, directory.path(), SaveKind::Full).unwrap();
        }
    }
    let (least, most) = (rows[50..].iter().min().unwrap(), rows[50..].iter().max().unwrap());
    assert!(least * 2 > *most, "{least} to {most} rows");
    save(&store, directory.path(), SaveKind::Delta).unwrap();
    let loaded = checkpoints::store();
    open(&loaded, "t", DIM, &config(""));
    checkpoints::load(&loaded, directory.path()).unwrap();
    assert!(checkpoints::state(&loaded) == checkpoints::state(&store));
}

#[test]
fn the_rows_of_the_call_and_those_to_keep_stay() {
    let store = store();
    let table = open(&store, "t", DIM, &config(r#", "keep": [3, 4]"#));
    step(&store, table, &(0..1_000).collect::<Vec<i64>>());
    for number in 1..40 {
        // The ids 10 to 20 are the oldest when their turn comes, but needed just then.
        let old = 10 * number..10 * (number + 1);
        let ids: Vec<i64> = old.clone().chain(number * 10_000..number * 10_000 + 600).collect();
        let before: Vec<bool> = old.clone().map(|id| is_there(&store, table, id)).collect();
        step(&store, table, &ids);
        assert!(ids.iter().all(|id| is_there(&store, table, *id)));
        assert!(before.len() == 10 && [3, 4].iter().all(|id| is_there(&store, table, *id)));
    }
    assert!(!is_there(&store, table, 900));
}

#[test]
fn more_than_fits_at_once_is_refused_and_nothing_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let store = store();
    let table = open(&store, "t", DIM, &config(""));
    step(&store, table, &(0..2_000).collect::<Vec<i64>>());
    let before = checkpoints::state(&store);
    let ids: Vec<i64> = (10_000..110_000).collect();
    let error = store.write(table, &ids, &vec![1.0; ids.len() * DIM]).unwrap_err();
    assert!(matches!(&error, Error::MemoryLimit { table, .. } if table == "t"), "{error}");
    assert!(checkpoints::state(&store) == before);

    // A checkpoint of more rows than fit is refused too: none of them would be missed.
    let large = checkpoints::store();
    let unlimited = config("").replace(&format!(r#""memory_limit": {LIMIT},"#), "");
    let table = open(&large, "t", DIM, &unlimited);
    step(&large, table, &ids);
    save(&large, directory.path(), SaveKind::Full).unwrap();
    let error = checkpoints::load(&store, directory.path()).unwrap_err();
    assert!(matches!(error, Error::MemoryLimit { operation: "load", .. }), "{error}");
    assert!(checkpoints::state(&store) == before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whoever_leaves_is_less_than_whoever_stays(
        steps in prop::collection::vec((0..6_000i64, 1..900usize), 1..60),
        is_lfu in any::<bool>(),
    ) {
        let policy = if is_lfu { r#", "capacity": 1000000, "policy": "lfu""# } else { "" };
        let store = store();
        let table = open(&store, "t", DIM, &config(policy));
        // Step and count of each row.
        let mut usages: BTreeMap<i64, (u64, u64)> = BTreeMap::new();
        for (number, (start, count)) in (1..).zip(steps) {
            let ids: Vec<i64> = (start..start + count as i64).collect();
            step(&store, table, &ids);
            let rank = |(step, count): (u64, u64), id: i64| if is_lfu { (count, step, id) } else { (step, count, id) };
            let (stayed, left): (Vec<i64>, Vec<i64>) = usages.keys().copied().partition(|id| is_there(&store, table, *id));
            let most = left.iter().map(|id| rank(usages[id], *id)).max();
            let least = stayed.iter().filter(|id| !ids.contains(id)).map(|id| rank(usages[id], *id)).min();
            if let (Some(most), Some(least)) = (most, least) {
                prop_assert!(most < least, "{most:?} left, {least:?} stayed");
            }
            left.iter().for_each(|id| _ = usages.remove(id));
            for id in ids {
                prop_assert!(is_there(&store, table, id));
                let usage = usages.entry(id).or_default();
                *usage = (number, usage.1 + 1);
            }
            prop_assert_eq!(store.statistics(table).unwrap().rows, usages.len());
        }
    }
}

#[test]
fn ids_far_from_each_other_find_the_room_of_those_side_by_side() {
    for more in ["", r#", "capacity": 1000000, "policy": "lfu""#] {
        let store = store();
        let table = open(&store, "t", DIM, &config(more));
        for start in (0..20_000).step_by(500) {
            step(&store, table, &(start..start + 500).collect::<Vec<i64>>());
        }
        for start in (0..20_000).step_by(500) {
            let ids: Vec<i64> = (start..start + 500).map(|number| number << 40).collect();
            step(&store, table, &ids);
            assert!(ids.iter().all(|id| is_there(&store, table, *id)), "{start}");
            assert!(store.statistics(table).unwrap().bytes <= LIMIT);
        }
    }
}
