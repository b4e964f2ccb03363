//! Checksums of blocks, compared when a block is first read: a file of gigabytes opens at once, and no changed byte is used.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// The bytes that have a checksum together.
pub(super) const BLOCK_BYTES: usize = 64 << 10;

/// Which blocks were compared with their checksums.
#[derive(Debug)]
pub(super) struct Blocks {
    /// A bit for each block.
    seen: Box<[AtomicU64]>,
    unseen: AtomicUsize,
    are_all_seen: AtomicBool,
}

impl Blocks {
    /// None of `count` blocks was compared yet.
    pub(super) fn new(count: usize) -> Self {
        let seen = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { seen, unseen: AtomicUsize::new(count), are_all_seen: AtomicBool::new(count == 0) }
    }

    /// Whether every block agreed with its checksum.
    #[inline(always)]
    pub(super) fn are_all_seen(&self) -> bool {
        self.are_all_seen.load(Ordering::Relaxed)
    }

    /// Compares the blocks of a range of `data` that were not compared yet with `checks`, one for each block. Returns the
    /// bytes of the first block that does not agree.
    pub(super) fn check(&self, data: &[u8], checks: &[u32], range: Range<usize>) -> Result<(), Range<usize>> {
        let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
        blocks.into_iter().filter(|&block| !self.is_seen(block)).try_for_each(|block| {
            let bytes = block * BLOCK_BYTES..data.len().min((block + 1) * BLOCK_BYTES);
            let found = data.get(bytes.clone()).map(crc32fast::hash);
            if found.is_none() || found != checks.get(block).copied() {
                return Err(bytes);
            }
            self.note(block);
            Ok(())
        })
    }

    fn is_seen(&self, block: usize) -> bool {
        // Relaxed: the bits guard no memory of their own, and a block that is compared twice does no harm.
        self.seen.get(block / 64).is_some_and(|bits| bits.load(Ordering::Relaxed) >> (block % 64) & 1 == 1)
    }

    fn note(&self, block: usize) {
        let bit = 1 << (block % 64);
        let Some(bits) = self.seen.get(block / 64) else { return };
        // Two threads may have compared it: it counts once.
        if bits.fetch_or(bit, Ordering::Relaxed) & bit == 0
            && self.unseen.fetch_sub(1, Ordering::Relaxed) == 1
        {
            self.are_all_seen.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_compared_once_and_a_changed_one_is_told() {
        let mut data = vec![7u8; BLOCK_BYTES * 2 + 10];
        let checks: Vec<u32> = data.chunks(BLOCK_BYTES).map(crc32fast::hash).collect();
        let blocks = Blocks::new(3);
        assert_eq!(blocks.check(&data, &checks, 5..10), Ok(()));
        data[0] = 8;
        data[BLOCK_BYTES * 2] = 8;
        assert_eq!(blocks.check(&data, &checks, 0..BLOCK_BYTES), Ok(()), "it was compared before");
        let last = BLOCK_BYTES * 2..BLOCK_BYTES * 2 + 10;
        assert_eq!(blocks.check(&data, &checks, BLOCK_BYTES..BLOCK_BYTES * 2 + 1), Err(last));
        assert!(!blocks.are_all_seen());
        data[BLOCK_BYTES * 2] = 7;
        assert_eq!(blocks.check(&data, &checks, 0..data.len()), Ok(()));
        assert!(blocks.are_all_seen());
    }

    #[test]
    fn a_block_without_a_checksum_is_none_that_agrees() {
        let data = vec![7u8; 10];
        assert_eq!(Blocks::new(1).check(&data, &[], 0..1), Err(0..10));
    }
}
