//! Row storage: fixed-size blocks of records, each a row and its optimizer slots, that never move.

use super::RowIndex;
use super::records::SharedRecords;
use crate::optimizer::Slot;
use crate::pages::Pages;

/// The four-byte words of a cache line.
const WORDS_A_LINE: usize = 16;

/// Records of a row's weights followed by the optimizer's slots, `block_size` records a block.
#[derive(Debug)]
pub(super) struct SlotGroup {
    weight_words: usize,
    stride: usize,
    block_size: BlockSize,
    slots: Vec<Slot>,
    blocks: Vec<Pages<f32>>,
}

/// The records of a block, by which indices are divided all the time.
///
/// Source: Lemire, Kaser and Kurz 2019, "Faster remainder by direct computation", section 3.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockSize {
    size: u32,
    /// 2^64 / size, rounded up; 0 for a size of 1.
    inverse: u64,
}

impl BlockSize {
    pub(super) fn new(size: usize) -> Self {
        // A block has at most 1 GiB, so its records fit into 32 bits.
        let size = size as u32;
        Self { size, inverse: (u64::MAX / u64::from(size)).wrapping_add(1) }
    }

    /// Returns the block of an index and its record there.
    #[inline(always)]
    pub(super) fn locate(self, index: RowIndex) -> (usize, usize) {
        let index = index.0;
        let block = match self.inverse {
            0 => index,
            inverse => ((u128::from(inverse) * u128::from(index)) >> 64) as u32,
        };
        (block as usize, (index - block * self.size) as usize)
    }
}

impl SlotGroup {
    /// Returns storage without blocks, for rows of `weight_words` four-byte words.
    pub(super) fn new(weight_words: usize, block_size: usize, slots: Vec<Slot>) -> Self {
        let words = weight_words + slots.iter().map(|slot| slot.width).sum::<usize>();
        let whole_lines = words.next_multiple_of(WORDS_A_LINE);
        // A record that begins with a line touches fewer of them; a little more memory is worth that.
        let stride = if (whole_lines - words) * 8 <= words { whole_lines } else { words };
        Self { weight_words, stride, block_size: BlockSize::new(block_size), slots, blocks: Vec::new() }
    }

    /// Makes room for the records of all indices below `rows`. Pages are touched when a record is first written.
    pub(super) fn reserve(&mut self, rows: usize) {
        let size = self.block_size.size as usize;
        while self.blocks.len() < rows.div_ceil(size) {
            // Of a small table's only block most is never used, and huge pages would be supplied whole.
            let huge = !self.blocks.is_empty();
            self.blocks.push(Pages::zeroed(size * self.stride, huge));
        }
    }

    /// Returns the words that hold a row's weights.
    #[inline(always)]
    pub(super) fn weights(&self, index: RowIndex) -> &[f32] {
        &self.record(index)[..self.weight_words]
    }

    #[inline(always)]
    pub(super) fn record(&self, index: RowIndex) -> &[f32] {
        let (block, record) = self.block_size.locate(index);
        &self.blocks[block][record * self.stride..][..self.stride]
    }

    /// Returns the weights and the state of a row.
    pub(super) fn record_mut(&mut self, index: RowIndex) -> (&mut [f32], &mut [f32]) {
        let (block, record) = self.block_size.locate(index);
        self.blocks[block][record * self.stride..][..self.stride].split_at_mut(self.weight_words)
    }

    /// Returns the records for several threads to change, each other ones.
    pub(super) fn shared(&mut self) -> SharedRecords<'_> {
        SharedRecords::new(&mut self.blocks, self.block_size, self.stride)
    }

    /// Returns the values of the slot called `name` of a row.
    pub(super) fn slot(&self, index: RowIndex, name: &str) -> Option<&[f32]> {
        let mut state = &self.record(index)[self.weight_words..];
        for slot in &self.slots {
            let (values, rest) = state.split_at(slot.width);
            if slot.name == name {
                return Some(values);
            }
            state = rest;
        }
        None
    }

    /// Returns the bytes of all blocks.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| size_of_val(&**block)).sum()
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
                prop_assert_eq!(BlockSize::new(size as usize).locate(RowIndex(index)), expected);
            }
        }
    }
}
