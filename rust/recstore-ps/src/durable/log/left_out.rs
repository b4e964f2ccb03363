//! The end of a log that a start leaves out: a record that a crash cut short, of which nobody was told, or one that is
//! damaged. Nobody can tell which, so it is told either way.

use std::io::ErrorKind;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use recstore::Directory;
use serde::{Deserialize, Serialize};

use super::{LogError, inside, refused};

/// What is known of the end that the last start left out.
pub(crate) const NAME: &str = "left-out.json";

const MAX_BYTES: u64 = 1 << 16;

/// The end of a file that a start left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftOut {
    /// The file of the log.
    pub file: String,
    /// Where in it the end began.
    pub start: u64,
    /// The bytes of the end.
    pub bytes: u64,
    /// What was wrong with the record there.
    pub message: String,
    /// When the start was, in seconds of Unix time.
    pub seconds: u64,
}

impl LeftOut {
    pub(super) fn now(file: &str, start: u64, bytes: u64, message: String) -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time: Duration| time.as_secs());
        Self { file: file.to_owned(), start, bytes, message, seconds }
    }

    /// Returns what the last start on a log that left something out did.
    ///
    /// # Errors
    /// [`LogError`] names the file that cannot be read.
    pub(crate) fn read(directory: &Directory) -> Result<Option<Self>, LogError> {
        match directory.read(NAME, MAX_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            text => {
                let text = text.map_err(inside(directory))?;
                let read = serde_json::from_slice(&text);
                read.map(Some).map_err(|error| refused(directory.path().join(NAME), error))
            }
        }
    }

    pub(super) fn write(&self, directory: &Directory) -> Result<(), LogError> {
        let text =
            serde_json::to_vec_pretty(self).map_err(|error| refused(directory.path().join(NAME), error))?;
        directory.replace(NAME, &text).map_err(inside(directory))
    }

    pub(super) fn remove(directory: &Directory) -> Result<(), LogError> {
        match directory.remove_file(NAME) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(inside(directory)),
        }
    }
}
