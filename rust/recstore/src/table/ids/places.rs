//! Places: where a lookup found its rows, kept for the step that follows, which then need not search again.
//!
//! A row never moves, so a place is good until rows are deleted. Places come with a tag of table, deletions and ids;
//! where it does not fit, the rows are searched for as if there were no places. Even a forged place harms no memory:
//! it is used only below the number of rows, and gradients are grouped by it, so that no row is changed by two threads.

use crate::kernel::hash::mix;
use crate::kernel::simd::{Kernel, Lanes};

/// The words that a tag takes behind the places.
pub const TAG_WORDS: usize = 2;

/// The tag of ids and places that come one block after another.
#[derive(Debug)]
pub(crate) struct Tag {
    epoch: u64,
    sum: u64,
    ids: u64,
}

impl Tag {
    /// Begins a tag; `epoch` tells a table and its deletions apart from all others.
    pub(crate) fn new(epoch: u64) -> Self {
        Self { epoch, sum: 0, ids: 0 }
    }

    /// Takes the next ids and their places.
    #[inline(always)]
    pub(crate) fn add(&mut self, ids: &[i64], places: &[u32]) {
        // Odd factors: exchanging two ids or places, or changing one, changes the sum.
        const BETWEEN_FACTORS: u64 = 0x9E37_79B9_7F4A_7C16;
        let first = self.ids.wrapping_mul(BETWEEN_FACTORS).wrapping_add(1);
        for (number, (&id, &place)) in (0u64..).zip(ids.iter().zip(places)) {
            let both = id as u64 ^ u64::from(place).rotate_left(32);
            let factor = first.wrapping_add(number.wrapping_mul(BETWEEN_FACTORS));
            self.sum = self.sum.wrapping_add(both.wrapping_mul(factor));
        }
        self.ids += ids.len() as u64;
    }

    /// Returns the words that stand behind the places.
    pub(crate) fn words(self) -> [u32; TAG_WORDS] {
        let tag = mix((self.sum ^ mix(self.epoch as i64)) as i64) ^ self.ids;
        [tag as u32, (tag >> 32) as u32]
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
        if let Some((places, words)) = self.places.split_at_mut_checked(self.ids.len()) {
            let mut tag = Tag::new(self.epoch);
            tag.add(self.ids, places);
            words.iter_mut().zip(tag.words()).for_each(|(word, value)| *word = value);
        }
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
            let (mut tag, half) = (Tag::new(epoch), ids.len() / 2);
            tag.add(&ids[..half], &places[..half]);
            tag.add(&ids[half..], &places[half..]);
            tag.words() == words
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
