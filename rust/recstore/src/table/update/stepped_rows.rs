//! What the steps of one table's rows have in common, and what is done with one of its rows.

use std::sync::atomic::AtomicU64;

use crate::kernel::cache::{Cache, prefetch};
use crate::kernel::simd::Simd;
use crate::kernel::sorting::CountedKeys;
use crate::kernel::squares::{Plain, sum_of_squares};
use crate::optimizer::{PreparedRule, RowRule, Slot};
use crate::rows::any_row_type::AnyRowType;
use crate::rows::gradient::Gradients;
use crate::rows::row_type::RowType;
use crate::table::access_stats::Usages;
use crate::table::changes::{Changes, RowKey};
use crate::table::ids::row_ids::RowIds;
use crate::table::ids::row_index::{NO_INDEX, RowIndex};
use crate::table::shared_rows::SharedRows;
use crate::table::storage::records::{RecordStart, SharedRecords};
use crate::table::storage::tier::Tier;
use crate::table::sweep::Sweep;
use crate::table::table::Table;

/// What the threads of one table's step share.
pub(super) struct SteppedRows<'a> {
    pub(super) table: &'a Table,
    pub(super) gradients: &'a Gradients<'a>,
    pub(super) row_type: AnyRowType,
    pub(super) weight_words: usize,
    pub(super) stride: usize,
    pub(super) records: SharedRecords<'a>,
    pub(super) changes: &'a Changes,
    pub(super) row_ids: &'a RowIds,
    /// None where rows never leave.
    pub(super) usages: Option<(&'a Usages, Option<&'a Sweep>)>,
    /// The step of rows that are updated now.
    pub(super) stamp: u64,
    pub(super) tier: Option<&'a Tier>,
    pub(super) indices: [CountedKeys<'a, u32>; 1],
    pub(super) is_new: &'a [bool],
    /// What new rows start from, if not from initial values.
    pub(super) shared: Option<&'a SharedRows>,
    pub(super) rule: &'a PreparedRule,
    pub(super) simd: Simd,
    /// The longest gradient of a row.
    pub(super) max_grad_norm: Option<f32>,
    pub(super) noise: u64,
    pub(super) stepped: &'a AtomicU64,
}

/// A row to be stepped.
pub(super) struct LocatedRow<'a> {
    pub(super) index: RowIndex,
    /// The position of its first gradient.
    pub(super) first: u32,
    /// Where among the sums of the group that of its gradients begins, if it has one.
    pub(super) sum: Option<u32>,
    pub(super) record: RecordStart,
    /// The first of its gradients, before any weight.
    pub(super) gradient: &'a [f32],
}

impl LocatedRow<'_> {
    /// Returns its gradient; `sums` are those of its group.
    #[inline(always)]
    pub(super) fn gradient<'b>(&'b self, sums: &'b [f32]) -> &'b [f32] {
        self.sum.map_or(self.gradient, |start| &sums[start as usize..][..self.gradient.len()])
    }
}

impl SteppedRows<'_> {
    /// Whether some of what records keep is not in single precision.
    #[inline(always)]
    pub(super) fn are_widened(&self) -> bool {
        !self.row_type.is_float32() || self.rule.narrow().is_some()
    }

    /// Returns the rule's slots, if not all are in single precision.
    #[inline(always)]
    pub(super) fn slots(&self) -> &[Slot] {
        self.rule.narrow().map_or(&[], |slots| slots.0)
    }

    /// Returns where among the records that of a row lies, which is in memory and about to change.
    #[inline(always)]
    pub(super) fn place(&self, index: RowIndex) -> RowIndex {
        // No records have the last place: a row that were not in memory would be a panic.
        self.tier.map_or(index, |tier| tier.place_to_change(index).unwrap_or(RowIndex(NO_INDEX)))
    }

    pub(super) fn key(&self, index: RowIndex) -> RowKey {
        RowKey { id: self.row_ids.of(index), usage: self.usages.map(|(usages, _)| usages.of(index)) }
    }

    /// Counts the step of a row.
    #[inline(always)]
    pub(super) fn use_row(&self, index: RowIndex) {
        if let Some((usages, sweep)) = self.usages {
            let usage = usages.of(index);
            // Before the new usage: a sweep that has not reached the row judges it as it was when it began.
            if let Some(sweep) = sweep {
                sweep.keep(index, self.row_ids.of(index), usage);
            }
            usages.set(index, usage.updated(self.stamp));
        }
    }

    /// Scales the gradient of a row whose norm is above the greatest to that.
    ///
    /// Source: Pascanu, Mikolov and Bengio 2013, algorithm 1, for each row by itself.
    #[inline(always)]
    pub(super) fn clip(&self, gradient: &mut [f32]) {
        let Some(most) = self.max_grad_norm else { return };
        let norm = sum_of_squares([gradient], &Plain).sqrt();
        if norm.is_infinite() {
            // The squares are beyond float32, which the values need not be.
            let greatest = gradient.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            gradient.iter_mut().for_each(|value| *value /= greatest);
            let norm = sum_of_squares([gradient], &Plain).sqrt();
            gradient.iter_mut().for_each(|value| *value *= most / norm);
        } else if norm > most {
            gradient.iter_mut().for_each(|value| *value *= most / norm);
        }
    }

    /// Asks for a row's record and the first of its gradients.
    #[inline(always)]
    pub(super) fn ask(&self, row: &LocatedRow<'_>, cache: Cache) {
        self.records.prefetch(row.record, cache);
        prefetch(row.gradient, cache);
    }

    /// Writes the weights that new rows start with.
    #[inline(always)]
    pub(super) fn fill_new(&self, ids: &[i64], rows: &mut [f32]) {
        match self.shared {
            None => self.table.initializer.fill(self.simd, ids, rows),
            Some(shared) => shared.fill(self.row_type, &self.table.initializer, ids, rows),
        }
    }

    /// Makes a record that of a new row with these weights, which become what the table keeps of them.
    #[inline(always)]
    pub(super) fn start_record(&self, weights: &mut [f32], record: &mut [f32]) {
        let (words, state) = record.split_at_mut(self.weight_words);
        self.row_type.round(weights, words);
        if !self.row_type.is_float32() {
            self.row_type.widen(words, weights);
        }
        state.fill(0.0);
        self.rule.adopt_weights(weights, state);
    }

    /// Takes the step of one record; `widened` has what it does not keep in single precision.
    #[inline(always)]
    pub(super) fn step(
        &self,
        rule: &(impl RowRule + ?Sized),
        record: &mut [f32],
        gradient: &[f32],
        widened: &mut [f32],
    ) {
        let (words, state) = record.split_at_mut(self.weight_words);
        let (state, besides) = self.rule.split(state);
        let (weights, values) = widened.split_at_mut(widened.len().min(gradient.len()));
        // What is as it lies in the record is stepped there.
        let weights = if self.row_type.is_float32() { words } else { weights };
        let kept = if self.rule.narrow().is_none() { state } else { values };
        self.rule.step(rule, weights, (kept, besides), gradient);
    }
}
