//! Frozen tables as a store: what reads works, what changes is refused.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::bags::pool;
use super::changed::RowChanges;
use super::encoding::Encoding;
use super::followed::FollowedTable;
use super::mapped::FrozenMemory;
use super::table::FrozenTable;
use crate::calls::{MemoryUse, TableDescription, TableId, TableStatistics, TableUpdate};
use crate::checkpoint::{LoadOptions, LoadReport, SaveOptions, SaveReport};
use crate::config::TableConfig;
use crate::fork;
use crate::kernel::parallel::Executor;
use crate::kernel::simd::{Simd, SimdLevel};
use crate::rows::pooling::BagInput;
use crate::store::embedding_store::EmbeddingStore;
use crate::store::embedding_table::EmbeddingTable;
use crate::table::{TAG_WORDS, TableValidator};
use crate::{Error, Result};

/// No row lies where a step could change it.
const NO_PLACE: u32 = u32::MAX;

/// The frozen tables that are open in a process. Two may have one name.
pub struct FrozenStore {
    executor: Arc<dyn Executor>,
    simd: SimdLevel,
    tables: RwLock<BTreeMap<TableId, Arc<OpenTable>>>,
    /// How many were opened so far.
    opened: AtomicI64,
}

impl fmt::Debug for FrozenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrozenStore").field("tables", &self.names()).finish_non_exhaustive()
    }
}

impl FrozenStore {
    /// No table is open.
    pub fn new(executor: Box<dyn Executor>) -> Self {
        let simd = SimdLevel::detect();
        Self { executor: Arc::from(executor), simd, tables: RwLock::default(), opened: AtomicI64::new(0) }
    }

    /// Reads with kernels compiled for another level than the machine's widest.
    ///
    /// # Errors
    /// [`Error::UnavailableSimd`].
    pub fn with_simd(mut self, level: SimdLevel) -> Result<Self> {
        self.simd = Simd::new(level).map(|_| level)?;
        Ok(self)
    }

    /// Opens the table of a file, whose `path` is for errors.
    ///
    /// # Errors
    /// As [`FrozenTable::of_file`].
    pub fn open(&self, file: &File, path: &Path, memory: FrozenMemory) -> Result<Arc<dyn EmbeddingTable>> {
        let table = FrozenTable::of_file(file, path, memory)?.with_simd(self.simd)?;
        // After the file is read: a fork waits for those within, and a file that is copied takes long.
        let _gate = fork::enter();
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        let id = TableId(self.opened.fetch_add(1, Ordering::Relaxed) + 1);
        let table = FollowedTable::new(table);
        let opened = Arc::new(OpenTable { id, table, executor: Arc::clone(&self.executor) });
        tables.insert(id, Arc::clone(&opened));
        Ok(opened)
    }

    /// Returns how the rows of a table are kept, and the fingerprint of its file.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`].
    pub fn describe_file(&self, id: TableId) -> Result<(Encoding, u32)> {
        let open = self.opened("describe_file", id)?;
        Ok((open.table.frozen().encoding(), open.table.frozen().fingerprint()))
    }

    /// Takes what changed in the table that was frozen. A reader has all of it or nothing.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`]; [`Error::LengthMismatch`]; [`Error::IdOutOfRange`]; [`Error::Frozen`]. Then nothing has
    /// changed.
    pub fn change(&self, id: TableId, changes: RowChanges<'_>) -> Result<()> {
        self.opened("follow", id)?.table.change(changes)
    }

    /// Forgets a table; whoever has it still reads it.
    pub fn close(&self, id: TableId) {
        let _gate = fork::enter();
        self.tables.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    fn opened(&self, operation: &'static str, id: TableId) -> Result<Arc<OpenTable>> {
        let _gate = fork::enter();
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        tables.get(&id).cloned().ok_or(Error::UnknownHandle { operation, handle: id.0 })
    }

    fn names(&self) -> Vec<String> {
        let _gate = fork::enter();
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = tables.values().map(|open| open.name().to_owned()).collect();
        names.sort();
        names
    }

    /// Returns the error of a change of a table.
    fn refused<T>(&self, operation: &'static str, table: Option<TableId>) -> Result<T> {
        let named = table.map(|id| self.opened(operation, id)).transpose()?;
        Err(Error::ReadOnly {
            operation,
            table: named.map_or_else(String::new, |open| open.name().to_owned()),
        })
    }
}

fn unsupported<T>(operation: &'static str) -> Result<T> {
    Err(Error::Unsupported { operation, message: "frozen tables are opened from their files".to_owned() })
}

impl EmbeddingStore for FrozenStore {
    fn open_table(&self, _name: &str, _config: &TableConfig) -> Result<Arc<dyn EmbeddingTable>> {
        unsupported("open_table")
    }

    fn find_table(&self, name: &str) -> Result<Option<Arc<dyn EmbeddingTable>>> {
        let _gate = fork::enter();
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        // Nothing keeps a name unique here: of several the one opened last answers.
        let found = tables.values().rev().find(|open| open.name() == name);
        Ok(found.map(|open| Arc::clone(open) as Arc<dyn EmbeddingTable>))
    }

