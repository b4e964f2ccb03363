//! The files of a checkpoint's directory: their names, and errors about them.

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::disk::{Directory, FileError};
use crate::{Error, Result};

/// The manifest's name in a checkpoint directory.
pub(super) const FILE_NAME: &str = "manifest.json";

/// The most bytes that a manifest, or what a shard saved, may have.
pub(super) const MAX_TEXT_BYTES: u64 = 1 << 30;

/// How names of files end.
pub(super) const FILE_EXTENSION: &str = ".safetensors";

/// How names of compressed files end.
pub(super) const COMPRESSED_EXTENSION: &str = ".safetensors.zst";

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

/// Opens a directory, which is made if it is not there.
pub(super) fn created(path: &Path) -> Result<Directory> {
    Directory::create(path).map_err(of_file(path))
}
