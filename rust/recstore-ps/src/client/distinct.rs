//! The distinct ids of a lookup: each is asked for once.

use std::borrow::Cow;

use recstore::{PlacedRows, Serial, unique};

/// Distinct ids, and where they stand among the ids of a lookup.
pub(super) struct Distinct<'a> {
    pub(super) ids: Cow<'a, [i64]>,
    /// The place of each id of the lookup among the distinct ones. Empty if no id comes twice: then they are as they were.
    inverse: Vec<i64>,
}

impl<'a> Distinct<'a> {
    /// On the calling thread alone: threads of a pool that wait for their next loop take cores from a server on the same
    /// machine, and a network is slower than one core.
    pub(super) fn of(ids: &'a [i64]) -> Self {
        let (distinct, inverse) = recstore::arrivals(ids).unwrap_or_else(|| sorted(ids));
        if distinct.len() == ids.len() {
            return Self { ids: Cow::Borrowed(ids), inverse: Vec::new() };
        }
        Self { ids: Cow::Owned(distinct), inverse }
    }

    /// Returns the rows of the lookup's ids, of which `rows` are those of the distinct ones.
    pub(super) fn placed<'r>(&'r self, rows: &'r [f32]) -> PlacedRows<'r> {
        PlacedRows { rows, places: &self.inverse }
    }

    /// Returns for each distinct id where it comes first in the lookup; none if no id comes twice.
    pub(super) fn first_positions(&self) -> Vec<usize> {
        if self.inverse.is_empty() {
            return Vec::new();
        }
        let mut firsts = vec![0; self.ids.len()];
        for (position, &place) in self.inverse.iter().enumerate().rev() {
            firsts[place as usize] = position;
        }
        firsts
    }

    /// Copies the row of an id at its first position to all its others.
    pub(super) fn repeat_rows(&self, first_positions: &[usize], dim: usize, rows: &mut [f32]) {
        for (position, &place) in self.inverse.iter().enumerate() {
            let first = first_positions[place as usize];
            if first != position {
                rows.copy_within(first * dim..(first + 1) * dim, position * dim);
            }
        }
    }
}

/// Returns the distinct ids, and the place of each among them.
fn sorted(ids: &[i64]) -> (Vec<i64>, Vec<i64>) {
    let (mut distinct, mut inverse) = (vec![0; ids.len()], vec![0; ids.len()]);
    let count = unique(&Serial, ids, &mut distinct, &mut inverse);
    distinct.truncate(count);
    (distinct, inverse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_at_first_positions_become_those_of_all(ids in prop::collection::vec(0..9i64, 0..12)) {
            let distinct = Distinct::of(&ids);
            let firsts = distinct.first_positions();
            let mut rows = vec![f32::NAN; 2 * ids.len()];
            for (place, &id) in distinct.ids.iter().enumerate() {
                let first = firsts.get(place).copied().unwrap_or(place);
                prop_assert_eq!(ids.iter().position(|&other| other == id), Some(first));
                rows[2 * first..][..2].copy_from_slice(&[id as f32, -id as f32]);
            }
            distinct.repeat_rows(&firsts, 2, &mut rows);
            let expected: Vec<f32> = ids.iter().flat_map(|&id| [id as f32, -id as f32]).collect();
            prop_assert_eq!(rows, expected);
            let placed = distinct.placed(&[]).places;
            let id = |position: usize| distinct.ids[placed.get(position).map_or(position, |&place| place as usize)];
            prop_assert!((0..ids.len()).all(|position| id(position) == ids[position]));
            let (mut once, places) = sorted(&ids);
            prop_assert!(places.iter().zip(&ids).all(|(&place, &id)| once[place as usize] == id));
            let mut own = distinct.ids.to_vec();
            own.sort_unstable();
            once.dedup();
            prop_assert_eq!(own, once);
        }
    }
}
