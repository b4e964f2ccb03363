//! The seam between whoever trains and whatever keeps the tables: what is asked of a store.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::embedding_table::EmbeddingTable;
use crate::calls::{ChangedRows, OptimizerState, StoreMemory, TableId, TableRead, TableUpdate};
use crate::checkpoint::{KnownSaves, LoadOptions, LoadReport, SaveOptions, SaveReport, Shard};
use crate::config::TableConfig;
use crate::rows::pooling::BagInput;
use crate::table::CutRows;
use crate::{Error, Result};

/// Tables of rows: in this process, on servers, or failing on purpose in tests.
///
/// A table is opened, or found, once; what is asked of it alone is a method of [`EmbeddingTable`]. Every method that is
/// given tables by number gives [`crate::Error::UnknownHandle`] for one that was dropped or never opened. A method that
/// fails has changed nothing.
pub trait EmbeddingStore: Send + Sync {
    /// Creates the table `name`, or opens it if its configuration agrees.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`]; [`crate::Error::ConfigMismatch`] shows both configurations;
    /// [`crate::Error::UnknownRule`].
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<Arc<dyn EmbeddingTable>>;

    /// Returns the table `name`, if there is one.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`], of a store on servers.
    fn find_table(&self, name: &str) -> Result<Option<Arc<dyn EmbeddingTable>>>;

