//! The seam between whoever trains and whatever keeps the tables, and the store that keeps them in this process.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use serde::{Deserialize, Serialize};

use crate::checkpoint::{
    self, LastSave, LoadOptions, LoadReport, LoadingStore, SaveOptions, SaveReport, Shard,
};
use crate::config::TableConfig;
use crate::kernel::parallel::{Executor, Sparing};
use crate::kernel::simd::{Simd, SimdLevel};
use crate::memory::{MemoryBudget, MemoryUse};
use crate::optimizer::{UpdateRule, UpdateRules};
use crate::rows::gradient::GradientChunk;
use crate::rows::pooling::BagInput;
use crate::table::{self, CutTables, Engine, StepRequest, Table, TableCut};
use crate::{Error, Result, fork};

/// The number of a table in its store. It is never given to another table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId(pub i64);

/// Which step of its table an update is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Step {
    /// One more than the last.
    #[default]
    Next,
    /// The caller's count, from 1: whoever shards a table gives every shard the same.
    At(u64),
}

/// One optimizer step of one table.
#[derive(Debug, Clone)]
pub struct TableUpdate<'a> {
    /// The table.
    pub table: TableId,
    /// Gradients of several backward passes; duplicate ids are summed within and then over the chunks.
    pub chunks: Vec<GradientChunk<'a>>,
    /// The step that this is.
    pub step: Step,
}

/// What the optimizer of a table keeps.
#[derive(Debug, Clone)]
pub struct OptimizerState<'a> {
    /// The table.
    pub table: TableId,
    /// The ids of all rows, in any order; none will do where the optimizer has no slots.
    pub ids: &'a [i64],
    /// The values of each slot in the order of [`TableDescription::slots`], row-major, as many rows as `ids`.
    pub slots: Vec<&'a [f32]>,
    /// The optimizer steps taken.
    pub step: u64,
    /// The rate of the next step.
    pub learning_rate: f64,
    /// Whether the rate was set by hand.
    pub learning_rate_was_set: bool,
}

/// A table's name and configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct TableDescription {
    /// The name.
    pub name: String,
    /// The configuration it was opened with.
    pub config: TableConfig,
    /// The names of the optimizer's slots and their elements a row.
    pub slots: Vec<(String, usize)>,
}

/// What a table holds and what was done to it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TableStatistics {
    /// Rows now in the table.
    pub rows: usize,
    /// Bytes of memory: what `memory` tells, in one sum.
    pub bytes: usize,
    /// What the memory holds, and what lies on disk.
    pub memory: MemoryUse,
    /// Rows ever created.
    pub inserts: u64,
    /// Row updates: one a distinct id and step.
    pub updates: u64,
    /// Rows deleted, those that left included.
    pub deletes: u64,
    /// Ids that a step updated and that were not admitted: one an id and step.
    pub rejections: u64,
    /// Rows that left by eviction.
    pub evictions: u64,
    /// Ids without a row that admission counts one by one.
    pub candidates: usize,
    /// Rows and gradients refused or skipped because they were not finite.
    pub refusals: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// The learning rate of the next step.
    pub learning_rate: f64,
    /// Whether the learning rate was set by hand.
    pub learning_rate_was_set: bool,
}

/// What the tables of a store take of memory together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreMemory {
    /// The limit, in bytes, if there is one.
    pub limit: Option<u64>,
    /// What is in use, in bytes.
    pub in_use: u64,
}

/// Tables of rows, addressed by number: in this process, on servers, or failing on purpose in tests.
///
/// Every method gives [`Error::UnknownHandle`] for a table that was dropped or never opened. A method that fails has
/// changed nothing. Rows are row-major, `dim` floats each.
pub trait EmbeddingStore: Send + Sync {
    /// Creates the table `name`, or opens it if its configuration agrees.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]; [`Error::ConfigMismatch`] shows both configurations; [`Error::UnknownRule`].
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<TableId>;

    /// Returns the table `name`, if there is one.
    ///
    /// # Errors
    /// [`Error::Unavailable`], of a store on servers.
    fn find_table(&self, name: &str) -> Result<Option<TableId>>;

