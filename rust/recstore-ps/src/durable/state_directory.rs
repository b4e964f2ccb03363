//! The directory that a server keeps its shard in, and what it says of itself: which shard of how many, how ids are
//! spread, how it is kept, and to which store it belongs. What is found is compared with what is asked for.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use recstore::{Directory, KnownSaves, Result, Shard, checkpoint_files, remove_checkpoint};
use serde::{Deserialize, Serialize};

use super::directory_lock::DirectoryLock;
use super::journal::{CHECKPOINT, LOG, in_log};
use super::log::Log;
use super::moves::{finish_moves, move_once};
use super::saves_file::{self, Owner};
use super::{MANIFEST, NAME, in_file, unusable};
use crate::wire::replica_role::{ReplicaRole, Role, Run};
use crate::wire::store_metadata::StoreMetadata;
use crate::wire::tls::ClientTls;

const FORMAT: &str = "recstore-shard";
const VERSION: u32 = 1;
/// The copy of another server's checkpoint, while it is made.
const COPY: &str = "copy";

const MAX_IDENTITY_BYTES: u64 = 1 << 20;

/// What a crash of a server may lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// What came since its last checkpoint.
    Checkpoint,
    /// Nothing that was acknowledged: the directory has a log of changes beside the checkpoint.
    Wal,
}

/// Where and how a server keeps its tables.
#[derive(Debug, Clone)]
pub struct KeptState {
    /// The shard's own directory.
    pub directory: PathBuf,
    /// What a crash may lose.
    pub durability: Durability,
    /// The server that this one follows, which takes a log; none for one that answers clients.
    pub follows: Option<FollowedServer>,
}

/// A server that another one follows.
#[derive(Debug, Clone)]
pub struct FollowedServer {
    /// Its bulk port, `host:port`.
    pub address: String,
    /// Encrypts the connection to it.
    pub tls: Option<ClientTls>,
    /// Whether it acknowledges changes only when the follower has them on its disk too.
    pub synchronous: bool,
}

impl KeptState {
    /// Keeps a checkpoint and a log of changes: what was acknowledged survives `kill -9`.
    pub fn logged(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), durability: Durability::Wal, follows: None }
    }
}

/// What a directory says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    format: String,
    version: u32,
    shard: usize,
    of: usize,
    durability: Durability,
    /// What lies here of another way to keep tables and counts no more: it is about to be removed, or was cut off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    discarded: Option<Durability>,
    /// What the shard's clients agreed on; none before the first.
    facts: Option<StoreMetadata>,
    /// What the server is to its shard.
    #[serde(default, skip_serializing_if = "is_default")]
    standing: ReplicaRole,
    /// Who made the changes, the newest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    runs: Vec<Run>,
    /// Whether the server has begun to follow another one and does not have that one's tables yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    awaits_leader: bool,
    /// Whether the copy of another server's tables that lies beside takes the place of those here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    copied: bool,
}

/// So many runs are remembered: a follower that was away for more copies all tables.
const MAX_RUNS: usize = 64;

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A directory that no other server uses and that has the shard it should.
#[derive(Debug)]
pub(crate) struct StateDirectory {
    lock: DirectoryLock,
    identity: Mutex<Identity>,
    /// Held while the file of saves is written.
    saves: Mutex<()>,
}

impl StateDirectory {
    /// Takes the directory of a shard, which is made if it is not there. `durability` is how it is to be kept if it says
    /// nothing about that.
    ///
    /// # Errors
    /// [`recstore::Error::Checkpoint`] names it: it has another shard, or other shards lie beside it; or another server has it.
    pub(crate) fn open(directory: &Path, shard: Shard, durability: Durability) -> Result<Self> {
        check_place(directory, shard)?;
        let lock = DirectoryLock::take(directory)?;
        let held = lock.directory();
        let identity = match read(held)? {
            Some(found) => {
                found.check(&directory.join(NAME), shard)?;
                found
            }
            None => {
                let durability = kept_before(held)?.unwrap_or(durability);
                let identity = Identity::new(shard, durability);
                write(held, &identity)?;
                identity
            }
        };
        let state = Self { lock, identity: Mutex::new(identity), saves: Mutex::default() };
        state.remove_discarded()?;
        state.finish_copy()?;
        // An older release may have left tables of both kinds.
        kept_before(state.directory())?;
        Ok(state)
    }

    /// Takes a directory that says itself which shard it has, or whose name does.
    ///
    /// # Errors
    /// As [`StateDirectory::open`]; [`recstore::Error::Checkpoint`]: it is that of no server.
    pub(crate) fn open_found(directory: &Path) -> Result<Self> {
        let held = Directory::open(directory).map_err(in_file(directory))?;
        let told = read(&held)?.map(|found| Shard { number: found.shard, of: found.of });
        let shard = told.or_else(|| shard_of(directory));
        let shard = shard.ok_or_else(|| unusable(directory, "it is no directory of a server"))?;
        Self::open(directory, shard, Durability::Checkpoint)
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory().path()
    }

