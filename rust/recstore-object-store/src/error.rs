//! The errors: every one names the URL, and the object where it is about one.

use std::path::Path;

/// What a save or a load returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a save or a load, or a file, failed. What was saved before can be loaded as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The URL or an option is not understood.
    #[error("{of}: {url}: {message}")]
    Url {
        /// What the URL is of: a checkpoint, or a publication.
        of: &'static str,
        /// The URL.
        url: String,
        /// What was expected.
        message: String,
    },

    /// An object cannot be read or written.
    #[error("{of}: {url}: the object \"{object}\": {source}")]
    Object {
        /// What the URL is of.
        of: &'static str,
        /// The URL.
        url: String,
        /// The object's name below it.
        object: String,
        /// What the object store says.
        source: Box<object_store::Error>,
    },

    /// Somebody else has saved since this save began.
    #[error(
        "checkpoint: {url}: somebody else has saved there meanwhile, as \"{object}\"; this save does not count"
    )]
    Conflict {
        /// The URL of the checkpoint.
        url: String,
        /// The manifest of the other one.
        object: String,
    },

    /// A temporary file cannot be read or written.
    #[error("{of}: {url}: the temporary file {path}: {source}")]
    Staging {
        /// What the URL is of.
        of: &'static str,
        /// The URL.
        url: String,
        /// The file.
        path: String,
        /// What the file system says.
        source: std::io::Error,
    },

    /// The store refuses to save, or what was downloaded.
    #[error(transparent)]
    Store(#[from] recstore::Error),
}

impl Error {
    /// Whether there is no such object.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Object { source, .. } if matches!(**source, object_store::Error::NotFound { .. }))
    }
}

/// Names the URL instead of the temporary directory that stands for it.
pub(crate) fn named(error: recstore::Error, url: &str, staging: &Path) -> Error {
    match error {
        recstore::Error::Checkpoint { path, message } => {
            let path = match Path::new(&path).strip_prefix(staging) {
                Ok(file) => format!("{url}/{}", file.display()).trim_end_matches('/').to_owned(),
                Err(_) => path,
            };
            recstore::Error::Checkpoint { path, message }.into()
        }
        other => other.into(),
    }
}
