//! What a table refuses, before anything has changed.

use std::sync::atomic::Ordering;

use super::ids::id_allocator::IdAllocator;
use super::table::Table;
use crate::config::NanPolicy;
use crate::{Error, Result, fork};

impl Table {
    pub(super) fn check_learning_rate(&self, lr: f64) -> Result<()> {
        // As the rules use it: a rate below 1e-45 is zero in single precision.
        let is_ftrl_zero = lr as f32 == 0.0 && self.config.optimizer.needs_positive_learning_rate();
        if !(lr as f32).is_finite() || lr < 0.0 || is_ftrl_zero {
            return Err(Error::InvalidLearningRate { table: self.name.clone(), value: lr });
        }
        Ok(())
    }

    pub(super) fn check_ids(&self, operation: &'static str, ids: &[i64]) -> Result<()> {
        let Some(num_embeddings) = self.config.num_embeddings else {
            return Ok(());
        };
        match ids.iter().position(|&id| id < 0 || id as u64 >= num_embeddings) {
            None => Ok(()),
            Some(position) => Err(Error::IdOutOfRange {
                operation,
                table: self.name.clone(),
                id: ids[position],
                position,
                num_embeddings,
            }),
        }
    }

    pub(super) fn check_width(
        &self,
        operation: &'static str,
        what: &str,
        count: usize,
        len: usize,
    ) -> Result<()> {
        let dim = self.config.dim;
        if len == count * dim {
            return Ok(());
        }
        let actual = match count > 0 && len.is_multiple_of(count) {
            true => format!("{what} of {}", len / count),
            false => format!("{len} values for {count} {what}"),
        };
        Err(Error::DimMismatch { operation, table: self.name.clone(), expected: dim, actual })
    }

    pub(super) fn check_length(
        &self,
        operation: &'static str,
        what: &str,
        expected: usize,
        actual: usize,
    ) -> Result<()> {
        if actual == expected {
            return Ok(());
        }
        let what = format!("{what} for the ids of table \"{}\"", self.name);
        Err(Error::LengthMismatch { operation, what, expected, actual })
    }

    /// Returns the positions of rows that the policy leaves out, in rising order.
    pub(super) fn check_finite(
        &self,
        operation: &'static str,
        what: &'static str,
        ids: &[i64],
        values: &[f32],
    ) -> Result<Vec<usize>> {
        // Almost all values are finite: one pass that keeps no positions answers for them.
        if self.config.nan_policy == NanPolicy::Allow || values.iter().all(|value| value.is_finite()) {
            return Ok(Vec::new());
        }
        let bad = |row: &[f32]| row.iter().copied().find(|value| !value.is_finite());
        let rows = values.chunks_exact(self.config.dim).enumerate();
        let mut refused = rows.filter_map(|(position, row)| bad(row).map(|value| (position, value)));
        if self.config.nan_policy == NanPolicy::Skip {
            return Ok(refused.map(|(position, _)| position).collect());
        }
        let Some((position, value)) = refused.next() else {
            return Ok(Vec::new());
        };
        self.refusals.fetch_add(1, Ordering::Relaxed);
        Err(Error::NonFinite {
            operation,
            what,
            table: self.name.clone(),
            id: ids[position],
            position,
            value,
        })
    }

    /// Checks that the table is not that of a parent of this process.
    pub(crate) fn check_own(&self, operation: &'static str) -> Result<()> {
        if self.generation == fork::generation() {
            return Ok(());
        }
        Err(Error::ForkedChild { operation, table: self.name.clone() })
    }

    /// Checks that this process may change the table and that `more` rows would fit.
    pub(super) fn check_writable(&self, operation: &'static str, more: usize) -> Result<()> {
        self.check_own(operation)?;
        let limit = IdAllocator::LIMIT;
        let rows = self.len();
        if rows + more > limit {
            return Err(Error::TableFull {
                operation,
                table: self.name.clone(),
                rows,
                requested: more,
                limit,
            });
        }
        Ok(())
    }

    /// Checks that this process may drop or replace the table.
    pub(crate) fn check_droppable(&self, operation: &'static str) -> Result<()> {
        self.check_writable(operation, 0)
    }
}
