//! Finding the rows of many ids: the lines of the map of those ahead are under way meanwhile.

use super::id_map::{BEHIND, Home, IdMap};
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
        let mut homes = [Home::default(); RUN];
        for (of, indices) in of.chunks(RUN).zip(indices.chunks_mut(RUN)) {
            find_run(lanes, ids, of, &mut homes[..of.len()], indices);
        }
    }
}

/// Writes the index of each id of a run to `indices`, and where its search begins to `homes`.
#[inline(always)]
fn find_run(lanes: impl Lanes, map: &IdMap, ids: &[i64], homes: &mut [Home], indices: &mut [u32]) {
    for (home, id) in homes.iter_mut().zip(ids) {
        *home = map.home(*id);
    }
    for home in homes.iter().take(LINES_LATER) {
        map.prefetch(*home, Cache::Second);
    }
    for place in 0..ids.len() {
        if let Some(home) = homes.get(place + LINES_LATER) {
            map.prefetch(*home, Cache::Second);
        }
        if let Some(home) = homes.get(place + LINES_NEAR) {
            map.prefetch(*home, Cache::First);
        }
        indices[place] = map.search(lanes, homes[place], ids[place]);
        if indices[place] == BEHIND {
            map.prefetch_behind(homes[place]);
        }
    }
    for ((index, home), id) in indices.iter_mut().zip(homes).zip(ids) {
        if *index == BEHIND {
            *index = map.search_behind(lanes, *home, *id).map_or(NO_INDEX, |index| index.0);
        }
    }
}
