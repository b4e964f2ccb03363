//! Row storage: fixed-size blocks of records, each a row and its optimizer slots, that never move.
//!
//! Blocks lie one after another in *slabs* of many huge pages: reading rows at random from ordinary pages would cost
//! a walk through page tables each.

use std::ops::Range;

use super::layout::{Layout, WORDS_PER_LINE};
use super::records::SharedRecords;
use crate::kernel::pages::{self, Pages};
use crate::optimizer::{Slot, Slots};
use crate::table::ids::row_index::RowIndex;

/// The bytes of a slab: 64 huge pages, or one block that is larger. Of the last page a part lies idle.
const SLAB_BYTES: usize = 128 << 20;

/// Records of a row's weights followed by the optimizer's slots, `block_size` records a block.
#[derive(Debug)]
pub(crate) struct SlotGroup {
    weight_words: usize,
    layout: Layout,
    slots: Vec<Slot>,
    slabs: Vec<Pages<f32>>,
    /// The words of the first slab that lie in ordinary pages.
    small_words: usize,
}

impl SlotGroup {
    /// Returns storage without blocks, for rows of `weight_words` four-byte words.
    pub(crate) fn new(weight_words: usize, block_size: usize, slots: Vec<Slot>) -> Self {
        let words = weight_words + Slots(&slots).words();
        let whole_lines = words.next_multiple_of(WORDS_PER_LINE);
        // A record that begins with a line touches fewer of them; a little more memory is worth that.
        let stride = if (whole_lines - words) * 8 <= words { whole_lines } else { words };
        let block = Layout::new(block_size, stride);
        let blocks_a_slab = (block.records_in(SLAB_BYTES / size_of::<f32>()) / block_size).max(1);
        let layout = Layout::new(block_size * blocks_a_slab, stride);
        // Of a small table's only block most is never used, and huge pages would be supplied whole.
        let small_words = layout.words(block_size);
        Self { weight_words, layout, slots, slabs: Vec::new(), small_words }
    }

    /// Returns storage whose slabs are small parts of `limit` bytes, so that one can be given back.
    pub(crate) fn within(weight_words: usize, limit: u64, slots: Vec<Slot>) -> Self {
        const PARTS: u64 = 32;
        const MAX_BYTES: usize = 32 << 20;
        let whole = Self::new(weight_words, 1, slots);
        let bytes = usize::try_from(limit / PARTS).unwrap_or(usize::MAX).min(MAX_BYTES);
        let records = whole.layout.records_in(pages::whole_pages(bytes) / size_of::<f32>());
        Self { layout: Layout::new(records.max(1), whole.stride()), small_words: 0, ..whole }
    }

    /// Makes room for the records of all indices below `rows`. Pages are touched when a record is first written.
    pub(crate) fn reserve(&mut self, rows: usize) {
        while self.slabs.len() * self.slab_records() < rows {
            let small = if self.slabs.is_empty() { self.small_words } else { 0 };
            self.slabs.push(Pages::zeroed(self.layout.words(self.slab_records()), small));
        }
    }

    /// Gives the slabs behind the first `count` back.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.slabs.truncate(count);
    }

    pub(crate) fn num_slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Returns the records of a slab.
    pub(crate) fn slab_records(&self) -> usize {
        self.layout.slab_records()
    }

    /// Returns the words of a record that hold a row's weights.
    pub(crate) fn weight_words(&self) -> usize {
        self.weight_words
    }

    /// Returns the words of a record.
    pub(crate) fn stride(&self) -> usize {
        self.layout.stride()
    }

    /// Returns the words that hold a row's weights.
    #[inline(always)]
    pub(crate) fn weights(&self, index: RowIndex) -> &[f32] {
        &self.record(index)[..self.weight_words]
    }

    #[inline(always)]
    pub(crate) fn record(&self, index: RowIndex) -> &[f32] {
        let (slab, start) = self.layout.locate(index);
        &self.slabs[slab][start..][..self.layout.stride()]
    }

    /// Returns the weights and the state of a row.
    pub(crate) fn record_mut(&mut self, index: RowIndex) -> (&mut [f32], &mut [f32]) {
        let (slab, start) = self.layout.locate(index);
        self.slabs[slab][start..][..self.layout.stride()].split_at_mut(self.weight_words)
    }

    /// Returns the records for several threads to change, each other ones.
    pub(crate) fn shared(&mut self) -> SharedRecords<'_> {
        SharedRecords::new(&mut self.slabs, self.layout)
    }

    /// Returns the slot called `name`, and where in a record it lies.
    pub(crate) fn slot(&self, name: &str) -> Option<(&Slot, Range<usize>)> {
        let mut start = self.weight_words;
        for slot in &self.slots {
            let words = start..start + slot.words();
            if slot.name == name {
                return Some((slot, words));
            }
            start = words.end;
        }
        None
    }

    /// Returns where in a record the last slot lies.
    pub(crate) fn last_slot(&self) -> Range<usize> {
        let end = self.weight_words + Slots(&self.slots).words();
        end - self.slots.last().map_or(0, Slot::words)..end
    }

    /// Returns the bytes that the system supplies when the records below `used` were written to.
    pub(crate) fn bytes_for(&self, used: usize) -> usize {
        let bytes = |records| self.layout.words(records) * size_of::<f32>();
        let (small, slab) = (self.small_words * size_of::<f32>(), bytes(self.slab_records()));
        let (full, rest) = (used / self.slab_records(), used % self.slab_records());
        let small_rest = if full == 0 { small } else { 0 };
        full * pages::supplied_bytes(slab, 0, slab) + pages::supplied_bytes(bytes(rest), small_rest, slab)
    }
}
