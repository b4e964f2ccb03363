//! What a start left out of a log, for who looks at the directory of a server.

use std::path::Path;

use recstore::{Directory, Result};

use super::in_file;
use super::journal::{LOG, in_log};
pub use super::log::LeftOut;
use super::state_directory::is_server_directory;

/// Returns the end of a log that the last start which left one out did; `path` is the directory of a server, or that of
/// its checkpoint. None where there is no log.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the file that cannot be read.
pub fn left_out_of_log(path: &Path) -> Result<Option<LeftOut>> {
    let absolute = std::path::absolute(path).map_err(in_file(path))?;
    let Some(shard) = absolute.ancestors().take(2).find(|directory| is_server_directory(directory)) else {
        return Ok(None);
    };
    let directory = Directory::open(shard).map_err(in_file(shard))?;
    if directory.kind(LOG).map_err(in_file(shard))?.is_none() {
        return Ok(None);
    }
    let log = directory.subdirectory(LOG).map_err(in_file(shard))?;
    LeftOut::read(&log).map_err(in_log)
}
