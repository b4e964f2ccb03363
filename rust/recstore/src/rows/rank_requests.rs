//! What a rank asks of all ranks: the distinct ids of a batch by their owners.

use std::ops::Range;

use crate::kernel::hash::mix;
use crate::kernel::parallel::Executor;
use crate::rows::distinct::unique;

/// Writes to `distinct` the distinct ids of several tables, those that the first rank owns first, for each rank one table
/// after the other, rising for each; returns how many of each rank and table, in that order.
///
/// Table t has `ids[splits[t]..splits[t + 1]]`. An id belongs to the rank that its hash, splitmix64, gives modulo
/// `ranks`. `places` gets the place of each id among the distinct ones of its table.
///
/// # Panics
/// If `distinct` or `places` is not as long as `ids`, `splits` does not cut them, or there are no ranks.
pub fn rank_requests(
    executor: &dyn Executor,
    ids: &[i64],
    splits: &[usize],
    ranks: usize,
    distinct: &mut [i64],
    places: &mut [i64],
) -> Vec<usize> {
    assert_eq!(ids.len(), distinct.len(), "rank_requests: room for every id");
    let tables = splits.len() - 1;
    let mut owned = Vec::with_capacity(tables);
    for range in splits.windows(2).map(|pair| pair[0]..pair[1]) {
        owned.push(Owned::of(executor, &ids[range.clone()], ranks, &mut places[range]));
    }
    let by_rank = |rank: usize| owned.iter().map(move |owned| owned.of_rank(rank));
    let mut end = 0;
    for part in (0..ranks).flat_map(by_rank) {
        distinct[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    (0..ranks).flat_map(by_rank).map(<[i64]>::len).collect()
}

/// The distinct ids of one table, those of the first rank first.
struct Owned {
    ids: Vec<i64>,
    /// Where those of each rank begin, and at the end where the last one's end.
    starts: Vec<usize>,
}

impl Owned {
    fn of(executor: &dyn Executor, ids: &[i64], ranks: usize, places: &mut [i64]) -> Self {
        let mut rising = vec![0; ids.len()];
        let count = unique(executor, ids, &mut rising, places);
        rising.truncate(count);
        let owners: Vec<u32> = rising.iter().map(|&id| (mix(id) % ranks as u64) as u32).collect();
        let mut starts = vec![0; ranks + 1];
        owners.iter().for_each(|&owner| starts[owner as usize + 1] += 1);
        (1..=ranks).for_each(|rank| starts[rank] += starts[rank - 1]);
        let mut next = starts.clone();
        let mut sorted = vec![0; count];
        let mut place_of = vec![0; count];
        for (number, (&id, &owner)) in rising.iter().zip(&owners).enumerate() {
            let place = &mut next[owner as usize];
            (sorted[*place], place_of[number]) = (id, *place as i64);
            *place += 1;
        }
        places.iter_mut().for_each(|place| *place = place_of[*place as usize]);
        Self { ids: sorted, starts }
    }

    fn of_rank(&self, rank: usize) -> &[i64] {
        let range: Range<usize> = self.starts[rank]..self.starts[rank + 1];
        &self.ids[range]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::{Rayon, Serial};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn each_owner_is_asked_once_for_each_id(
            tables in prop::collection::vec(prop::collection::vec(prop_oneof![-9..9i64, any::<i64>()], 0..40), 1..4),
            ranks in 1..6usize,
        ) {
            let ids = tables.concat();
            let mut splits = vec![0];
            splits.extend(tables.iter().scan(0, |sum, part| { *sum += part.len(); Some(*sum) }));
            let owned = |part: &Vec<i64>, rank| {
                let own = part.iter().copied().filter(|&id| mix(id) % ranks as u64 == rank as u64);
                own.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
            };
            let expected: Vec<Vec<i64>> =
                (0..ranks).flat_map(|rank| tables.iter().map(move |part| owned(part, rank))).collect();
            for executor in [&Serial as &dyn Executor, &Rayon] {
                let (mut distinct, mut places) = (vec![0; ids.len()], vec![0; ids.len()]);
                let counts = rank_requests(executor, &ids, &splits, ranks, &mut distinct, &mut places);
                prop_assert_eq!(&counts, &expected.iter().map(Vec::len).collect::<Vec<_>>());
                distinct.truncate(counts.iter().sum());
                prop_assert_eq!(&distinct, &expected.concat());
                for (table, pair) in splits.windows(2).enumerate() {
                    let own = expected.iter().skip(table).step_by(tables.len()).flatten().copied();
                    let own: Vec<i64> = own.collect();
                    for position in pair[0]..pair[1] {
                        prop_assert_eq!(own[places[position] as usize], ids[position]);
                    }
                }
            }
        }
    }
}