    pub(crate) fn directory(&self) -> &Directory {
        self.lock.directory()
    }

    /// Whether there are tables of a server that keeps no log.
    pub(crate) fn has_checkpoint(&self) -> bool {
        matches!(self.directory().kind(MANIFEST), Ok(Some(_)))
    }

    /// Returns how the tables are kept there.
    pub(crate) fn durability(&self) -> Durability {
        self.get().durability
    }

    /// Changes how tables are kept there. `save` saves them in the other way, and what was saved before goes only then.
    pub(crate) fn switch<T>(&self, to: Durability, save: impl FnOnce() -> Result<T>) -> Result<T> {
        // Each removal is noted before it begins, and the old state goes only when the new one is saved: a
        // crash at any line leaves a whole state, and the next start removes the rest.
        self.change(|identity| identity.discarded = Some(to))?;
        remove_kept(self.directory(), to)?;
        let saved = save()?;
        self.change(|identity| {
            identity.discarded = Some(identity.durability);
            identity.durability = to;
        })?;
        self.remove_discarded()?;
        Ok(saved)
    }

    /// Removes what a switch left.
    fn remove_discarded(&self) -> Result<()> {
        let Some(discarded) = self.get().discarded else { return Ok(()) };
        remove_kept(self.directory(), discarded)?;
        self.change(|identity| identity.discarded = None)
    }

    /// Returns what the clients of the shard agreed on.
    pub(crate) fn facts(&self) -> Option<StoreMetadata> {
        self.get().facts
    }

    pub(crate) fn set_facts(&self, facts: &StoreMetadata) -> Result<()> {
        self.change(|identity| identity.facts = Some(facts.clone()))
    }

    /// Returns which shard the directory has.
    pub(crate) fn shard(&self) -> Shard {
        let Identity { shard: number, of, .. } = self.get();
        Shard { number, of }
    }

    /// Returns which snapshots the store has saved and loaded, as far as the directory tells. One from before it told has no
    /// file: then all that were made under its number so far count.
    ///
    /// # Errors
    /// [`recstore::Error::Checkpoint`] names the file that is damaged.
    pub(crate) fn known_saves(&self) -> Result<KnownSaves> {
        if let Some(known) = saves_file::read(self.directory(), &self.owner())? {
            return Ok(known);
        }
        let has_tables = kept_before(self.directory())? == Some(Durability::Wal);
        Ok(KnownSaves::new(self.shard(), if has_tables { seconds_now() } else { 0 }))
    }

    /// Keeps which snapshots the store has saved and loaded, as `known` tells.
    ///
    /// # Errors
    /// As `known`; [`recstore::Error::Checkpoint`] names the file that cannot be written.
    pub(crate) fn keep_saves(&self, known: impl FnOnce() -> Result<KnownSaves>) -> Result<()> {
        // Asked under the lock: what another thread was told earlier must not be written later.
        let _writing = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves_file::write(self.directory(), self.owner(), known()?)
    }

    fn owner(&self) -> Owner {
        let Identity { facts, shard, of, .. } = self.get();
        Owner { store: facts.map(|facts| facts.store), shard, of }
    }

    /// Returns what the server was to its shard when it last ran.
    pub(crate) fn standing(&self) -> ReplicaRole {
        self.get().standing
    }

    /// Notes what the server is to its shard.
    pub(crate) fn set_standing(&self, standing: &ReplicaRole) -> Result<()> {
        self.change(|identity| {
            let follows = |standing: &ReplicaRole| matches!(standing.role, Role::Follower { .. });
            identity.awaits_leader =
                follows(standing) && (identity.awaits_leader || !follows(&identity.standing));
            identity.standing = standing.clone();
        })
    }

    /// Whether the server has begun to follow another one and does not have that one's tables yet.
    pub(crate) fn awaits_leader(&self) -> bool {
        self.get().awaits_leader
    }

    /// Returns who made the changes, the newest last.
    pub(crate) fn runs(&self) -> Vec<Run> {
        self.get().runs
    }

    /// Takes over who made the changes that are copied from another server, whose tables are here now.
    pub(crate) fn set_runs(&self, runs: &[Run]) -> Result<()> {
        self.change(|identity| {
            identity.runs = runs.to_vec();
            identity.awaits_leader = false;
        })
    }

