//! Which rows leave a table: chosen from the table as it was after one step, while training goes on.
//!
//! A sweep begins at the end of a step and goes through the rows some at a time, on a thread of its own. Whoever changes
//! a row that it has not come to keeps a copy of the row's usage, so that what it sees is of that moment. Where it is not done
//! when its rows are to leave, the step does the rest: what is chosen never depends on time.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::ids::row_index::RowIndex;
use crate::config::{EvictionConfig, EvictionPolicy};
use crate::lifecycle::{Least, Usage};

/// Copies of usages go to several piles, so that threads seldom wait for each other.
const PILES: usize = 16;

/// A row as the policy orders it.
type Ranked = (u64, u64, i64);

/// Returns how a policy orders a row: the least leave first.
pub(super) fn rank(policy: EvictionPolicy, id: i64, usage: Usage) -> Ranked {
    match policy {
        EvictionPolicy::Lru => (usage.step(), usage.count(), id),
        EvictionPolicy::Lfu => (usage.count(), usage.step(), id),
    }
}

/// When a sweep began and when its rows leave, in steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SweepSteps {
    /// The sweep is of the table after this step.
    pub(crate) began: u64,
    /// Its rows leave at the end of this one.
    pub(crate) leaves: u64,
}

/// A choice of rows.
#[derive(Debug)]
pub(crate) struct Sweep {
    pub(crate) steps: SweepSteps,
    /// Rows whose usage is of a later step than this were changed since.
    pub(super) newest: u64,
    pub(super) config: EvictionConfig,
    /// The rows below were gone through. It changes under the table's lock only.
    pub(super) position: AtomicUsize,
    pub(super) kept: [Mutex<Vec<(i64, Usage)>>; PILES],
    pub(super) progress: Mutex<Progress>,
}

#[derive(Debug)]
pub(super) struct Progress {
    pub(super) is_done: bool,
    pub(super) chosen: BTreeSet<i64>,
    pub(super) least: Least<Ranked>,
}

impl Sweep {
    /// Begins a sweep of a table as it is after step `steps.began`, one of so many `shards`.
    pub(super) fn begin(config: &EvictionConfig, shards: usize, rows: usize, steps: SweepSteps) -> Self {
        let capacity = config.share(shards).map_or(usize::MAX, |capacity| capacity as usize);
        let least = Least::new(rows.saturating_sub(capacity));
        Self {
            steps,
            newest: steps.began,
            config: config.clone(),
            position: AtomicUsize::new(0),
            kept: Default::default(),
            progress: Mutex::new(Progress { is_done: false, chosen: BTreeSet::new(), least }),
        }
    }

    /// Begins a sweep of a table that nobody changes until it is done.
    pub(super) fn of_now(config: &EvictionConfig, shards: usize, rows: usize, step: u64) -> Self {
        let sweep = Self::begin(config, shards, rows, SweepSteps { began: step, leaves: step });
        Self { newest: u64::MAX, ..sweep }
    }

    /// Returns a sweep that chose these ids.
    pub(super) fn done(config: &EvictionConfig, steps: SweepSteps, chosen: Vec<i64>) -> Self {
        let sweep = Self::begin(config, 1, 0, steps);
        let progress = Progress { is_done: true, chosen: chosen.into_iter().collect(), least: Least::new(0) };
        Self { progress: Mutex::new(progress), ..sweep }
    }

    /// Must be called before the usage of a row changes, or the row goes.
    #[inline(always)]
    pub(super) fn keep(&self, index: RowIndex, id: i64, usage: Usage) {
        // Relaxed: the position moves only under the table's lock, which orders it.
        if self.is_of_then(usage) && index.0 as usize >= self.position.load(Ordering::Relaxed) {
            let pile = &self.kept[index.0 as usize % PILES];
            pile.lock().unwrap_or_else(PoisonError::into_inner).push((id, usage));
        }
    }

    /// Whether a row was changed last when the sweep began, or before.
    #[inline(always)]
    pub(super) fn is_of_then(&self, usage: Usage) -> bool {
        usage.step() <= self.newest
    }

    /// Decides about a row by its usage.
    pub(super) fn see(&self, progress: &mut Progress, id: i64, usage: Usage) {
        let unseen = self.steps.began.saturating_sub(usage.step());
        if self.config.ttl.is_some_and(|ttl| unseen > ttl) {
            progress.chosen.insert(id);
        }
        if self.config.capacity.is_some() {
            progress.least.push(rank(self.config.policy, id, usage));
        }
    }

    /// Whether a row that was chosen is to go: not if it was updated or written since.
    pub(super) fn still_chooses(&self, id: i64, usage: Usage) -> bool {
        self.is_of_then(usage) && !self.config.keep.contains(&id)
    }
}
