//! What the lock of a table guards: ids, rows, what is noted of them, and the counts of what was done.

use std::sync::Arc;

use super::access_stats::Usages;
use super::admission::Admission;
use super::budget::Account;
use super::changes::{Changes, RowKey};
use super::engine::Engine;
use super::growth::Growth;
use super::ids::finding::FindRows;
use super::ids::id_allocator::IdAllocator;
use super::ids::id_map::IdMap;
use super::ids::row_ids::RowIds;
use super::ids::row_index::{NO_INDEX, RowIndex};
use super::shared_rows::SharedRows;
use super::storage::slot_group::SlotGroup;
use super::storage::tier::Tier;
use super::sweep::Sweep;
use crate::kernel::drawn::drawn_number;
use crate::kernel::parallel::Serial;
use crate::lifecycle::Usage;
use crate::optimizer::DecayFactor;
use crate::{Error, Result};

/// What the lock of a table guards.
pub(super) struct Rows {
    pub(super) ids: IdMap,
    pub(super) allocator: IdAllocator,
    pub(super) row_ids: RowIds,
    pub(super) changes: Changes,
    /// The records of all rows; of a table with a slot file those in memory.
    pub(super) storage: SlotGroup,
    /// What decides which ids get a row by training; none: all do.
    pub(super) admission: Option<Admission>,
    /// What ids without a row read and train; none: they read initial values.
    pub(super) shared: Option<Box<SharedRows>>,
    /// None where rows never leave.
    pub(super) usages: Option<Usages>,
    /// Rows that will leave.
    pub(super) sweep: Option<Arc<Sweep>>,
    pub(super) tier: Option<Box<Tier>>,
    /// Why rows may be of different steps: a rule of the program's own panicked.
    pub(super) broken: Option<Error>,
    /// The table's memory limit, in bytes.
    pub(super) limit: u64,
    pub(super) account: Account,
    /// Tells this table and its deletions apart from all others: places are good for one epoch.
    pub(super) epoch: u64,
    /// The memory of a step's indices, kept for the next step.
    pub(super) indices: Vec<u32>,
    pub(super) learning_rate: f64,
    pub(super) learning_rate_was_set: bool,
    pub(super) step: u64,
    /// What its steps leave of weights that they do not change, of a table where such weights decay.
    pub(super) kept: DecayFactor,
    pub(super) inserts: u64,
    pub(super) updates: u64,
    pub(super) writes: u64,
    pub(super) deletes: u64,
    pub(super) rejections: u64,
    pub(super) evictions: u64,
}

/// Numbers epochs: none is ever given out twice, whatever the process, for places may leave theirs.
pub(super) fn next_epoch() -> u64 {
    drawn_number()
}

impl Rows {
    /// Returns the index of `id`'s row, and whether it is new: then its record still holds what was there before.
    pub(super) fn find_or_allocate(&mut self, id: i64) -> (RowIndex, bool) {
        if let Some(index) = self.ids.find(id) {
            return (index, false);
        }
        let index = self.allocator.allocate();
        // Before anything is stored at the index: all that lies by index must reach so far.
        self.make_room();
        self.place_new(&[index]);
        self.ids.insert(id, index);
        self.gather_new_ids();
        self.forget(id);
        self.note_created(index, id, self.stamp(self.step.saturating_add(1)));
        self.inserts += 1;
        (index, true)
    }

    /// Notes a row that has been given its index. What is no step counts as of the next one.
    fn note_created(&mut self, index: RowIndex, id: i64, step: u64) {
        self.row_ids.set(index, id);
        self.changes.created(index);
        if let Some(usages) = &self.usages {
            usages.set(index, Usage::new(step, 0));
        }
    }

