//! Ids in the directory of a checkpoint, or of a server that does not run: which are there, and taking them out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use recstore::{
    Directory, Error, Forgetting, Forgotten, HeldIds, IdTally, IdsFound, LocalStore, Progress, Result,
    SERVER_SAVES, SERVER_STATE, Shard, checkpoint_files, checkpoint_tables, forget_in_checkpoint,
    ids_in_checkpoint,
};

use serde::Serialize;

use crate::durable::directory_lock::{DirectoryLock, NAME as LOCK};
use crate::durable::journal::{CHECKPOINT, INCARNATION, LOG, answers_in, in_log};
use crate::durable::log::{LEFT_OUT, Log};
use crate::durable::state_directory::{Durability, StateDirectory, is_server_directory, standing_in};
use crate::durable::{MANIFEST, in_file};
use crate::handler::Handler;
use crate::wire::codec::{Management, Request};
use crate::wire::replica_role::{ReplicaRole, Role};
use crate::workers::WorkerSync;

/// What a save to a checkpoint locks.
const CHECKPOINT_LOCK: &str = ".lock";

const IN_USE: &str =
    "a server uses the directory: end it first, or have the server itself forget, with --servers";

/// The tables of a directory, and the files that have them.
#[derive(Debug, Clone, Default, Serialize)]
pub struct TablesFound {
    /// The names of the tables of all snapshots, and of those that the log has opened since.
    pub tables: BTreeSet<String>,
    /// The files that [`ids_in`] reads or that cannot have ids, from the directory on.
    pub files: BTreeSet<String>,
}

/// Returns which tables lie in a directory.
///
/// # Errors
/// [`Error::InvalidConfig`]: a server uses the directory, or another one led its shard. [`Error::Checkpoint`] names the file
/// that is damaged.
pub fn tables_in(path: &Path) -> Result<TablesFound> {
    let directory = Directory::open(path).map_err(in_file(path))?;
    let (checkpoint, log) = parts_of(&directory)?;
    let mut found = TablesFound::default();
    let inside = |file: &str| checkpoint.map_or(file.to_owned(), |checkpoint| format!("{checkpoint}/{file}"));
    found.files.extend([MANIFEST, CHECKPOINT_LOCK].map(inside));
    let place = place_of(path, checkpoint);
    found.files.extend(checkpoint_files(&place, None)?.all.iter().map(|file| inside(file)));
    found.tables.extend(checkpoint_tables(&place)?);
    if is_server_directory(path) {
        if DirectoryLock::is_taken(&directory)? {
            return Err(refused(path, IN_USE));
        }
        check_leads(path, &standing_in(&directory)?)?;
        found.files.extend([SERVER_STATE, SERVER_SAVES, LOCK, INCARNATION].map(str::to_owned));
    }
    let Some(log) = log else { return Ok(found) };
    found.files.extend(Log::files(&log).map_err(in_log)?.into_iter().map(|name| format!("{LOG}/{name}")));
    found.files.insert(format!("{LOG}/{LEFT_OUT}"));
    let opened = Log::look_through(&log, |logged| {
        let request = Request::of(&logged.frame).map_err(|error| error.to_string())?;
        if let Request::Manage(Management::OpenTable { name, .. }) = request {
            found.tables.insert(name);
        }
        Ok(())
    });
    opened.map_err(in_log).map(|()| found)
}

/// Returns the name of the directory in which a server has its checkpoint, if that is another one, and that of its log.
fn parts_of(directory: &Directory) -> Result<(Option<&'static str>, Option<Directory>)> {
    let path = directory.path();
    if !is_server_directory(path) {
        return Ok((None, None));
    }
    let has = |name| directory.kind(name).map(|kind| kind.is_some()).map_err(in_file(path));
    let log = has(LOG)?.then(|| directory.subdirectory(LOG).map_err(in_file(path))).transpose()?;
    Ok((if has(MANIFEST)? { None } else { Some(CHECKPOINT) }, log))
}

fn place_of(path: &Path, checkpoint: Option<&str>) -> PathBuf {
    checkpoint.map_or_else(|| path.to_owned(), |checkpoint| path.join(checkpoint))
}

/// Returns what checkpoint and log have of some ids of tables. A log is searched byte by byte: what was cut off in it has
/// ids that no record names.
///
/// # Errors
/// [`Error::Checkpoint`] names the file that is damaged.
pub fn ids_in(path: &Path, tables: &[String], ids: &mut IdTally) -> Result<IdsFound> {
    let (checkpoint, log) = parts_of(&Directory::open(path).map_err(in_file(path))?)?;
    let mut found = ids_in_checkpoint(&place_of(path, checkpoint), tables, ids)?;
    if let Some(checkpoint) = checkpoint {
        let files = found.held.iter_mut().map(|held| &mut held.file).chain([&mut found.manifest]);
        files.for_each(|file| *file = format!("{checkpoint}/{file}"));
    }
    for (_, metadata) in &mut found.metadata {
        *metadata = answers_in(metadata).unwrap_or_else(|| metadata.clone());
    }
    let Some(log) = log else { return Ok(found) };
    for name in Log::files(&log).map_err(in_log)? {
        let mut file = log.open_file(&name).map_err(in_file(log.path()))?;
        ids.add_within(&mut file).map_err(in_file(&log.path().join(&name)))?;
        let own = ids.take();
        if !own.is_empty() {
            found.held.push(HeldIds { file: format!("{LOG}/{name}"), what: "log", ids: own });
        }
    }
    Ok(found)
}

/// Takes ids out of a directory. A checkpoint, and a server's directory without a log, lose the snapshots that `forgetting`
/// tells. From one with a log the tables are recovered, and a checkpoint without the ids takes the place of all there is.
/// It takes as much memory as the tables.
///
/// # Errors
/// [`Error::Checkpoint`] names the directory that a server uses, or the file that cannot be used; [`Error::InvalidConfig`]
/// one that follows another server.
/// Then the tables there are what they were.
pub fn forget(
    directory: &Path,
    forgetting: &Forgetting<'_>,
    progress: Option<&Progress>,
) -> Result<Forgotten> {
    if !is_server_directory(directory) {
        return forget_in_checkpoint(directory, forgetting, progress);
    }
    let state = StateDirectory::open_found(directory)?;
    check_leads(directory, &state.standing())?;
    match state.durability() {
        Durability::Checkpoint => forget_in_checkpoint(directory, forgetting, progress),
        Durability::Wal => forget_logged(&state, forgetting),
    }
}

fn check_leads(path: &Path, standing: &ReplicaRole) -> Result<()> {
    match &standing.role {
        Role::Leader => Ok(()),
        Role::Follower { leader } => {
            let message = format!("it is a copy of the shard at {leader}: forget there, and it follows");
            Err(refused(path, &message))
        }
        Role::Demoted => Err(refused(path, &standing.to_string())),
    }
}

fn refused(path: &Path, why: &str) -> Error {
    Error::InvalidConfig { message: format!("{}: {why}", path.display()) }
}

fn forget_logged(state: &StateDirectory, forgetting: &Forgetting<'_>) -> Result<Forgotten> {
    let store = Arc::new(LocalStore::default());
    let nobody = Shard { number: 0, of: 1 };
    let mut handler = Handler::new(Arc::clone(&store) as _, nobody, u64::MAX, WorkerSync::default())?;
    handler.take(state)?;
    let mut rows = 0;
    for table in forgetting.tables {
        rows += store.forget(table, forgetting.ids)?.len();
    }
    let written = handler.keep_without(state, &forgetting.ids.iter().copied().collect())?;
    Ok(Forgotten { rows, written })
}
