//! Rows that ids without one of their own share: a hash of an id names the one that it reads and trains.
//!
//! They lie in storage of their own, always in memory, beside the rows that ids have. As long as no step has trained any,
//! each has its initial value, and none takes memory.

use super::ids::row_index::RowIndex;
use super::initial_values::initializer::Initializer;
use super::storage::slot_group::SlotGroup;
use crate::kernel::hash::mix;
use crate::rows::any_row_type::AnyRowType;
use crate::rows::row_type::RowType;

/// The shared rows of a table.
#[derive(Debug)]
pub(super) struct SharedRows {
    pub(super) count: u32,
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
