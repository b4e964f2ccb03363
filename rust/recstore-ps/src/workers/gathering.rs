//! What needs all workers: a step that they make together, and barriers.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use recstore::{Result, Step, TableId};

use super::{Combine, Consistency, State, Wait, Workers};
use crate::wire::codec::{Answer, ClientId, MergedUpdate, Request, RoundMember};

/// What workers gather for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Purpose {
    /// A step of these tables.
    Step(Vec<(TableId, Option<u64>)>),
    /// A barrier of this name.
    Barrier(String),
}

/// Who has come, by purpose.
#[derive(Debug, Default)]
pub(super) struct Gatherings(HashMap<Purpose, Gathering>);

#[derive(Debug, Default)]
struct Gathering {
    /// By worker: results do not depend on who came first.
    came: BTreeMap<u32, Contribution>,
    outcome: Arc<OnceLock<Result<Answer>>>,
}

/// What one worker brings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Contribution {
    client: ClientId,
    sequence: u64,
    updates: Vec<OwnedUpdate>,
}

#[derive(Debug, Clone, PartialEq)]
struct OwnedUpdate {
    table: TableId,
    step: Step,
    ids: Vec<i64>,
    sums: Vec<f32>,
}

impl Contribution {
    /// Returns a client's change `sequence`: some updates, or none to a barrier.
    pub(crate) fn new(client: ClientId, sequence: u64, updates: &[MergedUpdate<'_>]) -> Self {
        let owned = |update: &MergedUpdate<'_>| OwnedUpdate {
            table: update.table,
            step: update.step,
            ids: update.ids.to_vec(),
            sums: update.sums.to_vec(),
        };
        let mut updates: Vec<_> = updates.iter().map(owned).collect();
        // In one order for all workers; two steps of a table stay as they came.
        updates.sort_by_key(|update| update.table);
        Self { client, sequence, updates }
    }

    fn purpose(&self) -> Purpose {
        let step = |update: &OwnedUpdate| match update.step {
            Step::Next => (update.table, None),
            Step::At(step) => (update.table, Some(step)),
        };
        Purpose::Step(self.updates.iter().map(step).collect())
    }

    fn scale(&mut self, factor: f32) {
        self.updates.iter_mut().flat_map(|update| &mut update.sums).for_each(|value| *value *= factor);
    }
}

impl Workers {
    /// Whether steps wait for all workers.
    pub(crate) fn are_synchronous(&self) -> bool {
        matches!(self.worker_sync.consistency, Consistency::Synchronous { .. })
    }

