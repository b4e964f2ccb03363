//! Where the row of an id is in a frozen table: ids lie in the order of their hashes, and buckets tell where to look.
//!
//! The upper bits of a hash are its bucket. A bucket begins at `starts[bucket]` and ends where the next one begins; it has
//! from three to six ids on average. So an id takes 8 bytes and at most 4/3 more, and a search reads two or three lines.

use std::cmp::max;
use std::ops::Range;

use crate::kernel::hash::mix;

/// The fewest ids that a bucket has on average, if there is more than one bucket.
const IDS_A_BUCKET: usize = 3;

/// Sorts ids, none of which may be there twice, by their hashes, and returns where each bucket begins: one number more
/// than there are buckets. An id that is there twice is returned as an error.
pub(super) fn build(ids: &mut [i64]) -> std::result::Result<Vec<u32>, i64> {
    ids.sort_unstable_by_key(|&id| mix(id));
    if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(twice[0]);
    }
    let shift = shift_of(num_buckets(ids.len()));
    let mut starts = vec![0u32; num_buckets(ids.len()) + 1];
    for &id in &*ids {
        starts[bucket(id, shift) + 1] += 1;
    }
    let mut sum = 0;
    for start in &mut starts {
        sum += *start;
        *start = sum;
    }
    Ok(starts)
}

/// Returns how many buckets a table of so many ids has: a power of two.
pub(super) fn num_buckets(ids: usize) -> usize {
    let most = max(ids / IDS_A_BUCKET, 1);
    1 << most.ilog2()
}

/// Returns by how much hashes are shifted to the right to give one of so many buckets.
pub(super) fn shift_of(buckets: usize) -> u32 {
    u64::BITS - buckets.trailing_zeros()
}

/// Returns the bucket of an id.
#[inline(always)]
pub(super) fn bucket(id: i64, shift: u32) -> usize {
    // A single bucket has no bits of the hash, and no shift is that long.
    mix(id).checked_shr(shift).unwrap_or(0) as usize
}

/// Returns where a bucket's ids are, by the numbers in a file: none beyond `ids`.
#[inline(always)]
pub(super) fn ids_of(starts: &[u32], bucket: usize, ids: usize) -> Option<Range<usize>> {
    let (start, end) = (*starts.get(bucket)? as usize, *starts.get(bucket + 1)? as usize);
    (start <= end && end <= ids).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn find(ids: &[i64], starts: &[u32], id: i64) -> Option<usize> {
        let place = bucket(id, shift_of(starts.len() - 1));
        let range = ids_of(starts, place, ids.len()).unwrap();
        let first = range.start;
        ids[range].iter().position(|other| *other == id).map(|place| first + place)
    }

    proptest! {
        #[test]
        fn each_id_is_found_where_it_is_and_no_other(ids in prop::collection::hash_set(any::<i64>(), 0..300), others in prop::collection::vec(any::<i64>(), 0..50)) {
            let mut sorted: Vec<i64> = ids.iter().copied().collect();
            let starts = build(&mut sorted).unwrap();
            for (place, &id) in sorted.iter().enumerate() {
                prop_assert_eq!(find(&sorted, &starts, id), Some(place));
            }
            for id in others {
                prop_assert_eq!(find(&sorted, &starts, id).is_some(), ids.contains(&id));
            }
        }
    }

    #[test]
    fn an_id_that_is_there_twice_is_told() {
        assert_eq!(build(&mut [5, -7, 5]), Err(5));
    }

    #[test]
    fn ids_take_twelve_bytes_at_most() {
        for count in [1usize, 2, 3, 7, 100, 1_000, 12_345, 1 << 20] {
            let bytes = 8 * count + 4 * (num_buckets(count) + 1);
            assert!(bytes <= 12 * count + 8, "{count} ids take {bytes} bytes");
        }
        let ids: HashSet<i64> = (0..10_000).collect();
        let mut sorted: Vec<i64> = ids.into_iter().collect();
        let starts = build(&mut sorted).unwrap();
        let longest = starts.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert!(longest < Some(24), "{longest:?}");
    }
}
