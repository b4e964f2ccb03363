//! Row storage: fixed-size blocks of records, each a row and its optimizer slots, that never move.

use super::RowIndex;
use crate::optimizer::Slot;

/// Records of `dim` weights followed by the optimizer's slots, `block_size` records a block.
#[derive(Debug)]
pub(super) struct SlotGroup {
    dim: usize,
    stride: usize,
    block_size: usize,
    slots: Vec<Slot>,
    blocks: Vec<Box<[f32]>>,
}

impl SlotGroup {
    pub(super) fn new(dim: usize, block_size: usize, slots: Vec<Slot>) -> Self {
        let stride = dim + slots.iter().map(|slot| slot.width).sum::<usize>();
        Self { dim, stride, block_size, slots, blocks: Vec::new() }
    }

    /// Makes room for the records of all indices below `rows`. Pages are touched when a record is first written.
    pub(super) fn reserve(&mut self, rows: usize) {
        let blocks = rows.div_ceil(self.block_size);
        while self.blocks.len() < blocks {
            self.blocks.push(vec![0.0; self.block_size * self.stride].into_boxed_slice());
        }
    }

    /// Returns the weights of a row.
    pub(super) fn weights(&self, index: RowIndex) -> &[f32] {
        let (block, row) = self.locate(index);
        &self.blocks[block][row * self.stride..][..self.dim]
    }

    /// Returns the weights and the state of a row.
    pub(super) fn record_mut(&mut self, index: RowIndex) -> (&mut [f32], &mut [f32]) {
        let (block, row) = self.locate(index);
        self.blocks[block][row * self.stride..][..self.stride].split_at_mut(self.dim)
    }

    /// Returns the values of the slot called `name` of a row.
    pub(super) fn slot(&self, index: RowIndex, name: &str) -> Option<&[f32]> {
        let (block, row) = self.locate(index);
        let mut start = row * self.stride + self.dim;
        for slot in &self.slots {
            if slot.name == name {
                return Some(&self.blocks[block][start..start + slot.width]);
            }
            start += slot.width;
        }
        None
    }

    /// Returns the block of an index and its row there.
    pub(super) fn locate(&self, index: RowIndex) -> (usize, usize) {
        // Most processors divide 32 bits several times faster than 64. A block has at most 1 GiB, so its rows fit.
        let (index, block_size) = (index.0, self.block_size as u32);
        ((index / block_size) as usize, (index % block_size) as usize)
    }

    /// Returns every block's records.
    pub(super) fn blocks_mut(&mut self) -> impl ExactSizeIterator<Item = &mut [f32]> {
        self.blocks.iter_mut().map(AsMut::as_mut)
    }

    /// Returns the floats of a record.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the bytes of all blocks.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * self.block_size * self.stride * size_of::<f32>()
    }
}
