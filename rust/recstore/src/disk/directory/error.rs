//! What is wrong with a file.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// What is wrong with a file: an [`io::Error`] of a [`crate::Directory`] holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileError {
    /// The path of the file.
    pub path: PathBuf,
    /// The system's number of the error.
    pub errno: i32,
    /// What is wrong.
    pub reason: String,
}

impl FileError {
    /// Returns what an error of a [`crate::Directory`] holds.
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }

    pub(super) fn new(path: &Path, errno: Errno) -> Self {
        Self::at(path, &errno.into())
    }

    /// Says which file an error is about: the one that it names itself, or else the one of `path`.
    pub fn at(path: &Path, error: &io::Error) -> Self {
        if let Some(found) = Self::of(error) {
            return found.clone();
        }
        let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
        let text = error.to_string();
        let number = format!(" (os error {errno})");
        let reason = text.strip_suffix(&number).unwrap_or(&text).to_owned();
        Self { path: path.to_owned(), errno, reason }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.reason)
    }
}

impl Error for FileError {}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno).kind(), error)
    }
}
