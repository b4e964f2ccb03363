//! Finding and using the rows of a batch, in input order.
//!
//! A row at random costs two trips to memory, one for the line of the id map and one for the row, and each may cost a
//! walk through page tables besides. So a run of ids is first found, then its rows are used, each pass with the next
//! trips under way. Doing both in one pass was slower: what a processor can have under way is shared by the stores.
//!
//! Finding goes through blocks: while the lines of one are asked for, those of the one before are searched, and the
//! few ids that lie in lines behind are found for the one before that. A stage is a short loop, so that much of what
//! a processor looks ahead at are loads.

use std::sync::OnceLock;

use super::id_map::{BEHIND, Home, IdMap};
use super::initializer::Initializer;
use super::slot_group::SlotGroup;
use super::tier::Tier;
use super::{NO_INDEX, RowIndex};
use crate::Error;
use crate::cache::prefetch;
use crate::row_type::RowType;
use crate::simd::{Kernel, Lanes};

/// The ids of a block.
const BLOCK: usize = 32;

/// The ids of a run: what is known of them fits the first cache.
const RUN: usize = 1024;

/// The ids of a run of a table whose rows may lie on disk: so many records are read before they are used.
const COLD_RUN: usize = 256;

/// How many rows are asked for ahead of their use.
const ROWS_AHEAD: usize = 16;

/// Ids so few that there is nothing to overlap.
const FEW_IDS: usize = 4;

/// Returns the ids of a block; none behind the last.
#[inline(always)]
fn block_of(ids: &[i64], block: usize) -> &[i64] {
    let start = (block * BLOCK).min(ids.len());
    &ids[start..ids.len().min(start + BLOCK)]
}

/// The blocks under way up to the indices of their ids.
struct Search<'a> {
    map: &'a IdMap,
    ids: &'a [i64],
    homes: [[Home; BLOCK]; 4],
    indices: [[u32; BLOCK]; 4],
}

impl<'a> Search<'a> {
    fn new(map: &'a IdMap, ids: &'a [i64]) -> Self {
        Self { map, ids, homes: [[Home::default(); BLOCK]; 4], indices: [[NO_INDEX; BLOCK]; 4] }
    }

    fn num_blocks(&self) -> usize {
        self.ids.len().div_ceil(BLOCK)
    }

    /// Asks for the lines of a block.
    #[inline(always)]
    fn ask(&mut self, block: usize) {
        let homes = &mut self.homes[block % 4];
        for (home, id) in homes.iter_mut().zip(block_of(self.ids, block)) {
            *home = self.map.home(*id);
        }
        for home in &homes[..] {
            self.map.prefetch(*home);
        }
    }

    /// Searches the lines of the block before.
    #[inline(always)]
    fn search(&mut self, lanes: impl Lanes, block: usize) {
        let Some(block) = block.checked_sub(1) else { return };
        let homes = &self.homes[block % 4];
        for ((index, home), id) in
            self.indices[block % 4].iter_mut().zip(homes).zip(block_of(self.ids, block))
        {
            *index = self.map.search(lanes, *home, *id);
            if *index == BEHIND {
                self.map.prefetch_behind(*home);
            }
        }
    }

    /// Searches the lines behind, for those ids of the block before that one whose home passed them, and returns its
    /// ids and their indices.
    #[inline(always)]
    fn finish(&mut self, block: usize) -> (usize, &[u32]) {
        let Some(block) = block.checked_sub(2) else { return (0, &[]) };
        let ids = block_of(self.ids, block);
        let indices = &mut self.indices[block % 4][..ids.len()];
        for place in 0..ids.len() {
            if indices[place] == BEHIND {
                let found = self.map.search_behind(self.homes[block % 4][place], ids[place]);
                indices[place] = found.map_or(NO_INDEX, |index| index.0);
            }
        }
        (block, indices)
    }
}

/// What a lookup reads: the ids' rows, or their initial values.
#[derive(Clone, Copy)]
pub(super) struct RowSource<'a> {
    pub(super) ids: &'a IdMap,
    pub(super) storage: &'a SlotGroup,
    pub(super) initializer: &'a Initializer,
    /// Of a table whose rows may lie on disk.
    pub(super) cold: Option<ColdRows<'a>>,
}

/// The rows of a table that may lie on disk.
#[derive(Clone, Copy)]
pub(super) struct ColdRows<'a> {
    pub(super) tier: &'a Tier,
    /// Gets the first error; rows that could not be read count as zeros then.
    pub(super) failure: &'a OnceLock<Error>,
}

/// The records of a run that lie on disk.
#[derive(Default)]
struct Fetched {
    /// Index and place in the run, in the order of the file.
    cold: Vec<(u32, usize)>,
    /// The records, each index once.
    records: Vec<f32>,
    /// For each place in the run which of the records is its own.
    record_of: Vec<usize>,
}

impl Fetched {
    /// Reads the records of those of `indices` that lie on disk, neighbours in one call.
    fn fetch(&mut self, cold: ColdRows<'_>, storage: &SlotGroup, indices: &[u32]) {
        let is_cold = |index: u32| index != NO_INDEX && cold.tier.place(RowIndex(index)).is_none();
        let found = indices.iter().enumerate().filter(|(_, index)| is_cold(**index));
        self.cold.clear();
        self.cold.extend(found.map(|(place, index)| (*index, place)));
        self.cold.sort_unstable();
        self.record_of.resize(indices.len(), 0);
        for (number, same) in self.cold.chunk_by(|(one, _), (next, _)| one == next).enumerate() {
            same.iter().for_each(|(_, place)| self.record_of[*place] = number);
        }
        self.cold.dedup_by_key(|(index, _)| *index);
        self.records.clear();
        self.records.resize(self.cold.len() * storage.stride(), 0.0);
        let mut rest = &mut self.records[..];
        for run in self.cold.chunk_by(|(one, _), (next, _)| one + 1 == *next) {
            let (own, behind) = std::mem::take(&mut rest).split_at_mut(run.len() * storage.stride());
            rest = behind;
            if let Err(error) = cold.tier.read(RowIndex(run[0].0), own) {
                _ = cold.failure.set(error);
                return;
            }
        }
    }

