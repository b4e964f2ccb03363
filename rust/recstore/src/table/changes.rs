//! What a table notes of its changes: for a snapshot the rows as they were at its moment; for the next delta, and for
//! those who follow the table, which rows changed and which ids were deleted.
//!
//! A snapshot costs the training next to nothing at its moment: a bit for each row that is to be written. Whoever
//! changes a row takes its bit first and keeps a copy of the row; whoever writes the snapshot takes the bits of the
//! others, some at a time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use super::ids::row_index::RowIndex;
use crate::Result;
use crate::kernel::bits::Bits;
use crate::lifecycle::Usage;

/// Names a save of a store, so that a delta can tell what it follows.
pub(crate) type SaveId = u64;

/// Copies of rows: ids, and their records one after another.
#[derive(Debug, Default)]
pub(crate) struct CopiedRows {
    pub(crate) ids: Vec<i64>,
    /// Empty where rows never leave.
    pub(crate) usages: Vec<Usage>,
    pub(crate) records: Vec<f32>,
}

/// What belongs to a row besides its record.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowKey {
    pub(super) id: i64,
    /// None where rows never leave.
    pub(super) usage: Option<Usage>,
}

impl CopiedRows {
    pub(super) fn push(&mut self, key: RowKey, record: &[f32]) {
        self.ids.push(key.id);
        self.usages.extend(key.usage);
        self.records.extend_from_slice(record);
    }

    /// Moves all rows of `others` to the end; the memory of both stays for more.
    fn append(&mut self, others: &mut Self) {
        self.ids.append(&mut others.ids);
        self.usages.append(&mut others.usages);
        self.records.append(&mut others.records);
    }

    pub(crate) fn clear(&mut self) {
        self.ids.clear();
        self.usages.clear();
        self.records.clear();
    }

    /// Drops the rows whose id `keeps` is not true of.
    pub(crate) fn retain(&mut self, keeps: impl Fn(i64) -> bool) {
        let Some(stride) = self.records.len().checked_div(self.ids.len()) else { return };
        let mut kept = 0;
        for place in 0..self.ids.len() {
            if keeps(self.ids[place]) {
                self.ids[kept] = self.ids[place];
                if let Some(usage) = self.usages.get(place).copied() {
                    self.usages[kept] = usage;
                }
                self.records.copy_within(place * stride..(place + 1) * stride, kept * stride);
                kept += 1;
            }
        }
        self.ids.truncate(kept);
        self.usages.truncate(kept);
        self.records.truncate(kept * stride);
    }
}

/// Copies of changed rows go to several piles, so that threads seldom wait for each other.
const PILES: usize = 16;

/// A table at one moment, as far as it was not written yet.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    /// The rows that were not copied yet.
    pending: Bits,
    /// Copies of rows that changed before they were written.
    kept: [Mutex<CopiedRows>; PILES],
}

impl Snapshot {
    /// Keeps a copy of a row that is about to change, if the snapshot has none yet.
    #[inline(always)]
    fn keep(&self, index: RowIndex, key: impl Fn() -> RowKey, record: &[f32]) {
        // Whoever takes the bit copies the row: a save and the threads of a step come to it at once.
        if self.pending.take(index.0 as usize) {
            // Several piles, since a step's threads come here together.
            let pile = &self.kept[index.0 as usize % PILES];
            pile.lock().unwrap_or_else(PoisonError::into_inner).push(key(), record);
        }
    }

    /// Copies up to `limit` rows from index `start` on that were not copied yet, and returns where to go on; `None` when
    /// none are left. `row` adds a row's record to what it is given, and returns the row's id; the snapshot is lost if
    /// it fails.
    pub(super) fn copy(
        &self,
        start: usize,
        limit: usize,
        mut row: impl FnMut(RowIndex, &mut Vec<f32>) -> Result<RowKey>,
        copied: &mut CopiedRows,
    ) -> Result<Option<usize>> {
        let mut next = None;
        for index in self.pending.ones_from(start).take(limit) {
            // Also behind a row that a step took meanwhile: it lies among the kept ones.
            next = Some(index + 1);
            if self.pending.take(index) {
                let key = row(RowIndex(index as u32), &mut copied.records)?;
                copied.ids.push(key.id);
                copied.usages.extend(key.usage);
            }
        }
        Ok(next)
    }

    /// Whether a row is as it was, and was not copied.
    pub(super) fn is_pending(&self, index: RowIndex) -> bool {
        self.pending.is_set(index.0 as usize)
    }

