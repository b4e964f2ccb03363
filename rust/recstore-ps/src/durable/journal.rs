//! What a server keeps on disk so that no acknowledged change is lost: its last checkpoint, and the log of the changes
//! behind it.
//!
//! Changes are made in the order of the log, one after another; they wait for the disk together. A checkpoint holds them
//! back for its moment only. With it goes all else that clients count on: which change of theirs was the last and what
//! came of it, the numbers of tables, and what tells this server from one that has lost its rows.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::num::ParseIntError;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use recstore::{
    Directory, EmbeddingStore, Error, LoadOptions, Result, SaveOptions, SaveReport, TableId,
    checkpoint_files, checkpoint_metadata,
};
use serde::{Deserialize, Serialize};

use crate::durable::feed::Feed;
use crate::durable::followers::Followers;
use crate::durable::log::{Lag, Log, LogError, Logged, Reader, Staged};
use crate::durable::{MANIFEST, in_file, unusable};
use crate::metrics::Metrics;
use crate::wire::codec::{Answer, ClientId, Frame, FrameError, Managed, Request, WireError};
use crate::workers::{SavedWorkers, Workers};

/// The clients remembered; beyond them, whoever has been quiet longest is forgotten.
pub(crate) const MAX_CLIENTS: usize = 1 << 16;

pub(crate) const CHECKPOINT: &str = "checkpoint";
pub(crate) const LOG: &str = "log";
pub(crate) const INCARNATION: &str = "incarnation";
const MAX_INCARNATION_BYTES: u64 = 64;

/// What came of a client's last change.
#[derive(Debug, Clone)]
pub(crate) struct LastChange {
    pub(crate) sequence: u64,
    pub(crate) outcome: Result<Answer>,
    /// The number of the change in the log.
    number: u64,
}

/// The last changes of clients.
type Order = HashMap<ClientId, LastChange>;

/// Who changes the tables, and the log with them: one at a time.
#[derive(Debug, Default)]
struct Turns {
    is_taken: Mutex<bool>,
    free: Condvar,
}

/// The right to make a change. It may go from one thread to another, as no lock's guard may.
struct Turn<'a>(&'a Turns);

impl Turns {
    fn take(&self) -> Turn<'_> {
        let is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.free.wait_while(is_taken, |is_taken| *is_taken);
        *free.unwrap_or_else(PoisonError::into_inner) = true;
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.free.notify_one();
    }
}

/// Checkpoint and log of a server.
#[derive(Debug)]
pub(crate) struct Journal {
    directory: Directory,
    log: Log,
    turns: Turns,
    order: Mutex<Order>,
    metrics: Arc<Metrics>,
    /// Why no changes of clients are made, if none are.
    closed: Mutex<Option<String>>,
    /// Held while a checkpoint is made, or its files are opened.
    saving: Mutex<()>,
    /// The last change that was made, or refused.
    pub(crate) made: Feed,
    /// The last change that was acknowledged.
    pub(crate) acknowledged: Feed,
    /// The servers that follow this one.
    pub(crate) followers: Followers,
}

/// What a checkpoint holds besides rows.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServerState {
    /// The number of the last change in the checkpoint.
    last: u64,
    tables: BTreeMap<String, i64>,
    clients: Vec<SavedClient>,
    workers: SavedWorkers,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedClient {
    /// Its number, as 32 hexadecimal digits.
    client: String,
    sequence: u64,
    number: u64,
    outcome: SavedOutcome,
}

/// What can come of a change.
#[derive(Debug, Serialize, Deserialize)]
enum SavedOutcome {
    Done,
    Count(u64),
    Managed(Box<Managed>),
    Refused(WireError),
}

impl SavedOutcome {
    fn of(outcome: &Result<Answer>) -> Self {
        match outcome {
            Ok(Answer::Count(count)) => Self::Count(*count),
            Ok(Answer::Managed(managed)) => Self::Managed(Box::new(managed.clone())),
            // No change that clients count gives rows.
            Ok(_) => Self::Done,
            Err(error) => Self::Refused(error.into()),
        }
    }

    fn outcome(self) -> Result<Answer> {
        match self {
            Self::Done => Ok(Answer::Done),
            Self::Count(count) => Ok(Answer::Count(count)),
            Self::Managed(managed) => Ok(Answer::Managed(*managed)),
            Self::Refused(error) => Err(error.into()),
        }
    }
}