    /// Deletes the table `name` and its rows; numbers of it are unknown from then on.
    ///
    /// # Errors
    /// [`Error::UnknownTable`]; [`Error::ForkedChild`].
    fn drop_table(&self, name: &str) -> Result<()>;

    /// Returns the names of all tables, sorted.
    ///
    /// # Errors
    /// [`Error::Unavailable`], of a store on servers.
    fn table_names(&self) -> Result<Vec<String>>;

    /// Returns name and configuration of a table.
    fn describe(&self, table: TableId) -> Result<TableDescription>;

    /// Returns the elements of a table's rows.
    fn dim(&self, table: TableId) -> Result<usize>;

    /// Writes the row of each id to `rows`. An id without a row reads as its initial value and gets no row.
    ///
    /// # Errors
    /// [`Error::IdOutOfRange`]; [`Error::DimMismatch`]; [`Error::Disk`].
    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()>;

    /// Reads, and writes where the rows lay to `places`, one an id and [`PLACES_TAG`](crate::PLACES_TAG) more.
    ///
    /// Given back with the ids' gradients, in [`GradientPart::places`](crate::GradientPart::places), they spare the
    /// step its search. They are good until rows are deleted, and then of no effect.
    ///
    /// # Errors
    /// As [`EmbeddingStore::read`]; [`Error::LengthMismatch`].
    fn read_with_places(
        &self,
        table: TableId,
        ids: &[i64],
        rows: &mut [f32],
        places: &mut [u32],
    ) -> Result<()>;

    /// Reads rows that a step will change soon: of a table whose rows may lie on disk they are brought into memory.
    ///
    /// # Errors
    /// As [`EmbeddingStore::read`].
    fn read_ahead(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.read(table, ids, rows)
    }

    /// Pools the rows of bags of `tables`: the first bags of all tables into the first row of `pooled`, side by side.
    ///
    /// `max_positions` is as large for the maximum, else empty. `places` is empty, or as large as all ids and a tag for
    /// each table: each table's ids' places and tag, as [`EmbeddingStore::read_with_places`] gives them.
    ///
    /// # Errors
    /// [`Error::InvalidBag`]; [`Error::LengthMismatch`]; as [`EmbeddingStore::read`].
    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()>;

    /// Overwrites the rows of `ids`; of duplicates the last one wins.
    ///
    /// # Errors
    /// [`Error::NonFinite`], [`Error::TableFull`], [`Error::MemoryLimit`], [`Error::Disk`], [`Error::ForkedChild`]; as
    /// [`EmbeddingStore::read`].
    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()>;

    /// Checks all of `updates`, then takes each one's optimizer step: one per distinct id, counted for an empty
    /// update too.
    ///
    /// # Errors
    /// As [`EmbeddingStore::write`], and [`Error::InvalidStep`]; then no table has changed. But when the disk fails within a
    /// step of more rows than memory holds, or a rule of the program's own panics ([`Error::RuleFailed`]), every later
    /// call on that table is refused until it is cleared or loaded.
    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<()>;

