//! Places: where a lookup found its rows, kept for the step that follows, which then need not search again.
//!
//! A row never moves, so a place is good until rows are deleted. Places come with a tag of table, deletions and ids;
//! where it does not fit, the rows are searched for as if there were no places. Even a forged place harms no memory:
//! it is used only below the number of rows, and gradients are grouped by it, so that no row is changed by two threads.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::kernel::hash::mix;
use crate::kernel::simd::{Kernel, Lanes};

/// The words that a tag takes behind the places.
pub const TAG_WORDS: usize = 2;

/// Returns the sum that a tag is made from, over some ids and their places; `first` is the number of the first one. The
/// sums of parts add up to that of the whole.
#[inline(always)]
pub(crate) fn tag_sum(first: usize, ids: &[i64], places: &[u32]) -> u64 {
    // Odd factors: exchanging two ids or places, or changing one, changes the sum.
    const BETWEEN_FACTORS: u64 = 0x9E37_79B9_7F4A_7C16;
    let first = (first as u64).wrapping_mul(BETWEEN_FACTORS).wrapping_add(1);
    let mut sum = 0u64;
    for (number, (&id, &place)) in (0u64..).zip(ids.iter().zip(places)) {
        let both = id as u64 ^ u64::from(place).rotate_left(32);
        let factor = first.wrapping_add(number.wrapping_mul(BETWEEN_FACTORS));
        sum = sum.wrapping_add(both.wrapping_mul(factor));
    }
    sum
}

/// Returns the tag of `count` ids and places; `epoch` tells a table and its deletions apart from all others.
pub(crate) fn tag(epoch: u64, sum: u64, count: usize) -> [u32; TAG_WORDS] {
    let tag = mix((sum ^ mix(epoch as i64)) as i64) ^ count as u64;
    [tag as u32, (tag >> 32) as u32]
}

/// Writes a tag behind the places of `count` ids, if there is room for it.
pub(crate) fn seal(places: &mut [u32], count: usize, tag: [u32; TAG_WORDS]) {
    if let Some((_, words)) = places.split_at_mut_checked(count) {
        words.iter_mut().zip(tag).for_each(|(word, value)| *word = value);
    }
}

/// Writes the tag behind the places of `ids`, if there is room for it.
pub(crate) struct Seal<'a> {
    pub(crate) places: &'a mut [u32],
    pub(crate) epoch: u64,
    pub(crate) ids: &'a [i64],
}

impl Kernel for Seal<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let sum = tag_sum(0, self.ids, self.places);
        seal(self.places, self.ids.len(), tag(self.epoch, sum, self.ids.len()));
    }
}

/// Adds the sum over some ids and places to those of the other parts; `first` is the number of the first one.
pub(crate) struct AddTagSum<'a> {
    pub(crate) first: usize,
    pub(crate) ids: &'a [i64],
    pub(crate) places: &'a [u32],
    pub(crate) sum: &'a AtomicU64,
}

impl Kernel for AddTagSum<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        self.sum.fetch_add(tag_sum(self.first, self.ids, self.places), Ordering::Relaxed);
    }
}

/// Returns the places of `count` ids and the tag behind them.
pub(crate) fn unseal(places: &[u32], count: usize) -> Option<(&[u32], [u32; TAG_WORDS])> {
    let (places, words) = places.split_at_checked(count)?;
    Some((places, words.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::{Simd, SimdLevel};

    fn are_good(places: &[u32], epoch: u64, ids: &[i64]) -> bool {
        unseal(places, ids.len()).is_some_and(|(places, words)| {
            let (sum, half) = (AtomicU64::new(0), ids.len() / 2);
            for (first, part) in [(half, half..ids.len()), (0, 0..half)] {
                let (ids, places) = (&ids[part.clone()], &places[part]);
                Simd::detect().run(AddTagSum { first, ids, places, sum: &sum });
            }
            tag(epoch, sum.into_inner(), ids.len()) == words
        })
    }

    #[test]
    fn places_are_good_for_the_same_ids_and_epoch_only() {
        let ids = [5, -3, 5, i64::MIN];
        let mut places = [1, 2, 1, 9, 0, 0];
        for level in SimdLevel::available() {
            let simd = Simd::new(level).unwrap();
            places[4..].fill(0);
            simd.run(Seal { places: &mut places, epoch: 7, ids: &ids });
            assert!(are_good(&places, 7, &ids), "{level}");
            assert!(!are_good(&places, 8, &ids));
            assert!(!are_good(&places, 7, &[-3, 5, 5, i64::MIN]));
            assert!(!are_good(&places, 7, &ids[..3]));
            assert!(!are_good(&places[..5], 7, &ids));
            assert!(!are_good(&[1, 2, 2, 9, places[4], places[5]], 7, &ids));
            assert!(!are_good(&[], 7, &ids));
            simd.run(Seal { places: &mut [], epoch: 7, ids: &ids });
        }
    }
}
