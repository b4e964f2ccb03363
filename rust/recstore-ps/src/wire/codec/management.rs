//! The requests about tables as a whole, and their answers, in JSON.

use std::collections::BTreeSet;
use std::path::PathBuf;

use recstore::{LoadReport, Metadata, SaveKind, SaveReport, Shard, TableConfig, TableStatistics};
use serde::{Deserialize, Serialize};

use super::tagged::tagged;
use super::worker_state::WorkerState;
use crate::router::HashMethod;
use crate::wire::replica_role::{Position, Run};
use crate::wire::store_metadata::StoreMetadata;

/// The most steps that [`Management::CountSteps`] counts at a time.
pub(crate) const MAX_COUNTED_STEPS: u64 = 1 << 16;

/// A request about tables as a whole. Tables are called by the server's numbers, or by name where they may not be there.
#[expect(clippy::large_enum_variant, reason = "there is one at a time for each connection")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub enum Management {
    /// Creates or opens a table; [`Managed::Table`].
    OpenTable {
        /// Its name.
        name: String,
        /// The elements of its rows.
        dim: usize,
        /// Its configuration.
        config: TableConfig,
    },
    /// Looks for a table; [`Managed::Table`].
    FindTable {
        /// Its name.
        name: String,
    },
    /// Deletes a table; [`Managed::Done`].
    DropTable {
        /// Its name.
        name: String,
    },
    /// The names of all tables; [`Managed::Names`].
    TableNames {},
    /// Name, dim, configuration and slots; [`Managed::Description`].
    Describe {
        /// The table.
        table: i64,
    },
    /// Deletes every row; [`Managed::Done`].
    Clear {
        /// The table.
        table: i64,
    },
    /// Takes away the rows that eviction chooses; [`Managed::Ids`].
    Evict {
        /// The table.
        table: i64,
        /// In place of the table's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ttl: Option<u64>,
        /// Whether nothing changes.
        dry_run: bool,
    },
    /// The number of rows; [`Managed::Count`].
    NumRows {
        /// The table.
        table: i64,
    },
    /// Sets the learning rate; [`Managed::Done`].
    SetLearningRate {
        /// The table.
        table: i64,
        /// The rate.
        learning_rate: f64,
        /// Whether it counts as set by hand.
        explicit: bool,
    },
    /// What a table holds and what was done to it; [`Managed::Statistics`].
    Statistics {
        /// The table.
        table: i64,
    },
    /// The step of a table, and the last steps of the other clients that are connected; [`Managed::Steps`]. Since version 5.
    Steps {
        /// The table.
        table: i64,
    },
    /// Counts steps that no row takes, up to number `to`, if the table is at step `from`: other shards have taken them;
    /// [`Managed::Done`]. Since version 4.
    CountSteps {
        /// The table.
        table: i64,
        /// Its step.
        from: u64,
        /// The step that it is to be at.
        to: u64,
    },
    /// Saves this server's part of a snapshot; [`Managed::Saved`].
    SavePart(SavePart),
    /// Makes what all shards saved the newest snapshot; [`Managed::Done`].
    Commit(SavePart),
    /// Loads the rows of this shard from a snapshot; [`Managed::Loaded`].
    Load(LoadShard),
    /// Saves the tables to the server's own directory, and drops the log before; [`Managed::Saved`], or [`Managed::Done`] of
    /// a server without one. Since version 3.
    Checkpoint {},
    /// Notes the changes of tables from here on, and ends other publications of them; [`Managed::Publication`]. Since
    /// version 3.
    BeginPublication {
        /// The tables.
        tables: Vec<i64>,
    },
    /// What changed in tables; [`Answer::Changed`](super::Answer::Changed). Since version 3.
    TakeChanges(TakeChanges),
    /// Notes nothing for a publication any more; [`Managed::Done`]. Since version 3.
    EndPublication {
        /// The tables.
        tables: Vec<i64>,
        /// Its number.
        publication: u64,
    },
    /// Makes the client a worker; [`Managed::Joined`].
    Join {
        /// Its number, from 0.
        worker: u32,
    },
    /// Says that a worker lives; [`Managed::Done`].
    Beat {
        /// Its number.
        worker: u32,
    },
    /// Says that the client, a worker, has finished; [`Managed::Done`].
    Leave {},
    /// Says what counts of the store if nobody has said it before; [`Managed::Agreed`]. Since version 2.
    Agree {
        /// What the client says.
        facts: StoreMetadata,
        /// Whether it counts instead of what was said before: rows were loaded into all servers.
        replaces: bool,
    },
    /// Waits until all workers have come; [`Managed::Done`].
    Barrier {
        /// Its name.
        name: String,
        /// How long to wait, in milliseconds.
        patience_ms: u64,
    },
    /// What is known of the workers; [`Managed::Workers`].
    Workers {},
    /// Sends the shard's changes from now on; [`Managed::Following`], the files that it lists one after another, and then
    /// what the log has, until the connection ends. Since version 3.
    Follow(Follow),
    /// Says that a follower has all changes up to a number on its disk; [`Managed::Done`]. Since version 3.
    Confirm {
        /// The number.
        number: u64,
    },
    /// Makes a follower lead its shard; [`Managed::Promoted`]. Since version 3.
    Promote {},
    /// Has rows that are read on this connection come as bfloat16; [`Managed::Done`]. Since version 3.
    Narrow {},
    /// Puts large frames into the memory whose descriptor comes along, over a Unix socket; [`Managed::Done`].
    AttachSegment {},
    /// Says that another server leads the shard; [`Managed::StoodDown`]. Since version 3.
    StandDown {
        /// The epoch since when, which is beyond the server's own.
        epoch: u64,
    },
}

