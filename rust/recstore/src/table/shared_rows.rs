//! Rows that ids without one of their own share: a hash of an id names the one that it reads and trains.
//!
//! They lie in storage of their own, always in memory, beside the rows that ids have. As long as no step has trained any,
//! each has its initial value, and none takes memory.

use super::ids::row_index::RowIndex;
use super::initial_values::initializer::Initializer;
use super::rows::Rows;
use super::storage::slot_group::SlotGroup;
use super::table::Table;
use crate::kernel::hash::mix;
use crate::kernel::simd::Simd;
use crate::optimizer::{PreparedRule, Slots};
use crate::rows::row_type::{AnyRowType, RowType, with_row_type};

/// The shared rows of a table.
#[derive(Debug)]
pub(super) struct SharedRows {
    count: u32,
    /// The table's seed.
    seed: u64,
    /// Without slabs until a step trains a shared row; then it has the records of all.
    pub(super) records: SlotGroup,
}

impl SharedRows {
    pub(super) fn new(count: u32, seed: u64, records: SlotGroup) -> Self {
        Self { count, seed, records }
    }

    /// Returns which one an id without a row has. The same on every machine and in every release.
    #[inline(always)]
    pub(super) fn index_of(&self, id: i64) -> RowIndex {
        RowIndex((mix(id ^ self.seed as i64) % u64::from(self.count)) as u32)
    }

    /// Returns the id whose initial value a shared row starts at.
    #[inline(always)]
    pub(super) fn first_value_of(index: RowIndex) -> i64 {
        -1 - i64::from(index.0)
    }

    /// Returns how many there are in memory.
    pub(super) fn len(&self) -> usize {
        if self.records.num_slabs() > 0 { self.count as usize } else { 0 }
    }

    /// Returns the words of the weights that an id without a row has; none while all have their initial values.
    #[inline(always)]
    pub(super) fn weights_of(&self, id: i64) -> Option<&[f32]> {
        (self.records.num_slabs() > 0).then(|| self.records.weights(self.index_of(id)))
    }

    /// Writes the weights that ids without rows have.
    pub(super) fn fill(
        &self,
        row_type: AnyRowType,
        initializer: &Initializer,
        ids: &[i64],
        rows: &mut [f32],
    ) {
        let dim = rows.len() / ids.len().max(1);
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(dim.max(1))) {
            match self.weights_of(*id) {
                Some(words) => row_type.widen(words, row),
                None => initializer.fill(row_type.simd, &[Self::first_value_of(self.index_of(*id))], row),
            }
        }
    }

    /// Returns all records, one behind the other; none while all have their initial values.
    pub(super) fn copied(&self) -> Vec<f32> {
        (0..self.len() as u32).flat_map(|index| self.records.record(RowIndex(index))).copied().collect()
    }

    /// Takes the place of all records; without any, all have their initial values.
    ///
    /// # Errors
    /// Says how many there should be.
    pub(super) fn put(&mut self, records: &[f32]) -> Result<(), String> {
        let (stride, count) = (self.records.stride(), self.count as usize);
        if !records.is_empty() && records.len() != count * stride {
            return Err(format!("expected {count} shared rows, got {}", records.len() / stride));
        }
        self.forget();
        self.records.reserve(records.len() / stride);
        for (index, record) in (0..).zip(records.chunks_exact(stride)) {
            let (weights, state) = self.records.record_mut(RowIndex(index));
            weights.copy_from_slice(&record[..weights.len()]);
            state.copy_from_slice(&record[weights.len()..]);
        }
        Ok(())
    }

    /// Brings all back to their initial values.
    pub(super) fn forget(&mut self) {
        self.records.truncate(0);
    }

    /// Returns the bytes that all take once there are any.
    pub(super) fn reserved_bytes(&self) -> usize {
        self.records.bytes_for(self.count as usize)
    }

    /// Returns the bytes in use: of weights, of slots, and of all with what lies idle between.
    pub(super) fn bytes(&self) -> [u64; 3] {
        let bytes = |words: usize| (self.len() * words * size_of::<f32>()) as u64;
        let (weights, record) = (bytes(self.records.weight_words()), bytes(self.records.stride()));
        [weights, record - weights, self.records.bytes_for(self.len()) as u64]
    }
}

impl Table {
    /// Sees that the shared rows have records.
    pub(super) fn make_shared_rows(&self, rows: &mut Rows, rule: &PreparedRule) {
        let Some(shared) = rows.shared.as_mut().filter(|shared| shared.len() == 0) else { return };
        shared.records.reserve(shared.count as usize);
        let mut weights = vec![0.0; self.config().dim];
        for index in (0..shared.count).map(RowIndex) {
            self.initializer.fill(Simd::baseline(), &[SharedRows::first_value_of(index)], &mut weights);
            let (words, state) = shared.records.record_mut(index);
            state.fill(0.0);
            self.store(rule, &weights, words, state);
        }
    }

    /// Returns the mean of each row over records of several stores, slots included.
    pub(crate) fn mean_of_records(&self, all: &[Vec<f32>]) -> Vec<f32> {
        let ((weight_words, stride), slots) = (self.record_words(), Slots(self.record_slots()));
        let mut values = vec![0.0; self.config.dim + slots.width()];
        let mut sum = vec![0.0; values.len()];
        let mut mean = vec![0.0; all.first().map_or(0, Vec::len)];
        for (place, record) in mean.chunks_exact_mut(stride).enumerate() {
            sum.fill(0.0);
            for records in all {
                let (words, state) = records[place * stride..][..stride].split_at(weight_words);
                let (row, kept) = values.split_at_mut(self.config.dim);
                with_row_type!(self.config.dtype, row_type => row_type.widen(words, row));
                slots.widen(state, kept);
                sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            for (value, sum) in values.iter_mut().zip(&sum) {
                *value = (sum / all.len() as f64) as f32;
            }
            let ((row, kept), (words, state)) =
                (values.split_at(self.config.dim), record.split_at_mut(weight_words));
            with_row_type!(self.config.dtype, row_type => row_type.round(row, words));
            slots.round(kept, state);
        }
        mean
    }

    /// Writes the weights that ids without rows have.
    pub(super) fn fill_rowless(&self, rows: &Rows, simd: Simd, ids: &[i64], weights: &mut [f32]) {
        match &rows.shared {
            None => self.initializer.fill(simd, ids, weights),
            Some(shared) => shared.fill(self.row_type(simd), &self.initializer, ids, weights),
        }
    }
}