    /// Writes each id's index, -1 where it has no row, and its row; with `insert`, such ids get a row first.
    ///
    /// # Errors
    /// As [`EmbeddingStore::read`], and with `insert` as [`EmbeddingStore::write`].
    fn lookup(
        &self,
        table: TableId,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()>;

    /// Deletes the rows of `ids` and returns how many there were; an id without a row is no error.
    fn delete(&self, table: TableId, ids: &[i64]) -> Result<usize>;

    /// Takes away the rows that the table's eviction chooses, as the table is now, and returns their ids in ascending
    /// order. A `dry_run` returns them and changes nothing.
    ///
    /// # Errors
    /// [`Error::NoEviction`]; [`Error::ForkedChild`].
    fn evict(&self, table: TableId, dry_run: bool) -> Result<Vec<i64>>;

    /// Returns how many rows left a table by eviction, as far as this store knows without asking others.
    fn num_evicted(&self, table: TableId) -> Result<u64>;

    /// Deletes every row; configuration, learning rate and step stay.
    fn clear(&self, table: TableId) -> Result<()>;

    /// Returns the ids that have a row, in the order of their indices.
    fn ids(&self, table: TableId) -> Result<Vec<i64>>;

    /// Returns the number of rows.
    fn num_rows(&self, table: TableId) -> Result<usize>;

    /// Returns the values of an optimizer slot for each id, zeros where it has no row; `None` for an unknown slot.
    ///
    /// # Errors
    /// [`Error::IdOutOfRange`].
    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>>;

    /// Sets the learning rate from the next step on; `explicit` marks it as set by hand.
    ///
    /// # Errors
    /// [`Error::InvalidLearningRate`]; [`Error::ForkedChild`].
    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()>;

    /// Puts what optimizers keep into several tables, all at one moment; rows stay as they are.
    ///
    /// # Errors
    /// [`Error::StateMismatch`]: other slots than the optimizer's, or other ids than those of the rows.
    /// [`Error::InvalidLearningRate`]; [`Error::ForkedChild`]. Then no table has changed.
    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()>;

    /// Returns what a table holds and what was done to it.
    fn statistics(&self, table: TableId) -> Result<TableStatistics>;

    /// Limits the memory of all tables together, from the next call on. Tables that take more already keep it, but get no
    /// more rows; those with a slot file make room by moving rows there.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a limit of 0.
    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()>;

    /// Returns what all tables take of memory together, and their limit.
    fn memory(&self) -> StoreMemory;

    /// Saves all tables, as they are at one moment, to a directory, while others go on reading and training them.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file; the directory still holds what it held before. [`Error::ForkedChild`].
    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport>;

    /// Replaces tables by those of the newest snapshot in a directory, and makes those that are not there. Other tables
    /// stay as they are.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file and what is wrong with it; [`Error::ConfigMismatch`] a table that is there
    /// with another configuration. Then nothing has changed.
    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport>;

    /// Saves all tables as the part that shard `shard` has in `snapshot`, a name from
    /// [`new_snapshot_name`](crate::new_snapshot_name) that all shards were given. The parts count when
    /// [`commit_snapshot`](crate::commit_snapshot) was called; after a failure all begin again with a new name. Nobody else
    /// may save to the directory meanwhile.
    ///
    /// # Errors
    /// As [`EmbeddingStore::save`].
    fn save_part(
        &self,
        directory: &Path,
        snapshot: &str,
        shard: Shard,
        options: &SaveOptions<'_>,
    ) -> Result<SaveReport>;
}

/// The store that keeps its tables in the memory of this process.
pub struct LocalStore {
    executor: Sparing,
    simd: Simd,
    tables: RwLock<Tables>,
    budget: Arc<MemoryBudget>,
    rules: UpdateRules,
    /// Saves and loads come one after another.
    last_save: Mutex<LastSave>,
}

#[derive(Default)]
struct Tables {
    by_name: HashMap<String, TableId>,
    /// Ordered: among so few numbers a search takes less time than a hash.
    by_id: BTreeMap<TableId, Arc<Table>>,
    last: i64,
}

#[cfg(feature = "rayon")]
impl Default for LocalStore {
    /// A store whose loops run on [`crate::Rayon`].
    fn default() -> Self {
        Self::new(Box::new(crate::Rayon))
    }
}

impl fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalStore")
            .field("tables", &self.table_names().unwrap_or_default())
            .finish_non_exhaustive()
    }
}

impl LocalStore {
    /// Returns an empty store whose loops run on `executor`, with the widest instructions of this machine.
    pub fn new(executor: Box<dyn Executor>) -> Self {
        Self {
            executor: Sparing::new(executor),
            simd: Simd::detect(),
            tables: RwLock::default(),
            budget: Arc::default(),
            rules: UpdateRules::default(),
            last_save: Mutex::default(),
        }
    }

    /// Makes the store use the instructions of `level`; the results are the same.
    ///
    /// # Errors
    /// [`Error::UnavailableSimd`] if this machine lacks them.
    pub fn with_simd(mut self, level: SimdLevel) -> Result<Self> {
        self.simd = Simd::new(level)?;
        Ok(self)
    }

