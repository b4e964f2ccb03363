//! A copy of a table, under a name of its own.

use std::sync::Arc;

use super::admission::Admission;
use super::budget::MemoryBudget;
use super::changes::CopiedRows;
use super::engine::Engine;
use super::ids::row_index::RowIndex;
use super::initial_values::initializer::seed_of_copy;
use super::rows::Rows;
use super::table::Table;
use crate::config::TableConfig;
use crate::kernel::bits::Bits;
use crate::optimizer::UpdateRules;
use crate::{Error, Result};

/// The words of records that are copied at once.
const WORDS_PER_CHUNK: usize = 1 << 17;

impl Table {
    /// Returns a table of another name with all that this one has: rows and slots, usages, what was counted of ids without
    /// a row, step, learning rate and counts. Nobody changes this one meanwhile. Ids without a row have the same initial
    /// values in both, by the seed of the copy.
    ///
    /// # Errors
    /// As [`Table::new`]; [`crate::Error::MemoryLimit`]; [`crate::Error::RuleFailed`].
    pub(crate) fn copy(
        &self,
        name: &str,
        engine: Engine<'_>,
        rules: &UpdateRules,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Self> {
        let seed = seed_of_copy(&self.name, self.config.seed, name);
        let config = TableConfig { seed, ..self.config.clone() };
        let mut copy = Self::new(name, &config, rules, budget)?;
        let (progress, sweep) = {
            let rows = self.shared();
            rows.check_whole()?;
            copy.take_rows(&rows, engine)?;
            let counts = rows.admission.as_ref().map(Admission::counts).unwrap_or_default();
            let added = copy.add_admission_counts(&counts, |_| true);
            added.map_err(|message| Error::StateMismatch { table: name.to_owned(), message })?;
            let records = rows.shared.as_ref().map(|shared| shared.copied()).unwrap_or_default();
            let shared = copy.put_shared_rows(&records);
            shared.map_err(|message| Error::StateMismatch { table: name.to_owned(), message })?;
            (self.progress(&rows), rows.sweep.clone())
        };
        copy.take_progress(&progress)?;
        // Outside the lock, which the sweep takes by itself.
        if let Some(sweep) = sweep {
            let chosen = sweep.finish_beside_training(self);
            copy.set_leaving(sweep.steps, chosen);
        }
        Ok(copy)
    }

    /// Gives this table, which has none, the rows of another of the same configuration.
    fn take_rows(&mut self, others: &Rows, engine: Engine<'_>) -> Result<()> {
        self.reserve(others.ids.len());
        let limit = (WORDS_PER_CHUNK / self.record_words().1).max(1);
        let (mut copied, mut scratch, mut seen) = (CopiedRows::default(), Vec::new(), Bits::default());
        let mut left = others.row_ids.used().ones_from(0).map(|index| RowIndex(index as u32)).peekable();
        while left.peek().is_some() {
            copied.clear();
            for index in left.by_ref().take(limit) {
                copied.push(others.key(index), others.record(index, &mut scratch)?);
            }
            let doubled = self.put_records(engine, &copied, &mut seen)?;
            debug_assert_eq!(doubled, None, "no table has two rows of one id");
        }
        Ok(())
    }
}
