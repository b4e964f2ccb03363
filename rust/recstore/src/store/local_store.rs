//! The store that keeps its tables in this process.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::embedding_store::{EmbeddingStore, InProcessStore, Publications};
use super::embedding_table::EmbeddingTable;
use super::local_table::LocalTable;
use super::save_lock::SaveLock;
use super::tables::Tables;
use crate::calls::{ChangedRows, OptimizerState, StoreMemory, TableId, TableRead, TableUpdate};
use crate::checkpoint::{
    self, KnownSaves, LoadOptions, LoadReport, LoadingStore, SaveOptions, SaveReport, Saves, Shard,
};
use crate::config::TableConfig;
use crate::kernel::parallel::{Executor, ReservedCores};
use crate::kernel::simd::{Simd, SimdLevel};
use crate::optimizer::{UpdateRule, UpdateRules};
use crate::rows::pooling::BagInput;
use crate::table::{
    self, CutRows, CutTables, Engine, MemoryBudget, StepRequest, Table, TableCut, publishing,
};
use crate::{Error, Result, fork};

/// The store that keeps its tables in the memory of this process.
pub struct LocalStore {
    executor: Arc<ReservedCores>,
    simd: Simd,
    tables: RwLock<Tables>,
    budget: Arc<MemoryBudget>,
    rules: UpdateRules,
    saves: SaveLock,
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
            executor: Arc::new(ReservedCores::new(executor)),
            simd: Simd::detect(),
            tables: RwLock::default(),
            budget: Arc::default(),
            rules: UpdateRules::default(),
            saves: SaveLock::default(),
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

    /// Deletes the rows that the table `name` has of `ids` and forgets what was counted of them, also where others were
    /// counted with them. Returns the ids that had a row; none without such a table.
    ///
    /// # Errors
    /// As deleting rows.
    pub fn forget(&self, name: &str, ids: &[i64]) -> Result<Vec<i64>> {
        let _gate = fork::enter();
        let table = self.shared().find(name);
        table.map_or(Ok(Vec::new()), |(_, table)| table.erase(ids))
    }

    fn engine(&self) -> Engine<'_> {
        Engine { executor: &*self.executor, simd: self.simd }
    }

    /// Cuts all tables, none of which is opened, dropped or replaced meanwhile.
    fn with_all(&self, cut: &CutTables<'_>) -> Result<Vec<TableCut>> {
        cut(&self.shared().all())
    }

    /// As [`LocalStore::lock_saves`], for tables that this process may save: a child of theirs takes no directory's lock,
    /// which would turn its parent's save away.
    fn lock_to_save(&self, directory: &Path) -> Result<MutexGuard<'_, Saves>> {
        // Before the directory's lock, which a forked child must not take for tables of its parent.
        {
            let _gate = fork::enter();
            self.shared().all().iter().try_for_each(|table| table.check_own("save"))?;
        }
        self.lock_saves(directory)
    }

    /// Waits for the save or load under way.
    fn lock_saves(&self, directory: &Path) -> Result<MutexGuard<'_, Saves>> {
        self.saves.lock().ok_or_else(|| Error::Checkpoint {
            path: directory.display().to_string(),
            message: "the parent of this forked process was saving or loading when it was forked".to_owned(),
        })
    }

    fn shared(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn exclusive(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self, id: TableId, table: &Arc<Table>) -> Arc<dyn EmbeddingTable> {
        Arc::new(LocalTable::new(id, table, Arc::clone(&self.executor), self.simd))
    }

    fn tables_of(
        &self,
        operation: &'static str,
        ids: impl Iterator<Item = TableId>,
    ) -> Result<Vec<Arc<Table>>> {
        let tables = self.shared();
        ids.map(|id| tables.get(operation, id)).collect()
    }
}

impl EmbeddingStore for LocalStore {
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<Arc<dyn EmbeddingTable>> {
        let _gate = fork::enter();
        if name.is_empty() {
            return Err(Error::InvalidConfig { message: "the table's name must not be empty".to_owned() });
        }
        config.validate()?;
        let (id, table) = self.exclusive().open(name, config, &self.rules, &self.budget)?;
        Ok(self.opened(id, &table))
    }

    fn find_table(&self, name: &str) -> Result<Option<Arc<dyn EmbeddingTable>>> {
        let _gate = fork::enter();
        Ok(self.shared().find(name).map(|(id, table)| self.opened(id, &table)))
    }

    fn table(&self, operation: &'static str, id: TableId) -> Result<Arc<dyn EmbeddingTable>> {
        let _gate = fork::enter();
        Ok(self.opened(id, &self.shared().get(operation, id)?))
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        let _gate = fork::enter();
        self.exclusive().drop_table(name)
    }

