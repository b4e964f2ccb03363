//! Finding the rows of many ids.

use super::id_lines::RUN;
use super::id_map::IdMap;
use super::row_index::NO_INDEX;
use crate::kernel::simd::{Kernel, Lanes};

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
        for (of, indices) in of.chunks(RUN).zip(indices.chunks_mut(RUN)) {
            ids.find_run(lanes, of, indices);
        }
    }
}
