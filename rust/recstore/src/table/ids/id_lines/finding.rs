//! Finding many ids: the lines of those ahead are under way meanwhile.

use super::{BEHIND, Bucket, IdLines};
use crate::kernel::cache::{Cache, LINES_LATER, LINES_NEAR};
use crate::kernel::simd::Lanes;
use crate::table::ids::row_index::NO_INDEX;

/// The ids of a run: what is known of them fits the first cache.
pub(crate) const RUN: usize = 1024;

impl IdLines {
    /// Writes the index of each id of a run to `indices`, [`NO_INDEX`] for one that does not lie in the lines.
    #[inline(always)]
    pub(crate) fn find_run(&self, lanes: impl Lanes, ids: &[i64], indices: &mut [u32]) {
        // Where the searches begin.
        let mut buckets = [Bucket::default(); RUN];
        let buckets = &mut buckets[..ids.len()];
        for (bucket, id) in buckets.iter_mut().zip(ids) {
            *bucket = self.bucket(*id);
        }
        for bucket in buckets.iter().take(LINES_LATER) {
            self.prefetch(*bucket, Cache::Second);
        }
        for place in 0..ids.len() {
            if let Some(bucket) = buckets.get(place + LINES_LATER) {
                self.prefetch(*bucket, Cache::Second);
            }
            if let Some(bucket) = buckets.get(place + LINES_NEAR) {
                self.prefetch(*bucket, Cache::First);
            }
            indices[place] = self.search(lanes, buckets[place], ids[place]);
            if indices[place] == BEHIND {
                self.prefetch_behind(buckets[place]);
            }
        }
        for ((index, bucket), id) in indices.iter_mut().zip(buckets).zip(ids) {
            if *index == BEHIND {
                *index = self.search_behind(lanes, *bucket, *id).map_or(NO_INDEX, |index| index.0);
            }
        }
    }
}