tagged!(Management, "verb");

/// A client's last change on a server, which is a step of a table or may be one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LastStep {
    /// The client's number, as 32 hexadecimal digits.
    pub client: String,
    /// The number of the change; none while it is under way.
    pub sequence: Option<u64>,
}

/// Asks what changed in the tables of a publication.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeChanges {
    /// The tables.
    pub tables: Vec<i64>,
    /// The number of the publication.
    pub publication: u64,
    /// The number of the last answer that was told to those who follow, 0 for none: what came behind it is in this one.
    pub told: u64,
}

/// Where a follower is, and how it follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    /// What it has.
    pub position: Position,
    /// Whether changes are acknowledged only when it has them too.
    pub synchronous: bool,
}

/// A file that a follower copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopiedFile {
    /// Its name in the directory of the checkpoint.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// A shard's part of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavePart {
    /// The directory, which all servers see under this path.
    pub directory: PathBuf,
    /// The snapshot's name.
    pub snapshot: String,
    /// Which of the servers this is.
    pub shard: Shard,
    /// Full, or what changed.
    pub kind: SaveKind,
    /// The full snapshots that stay.
    pub keep: usize,
    /// What is kept along with the tables.
    pub metadata: Metadata,
    /// The level of zstd; plain files without it. Since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<i32>,
    /// Whether the snapshots of other stores go. Since version 2.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replace: bool,
}

/// A shard's share of the rows in a directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadShard {
    /// The directory, which all servers see under this path.
    pub directory: PathBuf,
    /// Which of the servers this is.
    pub shard: Shard,
    /// How ids are routed.
    pub hash_method: HashMethod,
    /// The only tables to load. Since version 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<BTreeSet<String>>,
    /// The snapshot to load; the newest without it. Since version 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
}

/// The answer to a [`Management`] request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub enum Managed {
    /// It was done.
    Done {},
    /// The table's number, if there is one.
    Table {
        /// The number.
        table: Option<i64>,
    },
    /// Names.
    Names {
        /// Sorted.
        names: Vec<String>,
    },
    /// A table's name, dim, configuration and slots.
    Description {
        /// Its name.
        name: String,
        /// The elements of its rows.
        dim: usize,
        /// Its configuration.
        config: Box<TableConfig>,
        /// The names and widths of what its optimizer keeps beside each row.
        slots: Vec<(String, usize)>,
    },
    /// A publication has begun.
    Publication {
        /// Its number.
        number: u64,
    },
    /// Ids.
    Ids {
        /// Ascending.
        ids: Vec<i64>,
    },
    /// A number of rows.
    Count {
        /// The number.
        count: usize,
    },
    /// What a table holds.
    Statistics {
        /// The figures.
        statistics: Box<TableStatistics>,
    },
    /// How far a table is, and who may be taking a step of it.
    Steps {
        /// The steps that were taken.
        step: u64,
        /// The other connected clients whose last change here is a step of the table, or is under way.
        last: Vec<LastStep>,
    },
    /// What was saved.
    Saved {
        /// The report.
        report: SaveReport,
    },
    /// What was loaded.
    Loaded {
        /// The report.
        report: LoadReport,
    },
    /// What counts of the store.
    Agreed {
        /// It.
        facts: StoreMetadata,
    },
    /// The client is a worker.
    Joined {
        /// How long the server may let it wait for others, in milliseconds.
        patience_ms: u64,
    },
    /// What is known of the workers.
    Workers {
        /// Those who have joined and not left, by number.
        workers: Vec<WorkerState>,
        /// The most steps that one was ahead of another when it made one.
        most_ahead: u64,
    },
    /// A follower is sent changes from now on.
    Following {
        /// The runs of the server's changes.
        runs: Vec<Run>,
        /// The files of its checkpoint, if the follower must begin with them; they come behind this answer.
        files: Option<Vec<CopiedFile>>,
    },
    /// A follower leads.
    Promoted {
        /// The epoch that begins.
        epoch: u64,
        /// The last change that it has.
        last: u64,
    },
    /// A server leads no more.
    StoodDown {
        /// The last change that it made.
        last: u64,
    },
}

tagged!(Managed, "answer");

impl Managed {
    /// Returns the name of its form, for messages: its values may be many.
    pub(crate) fn form(&self) -> String {
        format!("{self:?}").chars().take_while(char::is_ascii_alphabetic).collect()
    }
}