    /// Whether an id without a row is counted already.
    pub(super) fn is_candidate(&self, id: i64) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.is_candidate(id))
    }

    /// For each of some distinct ids without a row, whether the next step gives it one if it updates them in this order.
    pub(super) fn would_admit(&self, ids: &[i64], noise: impl Fn(i64) -> u64) -> Vec<bool> {
        self.admission
            .as_ref()
            .map_or_else(|| vec![true; ids.len()], |admission| admission.would_admit(ids, noise))
    }

    /// Forgets how often an id without a row was updated.
    pub(super) fn forget(&mut self, id: i64) {
        if let Some(admission) = &mut self.admission {
            admission.forget(id);
        }
    }

    /// Returns what belongs to a row besides its record.
    pub(super) fn key(&self, index: RowIndex) -> RowKey {
        RowKey { id: self.row_ids.of(index), usage: self.usages.as_ref().map(|usages| usages.of(index)) }
    }

    /// Notes that a row was written.
    pub(super) fn renew(&self, index: RowIndex) {
        if let Some(usages) = &self.usages {
            let usage = usages.of(index);
            if let Some(sweep) = &self.sweep {
                sweep.keep(index, self.row_ids.of(index), usage);
            }
            usages.set(index, Usage::new(self.stamp(self.step.saturating_add(1)), usage.count()));
        }
    }

    /// Deletes the rows of `ids` and returns how many there were.
    ///
    /// # Errors
    /// [`Error::Disk`]; [`Error::RuleFailed`]; then all are there.
    pub(super) fn delete(&mut self, ids: &[i64]) -> Result<usize> {
        self.check_whole()?;
        let before = self.ids.len();
        // The only part that can fail comes before the first row goes.
        self.copy_before_delete(ids.iter().filter_map(|id| self.ids.find(*id)))?;
        // Each is noted for the next delta.
        if self.is_limited() && self.changes.bytes_to_delete(ids.len()) as u64 > self.room() {
            // Without room for the notes there are none, and the next save writes all rows.
            self.changes.forget();
        }
        for &id in ids {
            if let Some(index) = self.remove(id) {
                self.changes.deleted(index, id);
            }
        }
        let deleted = before - self.ids.len();
        // The ids deleted are noted for the next delta: that may cost frames. What cannot go now goes with the next step.
        _ = self.shrink_frames(&Serial, Growth::NONE);
        self.settle();
        self.deletes += deleted as u64;
        // Freed indices are handed out again: places from before would lead to rows of other ids.
        if deleted > 0 {
            self.epoch = next_epoch();
        }
        Ok(deleted)
    }

    /// Gives each of `ids`, which have none and are distinct, a record; it still holds what was there before.
    pub(super) fn allocate_each(&mut self, ids: &[i64]) {
        let indices: Vec<RowIndex> = ids.iter().map(|_| self.allocator.allocate()).collect();
        self.make_room();
        self.place_new(&indices);
        for (index, id) in indices.iter().zip(ids) {
            self.note_created(*index, *id, self.stamp(self.step));
        }
        self.ids.insert_each(ids, &indices);
        self.gather_new_ids();
        self.inserts += ids.len() as u64;
    }

    #[inline(always)]
    fn gather_new_ids(&mut self) {
        // Of a table with a slot file the next call does it, which can give frames back for what it takes.
        if self.tier.is_none() {
            self.gather_ids(Growth::NONE);
        }
    }

    /// Lets ids that came lately go where they take less, as far as there is room beside `new` rows.
    #[inline(always)]
    pub(super) fn gather_ids(&mut self, new: Growth) {
        if self.ids.is_due() {
            let room = if self.is_limited() { self.room_beside(self.bytes_after(new)) } else { u64::MAX };
            self.ids.gather(usize::try_from(room).unwrap_or(usize::MAX));
        }
    }

    /// Makes room for every index that was ever handed out.
    fn make_room(&mut self) {
        let len = self.allocator.high_water();
        match &mut self.tier {
            None => self.storage.reserve(len),
            Some(tier) => tier.grow(len),
        }
        self.row_ids.grow(len);
        self.changes.grow(len);
        self.usages.iter_mut().for_each(|usages| usages.grow(len));
    }

    /// Gives rows that were just made what frames are free, if this table has frames.
    fn place_new(&mut self, indices: &[RowIndex]) {
        if let Some(tier) = &mut self.tier {
            indices.iter().for_each(|index| tier.place_new(*index));
        }
    }

    /// Keeps the memory of a step's indices for the next one, unless the table has a limit, which is for rows.
    pub(super) fn keep(&mut self, indices: Vec<u32>) {
        // With a limit their memory is given back: it counts as the table's.
        if !self.is_limited() {
            self.indices = indices;
        }
    }

    /// Frees the row of `id` and returns the index that it had.
    pub(super) fn remove(&mut self, id: i64) -> Option<RowIndex> {
        let index = self.ids.remove(id)?;
        // Before the index is free: a sweep under way decides by the usage that the row has now.
        if let (Some(sweep), Some(usages)) = (&self.sweep, &self.usages) {
            sweep.keep(index, id, usages.of(index));
        }
        self.row_ids.clear(index);
        self.allocator.free(index);
        if let Some(tier) = &mut self.tier {
            tier.release(index);
        }
        Some(index)
    }

    /// Returns the index of each id, [`NO_INDEX`] for one without a row.
    pub(super) fn find(&self, engine: Engine<'_>, ids: &[i64]) -> Vec<u32> {
        let mut indices = vec![NO_INDEX; ids.len()];
        engine.simd.run(FindRows { ids: &self.ids, of: ids, indices: &mut indices });
        indices
    }
}