    /// Notes that this server makes the changes from number `first` on; `loaded` if that one is a load.
    pub(crate) fn begin_run(&self, first: u64, loaded: bool) -> Result<()> {
        let run = format!("{:016x}", RandomState::new().hash_one(SystemTime::now()));
        self.change(|identity| {
            // One that made no change is told by the next.
            identity.runs.retain(|run| run.first < first);
            identity.runs.push(Run { run, first, loaded });
            let surplus = identity.runs.len().saturating_sub(MAX_RUNS);
            identity.runs.drain(..surplus);
        })
    }

    /// Returns where the copy of another server's tables is made.
    pub(crate) fn copy(&self) -> Result<Directory> {
        self.directory().create_subdirectory(COPY).map_err(in_file(self.path()))
    }

    /// Puts the copy of another server's tables in the place of those here, as if at once: who is cut off goes on at the
    /// next start.
    pub(crate) fn take_copy(&self) -> Result<()> {
        // The tables are those of the other server once its runs are noted too.
        self.change(|identity| (identity.copied, identity.awaits_leader) = (true, true))?;
        self.finish_copy()
    }

    fn finish_copy(&self) -> Result<()> {
        if !self.get().copied {
            return Ok(());
        }
        let directory = self.directory();
        // The log first: its changes must not be made again on the rows of another server.
        Log::remove(directory, LOG).map_err(in_log)?;
        let copy = self.copy()?;
        // A crash in the middle of a save left files there that nobody knows: they stay.
        if copy.kind(MANIFEST).map_err(in_file(copy.path()))?.is_some() {
            let checkpoint = directory.create_subdirectory(CHECKPOINT).map_err(in_file(self.path()))?;
            remove_checkpoint(checkpoint.path())?;
            move_files(directory, &copy)?;
            checkpoint.sync().map_err(in_file(checkpoint.path()))?;
        }
        _ = directory.remove_directory(COPY);
        self.change(|identity| identity.copied = false)
    }

    fn get(&self) -> Identity {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, change: impl FnOnce(&mut Identity)) -> Result<()> {
        let mut identity = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = identity.clone();
        change(&mut changed);
        // The file before the memory: what a start would not find does not count here either.
        if changed != *identity {
            write(self.directory(), &changed)?;
            *identity = changed;
        }
        Ok(())
    }
}

impl Identity {
    fn new(Shard { number, of }: Shard, durability: Durability) -> Self {
        let (format, version) = (FORMAT.to_owned(), VERSION);
        let (standing, runs) = (ReplicaRole::default(), Vec::new());
        Self {
            format,
            version,
            shard: number,
            of,
            durability,
            discarded: None,
            facts: None,
            standing,
            runs,
            awaits_leader: false,
            copied: false,
        }
    }

    fn check(&self, path: &Path, Shard { number, of }: Shard) -> Result<()> {
        if self.format != FORMAT || self.version != VERSION {
            let message = format!(
                "expected the format \"{FORMAT}\" of version {VERSION}, got \"{}\" of version {}",
                self.format, self.version
            );
            return Err(unusable(path, message));
        }
        if (self.shard, self.of) != (number, of) {
            let message = format!(
                "the directory has shard {} of {}, and shard {number} of {of} is to be served: `recstore reshard` spreads rows anew",
                self.shard, self.of
            );
            return Err(unusable(path, message));
        }
        Ok(())
    }
}

/// Checks what lies beside a shard's directory: neither the shards of another number, whose rows this one would lack, nor
/// a checkpoint, whose rows a server does not take by itself.
fn check_place(directory: &Path, shard: Shard) -> Result<()> {
    let Some(data) = directory.parent().filter(|_| shard_of(directory).is_some()) else { return Ok(()) };
    let data = if data.as_os_str().is_empty() { Path::new(".") } else { data };
    if let Some(held) = found(data)? {
        finish_moves(&held)?;
    }
    if data.join(MANIFEST).is_file() {
        let message = "it is a checkpoint of tables: serve an empty directory, and load the checkpoint there (RecStoreClient.load, or `recstore reshard CHECKPOINT --to DATA --shards N`)";
        return Err(unusable(data, message));
    }
    let others: Vec<(PathBuf, Shard)> =
        shards_in(data)?.into_iter().filter(|(_, other)| other.of != shard.of).collect();
    let Some((other, Shard { of, .. })) = others.first() else { return Ok(()) };
    let message = format!(
        "{} is one of {of} shards, and {} are to be served: `recstore reshard {} --shards {}` spreads their rows anew, as `recstore serve --reshard` does at the start",
        other.display(),
        shard.of,
        data.display(),
        shard.of
    );
    Err(unusable(data, message))
}

/// Returns the directories of shards in `data` that have something in them, in the order of their names.
pub(crate) fn shards_in(data: &Path) -> Result<Vec<(PathBuf, Shard)>> {
    let Some(directory) = found(data)? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (name, _) in directory.entries().map_err(in_file(data))? {
        let path = data.join(name);
        if let Some(shard) = shard_of(&path).filter(|_| has_something(&path)) {
            found.push((path, shard));
        }
    }
    Ok(found)
}