    fn table(&self, operation: &'static str, id: TableId) -> Result<Arc<dyn EmbeddingTable>> {
        Ok(self.opened(operation, id)?)
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        let unknown = || Error::UnknownTable { operation: "drop_table", table: name.to_owned() };
        let table = self.find_table(name)?.ok_or_else(unknown)?;
        self.close(table.id());
        Ok(())
    }

    fn table_names(&self) -> Result<Vec<String>> {
        Ok(self.names())
    }

    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()> {
        let tables: Vec<Arc<OpenTable>> =
            tables.iter().map(|&id| self.opened("emb_bag", id)).collect::<Result<_>>()?;
        let rules: Vec<&TableValidator> = tables.iter().map(|open| open.table.frozen().rules()).collect();
        TableValidator::check_bags(&rules, &input, [pooled.len(), max_positions.len(), places.len()])?;
        let read: Vec<&FollowedTable> = tables.iter().map(|open| &open.table).collect();
        pool(&*self.executor, &read, input, pooled, max_positions)?;
        places.fill(NO_PLACE);
        Ok(())
    }

    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<u64> {
        self.refused("emb_update", updates.first().map(|update| update.table))
    }

    fn save(&self, _directory: &Path, _options: &SaveOptions<'_>) -> Result<SaveReport> {
        unsupported("save")
    }

    fn load(&self, _directory: &Path, _options: &LoadOptions<'_>) -> Result<LoadReport> {
        unsupported("load")
    }
}

/// A frozen table that was opened.
struct OpenTable {
    id: TableId,
    table: FollowedTable,
    executor: Arc<dyn Executor>,
}

impl OpenTable {
    fn refused<T>(&self, operation: &'static str) -> Result<T> {
        Err(Error::ReadOnly { operation, table: self.name().to_owned() })
    }
}

impl EmbeddingTable for OpenTable {
    fn id(&self) -> TableId {
        self.id
    }

    fn name(&self) -> &str {
        self.table.frozen().name()
    }

    fn dim(&self) -> usize {
        self.table.frozen().dim()
    }

    fn check_open(&self, _operation: &'static str) -> Result<()> {
        Ok(())
    }

    fn describe(&self) -> Result<TableDescription> {
        Ok(TableDescription {
            name: self.name().to_owned(),
            config: self.table.frozen().config().clone(),
            slots: Vec::new(),
        })
    }

    fn read(&self, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.table.read(&*self.executor, ids, rows)
    }

    fn read_with_places(&self, ids: &[i64], rows: &mut [f32], places: &mut [u32]) -> Result<()> {
        let expected = if places.is_empty() { 0 } else { ids.len() + TAG_WORDS };
        self.table.frozen().rules().check_length("emb_read", "places", expected, places.len())?;
        self.read(ids, rows)?;
        places.fill(NO_PLACE);
        Ok(())
    }

    fn write(&self, _ids: &[i64], _rows: &[f32]) -> Result<()> {
        self.refused("emb_write")
    }

    fn lookup(&self, ids: &[i64], insert: bool, indices: &mut [i64], rows: &mut [f32]) -> Result<()> {
        const OPERATION: &str = "hashtable_lookup";
        if insert {
            return self.refused(OPERATION);
        }
        self.table.frozen().rules().check_rows(OPERATION, ids, rows.len())?;
        self.table.frozen().rules().check_length(OPERATION, "indices", ids.len(), indices.len())?;
        self.table.lookup(&*self.executor, ids, indices, rows)
    }

    fn delete(&self, _ids: &[i64]) -> Result<usize> {
        self.refused("hashtable_delete")
    }

    fn evict(&self, _ttl: Option<u64>, _dry_run: bool) -> Result<Vec<i64>> {
        self.refused("evict")
    }

    fn clear(&self) -> Result<()> {
        self.refused("hashtable_clear")
    }

    fn ids(&self) -> Result<Vec<i64>> {
        self.table.ids()
    }

    fn num_rows(&self) -> Result<usize> {
        Ok(self.table.num_rows())
    }

    fn read_slot(&self, _slot: &str, _ids: &[i64]) -> Result<Option<Vec<f32>>> {
        Ok(None)
    }

    fn set_learning_rate(&self, _lr: f64, _explicit: bool) -> Result<()> {
        self.refused("set_learning_rate")
    }

    fn learning_rate(&self) -> Result<(f64, bool)> {
        self.refused("learning_rate")
    }

