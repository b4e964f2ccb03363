//! What is asked of one table.

use std::fmt;

use crate::Result;
use crate::calls::{TableDescription, TableId, TableStatistics};

/// A table that was opened: its rows in this process, on servers, or failing on purpose in tests.
///
/// Every method that returns a result gives [`crate::Error::UnknownHandle`] once the table was dropped. A method that
/// fails has changed nothing. Rows are row-major, `dim` floats each. Steps are taken through the store, several tables'
/// at one time: [`EmbeddingStore::update`](crate::EmbeddingStore::update).
pub trait EmbeddingTable: Send + Sync {
    /// Returns the table's number in its store.
    fn id(&self) -> TableId;

    /// Returns the table's name.
    fn name(&self) -> &str;

    /// Returns the elements of a row.
    fn dim(&self) -> usize;

    /// Checks that the table was not dropped, for a call of the name `operation`.
    fn check_open(&self, operation: &'static str) -> Result<()>;

    /// Returns name and configuration.
    fn describe(&self) -> Result<TableDescription>;

    /// Writes the row of each id to `rows`. An id without a row reads as its initial value and gets no row.
    ///
    /// # Errors
    /// [`crate::Error::IdOutOfRange`]; [`crate::Error::DimMismatch`]; [`crate::Error::Disk`].
    fn read(&self, ids: &[i64], rows: &mut [f32]) -> Result<()>;

    /// Reads, and writes where the rows lay to `places`, one an id and [`PLACES_TAG`](crate::PLACES_TAG) more.
    ///
    /// Given back with the ids' gradients, in [`GradientPart::places`](crate::GradientPart::places), they spare the
    /// step its search. They are good until rows are deleted, and then of no effect.
    ///
    /// # Errors
    /// As [`EmbeddingTable::read`]; [`crate::Error::LengthMismatch`].
    fn read_with_places(&self, ids: &[i64], rows: &mut [f32], places: &mut [u32]) -> Result<()>;

    /// Reads rows that a step will change soon: of a table whose rows may lie on disk they are brought into memory.
    ///
    /// # Errors
    /// As [`EmbeddingTable::read`].
    fn read_ahead(&self, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.read(ids, rows)
    }

    /// Overwrites the rows of `ids`; of duplicates the last one wins.
    ///
    /// # Errors
    /// [`crate::Error::NonFinite`], [`crate::Error::TableFull`], [`crate::Error::MemoryLimit`], [`crate::Error::Disk`],
    /// [`crate::Error::ForkedChild`]; as [`EmbeddingTable::read`].
    fn write(&self, ids: &[i64], rows: &[f32]) -> Result<()>;

    /// Writes each id's index, -1 where it has no row, and its row; with `insert`, such ids get a row first.
    ///
    /// # Errors
    /// As [`EmbeddingTable::read`], and with `insert` as [`EmbeddingTable::write`].
    fn lookup(&self, ids: &[i64], insert: bool, indices: &mut [i64], rows: &mut [f32]) -> Result<()>;

    /// Deletes the rows of `ids` and returns how many there were; an id without a row is no error.
    fn delete(&self, ids: &[i64]) -> Result<usize>;

    /// Takes away the rows that the table's eviction chooses, as the table is now, and returns their ids in ascending
    /// order. A `dry_run` returns them and changes nothing.
    ///
    /// A `ttl` takes the place of the table's own for this call: rows leave that no step has updated for more than so many
    /// steps.
    ///
    /// # Errors
    /// [`crate::Error::NoEviction`]; [`crate::Error::ForkedChild`].
    fn evict(&self, ttl: Option<u64>, dry_run: bool) -> Result<Vec<i64>>;

    /// Deletes every row; configuration, learning rate and step stay.
    fn clear(&self) -> Result<()>;

    /// Returns the ids that have a row, in the order of their indices.
    fn ids(&self) -> Result<Vec<i64>>;

    /// Returns the number of rows.
    fn num_rows(&self) -> Result<usize>;

    /// Returns the values of an optimizer slot for each id, zeros where it has no row; `None` for an unknown slot.
    ///
    /// # Errors
    /// [`crate::Error::IdOutOfRange`].
    fn read_slot(&self, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>>;

    /// Sets the learning rate from the next step on; `explicit` marks it as set by hand.
    ///
    /// # Errors
    /// [`crate::Error::InvalidLearningRate`]; [`crate::Error::ForkedChild`].
    fn set_learning_rate(&self, lr: f64, explicit: bool) -> Result<()>;

    /// Returns the learning rate of the next step and whether it was set by hand. On servers, as this client last set,
    /// loaded or asked for it: what others set meanwhile shows in [`EmbeddingTable::statistics`].
    fn learning_rate(&self) -> Result<(f64, bool)>;

    /// Returns what a table holds and what was done to it.
    fn statistics(&self) -> Result<TableStatistics>;
}

impl fmt::Debug for dyn EmbeddingTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddingTable").field("id", &self.id()).field("name", &self.name()).finish()
    }
}
