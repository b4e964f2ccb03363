//! What a server keeps on disk so that no acknowledged change is lost: its last checkpoint, and the log of the changes
//! behind it.
//!
//! Changes are made in the order of the log, one after another; they wait for the disk together. A checkpoint holds them
//! back for its moment only. With it goes all else that clients count on: which change of theirs was the last and what
//! came of it, the numbers of tables, and what tells this server from one that has lost its rows.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use recstore::{
    EmbeddingStore, Error, LoadOptions, Result, SaveOptions, SaveReport, TableId, checkpoint_metadata,
    write_file,
};
use serde::{Deserialize, Serialize};

use crate::durable::log::{Lag, Log, LogError, Logged, Staged};
use crate::durable::unusable;
use crate::metrics::Metrics;
use crate::wire::codec::{Answer, ClientId, FrameError, Managed, Request, WireError};
use crate::workers::{SavedWorkers, Workers};

/// The clients remembered; beyond them, whoever has been quiet longest is forgotten.
pub(crate) const MOST_CLIENTS: usize = 1 << 16;

pub(super) const CHECKPOINT: &str = "checkpoint";
pub(super) const LOG: &str = "log";

/// What came of a client's last change.
#[derive(Debug, Clone)]
pub(crate) struct Made {
    pub(crate) sequence: u64,
    pub(crate) outcome: Result<Answer>,
    /// The number of the change in the log.
    number: u64,
}

