//! Where the rows of a step's ids lie: from the places that lookups kept, and by searching.

use super::locked::{Known, Locked, PADDING};
use crate::kernel::parallel::for_each_mut;
use crate::kernel::simd::{Kernel, Lanes};
use crate::rows::gradient::GradientPart;
use crate::table::engine::Engine;
use crate::table::ids::places::{self, Tag};
use crate::table::ids::row_index::NO_INDEX;
use crate::table::lookup::FindRows;

/// The positions worth waking a thread for to look them up.
const POSITIONS_A_THREAD: usize = 4_096;

/// Uses the places that lookups kept, where they are still good.
pub(super) fn take_kept_places(engine: Engine<'_>, locked: &mut [Locked<'_>]) {
    let parts = locked.iter_mut().flat_map(|locked| {
        let epoch = locked.rows.epoch;
        let limit = locked.rows.allocator.high_water() as u32;
        let starts = &locked.gradients.starts;
        let mut rest = &mut locked.indices[..];
        let parts = locked.gradients.parts.iter().zip(&mut locked.known).enumerate();
        parts.map(move |(number, (part, known))| {
            let (indices, behind) =
                std::mem::take(&mut rest).split_at_mut(starts[number + 1] - starts[number]);
            rest = behind;
            TakePlaces { part, indices, known, epoch, limit }
        })
    });
    let with_places = parts.filter(|take| !take.part.places.is_empty());
    for_each_mut(engine.executor, with_places, |take| engine.simd.run(take));
}

/// Copies the places of a part and finds out whether they are good; one that no row can have counts as none.
struct TakePlaces<'a> {
    part: &'a GradientPart<'a>,
    indices: &'a mut [u32],
    known: &'a mut Known,
    epoch: u64,
    limit: u32,
}

impl Kernel for TakePlaces<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        const BLOCK: usize = 1024;
        let Self { part, indices, known, epoch, limit } = self;
        let Some((places, words)) = places::unseal(part.places, part.ids.len()) else { return };
        let (mut tag, mut misses) = (Tag::new(epoch), false);
        let blocks = part.ids.chunks(BLOCK).zip(places.chunks(BLOCK));
        for ((ids, places), indices) in blocks.zip(indices.chunks_mut(BLOCK)) {
            tag.add(ids, places);
            for (index, &place) in indices.iter_mut().zip(places) {
                *index = if place < limit { place } else { NO_INDEX };
                misses |= place >= limit;
            }
        }
        exclude_padding(part, 0, indices);
        *known = match tag.words() == words {
            false => Known::Nothing,
            true if misses => Known::Some,
            true => Known::All,
        };
    }
}

#[inline(always)]
fn exclude_padding(part: &GradientPart<'_>, first: usize, indices: &mut [u32]) {
    if let Some(padding) = part.padding_idx {
        for (index, &id) in indices.iter_mut().zip(&part.ids[first..]) {
            *index = if id == padding { PADDING } else { *index };
        }
    }
}

/// Finds the rows of all ids whose places are not known, or were not there at the lookup.
pub(super) fn find_rows(engine: Engine<'_>, locked: &mut [Locked<'_>]) {
    let pieces = locked.iter_mut().flat_map(|locked| {
        let (map, starts, known) = (&locked.rows.ids, &locked.gradients.starts, &locked.known);
        let mut rest = &mut locked.indices[..];
        locked.gradients.parts.iter().enumerate().flat_map(move |(number, part)| {
            let (own, behind) = std::mem::take(&mut rest).split_at_mut(starts[number + 1] - starts[number]);
            rest = behind;
            let chunks = own.chunks_mut(POSITIONS_A_THREAD).enumerate();
            chunks
                .map(move |(chunk, indices)| (map, part, chunk * POSITIONS_A_THREAD, indices, known[number]))
        })
    });
    let unknown = pieces.filter(|(.., known)| *known != Known::All);
    for_each_mut(engine.executor, unknown, |(ids, part, first, indices, known)| {
        let of = &part.ids[first..first + indices.len()];
        if known == Known::Some {
            let missing = indices.iter_mut().zip(of).filter(|(index, _)| **index == NO_INDEX);
            missing.for_each(|(index, id)| *index = ids.find(*id).map_or(NO_INDEX, |index| index.0));
        } else {
            engine.simd.run(FindRows { ids, of, indices });
            exclude_padding(part, first, indices);
        }
    });
}