    /// Returns a table by its number, for a call of the name `operation`.
    ///
    /// # Errors
    /// [`crate::Error::UnknownHandle`].
    fn table(&self, operation: &'static str, id: TableId) -> Result<Arc<dyn EmbeddingTable>>;

    /// Deletes the table `name` and its rows; numbers of it are unknown from then on.
    ///
    /// # Errors
    /// [`crate::Error::UnknownTable`]; [`crate::Error::ForkedChild`].
    fn drop_table(&self, name: &str) -> Result<()>;

    /// Returns the names of all tables, sorted.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`], of a store on servers.
    fn table_names(&self) -> Result<Vec<String>>;

    /// Reads rows of several tables, each as [`EmbeddingTable::read`] does, or as [`EmbeddingTable::read_ahead`] if it
    /// `is_ahead` of a step.
    ///
    /// # Errors
    /// As [`EmbeddingTable::read`], of the first table that has one; then rows hold anything.
    fn read_tables(&self, reads: &mut [TableRead<'_>], is_ahead: bool) -> Result<()> {
        reads.iter_mut().try_for_each(|TableRead { table, ids, rows }| {
            let table = self.table("emb_read", *table)?;
            if is_ahead { table.read_ahead(ids, rows) } else { table.read(ids, rows) }
        })
    }

    /// Pools the rows of bags of `tables`: the first bags of all tables into the first row of `pooled`, side by side.
    ///
    /// `max_positions` is as large for the maximum, else empty. `places` is empty, or as large as all ids and a tag for
    /// each table: each table's ids' places and tag, as [`EmbeddingTable::read_with_places`] gives them.
    ///
    /// # Errors
    /// [`crate::Error::InvalidBag`]; [`crate::Error::LengthMismatch`]; as [`EmbeddingTable::read`].
    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()>;

    /// Checks all of `updates`, then takes each one's optimizer step: one per distinct id, counted for an empty
    /// update too. Returns how many rows left the tables by eviction.
    ///
    /// # Errors
    /// As [`EmbeddingTable::write`], and [`crate::Error::InvalidStep`]; then no table has changed.
    /// [`crate::Error::StepCutShort`] when the disk fails within a step of more rows than memory holds, or a rule of the
    /// program's own panics: every later call on that table is refused until it is cleared or loaded, and the others have
    /// taken their steps.
    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<u64>;

    /// Saves all tables, as they are at one moment, to a directory, while others go on reading and training them.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`] names the file; the directory still holds what it held before.
    /// [`crate::Error::ForkedChild`].
    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport>;

    /// Replaces tables by those of the newest snapshot in a directory, and makes those that are not there. Other tables
    /// stay as they are.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`] names the file and what is wrong with it; [`crate::Error::ConfigMismatch`] a table
    /// that is there with another configuration. Then nothing has changed.
    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport>;

    /// Returns what a store in this process does besides; none of another.
    fn in_process(&self) -> Option<&dyn InProcessStore> {
        None
    }

    /// Returns what tells those who follow tables of their changes; none of a store whose tables do not change.
    fn publications(&self) -> Option<&dyn Publications> {
        None
    }
}

/// What a store does whose tables lie in this process.
pub trait InProcessStore: EmbeddingStore {
    /// Copies a table, with all that it holds and counts at one moment, under a name that no table has. Ids without a row
    /// have the same initial values in both.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] for a name that is empty or taken; [`crate::Error::MemoryLimit`];
    /// [`crate::Error::Disk`].
    fn copy_table(&self, table: TableId, name: &str) -> Result<Arc<dyn EmbeddingTable>>;

    /// Puts what optimizers keep into several tables, all at one moment; rows stay as they are.
    ///
    /// # Errors
    /// [`crate::Error::StateMismatch`]: other slots than the optimizer's, or other ids than those of the rows.
    /// [`crate::Error::InvalidLearningRate`]; [`crate::Error::ForkedChild`]. Then no table has changed.
    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()>;

    /// Returns the rows of tables as they are at one moment, to be read while others go on.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] for a table that is given twice; [`crate::Error::StepCutShort`].
    fn cut_rows(&self, tables: &[TableId]) -> Result<Vec<CutRows>>;

    /// Limits the memory of all tables together, from the next call on. Tables that take more already keep it, but get no
    /// more rows; those with a slot file make room by moving rows there.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] for a limit of 0.
    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()>;

    /// Says that the rows of tables are spread over so many stores, of which this is one: of a capacity each keeps its
    /// share. Counts for one table, or for all that are made or loaded from now on.
    ///
    /// # Errors
    /// [`crate::Error::UnknownHandle`]; [`crate::Error::InvalidConfig`] for 0.
    fn set_shards(&self, table: Option<TableId>, shards: usize) -> Result<()>;

    /// Returns what all tables take of memory together, and their limit.
    fn memory(&self) -> StoreMemory;

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

    /// Returns which snapshots the store has saved and loaded, for [`InProcessStore::remember_saves`].
    ///
    /// # Errors
    /// As [`EmbeddingStore::save`], in the child of a process that was saving or loading when it was forked.
    fn known_saves(&self) -> Result<KnownSaves>;

    /// Gives the store what it knew of its saves when it had these rows before. From then on the number of
    /// [`SaveOptions::writer`] counts for older snapshots only.
    ///
    /// # Errors
    /// As [`InProcessStore::known_saves`].
    fn remember_saves(&self, known: KnownSaves) -> Result<()>;
}

/// The changes of tables for those who follow them.
pub trait Publications: EmbeddingStore {
    /// Notes the changes of tables from here on for those who follow them, and returns the number of this publication.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] for a table that is given twice; [`crate::Error::Published`], but of a store on
    /// servers, where one that begins ends those before; [`crate::Error::ForkedChild`].
    fn begin_publication(&self, tables: &[TableId]) -> Result<u64>;

    /// Returns what changed in tables since this was asked last, of all at one moment. Unless the last answer `was_told` to
    /// those who follow, it is a part of this one.
    ///
    /// # Errors
    /// [`crate::Error::NotPublished`]; [`crate::Error::Published`]: another one has begun on the servers;
    /// [`crate::Error::Disk`] and [`crate::Error::RuleFailed`] for rows that cannot be read.
    fn take_changes(&self, tables: &[TableId], publication: u64, was_told: bool) -> Result<Vec<ChangedRows>>;

    /// Notes nothing for a publication any more.
    ///
    /// # Errors
    /// As [`Publications::begin_publication`].
    fn end_publication(&self, tables: &[TableId], publication: u64) -> Result<()>;
}

impl dyn EmbeddingStore + '_ {
    /// Returns what a store in this process does besides.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with `message`, of another store.
    pub fn needs_process(&self, operation: &'static str, message: &str) -> Result<&dyn InProcessStore> {
        self.in_process().ok_or_else(|| Error::Unsupported { operation, message: message.to_owned() })
    }

    /// Returns what tells those who follow tables of their changes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] of a store whose tables do not change.
    pub fn needs_publications(&self) -> Result<&dyn Publications> {
        let message = "the tables of this store do not change".to_owned();
        self.publications().ok_or(Error::Unsupported { operation: "publish", message })
    }
}

impl fmt::Debug for dyn EmbeddingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddingStore").finish_non_exhaustive()
    }
}
