//! Finding the rows of a batch: one rolling pass, in input order.
//!
//! A row at random costs two trips to memory, one for the line of the id map and one for the row. The pass keeps
//! those of many ids under way: it asks for the line of the newest id, searches the line of one asked for before, asks
//! for its row, and uses the row of one that was found before. The few ids that lie in a line behind their home have
//! a stage between, so that nobody waits for that line either.

use super::id_map::{Home, IdMap, Search};
use super::initializer::Initializer;
use super::slot_group::SlotGroup;
use super::{NO_INDEX, RowIndex};
use crate::row_type::RowType;
use crate::simd::{Kernel, Lanes};

/// How many ids are in each stage: between asking for a line and searching it, between that and searching the lines
/// behind, and between that and using the row.
const STAGE: usize = 32;

/// The ids that are under way, and where they are found: rings, by the ids' positions.
struct Pipeline {
    homes: [Home; 2 * STAGE],
    searched: [Search; 2 * STAGE],
}

impl Pipeline {
    fn new() -> Self {
        Self { homes: [Home::default(); 2 * STAGE], searched: [Search::Absent; 2 * STAGE] }
    }

    /// Asks for the line of the id at `position`.
    #[inline(always)]
    fn ask(&mut self, map: &IdMap, ids: &[i64], position: usize) {
        if let Some(&id) = ids.get(position) {
            let home = map.home(id);
            map.prefetch(home);
            self.homes[position % (2 * STAGE)] = home;
        }
    }

    /// Searches the line of the id that was asked for `STAGE` ids before `position`, and asks for the line behind if
    /// it may be there.
    #[inline(always)]
    fn search(&mut self, map: &IdMap, lanes: impl Lanes, ids: &[i64], position: usize) {
        let position = position.wrapping_sub(STAGE);
        let Some(&id) = ids.get(position) else {
            return;
        };
        let home = self.homes[position % (2 * STAGE)];
        let searched = map.search(lanes, home, id);
        if searched == Search::Behind {
            map.prefetch_behind(home);
        }
        self.searched[position % (2 * STAGE)] = searched;
    }

    /// Returns the index of the id at `position - 2 * STAGE`, and its position.
    #[inline(always)]
    fn found(&self, map: &IdMap, ids: &[i64], position: usize) -> Option<(usize, Option<RowIndex>)> {
        let position = position.checked_sub(2 * STAGE)?;
        let id = *ids.get(position)?;
        let index = match self.searched[position % (2 * STAGE)] {
            Search::Found(index) => Some(index),
            Search::Absent => None,
            Search::Behind => map.search_behind(self.homes[position % (2 * STAGE)], id),
        };
        Some((position, index))
    }
}

/// Ids so few that there is nothing to overlap.
const FEW_IDS: usize = 4;

/// What a lookup reads: the ids' rows, or their initial values.
#[derive(Clone, Copy)]
pub(super) struct RowSource<'a> {
    pub(super) ids: &'a IdMap,
    pub(super) storage: &'a SlotGroup,
    pub(super) initializer: &'a Initializer,
}

impl<'a> RowSource<'a> {
    /// Calls `visit` with each id's position, index ([`NO_INDEX`] without a row) and the words of its weights.
    #[inline(always)]
    pub(super) fn walk(self, lanes: impl Lanes, ids: &[i64], mut visit: impl FnMut(usize, u32, &'a [f32])) {
        if ids.len() <= FEW_IDS {
            for (position, id) in ids.iter().enumerate() {
                let (index, words) = self.words(self.ids.find(*id));
                visit(position, index, words);
            }
            return;
        }
        let mut pipeline = Pipeline::new();
        let mut rows: [(u32, &[f32]); STAGE] = [(NO_INDEX, &[]); STAGE];
        for step in 0..ids.len() + 3 * STAGE {
            if let Some(used) = step.checked_sub(3 * STAGE) {
                let (index, words) = rows[used % STAGE];
                visit(used, index, words);
            }
            if let Some((position, index)) = pipeline.found(self.ids, ids, step) {
                let row = self.words(index);
                crate::cache::prefetch(row.1);
                rows[position % STAGE] = row;
            }
            pipeline.search(self.ids, lanes, ids, step);
            pipeline.ask(self.ids, ids, step);
        }
    }

    #[inline(always)]
    fn words(self, index: Option<RowIndex>) -> (u32, &'a [f32]) {
        match index {
            Some(index) => (index.0, self.storage.weights(index)),
            None => (NO_INDEX, &[]),
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
    fn run(self, lanes: impl Lanes) {
        let Self { source, ids, out, places, dim, row_type } = self;
        source.walk(lanes, ids, |position, index, words| {
            let row = &mut out[position * dim..][..dim];
            source.widen(row_type, ids[position], index, words, row);
            if let Some(place) = places.get_mut(position) {
                *place = index;
            }
        });
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
        let mut pipeline = Pipeline::new();
        for step in 0..of.len() + 2 * STAGE {
            if let Some((position, index)) = pipeline.found(ids, of, step) {
                indices[position] = index.map_or(NO_INDEX, |index| index.0);
            }
            pipeline.search(ids, lanes, of, step);
            pipeline.ask(ids, of, step);
        }
    }
}