    /// Makes a rule of the program's own known, for tables whose configuration names it: before they are opened, or
    /// loaded. Checkpoints have its name and its slots; whoever loads one registers the rule too.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an empty name, or one that another rule has.
    pub fn register_rule(&self, name: &str, rule: Arc<dyn UpdateRule>) -> Result<()> {
        let _gate = fork::enter();
        self.rules.register(name, rule)
    }

    fn engine(&self) -> Engine<'_> {
        Engine { executor: &self.executor, simd: self.simd }
    }

    /// Cuts all tables, none of which is opened, dropped or replaced meanwhile.
    fn with_all(&self, cut: &CutTables<'_>) -> Result<Vec<TableCut>> {
        cut(&self.tables.read().unwrap_or_else(PoisonError::into_inner).all())
    }

    /// Waits for the save or load under way. In a forked child that of the parent would never end.
    fn lock_saves(&self, directory: &Path) -> Result<MutexGuard<'_, LastSave>> {
        match self.last_save.try_lock() {
            Err(TryLockError::WouldBlock) if fork::is_child() => Err(Error::Checkpoint {
                path: directory.display().to_string(),
                message: "the parent of this forked process was saving or loading when it was forked"
                    .to_owned(),
            }),
            Err(TryLockError::WouldBlock) => {
                Ok(self.last_save.lock().unwrap_or_else(PoisonError::into_inner))
            }
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Ok(last) => Ok(last),
        }
    }

    fn table(&self, operation: &'static str, id: TableId) -> Result<Arc<Table>> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner).get(operation, id)
    }

    /// Returns several tables: all from before a load or all from after it.
    fn tables_of(
        &self,
        operation: &'static str,
        ids: impl Iterator<Item = TableId>,
    ) -> Result<Vec<Arc<Table>>> {
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        ids.map(|id| tables.get(operation, id)).collect()
    }
}

impl EmbeddingStore for LocalStore {
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<TableId> {
        let _gate = fork::enter();
        if name.is_empty() {
            return Err(Error::InvalidConfig { message: "the table's name must not be empty".to_owned() });
        }
        config.validate()?;
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        tables.open(name, config, &self.rules, &self.budget)
    }

    fn find_table(&self, name: &str) -> Result<Option<TableId>> {
        let _gate = fork::enter();
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        Ok(tables.by_name.get(name).copied())
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        let _gate = fork::enter();
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        tables.drop_table(name)
    }

    fn table_names(&self) -> Result<Vec<String>> {
        let _gate = fork::enter();
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<_> = tables.by_name.keys().cloned().collect();
        names.sort_unstable();
        Ok(names)
    }

    fn describe(&self, table: TableId) -> Result<TableDescription> {
        let _gate = fork::enter();
        Ok(self.table("describe", table)?.description())
    }

