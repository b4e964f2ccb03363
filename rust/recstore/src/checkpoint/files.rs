//! The files of a checkpoint's directory: their names, errors about them, and how they are made to survive a crash.

use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

use crate::{Error, Result};

/// The manifest's name in a checkpoint directory.
pub(super) const FILE_NAME: &str = "manifest.json";

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

/// Reads a whole file.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    crate::disk::open_file(path)?.read_to_end(&mut text).map(|_| text)
}

/// Writes a file beside `path` and then gives it that name: readers see the old file or the new one.
pub(super) fn write_beside(path: &Path, text: &[u8]) -> Result<()> {
    let beside = path.with_extension("new");
    let write = |mut file: fs::File| file.write_all(text).and_then(|()| file.sync_all());
    if let Err(error) = fs::File::create(&beside).and_then(write) {
        // What is cut off has no use, and the disk may be full.
        _ = fs::remove_file(&beside);
        return Err(refused(&beside, error));
    }
    fs::rename(&beside, path).map_err(at(path))
}

/// As [`write_beside`], so that the name survives a crash too.
pub fn write_file(path: &Path, text: &[u8]) -> Result<()> {
    write_beside(path, text)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Makes a directory and those above it that are not there, so that they survive a crash.
pub(super) fn create_directory(directory: &Path) -> Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    match directory.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => {
            create_directory(parent)?;
            create_in(parent, directory)
        }
        _ => create_in(Path::new("."), directory),
    }
}

fn create_in(parent: &Path, directory: &Path) -> Result<()> {
    match fs::create_dir(directory) {
        // Somebody else was faster.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && directory.is_dir() => {}
        made => made.map_err(at(directory))?,
    }
    sync_directory(parent)
}

/// Makes the names in a directory survive a crash.
pub(super) fn sync_directory(directory: &Path) -> Result<()> {
    let opened = fs::File::open(directory);
    opened.and_then(|directory| directory.sync_all()).map_err(at(directory))
}
