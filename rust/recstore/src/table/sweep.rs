//! Which rows leave a table: chosen from the table as it was after one step, while training goes on.
//!
//! A sweep begins at the end of a step and goes through the rows some at a time, on a thread of its own. Whoever changes
//! a row that it has not come to keeps a copy of the row's usage, so that what it sees is of that moment. Where it is not done
//! when its rows are to leave, the step does the rest: what is chosen never depends on time.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{RowIndex, Rows, Table};
use crate::config::{EvictionConfig, EvictionPolicy};
use crate::fork;
use crate::lifecycle::{Least, Usage};
use crate::rows::row_type::{RowType, with_row_type};

/// The rows that a sweep goes through under one lock.
const ROWS_AT_A_TIME: usize = 8_192;

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
    newest: u64,
    config: EvictionConfig,
    /// The rows below were gone through. It changes under the table's lock only.
    position: AtomicUsize,
    kept: [Mutex<Vec<(i64, Usage)>>; PILES],
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    is_done: bool,
    chosen: BTreeSet<i64>,
    least: Least<Ranked>,
}

impl Sweep {
    /// Begins a sweep of a table as it is after step `steps.began`.
    pub(super) fn begin(config: &EvictionConfig, rows: usize, steps: SweepSteps) -> Self {
        let capacity = config.capacity.map_or(usize::MAX, |capacity| capacity as usize);
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
    pub(super) fn of_now(config: &EvictionConfig, rows: usize, step: u64) -> Self {
        let sweep = Self::begin(config, rows, SweepSteps { began: step, leaves: step });
        Self { newest: u64::MAX, ..sweep }
    }

    /// Returns a sweep that chose these ids.
    pub(super) fn done(config: &EvictionConfig, steps: SweepSteps, chosen: Vec<i64>) -> Self {
        let sweep = Self::begin(config, 0, steps);
        let progress = Progress { is_done: true, chosen: chosen.into_iter().collect(), least: Least::new(0) };
        Self { progress: Mutex::new(progress), ..sweep }
    }

    /// Must be called before the usage of a row changes, or the row goes.
    #[inline(always)]
    pub(super) fn keep(&self, index: RowIndex, id: i64, usage: Usage) {
        if self.is_of_then(usage) && index.0 as usize >= self.position.load(Ordering::Relaxed) {
            let pile = &self.kept[index.0 as usize % PILES];
            pile.lock().unwrap_or_else(PoisonError::into_inner).push((id, usage));
        }
    }

    /// Whether a row was changed last when the sweep began, or before.
    #[inline(always)]
    fn is_of_then(&self, usage: Usage) -> bool {
        usage.step() <= self.newest
    }

    /// Goes through up to `limit` more rows and returns whether that were all.
    fn advance(&self, table: &Table, rows: &Rows, limit: usize) -> bool {
        // Whoever holds this has the table's lock: none waits for the other.
        let progress = &mut *self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(usages) = rows.usages.as_ref().filter(|_| !progress.is_done) else { return true };
        let start = self.position.load(Ordering::Relaxed);
        let mut end = None;
        for index in rows.row_ids.used().ones_from(start).take(limit) {
            end = Some(index + 1);
            let index = RowIndex(index as u32);
            let (id, usage) = (rows.row_ids.of(index), usages.of(index));
            if self.is_of_then(usage) {
                self.see(progress, id, usage);
                if self
                    .config
                    .min_norm
                    .is_some_and(|least| table.norm(rows, index).is_some_and(|norm| norm < least))
                {
                    progress.chosen.insert(id);
                }
            }
        }
        if let Some(end) = end {
            self.position.store(end, Ordering::Relaxed);
            return false;
        }
        self.position.store(usize::MAX, Ordering::Relaxed);
        for pile in &self.kept {
            let kept = std::mem::take(&mut *pile.lock().unwrap_or_else(PoisonError::into_inner));
            kept.into_iter().for_each(|(id, usage)| self.see(progress, id, usage));
        }
        let least = std::mem::replace(&mut progress.least, Least::new(0));
        progress.chosen.extend(least.into_items().into_iter().map(|(.., id)| id));
        progress.is_done = true;
        true
    }

    /// Decides about a row by its usage.
    fn see(&self, progress: &mut Progress, id: i64, usage: Usage) {
        let unseen = self.steps.began.saturating_sub(usage.step());
        if self.config.ttl.is_some_and(|ttl| unseen > ttl) {
            progress.chosen.insert(id);
        }
        if self.config.capacity.is_some() {
            progress.least.push(rank(self.config.policy, id, usage));
        }
    }

    /// Does what is left and returns the ids chosen, in ascending order.
    pub(super) fn finish(&self, table: &Table, rows: &Rows) -> Vec<i64> {
        while !self.advance(table, rows, usize::MAX) {}
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).chosen.iter().copied().collect()
    }

    /// Does what is left, some at a time, and returns the ids chosen, in ascending order.
    pub(crate) fn finish_beside_training(&self, table: &Table) -> Vec<i64> {
        loop {
            let _gate = fork::enter();
            let rows = table.shared();
            if self.advance(table, &rows, ROWS_AT_A_TIME) {
                return self.finish(table, &rows);
            }
        }
    }

    /// Whether a row that was chosen is to go: not if it was updated or written since.
    pub(super) fn still_chooses(&self, id: i64, usage: Usage) -> bool {
        self.is_of_then(usage) && !self.config.keep.contains(&id)
    }
}

/// Goes through a table on a thread of its own, as long as there is the table. If no thread can be had, the step at which
/// rows leave does it.
pub(super) fn run_aside(table: &Arc<Table>, sweep: &Arc<Sweep>) {
    let (table, sweep): (Weak<Table>, _) = (Arc::downgrade(table), Arc::clone(sweep));
    let work = move || {
        while let Some(table) = table.upgrade() {
            let _gate = fork::enter();
            let rows = table.shared();
            if sweep.advance(&table, &rows, ROWS_AT_A_TIME) {
                return;
            }
        }
    };
    drop(std::thread::Builder::new().name("recstore-sweep".to_owned()).spawn(work));
}

impl Table {
    /// Returns the L2 norm of a row, unless the disk does not give it.
    fn norm(&self, rows: &Rows, index: RowIndex) -> Option<f64> {
        let (mut row, mut scratch) = (vec![0.0; self.config.dim], Vec::new());
        let words = &rows.record(index, &mut scratch).ok()?[..rows.storage.weight_words()];
        with_row_type!(self.config.dtype, row_type => row_type.widen(words, &mut row));
        Some(row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt())
    }
}
