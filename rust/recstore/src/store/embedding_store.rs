//! The seam between whoever trains and whatever keeps the tables.

use std::path::Path;

use crate::Result;
use crate::calls::{OptimizerState, StoreMemory, TableDescription, TableId, TableStatistics, TableUpdate};
use crate::checkpoint::{LoadOptions, LoadReport, SaveOptions, SaveReport, Shard};
use crate::config::TableConfig;
use crate::rows::pooling::BagInput;

/// Tables of rows, addressed by number: in this process, on servers, or failing on purpose in tests.
///
/// Every method gives [`crate::Error::UnknownHandle`] for a table that was dropped or never opened. A method that fails
/// has changed nothing. Rows are row-major, `dim` floats each.
pub trait EmbeddingStore: Send + Sync {
    /// Creates the table `name`, or opens it if its configuration agrees.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`]; [`crate::Error::ConfigMismatch`] shows both configurations;
    /// [`crate::Error::UnknownRule`].
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<TableId>;

    /// Returns the table `name`, if there is one.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`], of a store on servers.
    fn find_table(&self, name: &str) -> Result<Option<TableId>>;

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

    /// Returns name and configuration of a table.
    fn describe(&self, table: TableId) -> Result<TableDescription>;

    /// Returns the elements of a table's rows.
    fn dim(&self, table: TableId) -> Result<usize>;

    /// Writes the row of each id to `rows`. An id without a row reads as its initial value and gets no row.
    ///
    /// # Errors
    /// [`crate::Error::IdOutOfRange`]; [`crate::Error::DimMismatch`]; [`crate::Error::Disk`].
    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()>;

    /// Reads, and writes where the rows lay to `places`, one an id and [`PLACES_TAG`](crate::PLACES_TAG) more.
    ///
    /// Given back with the ids' gradients, in [`GradientPart::places`](crate::GradientPart::places), they spare the
    /// step its search. They are good until rows are deleted, and then of no effect.
    ///
    /// # Errors
    /// As [`EmbeddingStore::read`]; [`crate::Error::LengthMismatch`].
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
    /// [`crate::Error::InvalidBag`]; [`crate::Error::LengthMismatch`]; as [`EmbeddingStore::read`].
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
    /// [`crate::Error::NonFinite`], [`crate::Error::TableFull`], [`crate::Error::MemoryLimit`], [`crate::Error::Disk`],
    /// [`crate::Error::ForkedChild`]; as [`EmbeddingStore::read`].
    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()>;

    /// Checks all of `updates`, then takes each one's optimizer step: one per distinct id, counted for an empty
    /// update too.
    ///
    /// # Errors
    /// As [`EmbeddingStore::write`], and [`crate::Error::InvalidStep`]; then no table has changed. But when the disk
    /// fails within a step of more rows than memory holds, or a rule of the program's own panics
    /// ([`crate::Error::RuleFailed`]), every later call on that table is refused until it is cleared or loaded.
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
    /// [`crate::Error::NoEviction`]; [`crate::Error::ForkedChild`].
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
    /// [`crate::Error::IdOutOfRange`].
    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>>;

    /// Sets the learning rate from the next step on; `explicit` marks it as set by hand.
    ///
    /// # Errors
    /// [`crate::Error::InvalidLearningRate`]; [`crate::Error::ForkedChild`].
    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()>;

    /// Puts what optimizers keep into several tables, all at one moment; rows stay as they are.
    ///
    /// # Errors
    /// [`crate::Error::StateMismatch`]: other slots than the optimizer's, or other ids than those of the rows.
    /// [`crate::Error::InvalidLearningRate`]; [`crate::Error::ForkedChild`]. Then no table has changed.
    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()>;

    /// Returns what a table holds and what was done to it.
    fn statistics(&self, table: TableId) -> Result<TableStatistics>;

    /// Limits the memory of all tables together, from the next call on. Tables that take more already keep it, but get no
    /// more rows; those with a slot file make room by moving rows there.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`] for a limit of 0.
    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()>;

    /// Returns what all tables take of memory together, and their limit.
    fn memory(&self) -> StoreMemory;

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
