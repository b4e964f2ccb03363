//! Counts of ids in a fixed amount of memory.

use std::collections::HashMap;

use crate::kernel::hash::mix;

/// A count-min sketch with conservative updates: a count is never too low. With a probability of at least `1 - delta`
/// it is too high by at most `epsilon` times all that was counted.
///
/// Source: Cormode and Muthukrishnan 2005, "An improved data stream summary: the count-min sketch and its
/// applications", theorem 1, for the bound; Estan and Varghese 2002, "New directions in traffic measurement and
/// accounting", section 3.3.2, for counting up only the least counters, which keeps the bound.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sketch {
    width: usize,
    depth: usize,
    /// `depth` rows of `width` counters.
    counters: Vec<u32>,
}

impl Sketch {
    pub(crate) fn new(epsilon: f64, delta: f64) -> Self {
        let (width, depth) = size(epsilon, delta);
        Self { width, depth, counters: vec![0; width * depth] }
    }

    /// Returns the sketch that has these counters; none if it has another number of them.
    pub(crate) fn of(epsilon: f64, delta: f64, counters: Vec<u32>) -> Option<Self> {
        let (width, depth) = size(epsilon, delta);
        (width.checked_mul(depth) == Some(counters.len())).then_some(Self { width, depth, counters })
    }

    /// Returns the counters of an id, one a row.
    fn places(&self, id: i64) -> impl Iterator<Item = usize> + use<> {
        let width = self.width;
        // Two hashes give as many as are wanted. Source: Kirsch and Mitzenmacher 2006, "Less hashing, same
        // performance", section 3.
        // The second one is odd, so that no two rows use the same hash.
        let (first, second) = (mix(id), mix(mix(id) as i64) | 1);
        (0..self.depth).map(move |row| {
            let hash = first.wrapping_add(second.wrapping_mul(row as u64));
            row * width + ((u128::from(hash) * width as u128) >> 64) as usize
        })
    }

    /// Returns how often an id was counted, or more.
    pub(crate) fn estimate(&self, id: i64) -> u32 {
        self.places(id).map(|place| self.counters[place]).min().unwrap_or(0)
    }

    /// Counts an id once more and returns its count.
    pub(crate) fn count(&mut self, id: i64) -> u32 {
        let count = self.estimate(id).saturating_add(1);
        for place in self.places(id) {
            self.counters[place] = self.counters[place].max(count);
        }
        count
    }

    /// Returns the counts that [`Sketch::count`] would give these ids, one after another.
    pub(crate) fn counts_in_turn(&self, ids: &[i64]) -> Vec<u32> {
        // Ids share counters: one that is counted may raise the count of those behind it.
        let mut raised: HashMap<usize, u32> = HashMap::new();
        let mut count = |id: &i64| {
            let now = |place| raised.get(&place).copied().unwrap_or(self.counters[place]);
            let count = self.places(*id).map(now).min().unwrap_or(0).saturating_add(1);
            for place in self.places(*id) {
                let counter = raised.entry(place).or_insert(self.counters[place]);
                *counter = (*counter).max(count);
            }
            count
        };
        ids.iter().map(&mut count).collect()
    }

    /// Takes away all that an id may have added: its estimate is 0 then. A counter above its estimate was last raised by
    /// another id, and stays; an id whose counter was as low as this one's may have been counted more often than is known.
    pub(crate) fn forget(&mut self, id: i64) {
        let estimate = self.estimate(id);
        for place in self.places(id) {
            if self.counters[place] == estimate {
                self.counters[place] = 0;
            }
        }
    }

    /// Adds what another sketch of this size counted.
    pub(crate) fn add(&mut self, counters: &[u32]) {
        for (own, other) in self.counters.iter_mut().zip(counters) {
            *own = own.saturating_add(*other);
        }
    }

    pub(crate) fn counters(&self) -> &[u32] {
        &self.counters
    }

    /// Halves every count so many times.
    pub(crate) fn halve(&mut self, times: u32) {
        self.counters.iter_mut().for_each(|counter| *counter = halved(*counter, times));
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.counters.fill(0);
    }
}

/// Returns columns and rows.
fn size(epsilon: f64, delta: f64) -> (usize, usize) {
    ((1f64.exp() / epsilon).ceil() as usize, ((1.0 / delta).ln().ceil() as usize).max(1))
}

/// Returns a count that was halved so many times.
pub(crate) fn halved(count: u32, times: u32) -> u32 {
    count.checked_shr(times).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_are_known_before_ids_are_counted(
            before in prop::collection::vec(-40..40i64, 0..100), ids in prop::collection::vec(-40..40i64, 0..100)
        ) {
            let mut sketch = Sketch::new(0.3, 0.1);
            before.iter().for_each(|id| _ = sketch.count(*id));
            let expected = sketch.counts_in_turn(&ids);
            prop_assert_eq!(expected, ids.iter().map(|id| sketch.count(*id)).collect::<Vec<_>>());
        }

        #[test]
        fn no_count_is_too_low_and_two_sketches_add_up(
            first in prop::collection::vec(-40..40i64, 0..300), second in prop::collection::vec(-40..40i64, 0..300)
        ) {
            let (mut sketch, mut other) = (Sketch::new(0.05, 0.1), Sketch::new(0.05, 0.1));
            let mut exact: HashMap<i64, u32> = HashMap::new();
            for (sketch, ids) in [(&mut sketch, &first), (&mut other, &second)] {
                for &id in ids {
                    sketch.count(id);
                    *exact.entry(id).or_default() += 1;
                }
            }
            sketch.add(other.counters());
            for (id, count) in exact {
                prop_assert!(sketch.count(id) > count);
            }
        }
    }

    #[test]
    fn a_forgotten_id_leaves_the_sketch_as_it_was_before_it_came() {
        let mut sketch = Sketch::new(1e-3, 1e-3);
        (0..40).for_each(|id| _ = sketch.count(id));
        let before = sketch.clone();
        (0..5).for_each(|_| _ = sketch.count(1 << 40));
        assert_eq!(sketch.estimate(1 << 40), 5);
        sketch.forget(1 << 40);
        assert_eq!(sketch, before);
        sketch.forget(7);
        assert_eq!((sketch.estimate(7), sketch.estimate(8)), (0, 1));
    }

    /// Ids of which the n-th most frequent comes about 1/n as often as the first.
    fn zipf(number: u64, ids: f64) -> i64 {
        let uniform = (mix(number as i64) >> 11) as f64 / (1u64 << 53) as f64;
        ids.powf(uniform) as i64
    }

    #[test]
    fn on_a_skewed_stream_of_ten_million_ids_the_error_stays_within_its_bound() {
        const UPDATES: u64 = 10_000_000;
        const IDS: usize = 5_000_000;
        let (epsilon, delta) = (1e-5, 0.01);
        let mut sketch = Sketch::new(epsilon, delta);
        let mut exact = vec![0u32; IDS + 1];
        for number in 0..UPDATES {
            let id = zipf(number, IDS as f64);
            sketch.count(id);
            exact[id as usize] += 1;
        }
        let bound = (epsilon * UPDATES as f64) as u32;
        let errors = (0..=IDS).map(|id| sketch.estimate(id as i64) - exact[id]);
        let beyond = errors.filter(|error| *error > bound).count();
        assert!(beyond as f64 <= delta * IDS as f64, "{beyond} counts are off by more than {bound}");
    }
}
