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

fn make(directory: &Path) {
    for encoding in Encoding::ALL {
        let spec = FrozenSpec { name: "t", config: &config(), encoding };
        let read = |ids: &[i64], into: &mut [f32]| {
            into.copy_from_slice(&rows(ids));
            Ok(())
        };
        freeze(&directory.join(encoding.to_string()), spec, &ids(), read).unwrap();
    }
}

/// Makes such files in the directory that `RECSTORE_FIXTURES` names.
#[test]
fn specimens_are_made_where_a_variable_says() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = env::var_os("RECSTORE_FIXTURES").map_or(temporary.path().to_owned(), PathBuf::from);
    make(&directory);
    check(&directory);
}

fn read(path: &Path, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![f32::NAN; ids.len() * DIM];
    FrozenTable::open(path, FrozenMemory::Mapped).unwrap().read(&Serial, ids, &mut rows).unwrap();
    rows
}

fn check(directory: &Path) {
    for encoding in Encoding::ALL {
        let path = directory.join(encoding.to_string());
        let table = FrozenTable::open(&path, FrozenMemory::Copied).unwrap();
        assert_eq!((table.name(), table.encoding(), table.num_rows()), ("t", encoding, ids().len()));
        assert_eq!(table.config(), &config());
        let mut found = table.ids().unwrap();
        let mut expected = ids();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
        let bound = match encoding {
            Encoding::Int4 => 1.0,
            Encoding::Int8 => 0.06,
            _ => 0.0,
        };
        for (found, expected) in read(&path, &ids()).iter().zip(rows(&ids())) {
            assert!((found - expected).abs() <= bound, "{encoding}: {found} is {expected}");
        }
    }
}

#[test]
fn files_of_version_1_are_read() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/frozen_v1");
    check(&directory);
    let fresh = tempfile::tempdir().unwrap();
    make(fresh.path());
    for encoding in Encoding::ALL.map(|encoding| encoding.to_string()) {
        let asked: Vec<i64> = ids().into_iter().chain(100..120).collect();
        let old = read(&directory.join(&encoding), &asked);
        assert_eq!(read(&fresh.path().join(&encoding), &asked), old, "{encoding}, with initial values");
    }
}
