//! What calls on a store are given and what they give, below the tables and stores that take the calls.

use serde::{Deserialize, Serialize};

use crate::config::TableConfig;
use crate::rows::gradient::GradientChunk;

/// The number of a table in its store. It is never given to another table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId(pub i64);

/// The greatest [`Step::At`]: a float64 has it, and there is room for steps behind it.
pub const MAX_STEP: u64 = 1 << 53;

/// Which step of its table an update is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Step {
    /// One more than the last.
    #[default]
    Next,
    /// The caller's count, from 1 to [`MAX_STEP`]: whoever shards a table gives every shard the same.
    At(u64),
}

/// Rows wanted of one table.
#[derive(Debug)]
pub struct TableRead<'a> {
    /// The table.
    pub table: TableId,
    /// The ids, duplicates allowed.
    pub ids: &'a [i64],
    /// Gets a row for each.
    pub rows: &'a mut [f32],
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

/// What changed in a table since it was last asked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChangedRows {
    /// The ids whose rows changed or are new.
    pub ids: Vec<i64>,
    /// Their rows as they are now, one behind the other.
    pub rows: Vec<f32>,
    /// The ids whose rows were deleted; one that has a row again is among `ids` too.
    pub deleted: Vec<i64>,
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
    /// [`TableStatistics::idle_kept`]; none of a table that has none.
    pub idle_kept: Option<[f64; 2]>,
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
    /// Rows that programs wrote since the store has the table, new ones and others.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub writes: u64,
    /// Rows deleted, those that left included.
    pub deletes: u64,
    /// Ids that a step updated and that were not admitted: one an id and step.
    pub rejections: u64,
    /// Rows that left by eviction.
    pub evictions: u64,
    /// Ids without a row that admission counts one by one.
    pub candidates: usize,
    /// Rows in memory that ids without one of their own share.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_rows: usize,
    /// Rows and gradients refused or skipped because they were not finite.
    pub refusals: u64,
    /// Optimizer steps taken.
    pub step: u64,
    /// The learning rate of the next step.
    pub learning_rate: f64,
    /// Whether the learning rate was set by hand.
    pub learning_rate_was_set: bool,
    /// What the steps have left of a weight to which no gradient came, of a table whose rows decay while steps leave them
    /// alone: a fraction, times two to the power of an exponent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_kept: Option<[f64; 2]>,
    /// How many rows a sweep leaves here, the share of the eviction's capacity that one of the table's stores has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_share: Option<u64>,
}

fn is_zero<T: Default + PartialEq>(count: &T) -> bool {
    *count == T::default()
}

/// What the tables of a store take of memory together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreMemory {
    /// The limit, in bytes, if there is one.
    pub limit: Option<u64>,
    /// What is in use, in bytes.
    pub in_use: u64,
}

/// What a table takes of memory, in bytes, and how its rows lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryUse {
    /// The weights of the rows in memory.
    pub row_bytes: u64,
    /// The optimizer's slots of the rows in memory, and what rounds records up to whole cache lines.
    pub slot_bytes: u64,
    /// The id map, the ids of rows, and what is noted of rows for saves, for the disk and for the next step.
    pub index_bytes: u64,
    /// Records that hold no row: freed ones, and those of pages that the system supplied ahead of use.
    pub free_bytes: u64,
    /// What the slot file takes of the disk.
    pub disk_bytes: u64,
    /// The limit of this table.
    pub memory_limit: Option<u64>,
    /// The rows that lie in memory.
    pub resident_rows: u64,
    /// Rows read from the slot file since the table was made.
    pub rows_fetched: u64,
    /// Rows written to the slot file since the table was made.
    pub rows_spilled: u64,
    /// The time that calls spent on moving rows between memory and disk, in nanoseconds.
    pub disk_nanoseconds: u64,
    /// The ids found by their page alone: consecutive ones whose rows were made in the same order.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub linear_ids: u64,
    /// The ids that lie close together, found in an array of four bytes an id.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub array_ids: u64,
    /// All others, found in a hash map.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hash_ids: u64,
}

impl MemoryUse {
    /// Adds what another table, or another server's part of the table, takes.
    pub fn add(&mut self, other: &Self) {
        self.row_bytes += other.row_bytes;
        self.slot_bytes += other.slot_bytes;
        self.index_bytes += other.index_bytes;
        self.free_bytes += other.free_bytes;
        self.disk_bytes += other.disk_bytes;
        self.memory_limit = self.memory_limit.zip(other.memory_limit).map(|(own, other)| own + other);
        self.resident_rows += other.resident_rows;
        self.rows_fetched += other.rows_fetched;
        self.rows_spilled += other.rows_spilled;
        self.disk_nanoseconds += other.disk_nanoseconds;
        self.linear_ids += other.linear_ids;
        self.array_ids += other.array_ids;
        self.hash_ids += other.hash_ids;
    }

    /// Returns all bytes of memory.
    pub fn bytes(&self) -> u64 {
        self.row_bytes + self.slot_bytes + self.index_bytes + self.free_bytes
    }
}
