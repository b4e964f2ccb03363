//! A line: some ids and their indices.

use bytemuck::{Pod, Zeroable};

use crate::kernel::simd::Lanes;

/// The ids in one line.
pub(super) const IDS_PER_LINE: usize = 5;

/// One cache line.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line {
    pub(super) ids: [i64; IDS_PER_LINE],
    pub(super) indices: [u32; IDS_PER_LINE],
    /// Which places hold an id, as bits.
    pub(super) used: u16,
    /// How many ids that would lie here if there were room lie behind. At the greatest value it stays.
    pub(super) passed: u16,
}

impl Line {
    /// Returns the place of `id`.
    #[inline(always)]
    pub(super) fn find(&self, lanes: impl Lanes, id: i64) -> Option<usize> {
        // The last three words are no ids: no bit of `used` stands for them.
        let equal = lanes.equal(bytemuck::cast_ref(self), id) & u32::from(self.used);
        (equal != 0).then(|| equal.trailing_zeros() as usize)
    }

    #[inline(always)]
    pub(super) fn free_place(&self) -> Option<usize> {
        let place = self.used.trailing_ones() as usize;
        (place < IDS_PER_LINE).then_some(place)
    }

    #[inline(always)]
    pub(super) fn put(&mut self, place: usize, id: i64, index: u32) {
        self.ids[place] = id;
        self.indices[place] = index;
        self.used |= 1 << place;
    }

    pub(super) fn pass(&mut self) {
        self.passed = self.passed.saturating_add(1);
    }

    pub(super) fn unpass(&mut self) {
        // A full count stays: how many passed is not known any more, and one too many only lengthens a
        // search.
        if self.passed < u16::MAX {
            self.passed -= 1;
        }
    }
}
