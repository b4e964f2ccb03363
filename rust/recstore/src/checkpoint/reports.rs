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
