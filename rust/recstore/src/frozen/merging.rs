//! A frozen table of the rows of several, each of which has a part of them.

use std::path::{Path, PathBuf};

use super::encoding::Encoding;
use super::mapped::FrozenMemory;
use super::table::FrozenTable;
use super::writer::{FrozenSpec, write_file};
use crate::config::TableConfig;
use crate::{Error, Result};

/// Writes the rows of the frozen tables at `parts` to one at `to`, to the bit, and returns its bytes.
///
/// # Errors
/// [`Error::Frozen`]: there are no parts, one is no frozen table or a byte of it was changed, they are of tables of other
/// names, configurations or encodings, an id is in two of them; `to` cannot be written.
pub fn freeze_parts(parts: &[PathBuf], to: &Path) -> Result<u64> {
    let parts = parts.iter().map(|path| Part::open(path)).collect::<Result<Vec<_>>>()?;
    let refused =
        |message: &str| Error::Frozen { path: to.display().to_string(), message: message.to_owned() };
    let first = parts.first().ok_or_else(|| refused("there are no parts"))?;
    for other in &parts[1..] {
        other.check_same_as(first)?;
    }
    let all: Vec<i64> = parts.iter().flat_map(|part| part.ids.iter().copied()).collect();
    let (name, config, encoding) = first.described();
    write_file(to, FrozenSpec { name, config, encoding }, all, |ids| {
        let mut rows = Vec::new();
        for &id in ids {
            let found = parts.iter().find_map(|part| part.table.row_of(id).transpose());
            rows.extend_from_slice(found.ok_or_else(|| refused("an id of the parts is in none of them"))??);
        }
        Ok(rows)
    })
}

struct Part<'a> {
    path: &'a Path,
    table: FrozenTable,
    ids: Vec<i64>,
}

impl<'a> Part<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let table = FrozenTable::open(path, FrozenMemory::Mapped)?;
        table.verify()?;
        let ids = table.ids()?;
        Ok(Self { path, table, ids })
    }

    fn described(&self) -> (&str, &TableConfig, Encoding) {
        (self.table.name(), self.table.config(), self.table.encoding())
    }

    fn check_same_as(&self, first: &Self) -> Result<()> {
        if self.described() == first.described() {
            return Ok(());
        }
        let message = format!("it is no part of the same table as {}", first.path.display());
        Err(Error::Frozen { path: self.path.display().to_string(), message })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::writer::freeze;
    use super::*;

    fn written(path: &Path, name: &str, encoding: Encoding, rows: &BTreeMap<i64, [f32; 3]>) {
        let config = TableConfig { dim: 3, ..TableConfig::default() };
        let ids: Vec<i64> = rows.keys().copied().collect();
        let spec = FrozenSpec { name, config: &config, encoding };
        freeze(path, spec, &ids, |ids, values| {
            values.copy_from_slice(&ids.iter().flat_map(|id| rows[id]).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
    }

    fn message(parts: &[PathBuf], to: &Path) -> String {
        freeze_parts(parts, to).unwrap_err().to_string()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn parts_together_are_the_table(
            rows in prop::collection::btree_map(any::<i64>(), prop::array::uniform3(-9f32..9.0), 0..200),
            count in 1usize..5,
            encoding in prop::sample::select(vec![Encoding::Float32, Encoding::Int4]),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let paths: Vec<_> = (0..count).map(|part| directory.path().join(part.to_string())).collect();
            for (part, path) in paths.iter().enumerate() {
                let own = rows.iter().filter(|(id, _)| id.rem_euclid(count as i64) == part as i64);
                written(path, "t", encoding, &own.map(|(&id, &row)| (id, row)).collect());
            }
            let (merged, whole) = (directory.path().join("merged"), directory.path().join("whole"));
            let bytes = freeze_parts(&paths, &merged).unwrap();
            written(&whole, "t", encoding, &rows);
            prop_assert_eq!(std::fs::metadata(&merged).unwrap().len(), bytes);
            prop_assert_eq!(std::fs::read(&merged).unwrap(), std::fs::read(&whole).unwrap());
            let [merged, whole] = [&merged, &whole].map(|path| Part::open(path).unwrap());
            prop_assert_eq!(merged.described(), whole.described());
        }
    }

    #[test]
    fn parts_that_do_not_belong_together_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let rows = |ids: &[i64]| ids.iter().map(|&id| (id, [0.5; 3])).collect::<BTreeMap<_, _>>();
        written(&path("a"), "t", Encoding::Float32, &rows(&[1, 2]));
        written(&path("b"), "u", Encoding::Float32, &rows(&[3]));
        written(&path("c"), "t", Encoding::Int8, &rows(&[3]));
        written(&path("d"), "t", Encoding::Float32, &rows(&[2, 3]));
        for other in ["b", "c"] {
            let message = message(&[path("a"), path(other)], &path("to"));
            assert!(message.contains("it is no part of the same table as"), "{message}");
        }
        assert!(message(&[path("a"), path("d")], &path("to")).contains("id 2 is there twice"));
        assert!(message(&[], &path("to")).contains("there are no parts"));
        assert!(!path("to").exists());
    }
}