    /// Brings a worker's part of a step; the last one makes the step with `make`, which gets all parts as one request.
    ///
    /// # Errors
    /// As `make`, for all; [`Error::Workers`] names those whose part is missing: this one is withdrawn then.
    pub(crate) fn step_together(
        &self,
        contribution: Contribution,
        make: impl FnOnce(&Request<'_>) -> Result<Answer>,
    ) -> Result<Answer> {
        let purpose = contribution.purpose();
        let wait = Wait { operation: "emb_update", what: "updates", patience: self.worker_sync.patience };
        self.gather(&purpose, contribution, &wait, |mut parts| {
            // Before the request is made of the parts: the log has them as they count.
            if self.divides() {
                let factor = 1.0 / parts.len() as f32;
                parts.iter_mut().for_each(|part| part.scale(factor));
            }
            make(&round(&parts))
        })
    }

    /// Waits until all workers have come to the barrier `name`.
    ///
    /// # Errors
    /// [`Error::Workers`] names those who have not come in time; this one may come again then.
    pub(crate) fn barrier(
        &self,
        client: ClientId,
        sequence: u64,
        name: &str,
        patience: Duration,
    ) -> Result<Answer> {
        let wait = Wait { operation: "barrier", what: "arrivals", patience };
        let purpose = Purpose::Barrier(name.to_owned());
        self.gather(&purpose, Contribution::new(client, sequence, &[]), &wait, |_| Ok(Answer::Done))
    }

    fn divides(&self) -> bool {
        matches!(self.worker_sync.consistency, Consistency::Synchronous { combine: Combine::Mean, .. })
    }

    /// Brings a contribution and waits for the others'; whoever completes a gathering makes of it what all are told.
    fn gather(
        &self,
        purpose: &Purpose,
        contribution: Contribution,
        wait: &Wait,
        make: impl FnOnce(Vec<Contribution>) -> Result<Answer>,
    ) -> Result<Answer> {
        let workers = self.worker_sync.workers.ok_or_else(|| {
            self.refusal(wait.operation, "the server was not told how many workers there are".to_owned())
        })?;
        let mut state = self.lock();
        let worker = self.number(&state, wait.operation, contribution.client)?;
        let gathering = state.gatherings.0.entry(purpose.clone()).or_default();
        gathering.came.insert(worker, contribution);
        let outcome = Arc::clone(&gathering.outcome);
        let missing = |state: &State| state.missing(purpose, &outcome, workers);
        let ready = |state: &mut State| match outcome.get() {
            Some(told) => Some(Gathered::Outcome(Box::new(told.clone()))),
            None if missing(state).is_some_and(|missing| missing.is_empty()) => {
                // Taken away under the lock: who comes from here on begins the next gathering of this
                // purpose.
                state.gatherings.0.remove(purpose).map(|complete| Gathered::Complete(complete.came))
            }
            None => None,
        };
        let withdraw = |state: &mut State| state.withdraw(purpose, worker);
        match self.wait(state, wait, ready, |state| missing(state).unwrap_or_default(), withdraw)? {
            Gathered::Outcome(outcome) => *outcome,
            Gathered::Complete(came) => {
                // A panic must not leave the other workers waiting.
                let made = catch_unwind(AssertUnwindSafe(|| make(came.into_values().collect())));
                let made = made.unwrap_or_else(|_| {
                    Err(self.refusal(wait.operation, "the server met an internal panic".to_owned()))
                });
                _ = outcome.set(made.clone());
                // Whoever looked before the outcome was there waits by now.
                drop(self.lock());
                self.changed.notify_all();
                made
            }
        }
    }
}

/// How a gathering ends for one of those who came.
enum Gathered {
    /// All have come: this one is to make of it what all are told.
    Complete(BTreeMap<u32, Contribution>),
    /// Another has done so.
    Outcome(Box<Result<Answer>>),
}

impl State {
    /// Returns the workers that have not come to a gathering; none if it is complete and gone.
    fn missing(
        &self,
        purpose: &Purpose,
        outcome: &Arc<OnceLock<Result<Answer>>>,
        workers: u32,
    ) -> Option<Vec<u32>> {
        // Another gathering of the same purpose may have begun since: their outcomes tell them apart.
        let gathering =
            self.gatherings.0.get(purpose).filter(|found| Arc::ptr_eq(&found.outcome, outcome))?;
        let is_missing = |worker: &u32| !gathering.came.contains_key(worker) && !self.left.contains(worker);
        Some((0..workers).filter(is_missing).collect())
    }

    fn withdraw(&mut self, purpose: &Purpose, worker: u32) {
        let Some(gathering) = self.gatherings.0.get_mut(purpose) else { return };
        gathering.came.remove(&worker);
        if gathering.came.is_empty() {
            self.gatherings.0.remove(purpose);
        }
    }
}

/// Returns the parts of a step as one request. All are about the same tables.
fn round(parts: &[Contribution]) -> Request<'_> {
    let member = |part: &Contribution| RoundMember { client: part.client, sequence: part.sequence };
    let tables = 0..parts.first().map_or(0, |part| part.updates.len());
    let of_table = |place| parts.iter().map(move |part: &Contribution| borrowed(&part.updates[place]));
    Request::Round {
        members: parts.iter().map(member).collect(),
        updates: tables.flat_map(of_table).collect(),
    }
}

fn borrowed(update: &OwnedUpdate) -> MergedUpdate<'_> {
    MergedUpdate { table: update.table, step: update.step, ids: &update.ids, sums: &update.sums }
}
