//! What a server keeps on disk.

pub(crate) mod directory_lock;
pub(crate) mod feed;
pub(crate) mod followers;
pub(crate) mod journal;
pub(crate) mod left_out;
pub(crate) mod log;
pub(crate) mod moves;
mod saves_file;
pub(crate) mod state_directory;

use std::fmt::Display;
use std::io;
use std::path::Path;

use recstore::FileError;

/// The file that says which shard a server's directory is.
const NAME: &str = recstore::SERVER_STATE;

/// What a checkpoint of the tables has; a server that keeps no log has it in its own directory.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Says which file an error is about, which one of a directory that is held open tells itself.
pub(crate) fn in_file(path: &Path) -> impl FnOnce(io::Error) -> recstore::Error {
    move |error| {
        let FileError { path, reason, .. } = FileError::at(path, &error);
        unusable(&path, reason)
    }
}

/// Returns an error about a file or directory.
pub(crate) fn unusable(path: &Path, message: impl Display) -> recstore::Error {
    recstore::Error::Checkpoint { path: path.display().to_string(), message: message.to_string() }
}
