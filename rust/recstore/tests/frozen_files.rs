//! Frozen tables of the formats of earlier releases read as they were written.
//!
//! They were made once; the README beside each says how.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::env;
use std::path::{Path, PathBuf};

use recstore::{Encoding, FrozenMemory, FrozenSpec, FrozenTable, Serial, TableConfig, freeze};

const DIM: usize = 5;

/// Ids far apart, ids side by side, and those of both ends.
fn ids() -> Vec<i64> {
    let far = (0..40i64).map(|number| number * number * 7_919 - 1_000_003);
    (0..20).chain(far).chain([i64::MIN, i64::MAX]).collect()
}

fn config() -> TableConfig {
    TableConfig::from_json(DIM, r#"{"initializer": {"kind": "normal", "std": 1.0}, "seed": 3}"#).unwrap()
}

/// Eighths, which every encoding but the codes keeps.
fn row(id: i64) -> [f32; DIM] {
    std::array::from_fn(|column| (id.rem_euclid(97) + column as i64 * 13) as f32 / 8.0)
}

fn rows(ids: &[i64]) -> Vec<f32> {
    ids.iter().flat_map(|&id| row(id)).collect()
}

fn write(path: &Path, ids: &[i64], encoding: Encoding) {
    let spec = FrozenSpec { name: "t", config: &config(), encoding };
    let read = |ids: &[i64], into: &mut [f32]| {
        into.copy_from_slice(&rows(ids));
        Ok(())
    };
    freeze(path, spec, ids, read).unwrap();
}

/// Ids for the two kinds of index that those of [`ids`] do not get.
fn close_ids() -> [(&'static str, Vec<i64>); 2] {
    [("near", (-20..20).map(|id| id * 3).collect()), ("consecutive", (-5..40).collect())]
}

fn make(directory: &Path) {
    for encoding in Encoding::ALL {
        write(&directory.join(encoding.to_string()), &ids(), encoding);
    }
    for (name, ids) in close_ids() {
        write(&directory.join(name), &ids, Encoding::Int8);
    }
}

/// Makes such files in the directory that `RECSTORE_FIXTURES` names.
#[test]
fn specimens_are_made_where_a_variable_says() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = env::var_os("RECSTORE_FIXTURES").map_or(temporary.path().to_owned(), PathBuf::from);
    make(&directory);
    check_encodings(&directory);
}

fn read(path: &Path, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    FrozenTable::open(path, FrozenMemory::Mapped).unwrap().read(&Serial, ids, &mut rows).unwrap();
    rows
}

fn check_encodings(directory: &Path) {
    for encoding in Encoding::ALL {
        check(&directory.join(encoding.to_string()), &ids(), encoding);
    }
}

fn check(path: &Path, ids: &[i64], encoding: Encoding) {
    let table = FrozenTable::open(path, FrozenMemory::Copied).unwrap();
    assert_eq!((table.name(), table.encoding(), table.num_rows()), ("t", encoding, ids.len()));
    assert_eq!(table.config(), &config());
    let (mut found, mut expected) = (table.ids().unwrap(), ids.to_vec());
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
    let bound = match encoding {
        Encoding::Int4 => 1.0,
        Encoding::Int8 => 0.06,
        _ => 0.0,
    };
    for (found, expected) in read(path, ids).iter().zip(rows(ids)) {
        assert!((found - expected).abs() <= bound, "{encoding}: {found} is {expected}");
    }
}

/// Files read what those written today do, initial values included.
fn check_as_written_today(directory: &Path, names: &[String]) {
    let fresh = tempfile::tempdir().unwrap();
    make(fresh.path());
    for name in names {
        let asked: Vec<i64> = ids().into_iter().chain(-70..120).collect();
        let old = read(&directory.join(name), &asked);
        assert_eq!(read(&fresh.path().join(name), &asked), old, "{name}");
    }
}

fn encodings() -> Vec<String> {
    Encoding::ALL.map(|encoding| encoding.to_string()).to_vec()
}

fn specimens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[test]
fn files_of_version_1_are_read() {
    check_encodings(&specimens("frozen_v1"));
    check_as_written_today(&specimens("frozen_v1"), &encodings());
}

#[test]
fn files_of_version_2_are_read() {
    let directory = specimens("frozen_v2");
    check_encodings(&directory);
    for (name, ids) in close_ids() {
        check(&directory.join(name), &ids, Encoding::Int8);
    }
    let close = close_ids().map(|(name, _)| name.to_owned());
    check_as_written_today(&directory, &[encodings(), close.to_vec()].concat());
}