impl Journal {
    /// Gives `store` what the directory has: the tables of its checkpoint, and the changes behind them, which `make`
    /// makes. Returns the journal and the last change of each client.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be used.
    pub(crate) fn recover(
        directory: &Directory,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        metrics: Arc<Metrics>,
        make: impl Fn(ClientId, &Request<'_>) -> Result<Answer>,
    ) -> Result<Self> {
        let checkpoint = checkpoint_in(directory)?;
        let state = loaded(&checkpoint, store)?;
        workers.restore(state.workers).map_err(|error| unusable(&checkpoint, error))?;
        let mut order = order_of(state.clients).map_err(|error| unusable(&checkpoint, error))?;
        let logs = directory.create_subdirectory(LOG).map_err(in_file(directory.path()))?;
        let mut changes = 0_u64;
        let again = |logged: Logged| -> std::result::Result<(), String> {
            changes += 1;
            let request = Request::of(&logged.frame).map_err(|error: FrameError| error.to_string())?;
            let outcome = again_made(make(logged.client, &request)).map_err(|error| error.to_string())?;
            // Also of a refused one: a client that repeats it gets the same answer.
            note(&mut order, &logged, &request, &outcome);
            Ok(())
        };
        let log = Log::open(&logs, state.last, again).map_err(in_log)?;
        if let Some(left_out) = log.left_out() {
            let file = logs.path().join(&left_out.file);
            tracing::warn!(shard = metrics.shard(), file = %file.display(), bytes = left_out.bytes, reason = %left_out.message, "left out the end of the log: a crash cut its last record short, or it is damaged");
        }
        tracing::info!(shard = metrics.shard(), directory = %directory.path().display(), changes, "recovered");
        let (directory, last, order) = (directory.clone(), log.last(), Mutex::new(order));
        Ok(Self {
            directory,
            log,
            turns: Turns::default(),
            order,
            metrics,
            closed: Mutex::default(),
            saving: Mutex::default(),
            made: Feed::new(last),
            acknowledged: Feed::new(last),
            followers: Followers::default(),
        })
    }

    /// Returns what tells this server from one that has lost its rows: drawn once for a directory.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be used.
    pub(crate) fn incarnation(directory: &Directory) -> Result<u64> {
        let path = directory.path().join(INCARNATION);
        match directory.read(INCARNATION, MAX_INCARNATION_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            text => {
                let text = text.map_err(in_file(&path))?;
                let number = str::from_utf8(&text).ok().map(str::trim);
                let number = number.and_then(|text| u64::from_str_radix(text, 16).ok());
                return number.ok_or_else(|| unusable(&path, "expected a hexadecimal number"));
            }
        }
        let drawn = RandomState::new().hash_one(SystemTime::now());
        Self::set_incarnation(directory, drawn).map(|()| drawn)
    }

    /// Takes over what tells the server that this one follows from others.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be written.
    pub(crate) fn set_incarnation(directory: &Directory, incarnation: u64) -> Result<()> {
        let text = format!("{incarnation:016x}\n");
        directory.replace(INCARNATION, text.as_bytes()).map_err(in_file(directory.path()))
    }

    /// Returns the last change of each client.
    pub(crate) fn made(&self) -> Vec<(ClientId, LastChange)> {
        self.lock().iter().map(|(client, made)| (*client, made.clone())).collect()
    }

    /// Takes ids out of what the last changes of clients came to.
    pub(crate) fn forget(&self, ids: &BTreeSet<i64>) {
        for made in self.lock().values_mut() {
            if let Ok(Answer::Managed(Managed::Ids { ids: told })) = &mut made.outcome {
                told.retain(|id| !ids.contains(id));
            }
        }
    }

    /// Leaves room in the log for a large frame that comes, if that pays.
    pub(crate) fn stage(&self, bytes: u64) -> Option<Staged> {
        self.log.stage(bytes)
    }

    /// Makes a change and waits until it cannot be lost. `staged` is its frame, if the log has it already.
    ///
    /// # Errors
    /// As `make`; [`Error::Checkpoint`] names the log's file, where the disk fails.
    pub(crate) fn change(
        &self,
        client: ClientId,
        sequence: u64,
        request: &Request<'_>,
        staged: Option<Staged>,
        make: impl FnOnce() -> Result<Answer>,
    ) -> Result<Answer> {
        // Appended before it is made, within one turn: the order of the log is the order of changes, and the
        // log made again gives the same rows.
        let turn = self.open_turn()?;
        let appended = request.with_frame(0, sequence, |frame| self.log.append(client, frame, staged));
        let unwritable = |error: FrameError| unusable(&self.directory.path().join(LOG), error);
        let number = appended.map_err(unwritable)?.map_err(in_log)?;
        let outcome = make();
        // Within the turn: a checkpoint that comes next has the outcome of every change that its rows have.
        for (client, sequence) in makers(client, sequence, request) {
            remember(&mut self.lock(), client, LastChange { sequence, outcome: outcome.clone(), number });
        }
        // The record stays, and a further one takes it back: what is repeated after a crash leaves it out.
        if outcome.is_err() {
            let taken_back = self.log.take_back(number).map_err(in_log);
            self.made.advance(number);
            return taken_back.and(outcome);
        }
        self.made.advance(number);
        drop(turn);
        // Without the turn: others append meanwhile, and one sync serves all of them.
        self.log.wait(number).map_err(in_log)?;
        self.followers.wait(number);
        self.acknowledged.advance(number);
        outcome
    }

    /// Makes a change that another server has made, under its number there. It is on the disk after [`Journal::wait`].
    ///
    /// # Errors
    /// As the log; [`Error::UnknownRule`] for a rule that this process has not been told.
    pub(crate) fn follow(
        &self,
        logged: &Logged,
        make: impl FnOnce(&Request<'_>) -> Result<Answer>,
    ) -> Result<()> {
        let unwritable = |error: FrameError| unusable(&self.directory.path().join(LOG), error);
        let request = Request::of(&logged.frame).map_err(unwritable)?;
        // Not `open_turn`: a follower is closed to clients, and not to its leader.
        let _turn = self.turns.take();
        let sequence = logged.frame.header.sequence;
        let append = |frame: &Frame<'_>| self.log.append_as(logged.number, logged.client, frame);
        request.with_frame(0, sequence, append).map_err(unwritable)?.map_err(in_log)?;
        match again_made(make(&request)) {
            Ok(outcome) => note(&mut self.lock(), logged, &request, &outcome),
            Err(error) => return self.log.take_back(logged.number).map_err(in_log).and(Err(error)),
        }
        self.made.advance(logged.number);
        Ok(())
    }

    /// Notes that the other server has given no change a number up to `number` that is not here.
    ///
    /// # Errors
    /// As the log.
    pub(crate) fn pass_to(&self, number: u64) -> Result<()> {
        if number > self.log.last() {
            let _turn = self.turns.take();
            self.made.advance(self.log.pass_to(number).map_err(in_log)?);
        }
        Ok(())
    }

    /// Waits until the disk has all changes up to a number.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: the disk failed.
    pub(crate) fn wait(&self, number: u64) -> Result<()> {
        self.log.wait(number).map_err(in_log)
    }

    /// Returns the number of the last change.
    pub(crate) fn last(&self) -> u64 {
        self.log.last()
    }

    /// Makes no more changes of clients, and returns the number of the last one, which the disk has.
    ///
    /// # Errors
    /// As [`Journal::wait`].
    pub(crate) fn close(&self, why: &str) -> Result<u64> {
        // In a turn, so that no change is half made when the server closes.
        let turn = self.turns.take();
        *self.lock_closed() = Some(why.to_owned());
        let last = self.log.last();
        drop(turn);
        self.wait(last)?;
        self.acknowledged.advance(last);
        Ok(last)
    }

    /// Makes changes of clients from now on.
    pub(crate) fn open(&self) {
        *self.lock_closed() = None;
    }

    /// Takes the turn to make a change of a client.
    fn open_turn(&self) -> Result<Turn<'_>> {
        let turn = self.turns.take();
        match &*self.lock_closed() {
            None => Ok(turn),
            Some(why) => Err(Error::Unsupported { operation: "a change", message: why.clone() }),
        }
    }

    /// Keeps others from making a checkpoint or reading its files; taken before a turn.
    fn lock_saving(&self) -> MutexGuard<'_, ()> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_closed(&self) -> MutexGuard<'_, Option<String>> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what reads the changes behind number `last`; none if the log begins later.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be read.
    pub(crate) fn reader(&self, last: u64) -> Result<Option<Reader>> {
        self.log.reader(last).map_err(in_log)
    }

    /// Opens the files of the last checkpoint, the manifest last, and returns them with their names and the number of the
    /// last change in them.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be read.
    pub(crate) fn checkpoint_files(&self) -> Result<(u64, Vec<(String, File)>)> {
        let _saving = self.lock_saving();
        let checkpoint = self.directory.subdirectory(CHECKPOINT).map_err(in_file(self.directory.path()))?;
        let Some(state) = saved_state(checkpoint.path())? else { return Ok((0, Vec::new())) };
        let names = checkpoint_files(checkpoint.path(), None)?.all.into_iter().chain([MANIFEST.to_owned()]);
        let open = |name: String| {
            let file = checkpoint.open_file(&name).map_err(in_file(checkpoint.path()))?;
            Ok((name, file))
        };
        Ok((state.last, names.map(open).collect::<Result<_>>()?))
    }

    /// Begins anew with another checkpoint, which `replace` puts into the directory, in the place of all tables.
    ///
    /// # Errors
    /// As `replace`; [`Error::Checkpoint`] names the file that cannot be used.
    pub(crate) fn restart(
        &self,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        replace: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _saving = self.lock_saving();
        let _turn = self.turns.take();
        replace()?;
        store.table_names()?.iter().try_for_each(|name| store.drop_table(name))?;
        let checkpoint = checkpoint_in(&self.directory)?;
        let state = loaded(&checkpoint, store)?;
        workers.restore(state.workers).map_err(|error| unusable(&checkpoint, error))?;
        *self.lock() = order_of(state.clients).map_err(|error| unusable(&checkpoint, error))?;
        self.log.restart(state.last).map_err(in_log)?;
        self.made.restart(state.last);
        self.acknowledged.restart(state.last);
        Ok(())
    }

    /// Makes a change that no log can tell, and a checkpoint of it, whose report is returned too. `begin` notes the number
    /// that it has.
    ///
    /// # Errors
    /// As `begin` and `make`; as the checkpoint: then no change is taken any more.
    pub(crate) fn replace(
        &self,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        begin: impl FnOnce(u64) -> Result<()>,
        make: impl FnOnce() -> Result<Answer>,
    ) -> Result<(Answer, SaveReport)> {
        // Nobody copies the checkpoint before, which lacks what is loaded.
        let _saving = self.lock_saving();
        let turn = self.open_turn()?;
        // Followers, which cannot be told of it, must find that they lack something.
        let passed = self.log.pass_over().map_err(in_log)?;
        begin(passed)?;
        self.made.advance(passed);
        self.followers.end();
        let outcome = make()?;
        let saved = self.save_and_count(store, workers, turn);
        // The log cannot tell a load: without the checkpoint a restart would put later changes on other rows.
        if let Err(error) = &saved {
            self.log.fail(&format!("what was loaded could not be saved: {error}"));
        }
        self.acknowledged.advance(passed);
        saved.map(|report| (outcome, report))
    }

    /// Makes a checkpoint and drops the log before it.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: the one before still counts, and the log behind it.
    pub(crate) fn checkpoint(&self, store: &dyn EmbeddingStore, workers: &Workers) -> Result<SaveReport> {
        let _saving = self.lock_saving();
        self.save_and_count(store, workers, self.turns.take())
    }

    /// Returns how much log there is behind the last checkpoint.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the directory that cannot be read.
    pub(crate) fn lag(&self) -> Result<Lag> {
        self.log.lag().map_err(in_log)
    }

    /// Must be called with [`Journal::lock_saving`].
    fn save_and_count(
        &self,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        turn: Turn<'_>,
    ) -> Result<SaveReport> {
        self.metrics.checkpoints.make(|| self.save(store, workers, turn))
    }

    fn save(&self, store: &dyn EmbeddingStore, workers: &Workers, turn: Turn<'_>) -> Result<SaveReport> {
        // A file of the log ends where the checkpoint is cut, so whole files can go behind it.
        let last = self.log.rotate().map_err(in_log)?;
        let directory = checkpoint_in(&self.directory)?;
        let state = ServerState { workers: workers.saved(), ..state(store, &self.lock(), last)? };
        let mut options = SaveOptions::default();
        options.by_its_server = true;
        options.metadata = serde_json::to_value(state).map_err(|error| unusable(&directory, error))?.into();
        // From the moment of the save on others may make changes again.
        let turn = Mutex::new(Some(turn));
        let on_cut = || drop(turn.lock().unwrap_or_else(PoisonError::into_inner).take());
        options.on_cut = Some(&on_cut);
        let report = store.save(&directory, &options)?;
        // Files that a follower is still sent stay.
        let sent = self.followers.sent_to_all().unwrap_or(last);
        self.log.trim(last.min(sent)).map_err(in_log)?;
        Ok(report)
    }

    fn lock(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the path of the directory that checkpoints are in, which is made if it is not there.
fn checkpoint_in(directory: &Directory) -> Result<PathBuf> {
    let checkpoint = directory.create_subdirectory(CHECKPOINT).map_err(in_file(directory.path()))?;
    Ok(checkpoint.path().to_owned())
}

/// Loads the tables of a checkpoint, if there is one, under the numbers they had.
fn loaded(checkpoint: &Path, store: &dyn EmbeddingStore) -> Result<ServerState> {
    let Some(state) = saved_state(checkpoint)? else { return Ok(ServerState::default()) };
    let numbers = state.tables.iter().map(|(name, number)| (name.clone(), TableId(*number))).collect();
    let mut options = LoadOptions::default();
    options.numbers = Some(&numbers);
    store.load(checkpoint, &options)?;
    Ok(state)
}

/// Returns what a checkpoint holds besides rows, if there is one.
fn saved_state(checkpoint: &Path) -> Result<Option<ServerState>> {
    let state = checkpoint_metadata(checkpoint)?.map(|metadata| metadata.read()).transpose();
    state.map_err(|error| unusable(checkpoint, error))
}

/// Returns what clients were answered, if a server gave this along with a checkpoint: the rest counts its changes.
pub(crate) fn answers_in(metadata: &str) -> Option<String> {
    let state: ServerState = serde_json::from_str(metadata).ok()?;
    let outcomes: Vec<SavedOutcome> = state.clients.into_iter().map(|client| client.outcome).collect();
    serde_json::to_string(&outcomes).ok()
}

/// Returns the last changes of the clients in a checkpoint.
fn order_of(clients: Vec<SavedClient>) -> std::result::Result<Order, ParseIntError> {
    let known = |SavedClient { client, sequence, number, outcome }| {
        let client = ClientId(u128::from_str_radix(&client, 16)?);
        Ok((client, LastChange { sequence, outcome: outcome.outcome(), number }))
    };
    clients.into_iter().map(known).collect()
}

/// Returns what came of a change that was made again. One that is refused was refused the first time as well, or nobody
/// was told of it.
///
/// # Errors
/// [`Error::UnknownRule`]: this process cannot make it yet.
fn again_made(outcome: Result<Answer>) -> Result<Result<Answer>> {
    match outcome {
        Err(error @ Error::UnknownRule { .. }) => Err(error),
        outcome => Ok(outcome),
    }
}

/// Notes what came of a change of the log.
fn note(order: &mut Order, logged: &Logged, request: &Request<'_>, outcome: &Result<Answer>) {
    for (client, sequence) in makers(logged.client, logged.frame.header.sequence, request) {
        remember(order, client, LastChange { sequence, outcome: outcome.clone(), number: logged.number });
    }
}

fn state(store: &dyn EmbeddingStore, order: &Order, last: u64) -> Result<ServerState> {
    let mut tables = BTreeMap::new();
    for name in store.table_names()? {
        if let Some(table) = store.find_table(&name)? {
            tables.insert(name, table.id().0);
        }
    }
    let saved = |(client, made): (&ClientId, &LastChange)| SavedClient {
        client: format!("{:032x}", client.0),
        sequence: made.sequence,
        number: made.number,
        outcome: SavedOutcome::of(&made.outcome),
    };
    Ok(ServerState {
        last,
        tables,
        clients: order.iter().map(saved).collect(),
        workers: SavedWorkers::default(),
    })
}

/// Returns whose change a request is, and its number among each client's.
fn makers(client: ClientId, sequence: u64, request: &Request<'_>) -> Vec<(ClientId, u64)> {
    match request {
        Request::Round { members, .. } => {
            members.iter().map(|member| (member.client, member.sequence)).collect()
        }
        _ => vec![(client, sequence)],
    }
}

/// Notes a client's last change; beyond the most clients whoever has been quiet longest is forgotten.
fn remember(order: &mut Order, client: ClientId, made: LastChange) {
    if made.sequence == 0 {
        return;
    }
    if order.len() >= MAX_CLIENTS && !order.contains_key(&client) {
        let quietest = order.iter().min_by_key(|(_, made)| made.number).map(|(client, _)| *client);
        quietest.and_then(|quietest| order.remove(&quietest));
    }
    order.insert(client, made);
}

pub(crate) fn in_log(error: LogError) -> Error {
    unusable(&error.path, error.message)
}
