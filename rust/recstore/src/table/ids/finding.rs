//! Finding the rows of many ids: the lines of the map of those ahead are under way meanwhile.

use super::id_map::{BEHIND, Bucket, IdMap};
use super::row_index::NO_INDEX;
use crate::kernel::cache::{Cache, LINES_LATER, LINES_NEAR};
use crate::kernel::simd::{Kernel, Lanes};

/// The ids of a run: what is known of them fits the first cache.
pub(crate) const RUN: usize = 1024;

/// Ids so few that there is nothing to overlap.
const FEW_IDS: usize = 4;

/// Writes the index of each id to `indices`, [`NO_INDEX`] for one without a row.
pub(crate) struct FindRows<'a> {
    pub(crate) ids: &'a IdMap,
    pub(crate) of: &'a [i64],
    pub(crate) indices: &'a mut [u32],
}

impl Kernel for FindRows<'_> {
    #[inline(always)]
    fn run(self, lanes: impl Lanes) {
        let Self { ids, of, indices } = self;
        if of.len() <= FEW_IDS {
            for (index, id) in indices.iter_mut().zip(of) {
                *index = ids.find(*id).map_or(NO_INDEX, |index| index.0);
            }
            return;
        }
        let mut buckets = [Bucket::default(); RUN];
        for (of, indices) in of.chunks(RUN).zip(indices.chunks_mut(RUN)) {
            find_run(lanes, ids, of, &mut buckets[..of.len()], indices);
        }
    }
}

/// Writes the index of each id of a run to `indices`, and where its search begins to `buckets`.
#[inline(always)]
fn find_run(lanes: impl Lanes, map: &IdMap, ids: &[i64], buckets: &mut [Bucket], indices: &mut [u32]) {
    for (bucket, id) in buckets.iter_mut().zip(ids) {
        *bucket = map.bucket(*id);
    }
    for bucket in buckets.iter().take(LINES_LATER) {
        map.prefetch(*bucket, Cache::Second);
    }
    for place in 0..ids.len() {
        if let Some(bucket) = buckets.get(place + LINES_LATER) {
            map.prefetch(*bucket, Cache::Second);
        }
        if let Some(bucket) = buckets.get(place + LINES_NEAR) {
            map.prefetch(*bucket, Cache::First);
        }
        indices[place] = map.search(lanes, buckets[place], ids[place]);
        if indices[place] == BEHIND {
            map.prefetch_behind(buckets[place]);
        }
    }
    for ((index, bucket), id) in indices.iter_mut().zip(buckets).zip(ids) {
        if *index == BEHIND {
            *index = map.search_behind(lanes, *bucket, *id).map_or(NO_INDEX, |index| index.0);
        }
    }
}