    fn statistics(&self) -> Result<TableStatistics> {
        let disk_bytes = self.table.frozen().file_bytes() as u64;
        let memory = MemoryUse { disk_bytes, ..self.table.changed().memory() };
        let (rows, bytes) = (self.table.num_rows(), memory.bytes() as usize);
        Ok(TableStatistics { rows, bytes, memory, ..TableStatistics::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frozen::{FrozenSpec, freeze};
    use crate::kernel::parallel::Serial;
    use crate::rows::pooling::PoolingMode;
    use crate::store::local_store::LocalStore;

    const CONFIG: &str = r#"{"initializer": {"kind": "uniform", "a": -1.0, "b": 1.0}, "seed": 5}"#;

    /// Two tables of a store, and the same frozen.
    fn both(directory: &Path) -> (LocalStore, FrozenStore, Vec<TableId>, Vec<TableId>) {
        let (live, frozen) = (LocalStore::new(Box::new(Serial)), FrozenStore::new(Box::new(Serial)));
        let (mut own, mut opened) = (Vec::new(), Vec::new());
        for (name, dim) in [("a", 3), ("b", 4)] {
            let config = TableConfig::from_json(dim, CONFIG).unwrap();
            let table = live.open_table(name, &config).unwrap();
            let ids: Vec<i64> = (0..50).map(|id| id * 3).collect();
            let rows: Vec<f32> = (0..ids.len() * dim).map(|value| value as f32 / 7.0).collect();
            table.write(&ids, &rows).unwrap();
            let path = directory.join(name);
            let spec = FrozenSpec { name, config: &config, encoding: Encoding::Float32 };
            freeze(&path, spec, &ids, |ids, rows| table.read(ids, rows)).unwrap();
            own.push(table.id());
            let file = File::open(&path).unwrap();
            opened.push(frozen.open(&file, &path, FrozenMemory::Mapped).unwrap().id());
        }
        (live, frozen, own, opened)
    }

    #[test]
    fn lookups_and_bags_are_those_of_the_live_tables() {
        let directory = tempfile::tempdir().unwrap();
        let (live, frozen, own, opened) = both(directory.path());
        let ids: Vec<i64> = (0..40).map(|number| number * 11 % 160).collect();
        for ((&one, &other), dim) in own.iter().zip(&opened).zip([3, 4]) {
            let (mut expected, mut found) = (vec![0.0; ids.len() * dim], vec![1.0; ids.len() * dim]);
            live.table("t", one).unwrap().read(&ids, &mut expected).unwrap();
            frozen.table("t", other).unwrap().read(&ids, &mut found).unwrap();
            assert_eq!(found, expected);
        }
        let offsets = [0, 3, 3, 20, 21, 30, 40];
        for mode in [PoolingMode::Sum, PoolingMode::Mean, PoolingMode::Max] {
            let input = BagInput {
                ids: &ids,
                offsets: &offsets,
                mode,
                per_sample_weights: None,
                padding_idx: Some(11),
            };
            let positions = if mode == PoolingMode::Max { 3 * 7 } else { 0 };
            let pool = |store: &dyn EmbeddingStore, tables: &[TableId]| {
                let (mut pooled, mut positions) = (vec![f32::NAN; 3 * 7], vec![0; positions]);
                store.bag(tables, input, &mut pooled, &mut positions, &mut []).map(|()| (pooled, positions))
            };
            assert_eq!(pool(&frozen, &opened), pool(&live, &own), "{mode:?}");
        }
    }

    #[test]
    fn row_numbers_are_those_of_the_ids() {
        let directory = tempfile::tempdir().unwrap();
        let (_, frozen, _, opened) = both(directory.path());
        let table = frozen.table("t", opened[0]).unwrap();
        let ids = table.ids().unwrap();
        let (mut indices, mut rows) = (vec![7; 51], vec![0.0; 51 * 3]);
        let asked: Vec<i64> = ids.iter().copied().chain([1]).collect();
        table.lookup(&asked, false, &mut indices, &mut rows).unwrap();
        assert_eq!(indices, (0..50).chain([-1]).collect::<Vec<i64>>());
    }

    #[test]
    fn every_change_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let (_, frozen, _, opened) = both(directory.path());
        let table = frozen.table("t", opened[1]).unwrap();
        let update = TableUpdate { table: opened[1], chunks: Vec::new(), step: crate::Step::Next };
        let refusals = [
            table.write(&[1], &[0.0; 4]).unwrap_err(),
            table.lookup(&[1], true, &mut [0], &mut [0.0; 4]).unwrap_err(),
            table.delete(&[1]).unwrap_err(),
            table.evict(None, true).unwrap_err(),
            table.clear().unwrap_err(),
            table.set_learning_rate(0.1, true).unwrap_err(),
            frozen.update(&[update]).unwrap_err(),
        ];
        for error in refusals {
            assert!(error.to_string().ends_with(": table \"b\" is frozen: it is read only"), "{error}");
        }
        let error = frozen.open_table("x", &TableConfig::new(2)).unwrap_err().to_string();
        assert_eq!(error, "open_table: frozen tables are opened from their files");
    }

    #[test]
    fn a_closed_table_is_unknown_and_its_number_is_not_given_again() {
        let directory = tempfile::tempdir().unwrap();
        let (_, frozen, _, opened) = both(directory.path());
        frozen.drop_table("b").unwrap();
        frozen.drop_table("a").unwrap();
        assert!(matches!(frozen.table("t", opened[0]), Err(Error::UnknownHandle { .. })));
        assert_eq!(frozen.table_names().unwrap(), [""; 0]);
        assert!(frozen.find_table("a").unwrap().is_none());
        let path = directory.path().join("a");
        let again = frozen.open(&File::open(&path).unwrap(), &path, FrozenMemory::Mapped).unwrap();
        assert!(!opened.contains(&again.id()));
    }
}
