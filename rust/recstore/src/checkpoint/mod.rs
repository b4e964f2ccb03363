//! Checkpoints: the tables of a store in a directory, written while they are trained on.
//!
//! A directory holds *snapshots*, each the tables at one moment: full ones, and deltas that hold what changed since the
//! one before. Data lies in files of their own, which never change; the manifest lists those that count and is replaced
//! in one move, so a reader sees the old snapshots or the new ones, whenever a save ends. `docs/checkpoint_format.md`
//! tells the format byte by byte.

mod compact;
mod compression;
mod flusher;
mod load;
mod manifest;
mod parts;
mod save;
mod table_file;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::calls::TableId;
pub use compact::compact;
pub use compression::Compression;
pub use load::{CheckpointFiles, checkpoint_files, checkpoint_metadata};
pub(crate) use load::{LoadingStore, load};
pub(crate) use parts::save_part;
pub use parts::{Shard, commit};
pub use save::new_snapshot_name;
pub(crate) use save::{LastSave, save};

/// How names of files end.
const FILE_EXTENSION: &str = ".safetensors";

/// How names of compressed files end.
const COMPRESSED_EXTENSION: &str = ".safetensors.zst";

/// About how many bytes are copied or read at a time.
const BYTES_AT_A_TIME: usize = 512 << 10;

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

/// How to save.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct SaveOptions<'a> {
    /// What to write.
    pub kind: SaveKind,
    /// How many full snapshots stay in the directory, with the deltas that follow them; 0 counts as 1.
    pub keep: usize,
    /// What is kept along with the tables and given back by a load: the caller's own progress.
    pub metadata: serde_json::Value,
    /// How files are made smaller. A file is written plain first, and the room for both taken until it is compressed.
    pub compression: Compression,
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
    /// stores saved.
    pub keeps: Option<&'a (dyn Fn(i64) -> bool + Sync)>,
    /// Whether the tables begin to count anew what was inserted, updated and so on. Of stores that share the rows of a save
    /// all but one do: then the counts of all are together what they were.
    pub without_counts: bool,
    /// The numbers of tables that are not there yet, by name, for who has handed them out before; others get new ones.
    pub numbers: Option<&'a BTreeMap<String, TableId>>,
    /// Follows the bytes read.
    pub progress: Option<&'a Progress>,
}

/// What a save wrote.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SaveReport {
    /// The snapshot's name.
    pub snapshot: String,
    /// Whether it tells changes only.
    pub is_delta: bool,
    /// The rows written.
    pub rows: usize,
    /// The ids told to be deleted.
    pub deleted: usize,
    /// The bytes written.
    pub bytes: u64,
}

/// What a load read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The snapshot's name.
    pub snapshot: String,
    /// What its save was given along.
    pub metadata: serde_json::Value,
    /// Names of tables and their rows.
    pub tables: Vec<(String, usize)>,
    /// The bytes read.
    pub bytes: u64,
}

/// How far a save or a load is, for whoever shows it from another thread.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Returns the bytes done and the bytes in all; 0 of 0 before these are known.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Counts bytes that were written or read elsewhere, by a server.
    pub fn add_done(&self, bytes: u64) {
        Self::expect(Some(self), bytes);
        Self::advance(Some(self), bytes);
    }

    fn restart(progress: Option<&Self>) {
        if let Some(progress) = progress {
            progress.done.store(0, Ordering::Relaxed);
            progress.total.store(0, Ordering::Relaxed);
        }
    }

    fn expect(progress: Option<&Self>, bytes: u64) {
        if let Some(progress) = progress {
            progress.total.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn advance(progress: Option<&Self>, bytes: u64) {
        if let Some(progress) = progress {
            progress.done.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

/// Returns an error about a file.
fn refused(path: impl AsRef<Path>, message: impl Display) -> Error {
    Error::Checkpoint { path: path.as_ref().display().to_string(), message: message.to_string() }
}

/// Says which file an error is about.
fn at<E: Display>(path: &Path) -> impl FnOnce(E) -> Error {
    move |error| refused(path, error)
}
