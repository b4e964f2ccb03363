//! What a save wrote and what a load read.

use serde::{Deserialize, Serialize};

use super::metadata::Metadata;

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
    /// The newest of the snapshots of another store which stay beside this one, where this one is the first of its store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
}

/// What a load read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The snapshot's name.
    pub snapshot: String,
    /// What its save was given along.
    pub metadata: Metadata,
    /// Names of tables and their rows.
    pub tables: Vec<(String, usize)>,
    /// The bytes read.
    pub bytes: u64,
}