    fn weights(&self, storage: &SlotGroup, place: usize) -> &[f32] {
        &self.records[self.record_of[place] * storage.stride()..][..storage.weight_words()]
    }
}

/// Takes the rows of a batch. A trait, since a closure would be compiled without the kernel's instructions.
pub(super) trait TakeRows {
    /// Takes the row of the id at `position`: its index ([`NO_INDEX`] without a row) and the words of its weights.
    /// Must be `#[inline(always)]`.
    fn take(&mut self, position: usize, index: u32, words: &[f32]);
}

impl<'a> RowSource<'a> {
    /// Hands `rows` the row of each id, in input order.
    #[inline(always)]
    pub(super) fn walk(self, lanes: impl Lanes, ids: &[i64], rows: &mut impl TakeRows) {
        if let Some(cold) = self.cold {
            return self.walk_tiered(cold, lanes, ids, rows);
        }
        let mut indices = [NO_INDEX; RUN];
        let mut found: [&[f32]; RUN] = [&[]; RUN];
        for (run, ids) in ids.chunks(RUN).enumerate() {
            let indices = &mut indices[..ids.len()];
            FindRows { ids: self.ids, of: ids, indices }.run(lanes);
            for (words, index) in found.iter_mut().zip(&*indices) {
                *words = self.words(*index);
            }
            for (place, index) in indices.iter().enumerate() {
                // Behind the run lie rows of the run before, if any: asking for them does no harm.
                prefetch(found[(place + ROWS_AHEAD) % RUN]);
                rows.take(run * RUN + place, *index, found[place]);
            }
        }
    }

    /// As [`RowSource::walk`], of a table whose rows may lie on disk.
    #[inline(always)]
    fn walk_tiered(self, cold: ColdRows<'a>, lanes: impl Lanes, ids: &[i64], rows: &mut impl TakeRows) {
        let mut indices = [NO_INDEX; COLD_RUN];
        let mut fetched = Fetched::default();
        for (run, ids) in ids.chunks(COLD_RUN).enumerate() {
            let indices = &mut indices[..ids.len()];
            FindRows { ids: self.ids, of: ids, indices }.run(lanes);
            fetched.fetch(cold, self.storage, indices);
            for (place, index) in indices.iter().enumerate() {
                let words = match *index {
                    NO_INDEX => &[][..],
                    index => match cold.tier.place(RowIndex(index)) {
                        Some(place) => self.storage.weights(place),
                        None => fetched.weights(self.storage, place),
                    },
                };
                rows.take(run * COLD_RUN + place, *index, words);
            }
        }
    }

    #[inline(always)]
    fn words(self, index: u32) -> &'a [f32] {
        match index {
            NO_INDEX => &[],
            index => self.storage.weights(RowIndex(index)),
        }
    }

    /// Writes a row that [`RowSource::walk`] found for `id`.
    #[inline(always)]
    pub(super) fn widen(self, row_type: impl RowType, id: i64, index: u32, words: &[f32], row: &mut [f32]) {
        if index == NO_INDEX {
            self.initializer.fill(id, row);
            round_trip(row_type, row);
        } else {
            row_type.widen(words, row);
        }
    }
}

/// Rounds a row to what a table of this type keeps of it.
#[inline(always)]
pub(super) fn round_trip(row_type: impl RowType, row: &mut [f32]) {
    const PIECE: usize = 64;
    if row_type.is_float32() {
        return;
    }
    for piece in row.chunks_mut(PIECE) {
        let mut words = [0.0; PIECE];
        let words = &mut words[..row_type.words(piece.len())];
        row_type.round(piece, words);
        row_type.widen(words, piece);
    }
}

/// Writes the row of each id to `out`, and its index to `places` unless that is empty.
pub(super) struct ReadRows<'a, T> {
    pub(super) source: RowSource<'a>,
    pub(super) ids: &'a [i64],
    pub(super) out: &'a mut [f32],
    pub(super) places: &'a mut [u32],
    pub(super) dim: usize,
    pub(super) row_type: T,
}

impl<T: RowType> Kernel for ReadRows<'_, T> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        self.source.walk(lanes, self.ids, &mut self);
    }
}

impl<T: RowType> TakeRows for ReadRows<'_, T> {
    #[inline(always)]
    fn take(&mut self, position: usize, index: u32, words: &[f32]) {
        let row = &mut self.out[position * self.dim..][..self.dim];
        self.source.widen(self.row_type, self.ids[position], index, words, row);
        if let Some(place) = self.places.get_mut(position) {
            *place = index;
        }
    }
}

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
        let mut search = Search::new(ids, of);
        for block in 0..search.num_blocks() + 2 {
            search.ask(block);
            search.search(lanes, block);
            let (found, of_block) = search.finish(block);
            indices[found * BLOCK..][..of_block.len()].copy_from_slice(of_block);
        }
    }
}
