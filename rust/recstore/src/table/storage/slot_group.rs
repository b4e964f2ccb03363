//! Row storage: fixed-size blocks of records, each a row and its optimizer slots, that never move.
//!
//! Blocks lie one after another in *slabs* of many huge pages: reading rows at random from ordinary pages would cost
//! a walk through page tables each.
//!
//! Records begin with cache lines of even and of odd number alike: where all that is read at random begins with even
//! ones, processors guess that the line beside will be needed, and load it too. See [`Layout`].

use super::records::SharedRecords;
use crate::kernel::pages::{self, Pages};
use crate::optimizer::Slot;
use crate::table::ids::row_index::RowIndex;

/// The four-byte words of a cache line.
const WORDS_A_LINE: usize = 16;

/// The bytes of a slab: 64 huge pages, or one block that is larger. Of the last page a part lies idle.
const SLAB_BYTES: usize = 128 << 20;

/// The records that lie side by side without a gap.
const RECORDS_A_STRETCH: usize = 64;

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

/// Where records lie in slabs: one behind the other, with a line left out now and then if all would else begin with
/// lines of even number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    slab_size: SlabSize,
    stride: usize,
    /// The words left out after each stretch of records.
    gap: usize,
}

impl Layout {
    /// Lays out slabs of `records` records of `stride` words.
    fn new(records: usize, stride: usize) -> Self {
        let gap = if stride.is_multiple_of(2 * WORDS_A_LINE) { WORDS_A_LINE } else { 0 };
        Self { slab_size: SlabSize::new(records), stride, gap }
    }

    /// Returns the slab of an index and the first word of its record there.
    #[inline(always)]
    pub(crate) fn locate(self, index: RowIndex) -> (usize, usize) {
        let (slab, record) = self.slab_size.locate(index);
        (slab, self.start(record))
    }

    #[inline(always)]
    fn start(self, record: usize) -> usize {
        record * self.stride + record / RECORDS_A_STRETCH * self.gap
    }

    /// Returns the words of the first `records` of a slab.
    fn words(self, records: usize) -> usize {
        records.checked_sub(1).map_or(0, |last| self.start(last) + self.stride)
    }

    /// Returns how many records `words` have room for.
    fn records_in(self, words: usize) -> usize {
        words / (RECORDS_A_STRETCH * self.stride + self.gap) * RECORDS_A_STRETCH
            + words % (RECORDS_A_STRETCH * self.stride + self.gap) / self.stride
    }

    /// Returns the words of a record.
    pub(crate) fn stride(self) -> usize {
        self.stride
    }
}

/// The records of a slab, by which indices are divided all the time.
///
/// Source: Lemire, Kaser and Kurz 2019, "Faster remainder by direct computation", section 3.
#[derive(Debug, Clone, Copy)]
struct SlabSize {
    size: u32,
    /// 2^64 / size, rounded up; 0 for a size of 1.
    inverse: u64,
}

impl SlabSize {
    fn new(size: usize) -> Self {
        // A slab has at most 1 GiB, so its records fit into 32 bits.
        let size = size as u32;
        Self { size, inverse: (u64::MAX / u64::from(size)).wrapping_add(1) }
    }

    /// Returns the slab of an index and its record there.
    #[inline(always)]
    fn locate(self, index: RowIndex) -> (usize, usize) {
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
    pub(crate) fn new(weight_words: usize, block_size: usize, slots: Vec<Slot>) -> Self {
        let words = weight_words + slots.iter().map(|slot| slot.width).sum::<usize>();
        let whole_lines = words.next_multiple_of(WORDS_A_LINE);
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
        const MOST_BYTES: usize = 32 << 20;
        let whole = Self::new(weight_words, 1, slots);
        let bytes = usize::try_from(limit / PARTS).unwrap_or(usize::MAX).min(MOST_BYTES);
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
        self.layout.slab_size.size as usize
    }

    /// Returns the words of a record that hold a row's weights.
    pub(crate) fn weight_words(&self) -> usize {
        self.weight_words
    }

    /// Returns the words of a record.
    pub(crate) fn stride(&self) -> usize {
        self.layout.stride
    }

    /// Returns the words that hold a row's weights.
    #[inline(always)]
    pub(crate) fn weights(&self, index: RowIndex) -> &[f32] {
        &self.record(index)[..self.weight_words]
    }

    #[inline(always)]
    pub(crate) fn record(&self, index: RowIndex) -> &[f32] {
        let (slab, start) = self.layout.locate(index);
        &self.slabs[slab][start..][..self.layout.stride]
    }

    /// Returns the weights and the state of a row.
    pub(crate) fn record_mut(&mut self, index: RowIndex) -> (&mut [f32], &mut [f32]) {
        let (slab, start) = self.layout.locate(index);
        self.slabs[slab][start..][..self.layout.stride].split_at_mut(self.weight_words)
    }

    /// Returns the records for several threads to change, each other ones.
    pub(crate) fn shared(&mut self) -> SharedRecords<'_> {
        SharedRecords::new(&mut self.slabs, self.layout)
    }

    /// Returns the values of the slot called `name` in a record.
    pub(crate) fn slot<'a>(&self, record: &'a [f32], name: &str) -> Option<&'a [f32]> {
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
    pub(crate) fn bytes_for(&self, used: usize) -> usize {
        let bytes = |records| self.layout.words(records) * size_of::<f32>();
        let (small, slab) = (self.small_words * size_of::<f32>(), bytes(self.slab_records()));
        let (full, rest) = (used / self.slab_records(), used % self.slab_records());
        let small_rest = if full == 0 { small } else { 0 };
        full * pages::supplied_bytes(slab, 0, slab) + pages::supplied_bytes(bytes(rest), small_rest, slab)
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

        #[test]
        fn records_lie_apart_and_within_what_they_are_said_to_take(stride in 1..200usize, records in 1..1000usize) {
            let layout = Layout::new(records, stride);
            let starts: Vec<usize> = (0..records as u32).map(|index| layout.locate(RowIndex(index)).1).collect();
            prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= stride));
            prop_assert_eq!(layout.words(records), starts[records - 1] + stride);
            prop_assert!(layout.words(records) <= records * stride + records / RECORDS_A_STRETCH * WORDS_A_LINE);
            prop_assert_eq!(layout.records_in(layout.words(records)), records);
            prop_assert_eq!(layout.records_in(layout.words(records) - 1), records - 1);
        }
    }

    #[test]
    fn records_begin_with_lines_of_either_parity() {
        for stride in (WORDS_A_LINE..20 * WORDS_A_LINE).step_by(WORDS_A_LINE) {
            let layout = Layout::new(1024, stride);
            let lines = (0..1024).map(|index| layout.locate(RowIndex(index)).1 / WORDS_A_LINE);
            let odd = lines.filter(|line| line % 2 == 1).count();
            assert_eq!(odd, 512, "{stride} words");
        }
    }
}
