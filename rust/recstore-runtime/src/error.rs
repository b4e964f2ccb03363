//! Why a bundle cannot be opened or does not answer.

use std::io;
use std::path::{Path, PathBuf};

use recstore::FileError;

/// What fails here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A directory is no bundle, or one of another version, or has what this runtime cannot run.
    #[error("{path}: {reason}", path = path.display())]
    Unfit {
        /// The directory or a file of it.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file is missing, cut off, changed, or of another bundle.
    #[error("{path} is damaged: {reason}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How that shows.
        reason: String,
    },
    /// A tensor is not one that the bundle takes.
    #[error("{0}")]
    Input(String),
    /// An output was asked for as another type.
    #[error("output {name}: expected {expected}, got {found}")]
    Output {
        /// Of the output.
        name: String,
        /// The type that was asked for.
        expected: &'static str,
        /// Its type.
        found: &'static str,
    },
    /// The file of a table cannot be opened, or is none that this version knows.
    #[error(transparent)]
    Table(#[from] recstore::Error),
    /// An operator failed.
    #[error("{0}")]
    Run(String),
}

/// A result that fails with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn unfit(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unfit { path: path.to_owned(), reason: reason.into() }
    }

    /// A file of a bundle that cannot be opened or read.
    pub(crate) fn unreadable(path: &Path, error: &io::Error) -> Self {
        Self::damaged(path, FileError::at(path, error).reason)
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }
}
