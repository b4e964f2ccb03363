//! Moving several directories of shards as if at once.
//!
//! What is to be moved is written down first: a run that is cut off before begins anew, one that is cut off later is
//! finished by the next.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use recstore::{Result, remove_checkpoint, write_file};
use serde::{Deserialize, Serialize};

use super::state_directory::NAME;
use super::{directory_lock, unusable};

/// Where new directories are made.
pub(crate) const WORKSHOP: &str = "resharding";
/// The list of what is to be moved.
const MOVES: &str = "moves.json";

/// What is to be moved, in this order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Moves {
    moves: Vec<(PathBuf, PathBuf)>,
}

/// Moves directories within `data`, each to a name that nothing has.
pub(crate) fn move_to(data: &Path, moves: Vec<(PathBuf, PathBuf)>) -> Result<()> {
    let list = data.join(WORKSHOP).join(MOVES);
    let text = serde_json::to_vec_pretty(&Moves { moves }).map_err(|error| unusable(&list, error))?;
    write_file(&list, &text)?;
    finish_moves(data)
}

/// Finishes what a run that was cut off had begun to move.
pub(crate) fn finish_moves(data: &Path) -> Result<()> {
    let workshop = data.join(WORKSHOP);
    let list = workshop.join(MOVES);
    let text = match recstore::read_file(&list) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        text => text.map_err(|error| unusable(&list, error))?,
    };
    let Moves { moves } = serde_json::from_slice(&text).map_err(|error| unusable(&list, error))?;
    for (from, to) in moves {
        move_once(&data.join(from), &data.join(to))?;
    }
    fs::remove_file(&list).map_err(|error| unusable(&list, error))?;
    clear(&workshop)
}

/// Moves a file or directory, unless a run that was cut off has moved it.
pub(super) fn move_once(from: &Path, to: &Path) -> Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == ErrorKind::NotFound && to.exists() => Ok(()),
        moved => moved.map_err(|error| unusable(from, error)),
    }
}

/// Removes what an earlier run made and did not come to use.
pub(crate) fn clear(workshop: &Path) -> Result<()> {
    if !workshop.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(workshop).map_err(|error| unusable(workshop, error))? {
        let path = entry.map_err(|error| unusable(workshop, error))?.path();
        if path.is_dir() {
            remove_checkpoint(&path)?;
            for own in [NAME, directory_lock::NAME] {
                _ = fs::remove_file(path.join(own));
            }
            // It stays where somebody else's files are in it.
            _ = fs::remove_dir(&path);
        }
    }
    _ = fs::remove_dir(workshop);
    Ok(())
}
