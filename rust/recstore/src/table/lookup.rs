//! Finding and using the rows of a batch, in input order.
//!
//! A row at random costs two trips to memory, one for the line of the id map and one for the row, and each may cost a
//! walk through page tables besides. So a run of ids is first found, then its rows are used, each pass with the next
//! trips under way (see [`crate::kernel::cache`]). Every stage is a short loop, so that much of what a processor looks
//! ahead at are loads. The few ids that lie in lines behind their buckets are found when all lines of a run were searched.
//!
//! Where the rows lie is known for the whole run before any is used: whatever is loaded between the stores of rows waits
//! for them. Rows are used in groups, so that initial values are drawn for several ids at a time. Those used later are
//! asked for one with each row that is copied, and a group at a time where more is done with a row: what copying gains by
//! that, the sums of bags lose.

use std::ops::Range;
use std::sync::OnceLock;

use super::ids::finding::FindRows;
use super::ids::id_lines::RUN;
use super::ids::id_map::IdMap;
use super::ids::row_index::{NO_INDEX, RowIndex};
use super::initial_values::initializer::Initializer;
use super::shared_rows::SharedRows;
use super::storage::slot_group::SlotGroup;
use super::storage::tier::Tier;
use crate::Error;
use crate::disk::{Reads, Slot};
use crate::kernel::cache::{Cache, prefetch, rows_later, rows_of_lines};
use crate::kernel::simd::{Kernel, Lanes};
use crate::optimizer::Idle;
use crate::rows::any_row_type::AnyRowType;
use crate::rows::row_type::RowType;

/// The ids of a run of a table whose rows may lie on disk: so many records are read before they are used.
const COLD_RUN: usize = 256;

/// The lines of the rows of a group.
const LINES_TOGETHER: usize = 64;

/// What a lookup reads: the ids' rows, or those that they share, or their initial values.
#[derive(Clone, Copy)]
pub(super) struct RowSource<'a> {
    pub(super) ids: &'a IdMap,
    pub(super) storage: &'a SlotGroup,
    pub(super) initializer: &'a Initializer,
    pub(super) row_type: AnyRowType,
    /// Of a table whose ids without a row share some.
    pub(super) shared: Option<&'a SharedRows>,
    pub(super) dim: usize,
    /// Of a table whose rows may lie on disk.
    pub(super) cold: Option<ColdRows<'a>>,
    /// Of a table whose steps change rows that they leave alone.
    pub(super) idle: Option<IdleRows>,
}

/// What brings the rows of a table up to now that its last steps left alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdleRows {
    idle: Idle,
    /// Where a record's slot begins and ends that tells its last step.
    slot: [usize; 2],
}

impl IdleRows {
    pub(super) fn new(idle: Idle, slot: &Range<usize>) -> Self {
        Self { idle, slot: [slot.start, slot.end] }
    }

    /// Writes the weights of a record as they are now to `row`.
    #[inline(always)]
    pub(super) fn read(self, record: &[f32], row: &mut [f32]) {
        let [start, end] = self.slot;
        self.idle.read(record, &record[start..end], row);
    }
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
    /// For each place in the run where the record lies in memory, [`NO_INDEX`] for one that does not.
    places: Vec<u32>,
    /// Where in the file, and place in the run, in the order of the file.
    cold: Vec<(Slot, usize)>,
    /// The records, each once.
    records: Vec<f32>,
    /// For each place in the run which of the records is its own.
    record_of: Vec<usize>,
}

impl Fetched {
    /// Reads the records of those of `indices` that lie on disk, together.
    fn fetch(&mut self, cold: ColdRows<'_>, storage: &SlotGroup, indices: &[u32]) {
        self.places.clear();
        self.places.extend(indices.iter().map(|&index| match index {
            NO_INDEX => NO_INDEX,
            index => cold.tier.place(RowIndex(index)).map_or(NO_INDEX, |place| place.0),
        }));
        let found = indices.iter().zip(&self.places).enumerate();
        let found = found.filter(|(_, (index, place))| **place == NO_INDEX && **index != NO_INDEX);
        self.cold.clear();
        self.cold.extend(found.map(|(place, (index, _))| (Slot::of(*index), place)));
        if self.cold.is_empty() {
            return;
        }
        // By slot: neighbours in the file share a call, and an id that comes twice is read once.
        self.cold.sort_unstable();
        self.record_of.resize(indices.len(), 0);
        for (number, same) in self.cold.chunk_by(|(one, _), (next, _)| one == next).enumerate() {
            same.iter().for_each(|(_, place)| self.record_of[*place] = number);
        }
        self.cold.dedup_by_key(|(slot, _)| *slot);
        self.records.clear();
        self.records.resize(self.cold.len() * storage.stride(), 0.0);
        let mut reads = Reads::default();
        for ((slot, _), record) in self.cold.iter().zip(self.records.chunks_exact_mut(storage.stride())) {
            reads.push(*slot, record);
        }
        // A kernel returns nothing: the first error waits for the caller, who gives it in place of the rows.
        if let Err(error) = cold.tier.read_all(reads) {
            _ = cold.failure.set(error);
        }
    }