    /// Moves the copies of rows that changed behind those in `copied`.
    pub(crate) fn take_kept(&self, copied: &mut CopiedRows) {
        for pile in &self.kept {
            copied.append(&mut pile.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// What changed since a moment.
#[derive(Debug, Default)]
struct Since {
    /// The save, or the publication, whose moment it was.
    mark: u64,
    rows: Bits,
    deleted: HashSet<i64>,
}

impl Since {
    fn new(mark: u64, len: usize) -> Self {
        let mut since = Self { mark, ..Self::default() };
        since.rows.grow(len);
        since
    }

    fn note_deleted(&mut self, index: RowIndex, id: i64) {
        // A row that is gone is no changed one: a delta has it among the deleted ids alone.
        self.rows.take(index.0 as usize);
        self.deleted.insert(id);
    }

    /// Returns at most how many more bytes are in use after so many rows were deleted.
    fn bytes_to_delete(&self, rows: usize) -> usize {
        let needed = self.deleted.len() + rows;
        if needed <= self.deleted.capacity() {
            return 0;
        }
        // A set has a power of two of places.
        let capacity = (needed * 8 / 7 + 1).next_power_of_two() * 7 / 8;
        set_bytes(capacity).saturating_sub(self.deleted_bytes())
    }

    /// Adds what changed after it. Of the indices only the `used` ones count: rows may have been deleted since.
    fn joined(mut self, after: Self, used: &Bits) -> Self {
        self.rows.join(&after.rows);
        // Indices that were freed since have a bit from before: those in use alone are rows.
        self.rows.keep_only(used);
        self.deleted.extend(after.deleted);
        self
    }

    fn deleted_bytes(&self) -> usize {
        set_bytes(self.deleted.capacity())
    }
}

/// Returns the bytes of a hash set with room for so many ids: a byte beside each place, and an eighth of them free.
fn set_bytes(capacity: usize) -> usize {
    const PLACE_BYTES: usize = size_of::<i64>() + 1;
    capacity * PLACE_BYTES * 8 / 7
}

/// What is to be told of changes.
#[derive(Debug, Default)]
pub(super) struct Changes {
    since: Option<Since>,
    /// What was noted until the cut of the snapshot under way, should its save fail.
    before: Option<Since>,
    /// Those under way: of a save, and of those who read the table as it was at one moment.
    snapshots: Vec<Arc<Snapshot>>,
    published: Option<Published>,
    /// The indices there is room for.
    len: usize,
}

/// What is noted for those who follow a table.
#[derive(Debug, Default)]
struct Published {
    /// What they are to be told next.
    next: Since,
    /// What they were told last, should it not have reached them.
    last: Since,
}

/// What a cut gives: the rows of the snapshot and their number, and for a delta the ids deleted since its base.
pub(crate) struct Cut {
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) rows: usize,
    pub(crate) is_delta: bool,
    pub(crate) deleted: Vec<i64>,
}

impl Changes {
    /// Makes room for the indices below `len`.
    pub(super) fn grow(&mut self, len: usize) {
        self.len = self.len.max(len);
        self.noted_mut().for_each(|since| since.rows.grow(len));
    }

    /// Whether anything is noted of rows that change.
    pub(super) fn are_noted(&self) -> bool {
        !self.snapshots.is_empty() || self.since.is_some() || self.published.is_some()
    }

    /// Must be called before a row changes.
    #[inline(always)]
    pub(super) fn before_change(&self, index: RowIndex, key: impl Fn() -> RowKey, record: &[f32]) {
        self.snapshots.iter().for_each(|snapshot| snapshot.keep(index, &key, record));
        self.created(index);
    }

    /// Must be called when a row was made.
    #[inline(always)]
    pub(super) fn created(&self, index: RowIndex) {
        self.noted().for_each(|since| since.rows.set(index.0 as usize));
    }

    /// Must be called when a row is deleted; a snapshot under way needs its copy before.
    pub(super) fn deleted(&mut self, index: RowIndex, id: i64) {
        self.noted_mut().for_each(|since| since.note_deleted(index, id));
    }

    /// What changes are added to.
    #[inline(always)]
    fn noted(&self) -> impl Iterator<Item = &Since> {
        self.since.iter().chain(self.published.iter().map(|published| &published.next))
    }

    fn noted_mut(&mut self) -> impl Iterator<Item = &mut Since> {
        self.since.iter_mut().chain(self.published.iter_mut().map(|published| &mut published.next))
    }

    /// Begins the snapshot of save `save`: of the rows changed since `base` if that was this table's last save, else of
    /// all `used` ones. From here on changes are counted as those since `save`.
    pub(super) fn cut(&mut self, used: &Bits, base: Option<SaveId>, save: SaveId) -> Cut {
        // New notes begin at the cut, not at the end of the save: what changes while it writes is the next
        // delta's.
        self.before = self.since.replace(Since::new(save, self.len));
        // Notes count from one save: over another base they would miss rows, so all are written.
        let before = self.before.as_ref().filter(|since| Some(since.mark) == base);
        let (pending, deleted, is_delta) = match before {
            Some(Since { rows, deleted, .. }) => (rows.clone(), deleted.iter().copied().collect(), true),
            None => (used.clone(), Vec::new(), false),
        };
        let rows = pending.count();
        Cut { snapshot: self.begin_snapshot(pending), rows, is_delta, deleted }
    }

    /// Begins a snapshot of the rows at indices.
    pub(super) fn begin_snapshot(&mut self, pending: Bits) -> Arc<Snapshot> {
        let snapshot = Arc::new(Snapshot { pending, ..Snapshot::default() });
        self.snapshots.push(Arc::clone(&snapshot));
        snapshot
    }

    /// Whether a snapshot is under way: not after a load, which puts other rows in the place of its own.
    pub(super) fn has_snapshot(&self, snapshot: &Arc<Snapshot>) -> bool {
        self.snapshots.iter().any(|other| Arc::ptr_eq(other, snapshot))
    }

    /// Ends a snapshot.
    pub(super) fn end_snapshot(&mut self, snapshot: &Arc<Snapshot>) {
        self.snapshots.retain(|other| !Arc::ptr_eq(other, snapshot));
    }

    /// Ends the snapshot of a save. If it failed, changes are those since the save before it again; `used` are the
    /// indices of rows.
    pub(super) fn end_save(&mut self, snapshot: &Arc<Snapshot>, used: &Bits, was_saved: bool) {
        self.end_snapshot(snapshot);
        let before = self.before.take();
        if !was_saved {
            // Without notes from before there is no base, and the next save writes all rows.
            self.since = before.zip(self.since.take()).map(|(before, since)| before.joined(since, used));
        }
    }

    /// Notes no changes any more until the next save, which then has all rows of the table, or the next publication.
    pub(super) fn forget(&mut self) {
        (self.since, self.before, self.published) = (None, None, None);
    }

    /// Counts changes from here on as those since `save`, which holds the table as it is.
    pub(super) fn is_as_saved(&mut self, save: SaveId) {
        self.since = Some(Since::new(save, self.len));
    }

    /// Notes changes for a publication from here on.
    pub(super) fn publish(&mut self, publication: u64) {
        let next = Since::new(publication, self.len);
        self.published = Some(Published { next, last: Since::default() });
    }

    /// Whether changes are noted for some publication.
    pub(super) fn are_published(&self) -> bool {
        self.published.is_some()
    }

    /// Whether changes are noted for a publication.
    pub(super) fn are_published_by(&self, publication: u64) -> bool {
        self.published.as_ref().is_some_and(|published| published.next.mark == publication)
    }

    /// Returns the indices of rows that changed and the ids that were deleted since this was asked last. Unless the last
    /// answer `was_told`, its rows and ids come again. `used` are the indices of rows.
    pub(super) fn take_published(&mut self, used: &Bits, was_told: bool) -> (Vec<usize>, Vec<i64>) {
        let Some(Published { next, last }) = self.published.take() else { return Default::default() };
        let publication = next.mark;
        // An answer that may be lost is given again, with what changed since.
        let last = if was_told { next } else { last.joined(next, used) };
        let changed = (last.rows.ones_from(0).collect(), last.deleted.iter().copied().collect());
        self.published = Some(Published { next: Since::new(publication, self.len), last });
        changed
    }

    /// Notes nothing for a publication any more.
    pub(super) fn end_publication(&mut self, publication: u64) {
        if self.are_published_by(publication) {
            self.published = None;
        }
    }

    /// Returns the bytes in use, but for a snapshot's.
    pub(super) fn bytes(&self) -> usize {
        self.kept().map(|since| since.rows.bytes() + since.deleted_bytes()).sum()
    }

    /// Returns the bytes in use with room for the indices below `len`, whether there is something to count from or not: a
    /// save makes it so. Room that there was stays, though all rows went.
    pub(super) fn bytes_for(&self, len: usize) -> usize {
        // The notes since its last answer, and those of that answer.
        let for_publication = self.published.as_ref().map_or(0, |_| 2);
        len.max(self.len).div_ceil(64) * 8 * (1 + for_publication)
            + self.kept().map(Since::deleted_bytes).sum::<usize>()
    }

    /// What takes memory as long as there is no snapshot.
    fn kept(&self) -> impl Iterator<Item = &Since> {
        self.noted().chain(self.published.iter().map(|published| &published.last))
    }

    /// Returns at most how many more bytes are in use after so many rows were deleted.
    pub(super) fn bytes_to_delete(&self, rows: usize) -> usize {
        self.noted().map(|since| since.bytes_to_delete(rows)).sum()
    }

    /// Whether a snapshot under way still has to copy a row before it changes.
    pub(super) fn needs_copy(&self, index: RowIndex) -> bool {
        self.snapshots.iter().any(|snapshot| snapshot.pending.is_set(index.0 as usize))
    }

    /// Copies a row for the snapshots under way that have no copy yet.
    pub(super) fn copy_now(&self, index: RowIndex, key: RowKey, record: &[f32]) {
        self.snapshots.iter().for_each(|snapshot| snapshot.keep(index, || key, record));
    }
}
