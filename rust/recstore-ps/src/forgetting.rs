//! Taking ids out of the directory of a server that does not run.

use std::path::Path;
use std::sync::Arc;

use recstore::{Forgetting, Forgotten, LocalStore, Progress, Result, Shard, forget_in_checkpoint};

use crate::durable::state_directory::{Durability, StateDirectory};
use crate::durable::unusable;
use crate::handler::Handler;
use crate::wire::standing::Role;
use crate::workers::Teamwork;

/// Takes ids out of the directory of a server. One without a log is a checkpoint, of which `forgetting` tells the
/// snapshots. From one with a log the tables are recovered, and a checkpoint without the ids takes the place of all there
/// is. It takes as much memory as the tables.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the directory that a server uses, that follows another, or the file that cannot be used.
/// Then the tables there are what they were.
pub fn forget(
    directory: &Path,
    forgetting: &Forgetting<'_>,
    progress: Option<&Progress>,
) -> Result<Forgotten> {
    let state = StateDirectory::open_found(directory)?;
    check_leads(&state)?;
    match state.durability() {
        Durability::Checkpoint => forget_in_checkpoint(directory, forgetting, progress),
        Durability::Wal => forget_logged(&state, forgetting),
    }
}

fn check_leads(state: &StateDirectory) -> Result<()> {
    let standing = state.standing();
    match standing.role {
        Role::Leader => Ok(()),
        Role::Follower { leader } => {
            let message = format!("it is a copy of the shard at {leader}: forget there, and it follows");
            Err(unusable(state.path(), message))
        }
        Role::Demoted => Err(unusable(state.path(), standing)),
    }
}

fn forget_logged(state: &StateDirectory, forgetting: &Forgetting<'_>) -> Result<Forgotten> {
    let store = Arc::new(LocalStore::default());
    let nobody = Shard { number: 0, of: 1 };
    let mut handler = Handler::new(Arc::clone(&store) as _, nobody, u64::MAX, Teamwork::default())?;
    handler.take(state)?;
    let mut rows = 0;
    for table in forgetting.tables {
        rows += store.forget(table, forgetting.ids)?.len();
    }
    let written = handler.keep_without(state, &forgetting.ids.iter().copied().collect())?;
    Ok(Forgotten { rows, written })
}
