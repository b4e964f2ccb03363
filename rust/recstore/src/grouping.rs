//! Finds the positions of equal keys in a batch: what summing duplicates and finding distinct ids come down to.
//!
//! The work is cut into *parts* by a hash of the key: each thread goes through all keys and keeps those of its part.
//! Equal keys so meet on one thread, in input order, with nothing shared and nothing locked. A part's groups come in
//! the order in which their keys first came.

use crate::parallel::{Executor, for_each_mut};
use crate::table::mix;

/// What positions are grouped by.
pub(crate) trait Key: Copy + Eq + Sync {
    /// Whether positions with this key belong to no group.
    fn is_excluded(self) -> bool;

    /// Returns 64 well-mixed bits.
    fn hash(self) -> u64;
}

/// An id of which some positions do not count.
impl Key for Option<i64> {
    #[inline(always)]
    fn is_excluded(self) -> bool {
        self.is_none()
    }

    #[inline(always)]
    fn hash(self) -> u64 {
        mix(self.unwrap_or_default())
    }
}

/// The positions of equal keys, chained: those of one part.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// The positions of the part, in input order.
    positions: Vec<u32>,
    /// For each of `positions` the place of the next one with the same key; itself at the end.
    next: Vec<u32>,
    /// For each group the places of its first and its last position in `positions`.
    ends: Vec<(u32, u32)>,
    /// An open-addressing table of groups, one more than their number; 0 is free.
    table: Vec<u32>,
}

impl Groups {
    /// Groups the positions of `keys` that belong to part `part` of `parts`. What was there before is dropped.
    pub(crate) fn fill(&mut self, keys: &[impl Key], part: usize, parts: usize) {
        self.select(keys, part, parts);
        let count = self.positions.len();
        // At most a quarter full: searches end at once, and the table still fits a core's own cache.
        let bits = (4 * count.max(1)).next_power_of_two().trailing_zeros();
        self.table.clear();
        self.table.resize(1 << bits, 0);
        self.next.clear();
        self.next.extend(0..count as u32);
        self.ends.clear();
        for place in 0..count {
            self.add(keys, place, bits);
        }
    }

    /// Keeps the positions of one part.
    fn select(&mut self, keys: &[impl Key], part: usize, parts: usize) {
        self.positions.clear();
        self.positions.resize(keys.len(), 0);
        let mut count = 0;
        for (position, key) in keys.iter().enumerate() {
            // Written always, kept if it counts: which it is cannot be predicted.
            self.positions[count] = position as u32;
            let own = parts == 1 || part_of(key.hash(), parts) == part;
            count += usize::from(own & !key.is_excluded());
        }
        self.positions.truncate(count);
    }

    #[inline(always)]
    fn add(&mut self, keys: &[impl Key], place: usize, bits: u32) {
        let key = keys[self.positions[place] as usize];
        let mut slot = (key.hash() >> (64 - bits)) as usize;
        loop {
            let group = self.table[slot] as usize;
            if group == 0 {
                self.ends.push((place as u32, place as u32));
                self.table[slot] = self.ends.len() as u32;
                return;
            }
            let (first, last) = &mut self.ends[group - 1];
            if keys[self.positions[*first as usize] as usize] == key {
                self.next[*last as usize] = place as u32;
                *last = place as u32;
                return;
            }
            slot = (slot + 1) & (self.table.len() - 1);
        }
    }

    /// Returns the number of distinct keys.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the first position of a group.
    #[inline(always)]
    pub(crate) fn first(&self, group: usize) -> usize {
        self.positions[self.ends[group].0 as usize] as usize
    }

    /// Whether a group has one position only.
    #[inline(always)]
    pub(crate) fn is_single(&self, group: usize) -> bool {
        let (first, last) = self.ends[group];
        first == last
    }

    /// Returns the positions of a group, in input order.
    #[inline(always)]
    pub(crate) fn positions(&self, group: usize) -> Positions<'_> {
        Positions { groups: self, place: Some(self.ends[group].0) }
    }
}

/// The positions of one key, in input order.
pub(crate) struct Positions<'a> {
    groups: &'a Groups,
    place: Option<u32>,
}

impl Iterator for Positions<'_> {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let place = self.place?;
        let next = self.groups.next[place as usize];
        self.place = (next != place).then_some(next);
        Some(self.groups.positions[place as usize] as usize)
    }
}

/// Returns the part that a key of this hash belongs to, from other bits than a part's table uses.
#[inline(always)]
fn part_of(hash: u64, parts: usize) -> usize {
    ((hash & u64::from(u32::MAX)) as usize * parts) >> 32
}

/// Groups all positions of `keys` on the threads of `executor`, in `parts` parts.
pub(crate) fn group(executor: &dyn Executor, keys: &[impl Key], parts: usize) -> Vec<Groups> {
    let mut groups: Vec<Groups> = (0..parts).map(|_| Groups::default()).collect();
    for_each_mut(executor, groups.iter_mut().enumerate(), |(part, groups)| groups.fill(keys, part, parts));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Serial;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn groups_agree_with_a_map(keys in prop::collection::vec(prop::option::weighted(0.9, -9..9i64), 0..60), parts in 1..5usize) {
            let mut model = BTreeMap::<i64, Vec<usize>>::new();
            for (position, key) in keys.iter().enumerate() {
                if let Some(id) = key {
                    model.entry(*id).or_default().push(position);
                }
            }
            let mut found = BTreeMap::new();
            for groups in group(&Serial, &keys, parts) {
                let firsts: Vec<_> = (0..groups.len()).map(|group| groups.first(group)).collect();
                prop_assert!(firsts.is_sorted());
                for (number, first) in firsts.into_iter().enumerate() {
                    let earlier = found.insert(keys[first].unwrap(), groups.positions(number).collect::<Vec<_>>());
                    prop_assert_eq!(earlier, None);
                }
            }
            prop_assert_eq!(found, model);
        }
    }
}
