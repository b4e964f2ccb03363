//! Where the rows of a step's ids lie: from the places that lookups kept, and by searching.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::locked::{Known, Locked, PADDING};
use crate::kernel::parallel::for_each_mut;
use crate::kernel::simd::{Kernel, Lanes};
use crate::rows::gradient::GradientPart;
use crate::table::engine::Engine;
use crate::table::ids::finding::FindRows;
use crate::table::ids::places;
use crate::table::ids::row_index::NO_INDEX;

/// The positions worth waking a thread for to look them up.
const POSITIONS_PER_THREAD: usize = 4_096;

/// The positions worth waking a thread for to take their places.
const PLACES_PER_THREAD: usize = 8_192;

/// Uses the places that lookups kept, where they are still good.
pub(super) fn take_kept_places(engine: Engine<'_>, locked: &mut [Locked<'_>]) {
    let seen =
        locked.iter().map(|locked| locked.gradients.parts.iter().map(|_| PlacesSeen::default()).collect());
    let seen: Vec<Vec<PlacesSeen>> = seen.collect();
    let pieces = locked.iter_mut().zip(&seen).flat_map(|(locked, seen)| {
        let limit = locked.rows.allocator.high_water() as u32;
        let starts = &locked.gradients.starts;
        let mut rest = &mut locked.indices[..];
        locked.gradients.parts.iter().zip(seen).enumerate().flat_map(move |(number, (part, seen))| {
            let (own, behind) = std::mem::take(&mut rest).split_at_mut(starts[number + 1] - starts[number]);
            rest = behind;
            let places = places::unseal(part.places, part.ids.len()).map_or(&[][..], |(places, _)| places);
            let pieces = own.chunks_mut(PLACES_PER_THREAD).zip(places.chunks(PLACES_PER_THREAD)).enumerate();
            pieces.map(move |(piece, (indices, places))| TakePlaces {
                part,
                first: piece * PLACES_PER_THREAD,
                places,
                indices,
                limit,
                seen,
            })
        })
    });
    for_each_mut(engine.executor, pieces, |take| engine.simd.run(take));
    for (locked, seen) in locked.iter_mut().zip(&seen) {
        let parts = locked.gradients.parts.iter().zip(seen);
        for (known, (part, seen)) in locked.known.iter_mut().zip(parts) {
            *known = seen.known(part, locked.rows.epoch);
        }
    }
}

/// What was seen of the places of a part: the sum for their tag, and whether any id had no row.
#[derive(Default)]
struct PlacesSeen {
    sum: AtomicU64,
    misses: AtomicBool,
}

impl PlacesSeen {
    /// Returns what the places tell if they are good.
    fn known(&self, part: &GradientPart<'_>, epoch: u64) -> Known {
        let Some((_, words)) = places::unseal(part.places, part.ids.len()) else { return Known::Nothing };
        let tag = places::tag(epoch, self.sum.load(Ordering::Relaxed), part.ids.len());
        match tag == words {
            false => Known::Nothing,
            true if self.misses.load(Ordering::Relaxed) => Known::Some,
            true => Known::All,
        }
    }
}

/// Copies some places of a part, before it is known whether they are good; one that no row can have counts as none.
struct TakePlaces<'a> {
    part: &'a GradientPart<'a>,
    first: usize,
    places: &'a [u32],
    indices: &'a mut [u32],
    limit: u32,
    seen: &'a PlacesSeen,
}

impl Kernel for TakePlaces<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        const BLOCK: usize = 1024;
        let Self { part, first, places, indices, limit, seen } = self;
        let (mut sum, mut misses) = (0u64, false);
        let blocks = part.ids[first..].chunks(BLOCK).zip(places.chunks(BLOCK)).zip(indices.chunks_mut(BLOCK));
        for (block, ((ids, places), indices)) in blocks.enumerate() {
            sum = sum.wrapping_add(places::tag_sum(first + block * BLOCK, ids, places));
            for (index, &place) in indices.iter_mut().zip(places) {
                // Whatever the tag proves to be, an index stays among the records.
                *index = if place < limit { place } else { NO_INDEX };
                misses |= place >= limit;
            }
        }
        exclude_padding(part, first, indices);
        // The tag's sum wraps and takes its pieces in any order; the end of the loop orders it before it is
        // read.
        seen.sum.fetch_add(sum, Ordering::Relaxed);
        seen.misses.fetch_or(misses, Ordering::Relaxed);
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
            let chunks = own.chunks_mut(POSITIONS_PER_THREAD).enumerate();
            chunks.map(move |(chunk, indices)| {
                (map, part, chunk * POSITIONS_PER_THREAD, indices, known[number])
            })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::Simd;
    use crate::table::ids::places::{Seal, TAG_WORDS};

    const COUNT: usize = 4_000;
    const EPOCH: u64 = 7;

    /// Takes the places of all ids in pieces, the last first, and returns what they tell and the indices.
    fn take_in_pieces(ids: &[i64], places: &[u32], epoch: u64, limit: u32) -> (Known, Vec<u32>) {
        const PIECE: usize = 1_500;
        let part = GradientPart { places, padding_idx: Some(-3), ..GradientPart::new(ids, &[], 1) };
        let (seen, mut indices) = (PlacesSeen::default(), vec![0; ids.len()]);
        let pieces = indices.chunks_mut(PIECE).zip(places[..ids.len()].chunks(PIECE)).enumerate();
        for (piece, (indices, places)) in pieces.collect::<Vec<_>>().into_iter().rev() {
            let first = piece * PIECE;
            Simd::detect().run(TakePlaces { part: &part, first, places, indices, limit, seen: &seen });
        }
        (seen.known(&part, epoch), indices)
    }

    #[test]
    fn places_taken_in_pieces_tell_what_the_whole_does() {
        let ids: Vec<i64> = (0..COUNT as i64).map(|id| if id % 5 == 3 { -3 } else { id * 17 }).collect();
        let mut places: Vec<u32> = (0..(COUNT + TAG_WORDS) as u32).collect();
        Simd::detect().run(Seal { places: &mut places, epoch: EPOCH, ids: &ids });
        let index = |place: usize| if place % 5 == 3 { PADDING } else { place as u32 };
        let (known, indices) = take_in_pieces(&ids, &places, EPOCH, COUNT as u32);
        assert_eq!((known, indices), (Known::All, (0..COUNT).map(index).collect()));
        let (known, indices) = take_in_pieces(&ids, &places, EPOCH, COUNT as u32 - 1);
        assert_eq!((known, indices[COUNT - 1]), (Known::Some, NO_INDEX));
        assert_eq!(take_in_pieces(&ids, &places, EPOCH + 1, COUNT as u32).0, Known::Nothing);
        places.swap(1, 2_000);
        assert_eq!(take_in_pieces(&ids, &places, EPOCH, COUNT as u32).0, Known::Nothing);
    }
}
