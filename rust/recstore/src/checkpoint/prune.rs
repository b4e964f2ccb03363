//! Takes old snapshots out of a directory, and removes the files that its manifest lists for these alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::Path;

use serde::Serialize;

use super::compact::locked;
use super::files::{DirectoryLock, FILE_NAME, existing};
use super::manifest::{Manifest, Snapshot};
use crate::Result;
use crate::disk::Directory;

/// What is about to be taken out of a directory, which nobody saves to until it is dropped, unless it is a dry run.
pub struct Pruning {
    directory: Directory,
    /// As it is to be.
    manifest: Manifest,
    pruned: Pruned,
    _lock: Option<DirectoryLock>,
}

/// What is taken out of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// The snapshots that stay, the oldest first.
    pub kept: Vec<String>,
    /// Those that go.
    pub snapshots: Vec<String>,
    /// The bytes of each file that goes, by its name.
    pub files: BTreeMap<String, u64>,
}

impl Pruning {
    /// Plans to keep the newest `keep` full snapshots and what follows them.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`]: there is no checkpoint, its manifest is damaged, or somebody saves to it.
    pub fn plan(path: &Path, keep: usize, dry_run: bool) -> Result<Self> {
        let directory = existing(path)?;
        let (lock, mut manifest) = match dry_run {
            true => (None, Manifest::existing(&directory)?),
            false => locked(&directory).map(|(lock, manifest)| (Some(lock), manifest))?,
        };
        let dropped = manifest.retain(keep);
        let needed: BTreeSet<&String> = manifest.files().collect();
        let files = dropped.iter().flat_map(Snapshot::shards).filter(|shard| !needed.contains(&shard.file));
        let files = files.map(|shard| (shard.file.clone(), shard.bytes)).collect();
        let ids = |snapshots: &[Snapshot]| snapshots.iter().map(|snapshot| snapshot.id.clone()).collect();
        let pruned = Pruned { kept: ids(&manifest.snapshots), snapshots: ids(&dropped), files };
        Ok(Self { directory, manifest, pruned, _lock: lock })
    }

    /// Returns what will go.
    pub fn pruned(&self) -> &Pruned {
        &self.pruned
    }

    /// Replaces the manifest and then removes the files.
    ///
    /// # Errors
    /// A [`crate::FileError`]: the manifest cannot be written, or what has the name of a file that goes is something else;
    /// nothing has changed. Or a file cannot be removed, which does no harm.
    pub fn carry_out(&self) -> io::Result<()> {
        if self.pruned.snapshots.is_empty() {
            return Ok(());
        }
        let files = || self.pruned.files.keys();
        files().try_for_each(|file| if_there(self.directory.open_file(file).map(drop)))?;
        // The manifest first: a crash in between leaves files without a snapshot, and no snapshot without its
        // files.
        self.directory.replace(FILE_NAME, &self.manifest.signed()?)?;
        files().try_for_each(|file| if_there(self.directory.remove_file(file)))?;
        self.directory.sync()
    }
}

fn if_there(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