/// The last changes of clients.
type Order = HashMap<ClientId, Made>;

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
    directory: PathBuf,
    log: Log,
    turns: Turns,
    order: Mutex<Order>,
    metrics: Arc<Metrics>,
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
        directory: &Path,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        metrics: Arc<Metrics>,
        make: impl Fn(ClientId, &Request<'_>) -> Result<Answer>,
    ) -> Result<Self> {
        let checkpoint = directory.join(CHECKPOINT);
        fs::create_dir_all(&checkpoint).map_err(|error| unusable(&checkpoint, error))?;
        let state = loaded(&checkpoint, store)?;
        workers.restore(state.workers).map_err(|error| unusable(&checkpoint, error))?;
        let mut order = Order::new();
        for saved in state.clients {
            let SavedClient { client, sequence, number, outcome } = saved;
            let client = u128::from_str_radix(&client, 16).map_err(|error| unusable(&checkpoint, error))?;
            order.insert(ClientId(client), Made { sequence, outcome: outcome.outcome(), number });
        }
        let mut changes = 0_u64;
        let again = |logged: Logged| -> std::result::Result<(), String> {
            let Logged { number, client, frame } = logged;
            changes += 1;
            let request = Request::of(&frame).map_err(|error: FrameError| error.to_string())?;
            let outcome = make(client, &request);
            if let Err(error @ Error::UnknownRule { .. }) = &outcome {
                return Err(error.to_string());
            }
            // Any other one that is refused was refused before the crash as well, or nobody was told of it.
            for (client, sequence) in makers(client, frame.header.sequence, &request) {
                remember(&mut order, client, Made { sequence, outcome: outcome.clone(), number });
            }
            Ok(())
        };
        let log = Log::open(&directory.join(LOG), state.last, again).map_err(in_log)?;
        let shown = directory.display();
        tracing::info!(shard = metrics.shard(), directory = %shown, changes, "recovered");
        let (turns, order) = (Turns::default(), Mutex::new(order));
        Ok(Self { directory: directory.to_owned(), log, turns, order, metrics })
    }

    /// Returns what tells this server from one that has lost its rows: drawn once for a directory.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be used.
    pub(crate) fn incarnation(directory: &Path) -> Result<u64> {
        let path = directory.join("incarnation");
        if let Ok(text) = fs::read_to_string(&path) {
            return u64::from_str_radix(text.trim(), 16).map_err(|error| unusable(&path, error));
        }
        let drawn = RandomState::new().hash_one(SystemTime::now());
        fs::create_dir_all(directory).map_err(|error| unusable(directory, error))?;
        write_file(&path, format!("{drawn:016x}\n").as_bytes()).map(|()| drawn)
    }

    /// Returns the last change of each client.
    pub(crate) fn made(&self) -> Vec<(ClientId, Made)> {
        self.lock().iter().map(|(client, made)| (*client, made.clone())).collect()
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
        let turn = self.turns.take();
        let appended = request.with_frame(0, sequence, |frame| self.log.append(client, frame, staged));
        let unwritable = |error: FrameError| unusable(&self.directory.join(LOG), error);
        let number = appended.map_err(unwritable)?.map_err(in_log)?;
        let outcome = make();
        for (client, sequence) in makers(client, sequence, request) {
            remember(&mut self.lock(), client, Made { sequence, outcome: outcome.clone(), number });
        }
        if outcome.is_err() {
            return self.log.take_back(number).map_err(in_log).and(outcome);
        }
        drop(turn);
        self.log.wait(number).map_err(in_log).and(outcome)
    }

    /// Makes a change that no log can tell, and a checkpoint of it.
    ///
    /// # Errors
    /// As `make`; as the checkpoint: then no change is taken any more.
    pub(crate) fn replace(
        &self,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        make: impl FnOnce() -> Result<Answer>,
    ) -> Result<Answer> {
        let turn = self.turns.take();
        let outcome = make()?;
        let saved = self.save_and_count(store, workers, turn);
        if let Err(error) = &saved {
            self.log.fail(&format!("what was loaded could not be saved: {error}"));
        }
        saved.map(|_| outcome)
    }

    /// Makes a checkpoint and drops the log before it.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: the one before still counts, and the log behind it.
    pub(crate) fn checkpoint(&self, store: &dyn EmbeddingStore, workers: &Workers) -> Result<SaveReport> {
        self.save_and_count(store, workers, self.turns.take())
    }

    /// Returns how much log there is behind the last checkpoint.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the directory that cannot be read.
    pub(crate) fn lag(&self) -> Result<Lag> {
        self.log.lag().map_err(in_log)
    }

    fn save_and_count(
        &self,
        store: &dyn EmbeddingStore,
        workers: &Workers,
        turn: Turn<'_>,
    ) -> Result<SaveReport> {
        self.metrics.checkpoints.make(|| self.save(store, workers, turn))
    }

    fn save(&self, store: &dyn EmbeddingStore, workers: &Workers, turn: Turn<'_>) -> Result<SaveReport> {
        let last = self.log.rotate().map_err(in_log)?;
        let directory = self.directory.join(CHECKPOINT);
        let state = ServerState { workers: workers.saved(), ..state(store, &self.lock(), last)? };
        let mut options = SaveOptions::default();
        options.by_its_server = true;
        options.metadata = serde_json::to_value(state).map_err(|error| unusable(&directory, error))?;
        // From the moment of the save on others may make changes again.
        let turn = Mutex::new(Some(turn));
        let on_cut = || drop(turn.lock().unwrap_or_else(PoisonError::into_inner).take());
        options.on_cut = Some(&on_cut);
        let report = store.save(&directory, &options)?;
        self.log.trim(last).map_err(in_log)?;
        Ok(report)
    }

    fn lock(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Loads the tables of a checkpoint, if there is one, under the numbers they had.
fn loaded(checkpoint: &Path, store: &dyn EmbeddingStore) -> Result<ServerState> {
    let Some(metadata) = checkpoint_metadata(checkpoint)? else { return Ok(ServerState::default()) };
    let state: ServerState = serde_json::from_value(metadata).map_err(|error| unusable(checkpoint, error))?;
    let numbers = state.tables.iter().map(|(name, number)| (name.clone(), TableId(*number))).collect();
    let mut options = LoadOptions::default();
    options.numbers = Some(&numbers);
    store.load(checkpoint, &options)?;
    Ok(state)
}

fn state(store: &dyn EmbeddingStore, order: &Order, last: u64) -> Result<ServerState> {
    let mut tables = BTreeMap::new();
    for name in store.table_names()? {
        if let Some(table) = store.find_table(&name)? {
            tables.insert(name, table.id().0);
        }
    }
    let saved = |(client, made): (&ClientId, &Made)| SavedClient {
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
fn remember(order: &mut Order, client: ClientId, made: Made) {
    if made.sequence == 0 {
        return;
    }
    if order.len() >= MOST_CLIENTS && !order.contains_key(&client) {
        let quietest = order.iter().min_by_key(|(_, made)| made.number).map(|(client, _)| *client);
        quietest.and_then(|quietest| order.remove(&quietest));
    }
    order.insert(client, made);
}

pub(super) fn in_log(error: LogError) -> Error {
    unusable(&error.path, error.message)
}
