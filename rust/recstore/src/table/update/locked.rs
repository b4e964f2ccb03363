//! A table under way in a step: what is known of the rows of each position, and the rows that the step adds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::request::{CheckedStep, OPERATION};
use crate::Result;
use crate::calls::{MAX_STEP, Step};
use crate::kernel::hash::mix;
use crate::optimizer::PreparedRule;
use crate::rows::gradient::Gradients;
use crate::table::engine::Engine;
use crate::table::growth::Growth;
use crate::table::ids::row_index::NO_INDEX;
use crate::table::memory::{NewRows, distinct};
use crate::table::rows::Rows;
use crate::table::table::Table;

/// The index of an id whose gradients do not count.
pub(super) const PADDING: u32 = u32::MAX - 1;

/// A table under way.
pub(super) struct Locked<'a> {
    pub(super) table: &'a Arc<Table>,
    pub(super) gradients: &'a Gradients<'a>,
    /// The same by the rows of their matrix, and the row of each position, where no position is asked for.
    pub(super) by_row: Option<(Gradients<'a>, &'a [u32])>,
    pub(super) rows: &'a mut Rows,
    pub(super) rule: PreparedRule,
    /// The step before this one.
    pub(super) step_before: u64,
    /// The row of each position.
    pub(super) indices: Vec<u32>,
    /// Whether a position's row was made by this step; empty where none was.
    pub(super) is_new: Vec<bool>,
    /// The positions of ids that were not admitted, of a table whose ids share rows; they ascend.
    pub(super) rejected: Vec<usize>,
    /// For each part, what its places tell.
    pub(super) known: Vec<Known>,
    pub(super) stepped: AtomicU64,
    pub(super) skipped: usize,
    /// Whether sums over several ids may be beyond float32.
    pub(super) may_overflow: bool,
}

impl<'a> Locked<'a> {
    pub(super) fn new(
        checked: &CheckedStep<'a>,
        merged: Option<&'a Gradients<'a>>,
        rows: &'a mut Rows,
    ) -> Self {
        let table = checked.table;
        let step_before = rows.step;
        rows.step = match checked.step {
            Step::Next => rows.step.saturating_add(1).min(MAX_STEP),
            Step::At(step) => step,
        };
        let gradients = merged.unwrap_or(checked.gradients);
        let mut indices = std::mem::take(&mut rows.indices);
        indices.resize(gradients.len(), NO_INDEX);
        let known = vec![Known::Nothing; gradients.parts.len()];
        let rule = table.prepare_rule(rows, rows.step.saturating_sub(step_before));
        Self {
            table,
            gradients,
            by_row: None,
            rows,
            rule,
            step_before,
            indices,
            is_new: Vec::new(),
            rejected: Vec::new(),
            known,
            stepped: AtomicU64::new(0),
            skipped: checked.skipped,
            may_overflow: merged.is_some(),
        }
    }

    /// Sees that new rows fit, and brings the others into memory.
    pub(super) fn make_ready(&mut self, engine: Engine<'_>) -> Result<()> {
        self.rows.check_whole()?;
        if !self.rows.is_limited() {
            return Ok(());
        }
        let (indices, gradients) = (&self.indices, self.gradients);
        let missing = || (0..indices.len()).filter(|&position| indices[position] == NO_INDEX);
        let noise = self.noise();
        let count = |rows: &Rows| {
            let ids = distinct(missing().map(|position| gradients.id(position)).collect());
            let is_admitted = rows.would_admit(&ids, &noise);
            let others = ids.iter().zip(&is_admitted).filter(|(_, is_admitted)| !**is_admitted);
            let candidates = others.filter(|(id, _)| !rows.is_candidate(**id)).count();
            Growth { rows: is_admitted.iter().filter(|is_admitted| **is_admitted).count(), candidates }
        };
        let at_most = missing().count();
        let at_most = Growth { rows: at_most, candidates: at_most };
        let needed = |_: &Rows| indices.clone();
        let new = NewRows { at_most, count: &count, needed: Some(&needed) };
        let new = self.table.admit(OPERATION, self.rows, &new)?;
        self.rows.make_ready(engine.executor, &self.indices, new)?;
        if let Some(tier) = &mut self.rows.tier {
            // The step for which these were expected has come.
            tier.residence.meet_pinned();
        }
        Ok(())
    }

    pub(super) fn misses(&self) -> bool {
        self.known.iter().any(|known| *known != Known::All) && self.indices.contains(&NO_INDEX)
    }

    /// Gives every id without a row one that is admitted, in ascending order of the ids.
    pub(super) fn insert_missing(&mut self) {
        let missing = |index: &u32| *index == NO_INDEX;
        let positions: Vec<usize> =
            (0..self.indices.len()).filter(|&position| missing(&self.indices[position])).collect();
        let mut ids: Vec<i64> = positions.iter().map(|&position| self.gradients.id(position)).collect();
        // Ascending, so that indices, and counts in a sketch that ids share, do not depend on the order of
        // the batch.
        ids.sort_unstable();
        ids.dedup();
        self.leave_out_rejected(&mut ids);
        self.rows.allocate_each(&ids);
        self.is_new.clear();
        self.is_new.resize(self.indices.len(), false);
        for position in positions {
            // An id that was not admitted takes no step of its own.
            let index = self.rows.ids.find(self.gradients.id(position));
            self.indices[position] = index.map_or(PADDING, |index| index.0);
            self.is_new[position] = index.is_some();
            if index.is_none() && self.rows.shared.is_some() {
                self.rejected.push(position);
            }
        }
        if !self.rejected.is_empty() {
            self.table.make_shared_rows(self.rows, &self.rule);
        }
    }

    /// Returns what gives a uniform number of an id and this step.
    fn noise(&self) -> impl Fn(i64) -> u64 + use<> {
        let of_step = self.table.noise(self.rows.step);
        move |id| mix((mix(id) ^ of_step) as i64)
    }

    /// Leaves out those of `ids` that are not admitted yet.
    fn leave_out_rejected(&mut self, ids: &mut Vec<i64>) {
        let noise = self.noise();
        if let Some(admission) = &mut self.rows.admission {
            let before = ids.len();
            ids.retain(|id| admission.admits(*id, || noise(*id)));
            self.rows.rejections += (before - ids.len()) as u64;
        }
    }

    /// Ends the step and returns how many rows left the table with it.
    pub(super) fn finish(self) -> Result<u64> {
        self.table.refusals.fetch_add(self.skipped as u64, Ordering::Relaxed);
        self.rows.updates += self.stepped.into_inner();
        self.rows.kept = self.rule.idle().map_or(self.rows.kept, |idle| idle.kept_after);
        let left = self.rows.let_leave(self.table);
        self.table.age_counts(self.rows, self.step_before);
        self.rows.begin_sweep(self.table, self.step_before);
        self.rows.keep(self.indices);
        self.rows.settle();
        // Errors come last: a step that was cut short counts all the same, and its memory is settled.
        self.table.check_rule(self.rows, &self.rule)?;
        self.rows.tier.as_ref().map_or(Ok(()), |tier| tier.cut_short())?;
        Ok(left as u64)
    }

    /// Leaves the table as it was.
    pub(super) fn give_up(self) {
        self.rows.step = self.step_before;
        self.rows.keep(self.indices);
        self.rows.settle();
    }
}

/// What is known of the rows of a part's ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    Nothing,
    /// Those that were there at the lookup.
    Some,
    All,
}
