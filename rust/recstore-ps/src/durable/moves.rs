//! Moving several directories of shards as if at once.
//!
//! What is to be moved is written down first: a run that is cut off before begins anew, one that is cut off later is
//! finished by the next.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use recstore::{Directory, FileKind, Result, SERVER_SAVES, remove_checkpoint};
use serde::{Deserialize, Serialize};

use super::{NAME, directory_lock, in_file, unusable};

/// Where new directories are made.
pub(crate) const WORKSHOP: &str = "resharding";
/// The list of what is to be moved.
const MOVES: &str = "moves.json";

const MAX_LIST_BYTES: u64 = 1 << 24;

/// What is to be moved, in this order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Moves {
    moves: Vec<(PathBuf, PathBuf)>,
}

/// Moves directories within `data`, each to a name that nothing has.
pub(crate) fn move_to(data: &Directory, moves: Vec<(PathBuf, PathBuf)>) -> Result<()> {
    let workshop = data.create_subdirectory(WORKSHOP).map_err(in_file(data.path()))?;
    // Looked for before the list is there: from then on each start goes on with the moves.
    for (from, _) in &moves {
        data.subdirectory(from).map_err(in_file(data.path()))?;
    }
    let list = workshop.path().join(MOVES);
    let text = serde_json::to_vec_pretty(&Moves { moves }).map_err(|error| unusable(&list, error))?;
    workshop.replace(MOVES, &text).map_err(in_file(&list))?;
    finish_moves(data)
}

/// Finishes what a run that was cut off had begun to move.
pub(crate) fn finish_moves(data: &Directory) -> Result<()> {
    let Some(workshop) = workshop_of(data)? else { return Ok(()) };
    let list = workshop.path().join(MOVES);
    let text = match workshop.read(MOVES, MAX_LIST_BYTES) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        text => text.map_err(in_file(&list))?,
    };
    let Moves { moves } = serde_json::from_slice(&text).map_err(|error| unusable(&list, error))?;
    for (from, to) in moves {
        move_once(data, (&from, &to))?;
    }
    workshop.remove_file(MOVES).map_err(in_file(&list))?;
    clear(data)
}

fn workshop_of(data: &Directory) -> Result<Option<Directory>> {
    match data.subdirectory(WORKSHOP) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(in_file(data.path())),
    }
}

/// Moves a file or directory within one, unless a run that was cut off has moved it.
pub(super) fn move_once(within: &Directory, (from, to): (&Path, &Path)) -> Result<()> {
    match within.rename(from, to) {
        Err(error) if error.kind() == ErrorKind::NotFound => match within.kind(to) {
            Ok(Some(_)) => Ok(()),
            _ => Err(in_file(within.path())(error)),
        },
        moved => moved.map_err(in_file(within.path())),
    }
}

/// Removes what an earlier run made in the workshop of a directory and did not come to use.
pub(crate) fn clear(data: &Directory) -> Result<()> {
    let Some(workshop) = workshop_of(data)? else { return Ok(()) };
    for (name, kind) in workshop.entries().map_err(in_file(workshop.path()))? {
        if kind == FileKind::Directory {
            let made = workshop.subdirectory(&name).map_err(in_file(workshop.path()))?;
            remove_checkpoint(made.path())?;
            for own in [NAME, SERVER_SAVES, directory_lock::NAME] {
                _ = made.remove_file(own);
            }
            // It stays where somebody else's files are in it.
            _ = workshop.remove_directory(&name);
        }
    }
    _ = data.remove_directory(WORKSHOP);
    Ok(())
}