    fn dim(&self, table: TableId) -> Result<usize> {
        let _gate = fork::enter();
        Ok(self.table("dim", table)?.config().dim)
    }

    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        let _gate = fork::enter();
        self.table("emb_read", table)?.read(self.engine(), ids, rows, &mut [])
    }

    fn read_with_places(
        &self,
        table: TableId,
        ids: &[i64],
        rows: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        let _gate = fork::enter();
        self.table("emb_read", table)?.read(self.engine(), ids, rows, places)
    }

    fn read_ahead(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        let _gate = fork::enter();
        let table = self.table("emb_read", table)?;
        table.bring_in(self.engine(), ids);
        table.read(self.engine(), ids, rows, &mut [])
    }

    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()> {
        let _gate = fork::enter();
        let tables = self.tables_of("emb_bag", tables.iter().copied())?;
        table::pool(self.engine(), &tables, input, pooled, max_positions, places)
    }

    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()> {
        let _gate = fork::enter();
        self.table("emb_write", table)?.write(self.engine(), ids, rows)
    }

    fn update<'a>(&self, updates: &[TableUpdate<'a>]) -> Result<()> {
        let _gate = fork::enter();
        let tables = self.tables_of("emb_update", updates.iter().map(|update| update.table))?;
        let request =
            |(update, table): (&TableUpdate<'a>, _)| StepRequest::new(table, &update.chunks, update.step);
        let requests = updates.iter().zip(tables).map(request).collect::<Result<Vec<_>>>()?;
        let checked = table::check(self.engine(), &requests)?;
        for steps in one_a_table(updates, checked) {
            table::apply(self.engine(), steps)?;
        }
        Ok(())
    }

    fn lookup(
        &self,
        table: TableId,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        let _gate = fork::enter();
        self.table("hashtable_lookup", table)?.lookup(self.engine(), ids, insert, indices, rows)
    }

    fn delete(&self, table: TableId, ids: &[i64]) -> Result<usize> {
        let _gate = fork::enter();
        self.table("hashtable_delete", table)?.delete(ids)
    }

    fn evict(&self, table: TableId, dry_run: bool) -> Result<Vec<i64>> {
        let _gate = fork::enter();
        self.table("evict", table)?.evict(dry_run)
    }

    fn num_evicted(&self, table: TableId) -> Result<u64> {
        let _gate = fork::enter();
        Ok(self.table("num_evicted", table)?.num_evicted())
    }

    fn clear(&self, table: TableId) -> Result<()> {
        let _gate = fork::enter();
        self.table("hashtable_clear", table)?.clear()
    }

    fn ids(&self, table: TableId) -> Result<Vec<i64>> {
        let _gate = fork::enter();
        Ok(self.table("hashtable_ids", table)?.ids())
    }

    fn num_rows(&self, table: TableId) -> Result<usize> {
        let _gate = fork::enter();
        Ok(self.table("hashtable_size", table)?.len())
    }

    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        let _gate = fork::enter();
        self.table("read_slot", table)?.read_slot(slot, ids)
    }

    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()> {
        let _gate = fork::enter();
        self.table("set_learning_rate", table)?.set_learning_rate(lr, explicit)
    }

    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()> {
        let _gate = fork::enter();
        let tables = self.tables_of("put_optimizer_states", states.iter().map(|state| state.table))?;
        table::put_states(&tables, states)
    }

    fn statistics(&self, table: TableId) -> Result<TableStatistics> {
        let _gate = fork::enter();
        Ok(self.table("statistics", table)?.statistics())
    }

    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()> {
        if limit == Some(0) {
            let message = "the store's memory_limit must be null or positive, got 0".to_owned();
            return Err(Error::InvalidConfig { message });
        }
        self.budget.set_limit(limit);
        Ok(())
    }

    fn memory(&self) -> StoreMemory {
        StoreMemory { limit: self.budget.limit(), in_use: self.budget.in_use() }
    }

    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport> {
        let mut last = self.lock_saves(directory)?;
        let _besides = self.executor.besides();
        checkpoint::save(&|cut| self.with_all(cut), &mut last, directory, options)
    }

    fn save_part(
        &self,
        directory: &Path,
        snapshot: &str,
        shard: Shard,
        options: &SaveOptions<'_>,
    ) -> Result<SaveReport> {
        let mut last = self.lock_saves(directory)?;
        let _besides = self.executor.besides();
        checkpoint::save_part(&|cut| self.with_all(cut), &mut last, directory, (snapshot, shard), options)
    }

    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport> {
        let mut last = self.lock_saves(directory)?;
        let configured = |name: &str, saved: &TableConfig| {
            self.tables.read().unwrap_or_else(PoisonError::into_inner).config_for(name, saved)
        };
        let (rules, budget) = (&self.rules, &self.budget);
        let store =
            LoadingStore { engine: self.engine(), rules: Some(rules), budget, configured: &configured };
        let loaded = checkpoint::load(directory, options, store)?;
        let _gate = fork::enter();
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        tables.replace(loaded.tables, options.numbers)?;
        *last = Some(loaded.save);
        Ok(loaded.report)
    }
}

