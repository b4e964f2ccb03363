//! Workers that train together: who has joined, how far each is, and who waits for whom.
//!
//! A worker is a client with a number. Its process says at short intervals that it lives. Whoever waits for a worker that
//! was silent too long is told so and waits no longer; the same goes for one that waited too long. What was refused has
//! changed nothing: a worker that was started anew takes the number of the one before, and the others repeat their calls.

mod consistency;
mod gathering;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::ParseIntError;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use recstore::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::wire::codec::{ClientId, WorkerState};
pub use consistency::{Combine, Consistency, WorkerSync};
pub(crate) use gathering::Contribution;
use gathering::Gatherings;

/// How often those who wait look after the ones they wait for.
const LOOK: Duration = Duration::from_millis(100);

/// The workers of a server.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    worker_sync: WorkerSync,
    shard: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Those who have joined, by their numbers.
    members: BTreeMap<u32, Member>,
    numbers: HashMap<ClientId, u32>,
    /// Those who have finished: nobody waits for them.
    left: BTreeSet<u32>,
    gatherings: Gatherings,
    /// The most steps that a worker was ahead of another when it made one.
    most_ahead: u64,
}

#[derive(Debug)]
struct Member {
    client: ClientId,
    /// The steps that it has made.
    steps: u64,
    heard: Instant,
}

/// The workers as a checkpoint keeps them.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedWorkers {
    members: Vec<SavedWorker>,
    left: BTreeSet<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedWorker {
    worker: u32,
    /// The client's number, as 32 hexadecimal digits.
    client: String,
    steps: u64,
}

impl Workers {
    pub(crate) fn new(worker_sync: WorkerSync, shard: usize) -> Self {
        Self { worker_sync, shard, ..Self::default() }
    }

    pub(crate) fn worker_sync(&self) -> WorkerSync {
        self.worker_sync
    }

