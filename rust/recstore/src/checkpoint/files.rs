//! The files of a checkpoint's directory: their names, its lock, and errors about them.

use std::collections::hash_map::RandomState;
use std::fmt::Display;
use std::fs::{File, TryLockError};
use std::hash::BuildHasher;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::SystemTime;

use crate::disk::{Directory, FileError};
use crate::table::SaveId;
use crate::{Error, Result};

/// The manifest's name in a checkpoint directory.
pub(super) const FILE_NAME: &str = "manifest.json";

/// The most bytes that a manifest, or what a shard saved, may have.
pub(super) const MAX_TEXT_BYTES: u64 = 1 << 30;

/// How names of files end.
pub(super) const FILE_EXTENSION: &str = ".safetensors";

/// How names of compressed files end.
pub(super) const COMPRESSED_EXTENSION: &str = ".safetensors.zst";

/// The file by which a save keeps others away.
pub(super) const LOCK_NAME: &str = ".lock";

/// What is said of a directory without a manifest.
pub(super) const NOTHING: &str = "there is no checkpoint here";

/// Returns an error about a file.
pub(super) fn refused(path: impl AsRef<Path>, message: impl Display) -> Error {
    Error::Checkpoint { path: path.as_ref().display().to_string(), message: message.to_string() }
}

/// Says which file an error is about.
pub(super) fn at<E: Display>(path: &Path) -> impl FnOnce(E) -> Error {
    move |error| refused(path, error)
}

/// Says which file of a directory an error is about.
pub(super) fn inside(directory: &Directory) -> impl FnOnce(io::Error) -> Error {
    of_file(directory.path())
}

fn of_file(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        let FileError { path, reason, .. } = FileError::at(path, &error);
        refused(path, reason)
    }
}

/// Opens a directory, if it is there.
pub(super) fn found(path: &Path) -> Result<Option<Directory>> {
    match Directory::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(of_file(path)),
    }
}

/// Opens the directory of a checkpoint.
pub(super) fn existing(path: &Path) -> Result<Directory> {
    found(path)?.ok_or_else(|| refused(path, NOTHING))
}

/// Opens a directory, which is made if it is not there.
pub(super) fn created(path: &Path) -> Result<Directory> {
    Directory::create(path).map_err(of_file(path))
}

/// Returns the name of a snapshot that does not exist yet.
pub fn new_snapshot_name() -> String {
    name_of(new_save())
}

pub(super) fn new_save() -> SaveId {
    // Random by the hasher's keys: two that save in the same instant get different names.
    RandomState::new().hash_one(SystemTime::now())
}

/// Keeps others from saving to a directory.
pub(super) struct DirectoryLock(File);

impl Drop for DirectoryLock {
    /// Closing the file would not do: a child forked meanwhile has it open too.
    fn drop(&mut self) {
        _ = self.0.unlock();
    }
}

/// Keeps others, in this process too, from saving to the directory as long as what is returned lives.
pub(super) fn lock(directory: &Directory) -> Result<DirectoryLock> {
    let path = directory.path().join(LOCK_NAME);
    let file = directory.lock_file(LOCK_NAME).map_err(inside(directory))?;
    // Refused rather than waited for: the other save would change what this one was about to follow.
    match file.try_lock() {
        Ok(()) => Ok(DirectoryLock(file)),
        Err(TryLockError::WouldBlock) => {
            Err(refused(directory.path(), "another process or store is saving to it"))
        }
        Err(TryLockError::Error(error)) => Err(refused(&path, error)),
    }
}

pub(super) fn name_of(save: SaveId) -> String {
    format!("{save:016x}")
}

/// Returns the save of a snapshot's name.
pub(super) fn save_id(snapshot: &str) -> std::result::Result<SaveId, String> {
    let parsed = SaveId::from_str_radix(snapshot, 16).ok().filter(|save| name_of(*save) == snapshot);
    parsed.ok_or_else(|| format!("\"{snapshot}\" is not the name of a snapshot: sixteen hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_the_save_though_a_forked_child_has_its_file_open() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = &Directory::open(temporary.path()).unwrap();
        let held = lock(directory).unwrap();
        let inherited = held.0.try_clone().unwrap();
        assert!(lock(directory).is_err());
        drop(held);
        assert!(lock(directory).is_ok());
        drop(inherited);
    }
}