    fn record(&self, storage: &SlotGroup, place: usize) -> &[f32] {
        &self.records[self.record_of[place] * storage.stride()..][..storage.stride()]
    }
}

/// Takes the rows of a batch. A trait, since a closure would be compiled without the kernel's instructions.
pub(super) trait TakeRows {
    /// Takes the rows of the ids from `first` on: their indices, [`NO_INDEX`] for an id without a row, and the words of
    /// their weights, or of their initial values. `upcoming` are the rows' words and those of the rows taken after them,
    /// to ask for; those of ids without a row are empty. Must be `#[inline(always)]`.
    fn take(&mut self, first: usize, indices: &[u32], words: &[&[f32]], upcoming: &[&[f32]]);

    /// Asks for the memory that the row of the id at `place` is copied to, if it is copied. Must be `#[inline(always)]`.
    fn prefetch_copy(&self, _place: usize) {}
}

impl<'a> RowSource<'a> {
    /// Hands `rows` the rows of all ids, in input order.
    #[inline(always)]
    pub(super) fn walk(
        self,
        lanes: impl Lanes,
        row_type: impl RowType,
        ids: &[i64],
        rows: &mut impl TakeRows,
    ) {
        let run_len = if self.cold.is_some() { COLD_RUN } else { RUN };
        let row_words = self.storage.weight_words();
        let (group_len, later) = (rows_of_lines(LINES_TOGETHER, row_words), rows_later(row_words));
        let mut indices = vec![NO_INDEX; ids.len().min(run_len)];
        let (mut fetched, mut initial) = (Fetched::default(), InitialRows::default());
        let mut current = Vec::new();
        // A run is found first and used then. One rolling pass of both took 130 against 70 ns: asking and
        // storing share the processor's look-ahead, and each trip delays everything behind it.
        for (number, ids) in ids.chunks(run_len).enumerate() {
            let indices = &mut indices[..ids.len()];
            FindRows { ids: self.ids, of: ids, indices }.run(lanes);
            if let Some(cold) = self.cold {
                fetched.fetch(cold, self.storage, indices);
            }
            // All rows of the run are located before any is used: with a load between the stores of rows,
            // even that of the next row's place, a lookup took 38 against 32 ns (1 M rows) and 54 against 41
            // (4 M).
            let words = indices.iter().enumerate().map(|(place, index)| {
                let words = match *index {
                    NO_INDEX => Default::default(),
                    index => self.words(&fetched, place, RowIndex(index)),
                };
                if place < later && !words.is_empty() {
                    prefetch(words, Cache::Second);
                }
                words
            });
            let words: Vec<&[f32]> = words.collect();
            for (group, own) in words.chunks(group_len).enumerate() {
                let first = group * group_len;
                let group = first..first + own.len();
                let copy = |place| rows.prefetch_copy(number * run_len + first + place);
                let completed = initial.complete(self, row_type, &ids[group.clone()], own, copy);
                let own = if completed.is_empty() { own } else { &completed };
                let caught_up = self.idle.map(|idle| catch_up(idle, own, self.dim, &mut current));
                let own = caught_up.as_deref().unwrap_or(own);
                rows.take(number * run_len + first, &indices[group], own, &words[first..]);
            }
        }
    }

    /// Returns the words of the row at `place` of a run; of a table whose steps change idle rows the whole record.
    #[inline(always)]
    fn words<'b>(self, fetched: &'b Fetched, place: usize, index: RowIndex) -> &'b [f32]
    where
        'a: 'b,
    {
        let record = match self.cold {
            None => self.storage.record(index),
            Some(_) => match fetched.places[place] {
                NO_INDEX => fetched.record(self.storage, place),
                index => self.storage.record(RowIndex(index)),
            },
        };
        if self.idle.is_some() { record } else { &record[..self.storage.weight_words()] }
    }
}

