//! Puts what optimizers keep into tables from outside: slots, step and learning rate, rows left alone.

use std::sync::Arc;

use super::ids::row_index::RowIndex;
use super::locks::lock_order;
use super::rows::Rows;
use super::table::Table;
use crate::calls::OptimizerState;
use crate::kernel::bits::Bits;
use crate::optimizer::DecayFactor;
use crate::{Error, Result};

const OPERATION: &str = "put_optimizer_states";

/// Puts a state into each table. The tables are locked together; only if all states fit, all are put.
///
/// # Errors
/// As [`crate::EmbeddingStore::put_optimizer_states`]; then no table has changed.
pub(crate) fn put_states(tables: &[Arc<Table>], states: &[OptimizerState<'_>]) -> Result<()> {
    let mut order: Vec<_> = tables.iter().zip(states).collect();
    order.iter().try_for_each(|(table, state)| table.check_state(state))?;
    // One order for all who lock several tables: two such calls never wait for each other.
    order.sort_by_key(|(table, _)| lock_order(table));
    // Before the locks: for a table that is given twice the call would wait for itself.
    if let Some(pair) = order.windows(2).find(|pair| Arc::ptr_eq(pair[0].0, pair[1].0)) {
        return Err(pair[0].0.state_mismatch("it is given two states".to_owned()));
    }
    let mut locked: Vec<_> =
        order.into_iter().map(|(table, state)| (table, state, table.exclusive())).collect();
    let indices = locked.iter().map(|(table, state, rows)| table.rows_of_state(rows, state));
    let indices = indices.collect::<Result<Vec<_>>>()?;
    for ((table, state, rows), indices) in locked.iter_mut().zip(indices) {
        table.put_state(rows, state, &indices)?;
    }
    Ok(())
}

impl Table {
    /// Checks all of a state that does not depend on the rows there are.
    fn check_state(&self, state: &OptimizerState<'_>) -> Result<()> {
        self.check_writable(OPERATION, 0)?;
        self.check_learning_rate(state.learning_rate)?;
        self.kept_of_state(state)?;
        if state.slots.len() != self.optimizer.slots().len() {
            let (expected, actual) = (self.optimizer.slots().len(), state.slots.len());
            return Err(self.state_mismatch(format!("expected {expected} slots, got {actual}")));
        }
        for (slot, values) in self.optimizer.slots().iter().zip(&state.slots) {
            let (expected, actual) = (state.ids.len() * slot.width, values.len());
            if actual != expected {
                let message = format!("expected {expected} values of slot \"{}\", got {actual}", slot.name);
                return Err(self.state_mismatch(message));
            }
        }
        Ok(())
    }

    fn kept_of_state(&self, state: &OptimizerState<'_>) -> Result<DecayFactor> {
        self.kept_of(state.idle_kept, state.idle_kept.and_then(DecayFactor::of_pair))
    }

    /// Returns where the rows of a state lie, which must be all that there are.
    fn rows_of_state(&self, rows: &Rows, state: &OptimizerState<'_>) -> Result<Vec<RowIndex>> {
        if self.optimizer.slots().is_empty() && state.ids.is_empty() {
            return Ok(Vec::new());
        }
        rows.check_whole()?;
        if state.ids.len() != rows.ids.len() {
            let (expected, actual) = (rows.ids.len(), state.ids.len());
            return Err(self.state_mismatch(format!("expected the ids of its {expected} rows, got {actual}")));
        }
        let mut seen = Bits::default();
        seen.grow(rows.allocator.high_water());
        let index_of = |(position, id): (usize, &i64)| {
            let mismatch =
                |what: &str| self.state_mismatch(format!("the id {id} at position {position} {what}"));
            let index = rows.ids.find(*id).ok_or_else(|| mismatch("has no row"))?;
            if seen.take(index.0 as usize) {
                return Err(mismatch("comes twice"));
            }
            seen.set(index.0 as usize);
            Ok(index)
        };
        state.ids.iter().enumerate().map(index_of).collect()
    }

    /// # Errors
    /// [`Error::Disk`], of a row that lies on disk; then no call uses the table's rows any more.
    fn put_state(&self, rows: &mut Rows, state: &OptimizerState<'_>, indices: &[RowIndex]) -> Result<()> {
        let kept = self.kept_of_state(state)?;
        let idle = self.optimizer.idle(kept, state.step);
        for (position, index) in indices.iter().enumerate() {
            rows.change(*index, false, |_, all| {
                let mut rest = &mut *all;
                for (slot, values) in self.optimizer.slots().iter().zip(&state.slots) {
                    let (own, behind) = rest.split_at_mut(slot.words());
                    slot.round(&values[position * slot.width..][..slot.width], own);
                    rest = behind;
                }
                // The rows are those that were read when the state was taken: nothing is left to catch up with.
                if let Some(idle) = idle {
                    self.optimizer.settle(idle, all);
                }
            })?;
        }
        rows.kept = kept;
        rows.step = state.step;
        rows.learning_rate = state.learning_rate;
        rows.learning_rate_was_set = state.learning_rate_was_set;
        Ok(())
    }

    fn state_mismatch(&self, message: String) -> Error {
        Error::StateMismatch { table: self.name.clone(), message }
    }
}
