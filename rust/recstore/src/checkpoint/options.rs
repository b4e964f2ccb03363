//! How to save and how to load.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::compression::Compression;
use super::metadata::Metadata;
use super::progress::Progress;
use crate::calls::TableId;
use crate::kernel::hash::mix;

/// What a save writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveKind {
    /// All rows.
    #[default]
    Full,
    /// What changed since the directory's last snapshot, which must be the last save of this store, or what it loaded.
    Delta,
    /// A delta where there is something it can follow, else all rows.
    Auto,
}

/// Which of the stores that save together this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The store's number, from 0.
    pub number: usize,
    /// How many stores there are.
    pub of: usize,
}

impl Shard {
    /// Whether an id is of this shard, where ids are spread by splitmix64 of the id modulo the number of shards. The
    /// same on every machine and in every release.
    ///
    /// # Panics
    /// There are 0 shards.
    pub fn holds(self, id: i64) -> bool {
        mix(id) % self.of as u64 == self.number as u64
    }
}

/// Returns the share of a shard: one of one has all rows.
pub(super) fn share_of(shard: Shard) -> Option<Shard> {
    Some(shard).filter(|shard| shard.of > 1)
}

/// How to save.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct SaveOptions<'a> {
    /// What to write.
    pub kind: SaveKind,
    /// How many full snapshots stay in the directory, with the deltas that follow them; 0 counts as 1.
    pub keep: usize,
    /// What is kept along with the tables and given back by a load: the caller's own progress.
    pub metadata: Metadata,
    /// How files are made smaller. A file is written plain first, and the room for both taken until it is compressed.
    pub compression: Compression,
    /// Drops the snapshots that other stores saved to the directory, also for a store without rows.
    pub replace: bool,
    /// Sixteen hexadecimal digits that tell the store from others, for one that comes back with its rows when its process
    /// has ended. One that does not is known by what it saved and loaded.
    pub writer: Option<String>,
    /// The directory is that of the server which saves; one of another server is refused.
    pub by_its_server: bool,
    /// Puts parts together though tables are at different steps on different shards; the greatest counts.
    pub at_any_step: bool,
    /// Called when the moment of the save has come: what is done from then on is not in it.
    pub on_cut: Option<&'a (dyn Fn() + Sync)>,
    /// Follows the bytes written.
    pub progress: Option<&'a Progress>,
}

/// How to load.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions<'a> {
    /// Whether a row is loaded, by its id; all are without it. So any number of stores can share what any number of
    /// stores saved. Without [`LoadOptions::shard`] the store has no part in what the directory holds.
    pub keeps: Option<&'a (dyn Fn(i64) -> bool + Sync)>,
    /// Which of the stores that share the load this is, if several do. Where as many saved, each gets the shared rows that
    /// its own had.
    pub shard: Option<Shard>,
    /// The snapshot to load; the newest without it.
    pub snapshot: Option<&'a str>,
    /// The only tables to load; all of the snapshot's without it. A store that leaves some out has no part in what the
    /// directory holds.
    pub tables: Option<&'a BTreeSet<String>>,
    /// Whether the tables begin to count anew what was inserted, updated and so on. Of stores that share the rows of a save
    /// all but one do: then the counts of all are together what they were.
    pub without_counts: bool,
    /// Whether tables whose update rule is a program's own are loaded without it: to be read, for their next step is refused.
    pub without_rules: bool,
    /// The numbers of tables that are not there yet, by name, for who has handed them out before; others get new ones.
    pub numbers: Option<&'a BTreeMap<String, TableId>>,
    /// Follows the bytes read.
    pub progress: Option<&'a Progress>,
}
