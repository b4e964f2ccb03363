//! A frozen table whose rows are kept as new as those of another one, by what is told of it.

use std::sync::{Arc, PoisonError, RwLock};

use super::changed::{Both, Changed, RowChanges};
use super::table::FrozenTable;
use super::walk::{read, row_numbers};
use crate::Result;
use crate::kernel::parallel::Executor;

/// A frozen table and what changed in it.
pub(super) struct FollowedTable {
    frozen: FrozenTable,
    changed: RwLock<Arc<Changed>>,
}

/// Gives a reader the rows as they are at one moment: the frozen table alone where nothing has changed, for that is read
/// faster.
macro_rules! with_rows {
    ($table:expr, $changed:expr, $source:ident => $read:expr) => {
        if $changed.is_empty() {
            let $source = $table.frozen().rows();
            $read
        } else {
            let $source = Both { frozen: $table.frozen().rows(), changed: $changed };
            $read
        }
    };
}
pub(super) use with_rows;

impl FollowedTable {
    pub(super) fn new(frozen: FrozenTable) -> Self {
        Self { frozen, changed: RwLock::default() }
    }

    /// Returns the table as it was frozen.
    pub(super) fn frozen(&self) -> &FrozenTable {
        &self.frozen
    }

    /// Returns what has changed: later changes leave it as it is.
    pub(super) fn changed(&self) -> Arc<Changed> {
        Arc::clone(&self.changed.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes changes. Those who read meanwhile go on with the rows as they were, at the cost of a copy of all that
    /// changed before.
    ///
    /// # Errors
    /// [`crate::Error::LengthMismatch`]; [`crate::Error::Frozen`]; [`crate::Error::IdOutOfRange`]. Then nothing has changed.
    pub(super) fn change(&self, changes: RowChanges<'_>) -> Result<()> {
        const OPERATION: &str = "follow";
        let rules = self.frozen.rules();
        rules.check_ids(OPERATION, changes.ids)?;
        let expected = changes.ids.len() * self.frozen.row_bytes();
        rules.check_length(OPERATION, "bytes of rows", expected, changes.rows.len())?;
        let mut changed = self.changed.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut changed).take(&self.frozen, changes)
    }

    /// As [`FrozenTable::read`].
    pub(super) fn read(&self, executor: &dyn Executor, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.frozen.rules().check_rows("emb_read", ids, rows.len())?;
        let changed = self.changed();
        with_rows!(self, &*changed, source => read(source, self.frozen.simd(), executor, ids, rows))
    }

    /// As [`FollowedTable::read`]; writes a number of each id's row to `numbers` too, -1 where it has none.
    pub(super) fn lookup(
        &self,
        executor: &dyn Executor,
        ids: &[i64],
        numbers: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        let changed = self.changed();
        with_rows!(self, &*changed, source => {
            read(source, self.frozen.simd(), executor, ids, rows)?;
            row_numbers(source, ids, numbers)
        })
    }

    /// Returns all ids that have a row.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`].
    pub(super) fn ids(&self) -> Result<Vec<i64>> {
        let changed = self.changed();
        let mut ids = self.frozen.ids()?;
        ids.retain(|id| changed.knows(*id).is_none());
        ids.extend(changed.ids());
        Ok(ids)
    }

    /// Returns the number of rows.
    pub(super) fn num_rows(&self) -> usize {
        self.changed().num_rows(self.frozen.num_rows())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::config::TableConfig;
    use crate::frozen::{Encoding, FrozenMemory, FrozenSpec, freeze};
    use crate::kernel::parallel::Serial;
    use crate::kernel::simd::{ScalarLanes, Simd};
    use crate::table::Initializer;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    const DIM: usize = 3;
    const CONFIG: &str = r#"{"initializer": {"kind": "normal", "std": 1.0}, "num_embeddings": 60}"#;

    type Rows = BTreeMap<i64, [f32; DIM]>;

    fn opened(directory: &Path, kept: &Rows, encoding: Encoding) -> FollowedTable {
        let (path, config) = (directory.join("t"), TableConfig::from_json(DIM, CONFIG).unwrap());
        let spec = FrozenSpec { name: "t", config: &config, encoding };
        let read = |ids: &[i64], rows: &mut [f32]| {
            ids.iter().zip(rows.chunks_mut(DIM)).for_each(|(id, row)| row.copy_from_slice(&kept[id]));
            Ok(())
        };
        freeze(&path, spec, &kept.keys().copied().collect::<Vec<_>>(), read).unwrap();
        FollowedTable::new(FrozenTable::open(&path, FrozenMemory::Mapped).unwrap())
    }

    fn encoded(encoding: Encoding, rows: &Rows) -> Vec<u8> {
        let mut bytes = vec![0; rows.len() * encoding.row_bytes(DIM)];
        for (row, bytes) in rows.values().zip(bytes.chunks_mut(encoding.row_bytes(DIM))) {
            encoding.encode(row, bytes).unwrap();
        }
        bytes
    }

    fn change(table: &FollowedTable, rows: &Rows, deleted: &[i64]) -> Result<()> {
        let ids: Vec<i64> = rows.keys().copied().collect();
        let bytes = encoded(table.frozen().encoding(), rows);
        table.change(RowChanges { ids: &ids, rows: &bytes, deleted })
    }

    fn read_from(table: &FollowedTable, changed: &Changed) -> Vec<f32> {
        let ids: Vec<i64> = (0..60).collect();
        let (mut rows, simd) = (vec![f32::NAN; ids.len() * DIM], table.frozen.simd());
        with_rows!(table, changed, source => read(source, simd, &Serial, &ids, &mut rows)).unwrap();
        rows
    }

    fn read_all(table: &FollowedTable) -> Vec<f32> {
        read_from(table, &table.changed())
    }

    /// The rows that a table frozen with all of them has.
    fn expected(encoding: Encoding, model: &Rows) -> Vec<f32> {
        let initializer = Initializer::new("t", &TableConfig::from_json(DIM, CONFIG).unwrap());
        let mut rows = vec![0.0; 60 * DIM];
        for (id, row) in (0..60).zip(rows.chunks_mut(DIM)) {
            match model.get(&id) {
                None => initializer.fill(Simd::baseline(), &[id], row),
                Some(own) => {
                    let mut bytes = vec![0; encoding.row_bytes(DIM)];
                    encoding.encode(own, &mut bytes).unwrap();
                    encoding.decode(ScalarLanes, &bytes, row);
                }
            }
        }
        rows
    }

    fn rows() -> impl Strategy<Value = Rows> {
        let row = prop::array::uniform3(-4i8..4).prop_map(|row| row.map(f32::from));
        prop::collection::btree_map(0i64..60, row, 0..12)
    }

    proptest! {
        #[test]
        fn rows_are_those_of_a_plain_map(
            kept in rows(), changes in prop::collection::vec((rows(), prop::collection::vec(0i64..60, 0..12)), 0..12),
            encoding in prop::sample::select(Encoding::ALL.to_vec()),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let table = opened(directory.path(), &kept, encoding);
            let mut model = kept;
            for (changed, deleted) in changes {
                let (before, was) = (table.changed(), read_all(&table));
                change(&table, &changed, &deleted).unwrap();
                deleted.iter().for_each(|id| { model.remove(id); });
                model.extend(changed);
                prop_assert_eq!(read_all(&table), expected(encoding, &model));
                let ids: BTreeSet<i64> = table.ids().unwrap().into_iter().collect();
                prop_assert_eq!(&ids, &model.keys().copied().collect());
                prop_assert_eq!(table.num_rows(), model.len());
                let (mut numbers, mut read) = (vec![0; 60], vec![0.0; 60 * DIM]);
                table.lookup(&Serial, &(0..60).collect::<Vec<_>>(), &mut numbers, &mut read).unwrap();
                prop_assert_eq!(numbers.iter().filter(|number| **number >= 0).count(), model.len());
                // Whoever reads meanwhile has the rows of before.
                prop_assert_eq!(read_from(&table, &before), was);
            }
        }
    }

    #[test]
    fn changes_that_do_not_fit_change_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let table = opened(directory.path(), &Rows::from([(1, [1.0; DIM])]), Encoding::Float32);
        let before = read_all(&table);
        let refused = |ids, rows| table.change(RowChanges { ids, rows, deleted: &[1] }).unwrap_err();
        let error = refused(&[2], &[0; 11]);
        assert_eq!(error.to_string(), "follow: expected 12 bytes of rows for the ids of table \"t\", got 11");
        assert!(matches!(refused(&[60], &[0; 12]), Error::IdOutOfRange { id: 60, .. }));
        assert_eq!(read_all(&table), before);
    }
}
