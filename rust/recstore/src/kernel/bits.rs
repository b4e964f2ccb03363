//! A bit for each row of a table, which several threads may set and take.

use std::sync::atomic::{AtomicU64, Ordering};

const BITS_PER_WORD: usize = u64::BITS as usize;

/// Bits, as many as were asked for; those behind are not set.
#[derive(Debug, Default)]
pub(crate) struct Bits {
    words: Vec<AtomicU64>,
}

impl Bits {
    /// Makes room for `len` bits; new ones are not set.
    pub(crate) fn grow(&mut self, len: usize) {
        let words = len.div_ceil(BITS_PER_WORD);
        if words > self.words.len() {
            self.words.resize_with(words, AtomicU64::default);
        }
    }

    /// Sets a bit that there is room for.
    #[inline(always)]
    pub(crate) fn set(&self, bit: usize) {
        let mask = 1 << (bit % BITS_PER_WORD);
        let word = &self.words[bit / BITS_PER_WORD];
        // Most bits are set already; not writing leaves the line with all threads that read it.
        if word.load(Ordering::Relaxed) & mask == 0 {
            word.fetch_or(mask, Ordering::Relaxed);
        }
    }

    /// Clears a bit and returns whether it was set: to one caller only.
    #[inline(always)]
    pub(crate) fn take(&self, bit: usize) -> bool {
        let mask = 1 << (bit % BITS_PER_WORD);
        let Some(word) = self.words.get(bit / BITS_PER_WORD) else {
            return false;
        };
        // `fetch_and` decides who gets the bit; the load before it spares a write to the line.
        word.load(Ordering::Relaxed) & mask != 0 && word.fetch_and(!mask, Ordering::Relaxed) & mask != 0
    }

    /// Whether a bit is set.
    #[inline(always)]
    pub(crate) fn is_set(&self, bit: usize) -> bool {
        let word = self.words.get(bit / BITS_PER_WORD);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (bit % BITS_PER_WORD) & 1 == 1)
    }

    /// Clears all bits.
    pub(crate) fn clear(&mut self) {
        self.words.iter_mut().for_each(|word| *word.get_mut() = 0);
    }

    /// Sets all bits of `others`, too.
    pub(crate) fn join(&mut self, others: &Self) {
        self.grow(others.words.len() * BITS_PER_WORD);
        for (word, other) in self.words.iter_mut().zip(&others.words) {
            *word.get_mut() |= other.load(Ordering::Relaxed);
        }
    }

    /// Clears all bits that are set in `others`.
    pub(crate) fn remove(&mut self, others: &Self) {
        for (word, other) in self.words.iter_mut().zip(&others.words) {
            *word.get_mut() &= !other.load(Ordering::Relaxed);
        }
    }

    /// Clears all bits that are not set in `others`.
    pub(crate) fn keep_only(&mut self, others: &Self) {
        for (place, word) in self.words.iter_mut().enumerate() {
            *word.get_mut() &= others.words.get(place).map_or(0, |other| other.load(Ordering::Relaxed));
        }
    }

    /// Returns how many bits are set.
    pub(crate) fn count(&self) -> usize {
        self.words.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    /// Returns the bits that are set, from `start` on.
    pub(crate) fn ones_from(&self, start: usize) -> impl Iterator<Item = usize> {
        let first = start / BITS_PER_WORD;
        let words = self.words.iter().enumerate().skip(first);
        let bits = words.flat_map(|(place, word)| {
            let mut rest = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                rest &= rest.checked_sub(1)?;
                Some(place * BITS_PER_WORD + bit)
            })
        });
        bits.skip_while(move |bit| *bit < start)
    }

    /// Returns the bytes in use.
    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }
}

impl Clone for Bits {
    fn clone(&self) -> Self {
        let words = self.words.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed)));
        Self { words: words.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn bits_agree_with_a_set(changes in prop::collection::vec((any::<bool>(), 0..200usize), 0..100), start in 0..250usize) {
            let (mut bits, mut model) = (Bits::default(), BTreeSet::new());
            for (is_set, bit) in changes {
                if is_set {
                    bits.grow(bit + 1);
                    bits.set(bit);
                    model.insert(bit);
                } else {
                    prop_assert_eq!(bits.take(bit), model.remove(&bit));
                }
            }
            prop_assert_eq!(bits.count(), model.len());
            prop_assert!((0..250).all(|bit| bits.is_set(bit) == model.contains(&bit)));
            prop_assert_eq!(bits.clone().ones_from(start).collect::<Vec<_>>(), model.range(start..).copied().collect::<Vec<_>>());
            let (mut both, others) = (bits.clone(), Bits::default());
            both.keep_only(&bits);
            both.join(&bits);
            prop_assert!(both.ones_from(0).eq(bits.ones_from(0)));
            both.keep_only(&others);
            prop_assert_eq!(both.count(), 0);
            both.join(&bits);
            prop_assert!(both.ones_from(0).eq(bits.ones_from(0)));
            bits.clear();
            prop_assert_eq!(bits.count(), 0);
        }
    }
}