fn found(path: &Path) -> Result<Option<Directory>> {
    match Directory::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(in_file(path)),
    }
}

/// Whether a directory is a server's: it says so, or its name does and tables lie in it.
pub fn is_server_directory(path: &Path) -> bool {
    let says_so = |directory: Directory| directory.kind(NAME).is_ok_and(|kind| kind.is_some());
    Directory::open(path).is_ok_and(says_so) || shard_of(path).is_some() && has_something(path)
}

/// Returns what the server of a directory was to its shard when it last ran.
pub(crate) fn standing_in(directory: &Directory) -> Result<ReplicaRole> {
    Ok(read(directory)?.map(|identity| identity.standing).unwrap_or_default())
}

/// Whether tables lie in a directory, or something that is for `kept_before` to refuse.
fn has_something(path: &Path) -> bool {
    Directory::open(path).is_ok_and(|directory| !kept_before(&directory).is_ok_and(|kept| kept.is_none()))
}

/// Returns the numbers of shards that there are in `data`, such as 3 where a directory is that of one of three.
///
/// # Errors
/// [`recstore::Error::Checkpoint`]: the directory cannot be read.
pub fn shard_counts(data: &Path) -> Result<BTreeSet<usize>> {
    Ok(shards_in(data)?.into_iter().map(|(_, shard)| shard.of).collect())
}

/// Returns the shard that a directory's name tells.
fn shard_of(directory: &Path) -> Option<Shard> {
    let name = directory.file_name()?.to_str()?;
    let (number, of) = name.strip_prefix("shard-")?.split_once("-of-")?;
    let shard = Shard { number: number.parse().ok()?, of: of.parse().ok()? };
    (directory_name(shard) == name).then_some(shard)
}

/// Returns the name of a shard's directory.
pub(crate) fn directory_name(Shard { number, of }: Shard) -> String {
    format!("shard-{number}-of-{of}")
}

/// Moves the files of the copy of a checkpoint, the manifest last: until then nothing there is one.
fn move_files(directory: &Directory, copy: &Directory) -> Result<()> {
    let files = checkpoint_files(copy.path(), None)?.all;
    for name in files.iter().map(String::as_str).chain([MANIFEST]) {
        move_once(directory, (&Path::new(COPY).join(name), &Path::new(CHECKPOINT).join(name)))?;
    }
    Ok(())
}

/// Removes what tables kept in one way left in a directory, and nothing else.
fn remove_kept(directory: &Directory, durability: Durability) -> Result<()> {
    match durability {
        Durability::Checkpoint => remove_checkpoint(directory.path()),
        Durability::Wal => {
            Log::remove(directory, LOG).map_err(in_log)?;
            match directory.subdirectory(CHECKPOINT) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                opened => remove_checkpoint(opened.map_err(in_file(directory.path()))?.path())?,
            }
            // They stay where somebody else's files are in them.
            _ = (directory.remove_directory(LOG), directory.remove_directory(CHECKPOINT));
            Ok(())
        }
    }
}

/// Returns how tables lie in a directory that does not say so, if there are any.
fn kept_before(directory: &Directory) -> Result<Option<Durability>> {
    let has = |name: &Path| match directory.kind(name) {
        Ok(kind) => Ok(kind.is_some()),
        Err(error) => Err(in_file(directory.path())(error)),
    };
    let is_plain = has(Path::new(MANIFEST))?;
    let is_logged = has(&Path::new(CHECKPOINT).join(MANIFEST))? || has(Path::new(LOG))?;
    match (is_plain, is_logged) {
        (true, true) => Err(unusable(
            directory.path(),
            format!(
                "it has tables twice: {MANIFEST} of a server that keeps checkpoints, and {CHECKPOINT} and {LOG} of one with a log. Move away what is older"
            ),
        )),
        (true, false) => Ok(Some(Durability::Checkpoint)),
        (false, true) => Ok(Some(Durability::Wal)),
        (false, false) => Ok(None),
    }
}

/// Returns the time in seconds since 1970.
pub(crate) fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn read(directory: &Directory) -> Result<Option<Identity>> {
    match directory.read(NAME, MAX_IDENTITY_BYTES) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => {
            let path = directory.path().join(NAME);
            let text = text.map_err(in_file(&path))?;
            serde_json::from_slice(&text).map(Some).map_err(|error| unusable(&path, error))
        }
    }
}

fn write(directory: &Directory, identity: &Identity) -> Result<()> {
    let path = directory.path().join(NAME);
    let text = serde_json::to_vec_pretty(identity).map_err(|error| unusable(&path, error))?;
    directory.replace(NAME, &text).map_err(in_file(&path))
}
