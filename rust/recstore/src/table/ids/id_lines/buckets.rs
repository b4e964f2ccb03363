//! Which line an id belongs to, also while the map grows.

use crate::kernel::hash::mix;

/// The lines that ids belong to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buckets {
    /// Mixed into hashes, so that nobody can choose ids that meet in one line.
    pub(super) seed: u64,
    /// The number of buckets.
    pub(super) count: usize,
    /// Their number before the map began to grow.
    pub(super) old_count: usize,
    /// The ids of the old buckets from this one on have moved.
    pub(super) moved_from: usize,
}

impl Buckets {
    #[inline(always)]
    pub(super) fn of(self, id: i64) -> usize {
        self.of_hash(self.hash(id))
    }

    #[inline(always)]
    pub(super) fn of_hash(self, hash: u64) -> usize {
        // Both are computed also for a map that does not grow: one number of lines for those was no faster
        // (25.5 against 25.7 ns).
        let old = scale(hash, self.old_count);
        let new = scale(hash, self.count);
        if old >= self.moved_from { new } else { old }
    }

    #[inline(always)]
    pub(super) fn hash(self, id: i64) -> u64 {
        mix(id ^ self.seed as i64)
    }

    pub(super) fn is_growing(self) -> bool {
        self.moved_from > 0
    }
}

/// Maps the upper half of a hash to a number below `count`, keeping the order of the hashes. Products of 32 bits are
/// what vector instructions have; there are never more than 2^32 lines.
#[inline(always)]
pub(super) fn scale(hash: u64, count: usize) -> usize {
    (((hash >> 32) * (count as u64 & u64::from(u32::MAX))) >> 32) as usize
}
