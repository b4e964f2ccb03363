//! A sweep on its way through the rows of a table.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use super::ids::row_index::RowIndex;
use super::rows::Rows;
use super::sweep::Sweep;
use super::table::Table;
use crate::fork;
use crate::lifecycle::Least;
use crate::rows::any_row_type::with_row_type;
use crate::rows::row_type::RowType;

/// The rows that a sweep goes through under one lock.
const ROWS_PER_CHUNK: usize = 8_192;

impl Sweep {
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
        // From here on `keep` copies nothing more.
        self.position.store(usize::MAX, Ordering::Relaxed);
        // Rows that changed before the sweep came to them, in any order: the ranks are total, so the choice
        // is the same.
        for pile in &self.kept {
            let kept = std::mem::take(&mut *pile.lock().unwrap_or_else(PoisonError::into_inner));
            kept.into_iter().for_each(|(id, usage)| self.see(progress, id, usage));
        }
        let least = std::mem::replace(&mut progress.least, Least::new(0));
        progress.chosen.extend(least.into_items().into_iter().map(|(.., id)| id));
        progress.is_done = true;
        true
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
            if self.advance(table, &rows, ROWS_PER_CHUNK) {
                return self.finish(table, &rows);
            }
        }
    }
}

/// Goes through a table on a thread of its own, as long as the sweep is that of its rows. If no thread can be had, the step at which
/// rows leave does it.
pub(super) fn run_aside(table: &Arc<Table>, sweep: &Arc<Sweep>) {
    // A weak one: a table that is dropped ends the thread.
    let (table, sweep): (Weak<Table>, _) = (Arc::downgrade(table), Arc::clone(sweep));
    let work = move || {
        while let Some(table) = table.upgrade() {
            // Gate and lock are taken anew for each chunk, so that steps and forks come in between.
            let _gate = fork::enter();
            let rows = table.shared();
            let is_current = rows.sweep.as_ref().is_some_and(|current| Arc::ptr_eq(current, &sweep));
            if !is_current || sweep.advance(&table, &rows, ROWS_PER_CHUNK) {
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
        let record = rows.record(index, &mut scratch).ok()?;
        match self.idle_rows(rows) {
            Some(idle) => idle.read(record, &mut row),
            None => {
                let words = &record[..rows.storage.weight_words()];
                with_row_type!(self.config.dtype, row_type => row_type.widen(words, &mut row));
            }
        }
        Some(row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt())
    }
}