/// Returns the weights of records as they are now, written to `current`. Initial values, which have no more than `dim`
/// words, stay.
#[inline(always)]
fn catch_up<'a>(idle: IdleRows, records: &[&[f32]], dim: usize, current: &'a mut Vec<f32>) -> Vec<&'a [f32]> {
    current.resize(records.len() * dim, 0.0);
    for (record, row) in records.iter().zip(current.chunks_exact_mut(dim)) {
        if record.len() == dim {
            row.copy_from_slice(record);
        } else {
            idle.read(record, row);
        }
    }
    current.chunks_exact(dim).collect()
}

/// The initial values of those ids of a group that have no row, as a table keeps them.
#[derive(Default)]
struct InitialRows {
    ids: Vec<i64>,
    values: Vec<f32>,
    rounded: Vec<f32>,
}

impl InitialRows {
    /// Returns `words` of a group with initial values in the empty places, or nothing if there are none.
    #[inline(always)]
    fn complete<'a>(
        &'a mut self,
        source: RowSource<'a>,
        row_type: impl RowType,
        ids: &[i64],
        words: &[&'a [f32]],
        prefetch_copy: impl Fn(usize),
    ) -> Vec<&'a [f32]> {
        self.ids.clear();
        for (id, words) in ids.iter().zip(words) {
            if words.is_empty() {
                self.ids.push(*id);
            }
        }
        if self.ids.is_empty() {
            return Vec::new();
        }
        // Drawing the values gives the memory time to come.
        for (place, _) in words.iter().enumerate().filter(|(_, words)| words.is_empty()) {
            prefetch_copy(place);
        }
        if let Some(shared) = source.shared {
            if shared.len() > 0 {
                return with_shared(shared, ids, words);
            }
            self.ids.iter_mut().for_each(|id| *id = SharedRows::first_value_of(shared.index_of(*id)));
        }
        let row_words = source.storage.weight_words();
        self.values.resize(self.ids.len() * source.dim, 0.0);
        source.initializer.fill(source.row_type.simd, &self.ids, &mut self.values);
        let mut initial = if row_type.is_float32() {
            self.values.chunks_exact(row_words)
        } else {
            self.rounded.resize(self.ids.len() * row_words, 0.0);
            for (row, words) in
                self.values.chunks_exact(source.dim).zip(self.rounded.chunks_exact_mut(row_words))
            {
                row_type.round(row, words);
            }
            self.rounded.chunks_exact(row_words)
        };
        let words = words.iter().map(|words| if words.is_empty() { initial.next() } else { Some(*words) });
        words.map(Option::unwrap_or_default).collect()
    }
}

/// Returns `words` of a group with the weights of shared rows in the empty places.
fn with_shared<'a>(shared: &'a SharedRows, ids: &[i64], words: &[&'a [f32]]) -> Vec<&'a [f32]> {
    let each = ids.iter().zip(words);
    let each = each.map(|(id, words)| if words.is_empty() { shared.weights_of(*id) } else { Some(*words) });
    let words: Vec<&[f32]> = each.map(Option::unwrap_or_default).collect();
    words.iter().for_each(|words| prefetch(words, Cache::Second));
    words
}

/// Writes the row of each id to `out`, and its index to `places` unless that is empty. Compiled for each row
/// type: with one that is known when the program runs, rows are read 3 to 8 % more slowly.
pub(super) struct ReadRows<'a, T> {
    pub(super) source: RowSource<'a>,
    pub(super) ids: &'a [i64],
    pub(super) out: &'a mut [f32],
    pub(super) places: &'a mut [u32],
    pub(super) row_type: T,
}

impl<T: RowType> Kernel for ReadRows<'_, T> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        self.source.walk(lanes, self.row_type, self.ids, &mut self);
    }
}

impl<T: RowType> TakeRows for ReadRows<'_, T> {
    #[inline(always)]
    fn take(&mut self, first: usize, indices: &[u32], words: &[&[f32]], upcoming: &[&[f32]]) {
        let dim = self.source.dim;
        self.row_type.widen_each(words, upcoming, &mut self.out[first * dim..][..indices.len() * dim], dim);
        if let Some(places) = self.places.get_mut(first..first + indices.len()) {
            places.copy_from_slice(indices);
        }
    }

    #[inline(always)]
    fn prefetch_copy(&self, place: usize) {
        let dim = self.source.dim;
        prefetch(&self.out[place * dim..][..dim], Cache::Second);
    }
}
