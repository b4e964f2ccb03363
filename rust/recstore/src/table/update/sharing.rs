//! The steps of shared rows, by the gradients of ids without a row of their own.
//!
//! Each id's gradients are summed as if it had a row, then the sums of the ids that share one, in ascending order of the
//! ids: nothing depends on how ids lie in a batch, nor on where they were merged before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::locked::{Locked, PADDING};
use super::stepped_rows::SteppedRows;
use super::stepping::walk_ranges;
use crate::config::NanPolicy;
use crate::kernel::parallel::{Serial, for_each_mut, parts_for};
use crate::kernel::sorting::{CountedKeys, ranges};
use crate::rows::gradient::MergedGradients;
use crate::table::changes::Changes;
use crate::table::engine::Engine;
use crate::table::ids::row_ids::RowIds;
use crate::table::shared_rows::SharedRows;

/// Takes the steps of the shared rows of all tables. Rows that begin as copies of shared ones have done so.
pub(super) fn step_shared_rows(engine: Engine<'_>, locked: &mut [Locked<'_>]) {
    let mut sharing: Vec<_> = locked.iter_mut().filter(|locked| !locked.rejected.is_empty()).collect();
    match &mut sharing[..] {
        [] => {}
        [one] => one.step_shared_rows(engine),
        several => {
            let alone = Engine { executor: &Serial, ..engine };
            for_each_mut(engine.executor, several.iter_mut(), |one| one.step_shared_rows(alone));
        }
    }
}

impl Locked<'_> {
    fn step_shared_rows(&mut self, engine: Engine<'_>) {
        let merged = self.gradients.merged_at(&self.rejected, engine.executor, engine.simd);
        let (may_overflow, dim) = (self.may_overflow, self.gradients.dim);
        let Some(shared) = &mut self.rows.shared else { return };
        let mut indices: Vec<u32> = merged.ids.iter().map(|&id| shared.index_of(id).0).collect();
        if may_overflow && self.table.config().nan_policy != NanPolicy::Allow {
            let left_out = leave_out_overflowing(&mut indices, &merged, dim);
            self.table.refusals.fetch_add(left_out, Ordering::Relaxed);
        }
        let gradients = merged.as_gradients(dim);
        let parts = parts_for(engine.executor, indices.len() * dim);
        let SharedRows { records, .. } = &mut **shared;
        // A save has copied them, they never leave, and their steps count for no row of an id's own.
        let (changes, row_ids, stepped) = (Changes::default(), RowIds::default(), AtomicU64::new(0));
        let rows = Arc::new(SteppedRows {
            table: self.table,
            gradients: &gradients,
            row_type: self.table.row_type(engine.simd),
            weight_words: records.weight_words(),
            stride: records.stride(),
            records: records.shared(),
            changes: &changes,
            row_ids: &row_ids,
            usages: None,
            stamp: 0,
            tier: None,
            indices: [CountedKeys { keys: &indices, padding: Some(PADDING), numbers: &[] }],
            is_new: &[],
            shared: None,
            rule: &self.rule,
            simd: engine.simd,
            max_grad_norm: self.table.config().max_grad_norm.map(|most| most as f32),
            noise: self.table.noise(self.rows.step),
            stepped: &stepped,
        });
        let work = ranges(&rows.indices, parts).into_iter().map(|range| (Arc::clone(&rows), range));
        walk_ranges(engine, work);
    }
}

/// Leaves out the ids that share a row if the sum of their gradients, of which each is finite, is not. Returns how many.
fn leave_out_overflowing(indices: &mut [u32], merged: &MergedGradients, dim: usize) -> u64 {
    let mut sums: BTreeMap<u32, Vec<f32>> = BTreeMap::new();
    for (index, gradient) in indices.iter().zip(merged.sums.chunks_exact(dim)) {
        let sum = sums.entry(*index).or_insert_with(|| vec![0.0; dim]);
        sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
    }
    sums.retain(|_, sum| sum.iter().any(|value| !value.is_finite()));
    let left_out = indices.iter_mut().filter(|index| sums.contains_key(index));
    left_out.map(|index| *index = PADDING).count() as u64
}