    fn table_names(&self) -> Result<Vec<String>> {
        let _gate = fork::enter();
        Ok(self.shared().names())
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

    fn read_tables(&self, reads: &mut [TableRead<'_>], is_ahead: bool) -> Result<()> {
        let _gate = fork::enter();
        let tables = self.tables_of("emb_read", reads.iter().map(|read| read.table))?;
        if is_ahead {
            tables
                .iter()
                .zip(&*reads)
                .for_each(|(table, read)| table.bring_in(self.engine(), read.ids, true));
        }
        table::read_each(self.engine(), tables.iter().zip(reads))
    }

    fn update<'a>(&self, updates: &[TableUpdate<'a>]) -> Result<u64> {
        let _gate = fork::enter();
        let tables = self.tables_of("emb_update", updates.iter().map(|update| update.table))?;
        let request =
            |(update, table): (&TableUpdate<'a>, _)| StepRequest::new(table, &update.chunks, update.step);
        let requests = updates.iter().zip(tables).map(request).collect::<Result<Vec<_>>>()?;
        // All tables are checked before the first takes its step: a refused call changes nothing.
        let checked = table::check(self.engine(), &requests)?;
        let mut left = 0;
        for steps in one_a_table(updates, checked) {
            left += table::apply(self.engine(), steps)?;
        }
        Ok(left)
    }

    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport> {
        let mut saves = self.lock_to_save(directory)?;
        let _besides = self.executor.besides();
        checkpoint::save(&|cut| self.with_all(cut), &mut saves, directory, options)
    }

    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport> {
        let mut saves = self.lock_saves(directory)?;
        // The gate is entered for the swap alone: a fork waits for those within, and files take long to read.
        let configured = |name: &str, saved: &TableConfig| self.shared().config_for(name, saved);
        let (rules, budget) = (&self.rules, &self.budget);
        let store = LoadingStore { engine: self.engine(), rules, budget, configured: &configured };
        let mut loaded = checkpoint::load(directory, options, store)?;
        let _gate = fork::enter();
        self.exclusive().replace(std::mem::take(&mut loaded.tables), options.numbers)?;
        // Only now: a delta may follow the snapshot once the tables are those that it has.
        saves.note_load(&loaded, options);
        Ok(loaded.report)
    }

    fn in_process(&self) -> Option<&dyn InProcessStore> {
        Some(self)
    }

    fn publications(&self) -> Option<&dyn Publications> {
        Some(self)
    }
}

impl InProcessStore for LocalStore {
    fn copy_table(&self, table: TableId, name: &str) -> Result<Arc<dyn EmbeddingTable>> {
        let _gate = fork::enter();
        let table = self.shared().get("copy_table", table)?;
        self.shared().check_free(name)?;
        // Without the lock of the tables, so others go on; `add` looks again whether the name is free.
        let copy = table.copy(name, self.engine(), &self.rules, &self.budget)?;
        let (id, copy) = self.exclusive().add(copy)?;
        Ok(self.opened(id, &copy))
    }

    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()> {
        let _gate = fork::enter();
        let tables = self.tables_of("put_optimizer_states", states.iter().map(|state| state.table))?;
        table::put_states(&tables, states)
    }

    fn cut_rows(&self, tables: &[TableId]) -> Result<Vec<CutRows>> {
        let _gate = fork::enter();
        let tables = self.tables_of("emb_read", tables.iter().copied())?;
        table::cut_rows(&tables, &self.executor, self.simd)
    }

    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()> {
        if limit == Some(0) {
            let message = "the store's memory_limit must be null or positive, got 0".to_owned();
            return Err(Error::InvalidConfig { message });
        }
        self.budget.set_limit(limit);
        Ok(())
    }

    fn set_shards(&self, table: Option<TableId>, shards: usize) -> Result<()> {
        const OPERATION: &str = "set_shards";
        if shards == 0 {
            let message = "rows must be spread over at least 1 store, got 0".to_owned();
            return Err(Error::InvalidConfig { message });
        }
        match table {
            None => self.budget.set_shards(shards),
            Some(table) => self.shared().get(OPERATION, table)?.set_shards(shards),
        }
        Ok(())
    }

    fn memory(&self) -> StoreMemory {
        StoreMemory { limit: self.budget.limit(), in_use: self.budget.in_use() }
    }

    fn save_part(
        &self,
        directory: &Path,
        snapshot: &str,
        shard: Shard,
        options: &SaveOptions<'_>,
    ) -> Result<SaveReport> {
        let mut saves = self.lock_to_save(directory)?;
        let _besides = self.executor.besides();
        checkpoint::save_part(&|cut| self.with_all(cut), &mut saves, directory, (snapshot, shard), options)
    }

    fn known_saves(&self) -> Result<KnownSaves> {
        self.lock_saves(Path::new("")).map(|saves| saves.known())
    }

    fn remember_saves(&self, known: KnownSaves) -> Result<()> {
        self.lock_saves(Path::new("")).map(|mut saves| saves.remember(known))
    }
}

impl Publications for LocalStore {
    fn begin_publication(&self, tables: &[TableId]) -> Result<u64> {
        let _gate = fork::enter();
        publishing::begin(&self.tables_of("publish", tables.iter().copied())?)
    }

    fn take_changes(&self, tables: &[TableId], publication: u64, was_told: bool) -> Result<Vec<ChangedRows>> {
        let _gate = fork::enter();
        let tables = self.tables_of("publish", tables.iter().copied())?;
        publishing::take(self.engine(), &tables, publication, was_told)
    }

    fn end_publication(&self, tables: &[TableId], publication: u64) -> Result<()> {
        let _gate = fork::enter();
        publishing::end(&self.tables_of("publish", tables.iter().copied())?, publication)
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