/// Puts the steps into rounds, in their order: of several steps of one table each comes a round after the one before.
fn one_a_table<T>(updates: &[TableUpdate<'_>], steps: Vec<T>) -> Vec<Vec<T>> {
    let mut steps_of = HashMap::new();
    let mut rounds: Vec<Vec<T>> = Vec::new();
    for (update, step) in updates.iter().zip(steps) {
        let round: &mut usize = steps_of.entry(update.table).or_default();
        if rounds.len() == *round {
            rounds.push(Vec::new());
        }
        rounds[*round].push(step);
        *round += 1;
    }
    rounds
}

impl Tables {
    fn open(
        &mut self,
        name: &str,
        config: &TableConfig,
        rules: &UpdateRules,
        budget: &Arc<MemoryBudget>,
    ) -> Result<TableId> {
        if let Some(id) = self.by_name.get(name) {
            return self.check_same(*id, config).map(|_| *id);
        }
        let table = Table::new(name, config, rules, budget)?;
        let id = self.add_name(name);
        self.by_id.insert(id, Arc::new(table));
        Ok(id)
    }

    fn get(&self, operation: &'static str, id: TableId) -> Result<Arc<Table>> {
        self.by_id.get(&id).cloned().ok_or(Error::UnknownHandle { operation, handle: id.0 })
    }

    /// Returns all tables.
    fn all(&self) -> Vec<Arc<Table>> {
        self.by_id.values().cloned().collect()
    }

    /// Returns the configuration with which a saved table is loaded: that of the table of its name, if there is one.
    fn config_for(&self, name: &str, saved: &TableConfig) -> Result<TableConfig> {
        match self.by_name.get(name) {
            None => Ok(saved.clone()),
            Some(id) => {
                let (memory_limit, disk) = self.memory_of(*id);
                let saved = TableConfig { memory_limit, disk, ..saved.clone() };
                self.check_same(*id, &saved).map(|table| table.config().clone())
            }
        }
    }

    /// Returns the limit and the disk of a table, which a checkpoint knows nothing of.
    fn memory_of(&self, id: TableId) -> (Option<u64>, Option<String>) {
        let config = self.by_id.get(&id).map(|table| table.config());
        config.map_or((None, None), |config| (config.memory_limit, config.disk.clone()))
    }

    /// Puts tables in the place of those of their names; new ones get the numbers asked for, where those are free.
    fn replace(&mut self, tables: Vec<Table>, numbers: Option<&BTreeMap<String, TableId>>) -> Result<()> {
        for table in &tables {
            self.config_for(table.name(), table.config())?;
            if let Some(existing) = self.by_name.get(table.name()).and_then(|id| self.by_id.get(id)) {
                existing.check_droppable("load")?;
            }
        }
        for table in tables {
            let id = match self.by_name.get(table.name()) {
                Some(id) => *id,
                None => {
                    let asked_for = numbers.and_then(|numbers| numbers.get(table.name()));
                    self.add_name_as(table.name(), asked_for.copied())
                }
            };
            self.by_id.insert(id, Arc::new(table));
        }
        Ok(())
    }

    /// Gives a new table's name a number.
    fn add_name(&mut self, name: &str) -> TableId {
        self.add_name_as(name, None)
    }

    /// Gives a new table's name the number asked for, if that is free.
    fn add_name_as(&mut self, name: &str, asked_for: Option<TableId>) -> TableId {
        let is_free = |number: &TableId| number.0 > 0 && !self.by_id.contains_key(number);
        let number = asked_for.filter(is_free).unwrap_or(TableId(self.last + 1));
        self.last = self.last.max(number.0);
        self.by_name.insert(name.to_owned(), number);
        number
    }

    fn check_same(&self, id: TableId, requested: &TableConfig) -> Result<&Table> {
        let table =
            self.by_id.get(&id).ok_or(Error::UnknownHandle { operation: "open_table", handle: id.0 })?;
        if table.config().is_same_table(requested) {
            return Ok(table);
        }
        let shown = |config: &TableConfig| Ok(format!("dim {} {}", config.dim, config.to_json()?));
        Err(Error::ConfigMismatch {
            table: table.name().to_owned(),
            existing: shown(table.config())?,
            requested: shown(requested)?,
        })
    }

    fn drop_table(&mut self, name: &str) -> Result<()> {
        let unknown = || Error::UnknownTable { operation: "drop_table", table: name.to_owned() };
        let id = *self.by_name.get(name).ok_or_else(unknown)?;
        let table = self.by_id.get(&id).ok_or_else(unknown)?;
        table.check_droppable("drop_table")?;
        self.by_name.remove(name);
        self.by_id.remove(&id);
        Ok(())
    }
}
