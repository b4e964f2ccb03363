//! Ids in the directory of a checkpoint, or of a server that does not run: which are there, and taking them out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use recstore::{
    Directory, Forgetting, Forgotten, HeldIds, IdTally, IdsFound, LocalStore, Progress, Result, SERVER_STATE,
    Shard, checkpoint_tables, files_of_checkpoint, forget_in_checkpoint, ids_in_checkpoint,
};

use crate::durable::directory_lock::{DirectoryLock, NAME as LOCK};
use crate::durable::journal::{CHECKPOINT, INCARNATION, LOG, answers_in, in_log};
use crate::durable::log::Log;
use crate::durable::state_directory::{
    Durability, MANIFEST, StateDirectory, is_server_directory, standing_in,
};
use crate::durable::{in_file, unusable};
use crate::handler::Handler;
use crate::wire::codec::{Management, Request};
use crate::wire::standing::{Role, Standing};
use crate::workers::Teamwork;

const IN_USE: &str =
    "a server uses the directory: end it first, or have the server itself forget, with --servers";

/// Where the tables of a directory lie.
struct Tables {
    /// The directory of the checkpoint, from the other one on.
    checkpoint: &'static str,
    log: Option<Directory>,
}

impl Tables {
    fn of(path: &Path) -> Result<Self> {
        let directory = Directory::open(path).map_err(in_file(path))?;
        let has = |name| directory.kind(name).map(|kind| kind.is_some()).map_err(in_file(path));
        if !is_server_directory(path) {
            return Ok(Self { checkpoint: "", log: None });
        }
        let checkpoint = if has(MANIFEST)? { "" } else { CHECKPOINT };
        let log = has(LOG)?.then(|| directory.subdirectory(LOG).map_err(in_file(path))).transpose()?;
        Ok(Self { checkpoint, log })
    }

    /// The files of the log, from the directory on.
    fn log_files(&self) -> Result<Vec<String>> {
        let names = self.log.as_ref().map_or(Ok(Vec::new()), Log::files).map_err(in_log)?;
        Ok(names.into_iter().map(|name| format!("{LOG}/{name}")).collect())
    }
}

/// Checks that no server uses a directory, and that the one that did led its shard.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names it.
pub fn check_server_rests(path: &Path) -> Result<()> {
    let directory = Directory::open(path).map_err(in_file(path))?;
    if DirectoryLock::is_taken(&directory)? {
        return Err(unusable(path, IN_USE));
    }
    check_leads(path, &standing_in(&directory)?)
}

/// Returns the names of the tables of all snapshots, and of those that the log has opened since.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the file that is damaged.
pub fn tables_in(path: &Path) -> Result<BTreeSet<String>> {
    let tables = Tables::of(path)?;
    let mut names: BTreeSet<String> = checkpoint_tables(&path.join(tables.checkpoint))?.into_iter().collect();
    if let Some(log) = &tables.log {
        let opened = Log::look_through(log, |logged| {
            if let Request::Manage(Management::OpenTable { name, .. }) =
                Request::of(&logged.frame).map_err(|error| error.to_string())?
            {
                names.insert(name);
            }
            Ok(())
        });
        opened.map_err(in_log)?;
    }
    Ok(names)
}

/// Returns the files that [`ids_in`] reads or that cannot have ids, from the directory on.
///
/// # Errors
/// As [`tables_in`].
pub fn files_in(path: &Path) -> Result<BTreeSet<PathBuf>> {
    let tables = Tables::of(path)?;
    let of_checkpoint = files_of_checkpoint(&path.join(tables.checkpoint))?;
    let of_checkpoint = of_checkpoint.into_iter().map(|file| Path::new(tables.checkpoint).join(file));
    let of_log = tables.log_files()?.into_iter().map(PathBuf::from);
    Ok(of_checkpoint.chain(of_log).chain([SERVER_STATE, LOCK, INCARNATION].map(PathBuf::from)).collect())
}

/// Returns what checkpoint and log have of some ids of tables. A log is searched byte by byte: what was cut off in it has
/// ids that no record names.
///
/// # Errors
/// As [`tables_in`].
pub fn ids_in(path: &Path, tables: &[String], ids: &mut IdTally) -> Result<IdsFound> {
    let lie = Tables::of(path)?;
    let mut found = ids_in_checkpoint(&path.join(lie.checkpoint), tables, ids)?;
    let inside = |file: &mut String| *file = Path::new(lie.checkpoint).join(&*file).display().to_string();
    found.held.iter_mut().for_each(|held| inside(&mut held.file));
    for metadata in &mut found.metadata {
        inside(&mut metadata.file);
        metadata.text = answers_in(&metadata.text).unwrap_or_else(|| metadata.text.clone());
    }
    let directory = Directory::open(path).map_err(in_file(path))?;
    for file in lie.log_files()? {
        let mut log = directory.open_file(&file).map_err(in_file(path))?;
        ids.add_within(&mut log).map_err(in_file(&path.join(&file)))?;
        let own = ids.take();
        if !own.is_empty() {
            found.held.push(HeldIds { file, what: "log", ids: own });
        }
    }
    Ok(found)
}

/// Takes ids out of a directory. A checkpoint, and a server's directory without a log, lose the snapshots that `forgetting`
/// tells. From one with a log the tables are recovered, and a checkpoint without the ids takes the place of all there is.
/// It takes as much memory as the tables.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the directory that a server uses, that follows another, or the file that cannot be used.
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

fn check_leads(path: &Path, standing: &Standing) -> Result<()> {
    match &standing.role {
        Role::Leader => Ok(()),
        Role::Follower { leader } => {
            let message = format!("it is a copy of the shard at {leader}: forget there, and it follows");
            Err(unusable(path, message))
        }
        Role::Demoted => Err(unusable(path, standing)),
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
