//! Rows on their way out of a table.

use std::sync::Arc;

use super::rows::Rows;
use super::sweep::{Sweep, SweepSteps};
use super::sweeping::run_aside;
use super::table::Table;
use crate::config::EvictionConfig;
use crate::{Error, Result};

impl Rows {
    /// Returns what counts as the step of rows changed in `step`: one after the sweep, also where a caller counts steps
    /// backwards.
    pub(super) fn stamp(&self, step: u64) -> u64 {
        step.max(self.sweep.as_ref().map_or(0, |sweep| sweep.steps.began + 1))
    }

    /// Takes away the rows that are to leave by now, and returns how many.
    pub(super) fn let_leave(&mut self, table: &Table) -> usize {
        let due = self.sweep.as_ref().filter(|sweep| sweep.steps.leaves <= self.step);
        let Some(sweep) = due.cloned() else { return 0 };
        // The step does what the thread has not: rows leave at the same step, whatever the timing.
        let chosen = sweep.finish(table, self);
        self.sweep = None;
        match self.evict(&sweep, chosen) {
            Ok(left) => left.len(),
            Err(_) => {
                // The disk keeps a save under way from getting its copies: with the next step, then.
                self.sweep = Some(sweep);
                0
            }
        }
    }

    /// Deletes the rows that a sweep chose and that were not changed since, and returns their ids.
    fn evict(&mut self, sweep: &Sweep, chosen: Vec<i64>) -> Result<Vec<i64>> {
        let leaves = |id: &i64| {
            let usage = self.usages.as_ref().zip(self.ids.find(*id)).map(|(usages, index)| usages.of(index));
            usage.is_some_and(|usage| sweep.still_chooses(*id, usage))
        };
        let leaving: Vec<i64> = chosen.into_iter().filter(leaves).collect();
        let deleted = self.delete(&leaving)?;
        self.evictions += deleted as u64;
        Ok(leaving)
    }

    /// Begins a sweep if the table came to one since step `before`.
    pub(super) fn begin_sweep(&mut self, table: &Arc<Table>, before: u64) {
        let Some(config) = &table.config.eviction else { return };
        if self.step / config.interval > before / config.interval && self.sweep.is_none() {
            let steps = SweepSteps { began: self.step, leaves: self.step.saturating_add(config.delay()) };
            let sweep = Arc::new(Sweep::begin(config, table.shards(), self.ids.len(), steps));
            run_aside(table, &sweep);
            self.sweep = Some(sweep);
        }
    }
}

impl Table {
    /// Returns the ids of the rows that a sweep of the table as it is would choose, in ascending order, and takes them away
    /// unless it is a `dry_run`. A `ttl` takes the place of the table's own.
    pub(crate) fn evict(&self, ttl: Option<u64>, dry_run: bool) -> Result<Vec<i64>> {
        const OPERATION: &str = "evict";
        let no_eviction = || Error::NoEviction { operation: OPERATION, table: self.name.clone() };
        let own = self.config.eviction.as_ref().ok_or_else(no_eviction)?;
        let config = &EvictionConfig { ttl: ttl.or(own.ttl), ..own.clone() };
        if dry_run {
            let rows = self.shared();
            let chosen = self.sweep_of_now(config, &rows).finish(self, &rows);
            return Ok(chosen.into_iter().filter(|id| !config.keep.contains(id)).collect());
        }
        self.check_writable(OPERATION, 0)?;
        let rows = &mut *self.exclusive();
        let sweep = self.sweep_of_now(config, rows);
        let chosen = sweep.finish(self, rows);
        rows.evict(&sweep, chosen)
    }

    fn sweep_of_now(&self, config: &EvictionConfig, rows: &Rows) -> Sweep {
        Sweep::of_now(config, self.shards(), rows.ids.len(), rows.step)
    }
}
