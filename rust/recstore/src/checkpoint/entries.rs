//! What a manifest says of a table and of its files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::files::{COMPRESSED_EXTENSION, FILE_EXTENSION, FILE_NAME, refused};
use crate::Result;
use crate::config::TableConfig;
use crate::table::TableProgress;

/// A table of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TableEntry {
    pub(super) name: String,
    pub(super) dim: usize,
    config: serde_json::Value,
    pub(super) progress: TableProgress,
    /// Whether the files hold only what changed since the parent.
    pub(super) is_delta: bool,
    pub(super) shards: Vec<ShardEntry>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardEntry {
    pub(super) file: String,
    pub(super) bytes: u64,
    pub(super) rows: usize,
    pub(super) deleted: usize,
    /// The elements of each tensor of what admission and eviction remember.
    pub(super) state: BTreeMap<String, usize>,
    /// CRC-32 (IEEE 802.3) of the header and of each tensor.
    pub(super) checksums: BTreeMap<String, u32>,
    /// How the file is compressed, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) compressed: Option<Compressed>,
}

impl ShardEntry {
    /// Returns the length of the plain file.
    pub(super) fn plain_bytes(&self) -> u64 {
        self.compressed.as_ref().map_or(self.bytes, |compressed| compressed.bytes)
    }

    /// Whether the file lies in the directory and its name tells what it is.
    pub(super) fn has_own_name(&self) -> bool {
        let end = if self.compressed.is_some() { COMPRESSED_EXTENSION } else { FILE_EXTENSION };
        !self.file.contains(['/', '\\']) && self.file.ends_with(end)
    }
}

impl TableEntry {
    pub(super) fn new(
        name: &str,
        config: &TableConfig,
        progress: TableProgress,
        is_delta: bool,
    ) -> Result<Self> {
        let text = config.without_memory().to_json()?;
        let config_value = serde_json::from_str(&text).map_err(|error| refused(FILE_NAME, error))?;
        Ok(Self {
            name: name.to_owned(),
            dim: config.dim,
            config: config_value,
            progress,
            is_delta,
            shards: vec![],
        })
    }

    /// Checks that its counts are some that a table can go on from.
    pub(super) fn validate(&self) -> std::result::Result<(), String> {
        self.progress.validate().map_err(|message| format!("table \"{}\": {message}", self.name))
    }

    /// Returns the table's step count.
    pub(super) fn step(&self) -> u64 {
        self.progress.step
    }

    /// Gives this and another shard of the same table the step of the one that is ahead.
    pub(super) fn level_steps(&mut self, other: &mut Self) {
        let ahead = if self.progress.step >= other.progress.step { &self.progress } else { &other.progress };
        let (step, sweep, idle_kept) = (ahead.step, ahead.sweep, ahead.idle_kept);
        for progress in [&mut self.progress, &mut other.progress] {
            (progress.step, progress.sweep, progress.idle_kept) = (step, sweep, idle_kept);
        }
    }

    /// Adds the files of another shard of the same table; fails with its name if it is not the same.
    pub(super) fn add_shards(&mut self, other: Self) -> std::result::Result<(), String> {
        let is_same = self.name == other.name
            && self.dim == other.dim
            && self.config == other.config
            && self.is_delta == other.is_delta
            && self.progress.step == other.progress.step
            && self.progress.sweep == other.progress.sweep
            && self.progress.idle_kept == other.progress.idle_kept;
        if !is_same {
            return Err(other.name);
        }
        self.progress.add(&other.progress);
        self.shards.extend(other.shards);
        Ok(())
    }

    /// Returns the configuration of the table.
    pub(super) fn config(&self) -> Result<TableConfig> {
        TableConfig::from_json(self.dim, &self.config.to_string())
    }

    /// Returns the rows in all files.
    pub(super) fn rows(&self) -> usize {
        self.shards.iter().map(|shard| shard.rows).fold(0, usize::saturating_add)
    }
}

/// The one way of compression there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Zstd,
}

/// How a file was compressed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Compressed {
    pub(super) kind: Kind,
    pub(super) level: i32,
    /// The length of the plain file.
    pub(super) bytes: u64,
    /// Where the frame of the header and that of each tensor begins.
    pub(super) frames: BTreeMap<String, u64>,
}
