//! Row storage: fixed-size blocks of records, each a row and its optimizer slots, that never move.
//!
//! Blocks lie one after another in *slabs* of many huge pages: reading rows at random from ordinary pages would cost
//! a walk through page tables each.

use super::RowIndex;
use super::records::SharedRecords;
use crate::optimizer::Slot;
use crate::pages::{self, Pages};

/// The four-byte words of a cache line.
const WORDS_A_LINE: usize = 16;

/// The bytes of a slab: sixteen huge pages, or one block that is larger.
const SLAB_BYTES: usize = 32 << 20;

/// Records of a row's weights followed by the optimizer's slots, `block_size` records a block.
#[derive(Debug)]
pub(super) struct SlotGroup {
    weight_words: usize,
    stride: usize,
    slab_size: SlabSize,
    slots: Vec<Slot>,
    slabs: Vec<Pages<f32>>,
    /// The words of the first slab that lie in ordinary pages.
    small_words: usize,
}

/// The records of a slab, by which indices are divided all the time.
///
/// Source: Lemire, Kaser and Kurz 2019, "Faster remainder by direct computation", section 3.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlabSize {
    size: u32,
    /// 2^64 / size, rounded up; 0 for a size of 1.
    inverse: u64,
}

impl SlabSize {
    pub(super) fn new(size: usize) -> Self {
        // A slab has at most 1 GiB, so its records fit into 32 bits.
        let size = size as u32;
        Self { size, inverse: (u64::MAX / u64::from(size)).wrapping_add(1) }
    }

    /// Returns the slab of an index and its record there.
    #[inline(always)]
    pub(super) fn locate(self, index: RowIndex) -> (usize, usize) {
        let index = index.0;
        let slab = match self.inverse {
            0 => index,
            inverse => ((u128::from(inverse) * u128::from(index)) >> 64) as u32,
        };
        (slab as usize, (index - slab * self.size) as usize)
    }
}

impl SlotGroup {
    /// Returns storage without blocks, for rows of `weight_words` four-byte words.
    pub(super) fn new(weight_words: usize, block_size: usize, slots: Vec<Slot>) -> Self {
        let words = weight_words + slots.iter().map(|slot| slot.width).sum::<usize>();
        let whole_lines = words.next_multiple_of(WORDS_A_LINE);
        // A record that begins with a line touches fewer of them; a little more memory is worth that.
        let stride = if (whole_lines - words) * 8 <= words { whole_lines } else { words };
        let blocks_a_slab = (SLAB_BYTES / (block_size * stride * size_of::<f32>())).max(1);
        let slab_size = SlabSize::new(block_size * blocks_a_slab);
        // Of a small table's only block most is never used, and huge pages would be supplied whole.
        let small_words = block_size * stride;
        Self { weight_words, stride, slab_size, slots, slabs: Vec::new(), small_words }
    }

    /// Returns storage whose slabs are small parts of `limit` bytes, so that one can be given back.
    pub(super) fn within(weight_words: usize, limit: u64, slots: Vec<Slot>) -> Self {
        const PARTS: u64 = 32;
        let whole = Self::new(weight_words, 1, slots);
        let bytes = usize::try_from(limit / PARTS).unwrap_or(usize::MAX).min(SLAB_BYTES);
        let records = pages::whole_pages(bytes) / (whole.stride * size_of::<f32>());
        Self { slab_size: SlabSize::new(records.max(1)), small_words: 0, ..whole }
    }

    /// Makes room for the records of all indices below `rows`. Pages are touched when a record is first written.
    pub(super) fn reserve(&mut self, rows: usize) {
        while self.slabs.len() * self.slab_records() < rows {
            let small = if self.slabs.is_empty() { self.small_words } else { 0 };
            self.slabs.push(Pages::zeroed(self.slab_records() * self.stride, small));
        }
    }

    /// Gives the slabs behind the first `count` back.
    pub(super) fn truncate(&mut self, count: usize) {
        self.slabs.truncate(count);
    }

    pub(super) fn num_slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Returns the records of a slab.
    pub(super) fn slab_records(&self) -> usize {
        self.slab_size.size as usize
    }

    /// Returns the words of a record that hold a row's weights.
    pub(super) fn weight_words(&self) -> usize {
        self.weight_words
    }

    /// Returns the words of a record.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the words that hold a row's weights.
    #[inline(always)]
    pub(super) fn weights(&self, index: RowIndex) -> &[f32] {
        &self.record(index)[..self.weight_words]
    }

    #[inline(always)]
    pub(super) fn record(&self, index: RowIndex) -> &[f32] {
        let (slab, record) = self.slab_size.locate(index);
        &self.slabs[slab][record * self.stride..][..self.stride]
    }

    /// Returns the weights and the state of a row.
    pub(super) fn record_mut(&mut self, index: RowIndex) -> (&mut [f32], &mut [f32]) {
        let (slab, record) = self.slab_size.locate(index);
        self.slabs[slab][record * self.stride..][..self.stride].split_at_mut(self.weight_words)
    }

    /// Returns the records for several threads to change, each other ones.
    pub(super) fn shared(&mut self) -> SharedRecords<'_> {
        SharedRecords::new(&mut self.slabs, self.slab_size, self.stride)
    }

    /// Returns the values of the slot called `name` in a record.
    pub(super) fn slot<'a>(&self, record: &'a [f32], name: &str) -> Option<&'a [f32]> {
        let mut state = &record[self.weight_words..];
        for slot in &self.slots {
            let (values, rest) = state.split_at(slot.width);
            if slot.name == name {
                return Some(values);
            }
            state = rest;
        }
        None
    }

    /// Returns the bytes that the system supplies when the records below `used` were written to.
    pub(super) fn bytes_for(&self, used: usize) -> usize {
        let record = self.stride * size_of::<f32>();
        let (small, slab) = (self.small_words * size_of::<f32>(), self.slab_records() * record);
        let (full, rest) = (used / self.slab_records(), used % self.slab_records());
        let small_rest = if full == 0 { small } else { 0 };
        full * pages::supplied_bytes(slab, 0, slab) + pages::supplied_bytes(rest * record, small_rest, slab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn locating_divides(size in 1..=u32::MAX, index in any::<u32>()) {
            for index in [index, 0, u32::MAX, index / size * size] {
                let expected = ((index / size) as usize, (index % size) as usize);
                prop_assert_eq!(SlabSize::new(size as usize).locate(RowIndex(index)), expected);
            }
        }
    }
}