    /// Gives a client the number `worker`. One that had it before has it no more; its successor begins where the slowest
    /// of the others is.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a number beyond the workers there are.
    pub(crate) fn join(&self, client: ClientId, worker: u32) -> Result<()> {
        if let Some(workers) = self.worker_sync.workers.filter(|&workers| worker >= workers) {
            let message = format!("there is no worker {worker} of {workers}");
            return Err(Error::InvalidConfig { message });
        }
        let mut state = self.lock();
        if state.members.values().all(|member| self.silence(member).is_some()) {
            // Nobody is there: others begin.
            state.left.clear();
        }
        if state.members.get(&worker).is_none_or(|member| member.client != client) {
            let others = state.members.iter().filter(|(number, _)| **number != worker);
            // From 0 it would be behind all others: with bounded staleness they would wait until it has
            // caught up.
            let steps = others.map(|(_, member)| member.steps).min().unwrap_or(0);
            state.leave(client);
            state.enter(worker, client, steps);
        }
        state.left.remove(&worker);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Notes that a worker lives. One that nobody knows, because the server was started anew, joins by it.
    ///
    /// # Errors
    /// [`Error::Workers`] if another client has its number by now; as joining.
    pub(crate) fn beat(&self, client: ClientId, worker: u32) -> Result<()> {
        let mut state = self.lock();
        let has_left = state.left.contains(&worker);
        match state.members.get_mut(&worker) {
            Some(member) if member.client == client => {
                member.heard = Instant::now();
                Ok(())
            }
            Some(_) => Err(self.refusal("heartbeat", format!("another client is worker {worker} by now"))),
            None if has_left => Ok(()),
            None => {
                // `join` takes the lock itself.
                drop(state);
                self.join(client, worker)
            }
        }
    }

    /// Notes that a worker has finished: nobody waits for it any more.
    pub(crate) fn leave(&self, client: ClientId) {
        let mut state = self.lock();
        if let Some(worker) = state.leave(client) {
            state.left.insert(worker);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Lets a worker begin a call, where staleness is bounded, when it is not too far ahead of the others.
    ///
    /// # Errors
    /// [`Error::Workers`] names those who are behind, or dead; or says that `client`, which `updates`, is no worker.
    pub(crate) fn admit(&self, operation: &'static str, client: ClientId, updates: bool) -> Result<()> {
        let Consistency::Bounded { staleness } = self.worker_sync.consistency else { return Ok(()) };
        let state = self.lock();
        if !updates && !state.numbers.contains_key(&client) {
            // Whoever only reads is ahead of nobody.
            return Ok(());
        }
        let worker = self.number(&state, operation, client)?;
        let behind = |state: &State| {
            let steps = state.steps(worker);
            let is_behind = |&other: &u32| {
                !state.left.contains(&other) && state.steps(other).saturating_add(staleness) < steps
            };
            self.numbers().filter(is_behind).collect::<Vec<u32>>()
        };
        let ready = |state: &mut State| behind(state).is_empty().then_some(());
        let wait = Wait { operation, what: "steps", patience: self.worker_sync.patience };
        self.wait(state, &wait, ready, behind, |_| {})
    }

    /// Counts a step that a client has made.
    pub(crate) fn count_step(&self, client: ClientId) {
        if !matches!(self.worker_sync.consistency, Consistency::Bounded { .. }) {
            return;
        }
        let mut state = self.lock();
        let Some(&worker) = state.numbers.get(&client) else { return };
        let others = self.numbers().filter(|other| !state.left.contains(other));
        let slowest = others.map(|other| state.steps(other)).min().unwrap_or(0);
        // Before this step is added: how far ahead it was when it began the step.
        let ahead = state.steps(worker).saturating_sub(slowest);
        state.most_ahead = state.most_ahead.max(ahead);
        if let Some(member) = state.members.get_mut(&worker) {
            member.steps += 1;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns what is known of the workers, and the most steps that one was ahead of another when it made one.
    pub(crate) fn states(&self) -> (Vec<WorkerState>, u64) {
        let state = self.lock();
        let known = |(&worker, member): (&u32, &Member)| WorkerState {
            worker,
            steps: member.steps,
            silent_for: member.heard.elapsed().as_secs_f64(),
        };
        (state.members.iter().map(known).collect(), state.most_ahead)
    }

    /// Returns the workers as a checkpoint keeps them.
    pub(crate) fn saved(&self) -> SavedWorkers {
        let state = self.lock();
        let saved = |(&worker, member): (&u32, &Member)| SavedWorker {
            worker,
            client: format!("{:032x}", member.client.0),
            steps: member.steps,
        };
        SavedWorkers { members: state.members.iter().map(saved).collect(), left: state.left.clone() }
    }

    /// Takes over the workers of a checkpoint.
    ///
    /// # Errors
    /// What is no client's number.
    pub(crate) fn restore(&self, saved: SavedWorkers) -> std::result::Result<(), ParseIntError> {
        let mut state = self.lock();
        (state.members, state.numbers) = Default::default();
        for SavedWorker { worker, client, steps } in saved.members {
            state.enter(worker, ClientId(u128::from_str_radix(&client, 16)?), steps);
        }
        state.left = saved.left;
        Ok(())
    }

    /// Takes all workers for alive: they were heard by another server until now.
    pub(crate) fn hear_all(&self) {
        self.lock().members.values_mut().for_each(|member| member.heard = Instant::now());
    }

    fn numbers(&self) -> std::ops::Range<u32> {
        0..self.worker_sync.workers.unwrap_or(0)
    }

    fn number(&self, state: &State, operation: &'static str, client: ClientId) -> Result<u32> {
        state.numbers.get(&client).copied().ok_or_else(|| {
            let message = "the servers' workers go together: whoever takes part must have joined as a worker, \
                           and have its number still";
            self.refusal(operation, message.to_owned())
        })
    }

    /// Waits until `ready` gives something, for the workers that `missing` names.
    ///
    /// # Errors
    /// [`Error::Workers`] names a worker that is dead, or those that did not come in time, after `give_up`.
    fn wait<'a, T>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        wait: &Wait,
        mut ready: impl FnMut(&mut State) -> Option<T>,
        missing: impl Fn(&State) -> Vec<u32>,
        give_up: impl FnOnce(&mut State),
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            // Before anyone is found dead or late: what is complete by now counts.
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            let missing = missing(&state);
            let message = self.dead(&state, &missing, wait.what).or_else(|| {
                // Where nobody is missing, somebody is about to say what comes of it.
                let is_late = began.elapsed() >= wait.patience && !missing.is_empty();
                let waited = wait.patience.as_secs_f64();
                let late = || format!("waited {waited} s for the {} of the workers {missing:?}", wait.what);
                is_late.then(late)
            });
            if let Some(message) = message {
                give_up(&mut state);
                return Err(self.refusal(wait.operation, message));
            }
            // At least a millisecond: once the patience is over, a wait of none would spin until the last
            // word comes.
            let look = LOOK.min(wait.patience.saturating_sub(began.elapsed())).max(Duration::from_millis(1));
            let waited = self.changed.wait_timeout(state, look);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Says which of some workers is dead.
    fn dead(&self, state: &State, of: &[u32], what: &str) -> Option<String> {
        of.iter().find_map(|worker| {
            let seconds = self.silence(state.members.get(worker)?)?.as_secs_f64();
            Some(format!(
                "worker {worker} was not heard of for {seconds:.1} s, and its {what} are waited for"
            ))
        })
    }

    /// Returns how long a worker was silent, if it is taken for dead.
    fn silence(&self, member: &Member) -> Option<Duration> {
        Some(member.heard.elapsed()).filter(|&silence| silence >= self.worker_sync.silence)
    }

    fn refusal(&self, operation: &'static str, message: String) -> Error {
        Error::Workers { operation, shard: self.shard, message }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a worker waits for, and how long.
struct Wait {
    operation: &'static str,
    what: &'static str,
    patience: Duration,
}

impl State {
    /// Returns the steps that a worker has made; one that has not come yet has made none.
    fn steps(&self, worker: u32) -> u64 {
        self.members.get(&worker).map_or(0, |member| member.steps)
    }

    fn enter(&mut self, worker: u32, client: ClientId, steps: u64) {
        let member = Member { client, steps, heard: Instant::now() };
        if let Some(before) = self.members.insert(worker, member) {
            self.numbers.remove(&before.client);
        }
        self.numbers.insert(client, worker);
    }

    fn leave(&mut self, client: ClientId) -> Option<u32> {
        let worker = self.numbers.remove(&client)?;
        self.members.remove(&worker);
        Some(worker)
    }
}
