//! A table's rows in two places: the hot ones in memory, the others in the slot file.
//!
//! Which rows lie where never shows in what a call gives. A row that is not in memory has its record in the file; one
//! that is may differ from the file, and then it is *dirty*. Before rows change, [`Rows::make_ready`] brings as many of
//! them into memory as fit, and from there on a step fails only if it has more rows than memory holds.

use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::memory::Growth;
use super::slot_group::SlotGroup;
use super::transfer::{read_in, write_back};
use super::{RowIndex, Rows};
use crate::calls::MemoryUse;
use crate::disk::{Residence, Resident, SlotFile};
use crate::kernel::parallel::Executor;
use crate::{Error, Result};

/// Where the rows of a table with a slot file lie.
#[derive(Debug)]
pub(super) struct Tier {
    table: String,
    directory: String,
    residence: Residence,
    file: SlotFile,
    /// Why some rows of a step may have changed and others not: no call uses the rows from then on.
    failure: OnceLock<Error>,
    fetched: AtomicU64,
    spilled: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Tier {
    /// Makes the slot file of a table.
    ///
    /// # Errors
    /// [`Error::Disk`].
    pub(super) fn new(table: &str, directory: &str, record_floats: usize) -> Result<Self> {
        let refused = |error| disk_error(table, directory, &error);
        let file = SlotFile::create(Path::new(directory), record_floats).map_err(refused)?;
        Ok(Self {
            table: table.to_owned(),
            directory: directory.to_owned(),
            residence: Residence::default(),
            file,
            failure: OnceLock::new(),
            fetched: AtomicU64::new(0),
            spilled: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        })
    }

    fn refused(&self, error: &io::Error) -> Error {
        disk_error(&self.table, &self.directory, error)
    }

    /// Checks that no step was cut short.
    pub(super) fn check(&self) -> Result<()> {
        match self.failure.get() {
            Some(Error::Disk { table, path, message }) => Err(Error::Disk {
                table: table.clone(),
                path: path.clone(),
                message: format!(
                    "a step was cut short, and rows are of different steps: clear the table or load a checkpoint ({message})"
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Notes that a step was cut short.
    pub(super) fn fail(&self, error: Error) {
        _ = self.failure.set(error);
    }

    /// Returns what cut the step short that was just taken.
    pub(super) fn cut_short(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Makes room for the indices below `len`.
    pub(super) fn grow(&mut self, len: usize) {
        self.residence.grow_indices(len);
    }

    pub(super) fn bytes_for(&self, indices: usize) -> usize {
        Residence::bytes_for(indices, self.residence.num_frames())
    }

    pub(super) fn num_resident(&self) -> usize {
        self.residence.num_resident()
    }

    /// Adds what is known of the disk.
    pub(super) fn add_to(&self, memory: &mut MemoryUse) {
        memory.disk_bytes = self.file.bytes();
        memory.rows_fetched = self.fetched.load(Ordering::Relaxed);
        memory.rows_spilled = self.spilled.load(Ordering::Relaxed);
        memory.disk_nanoseconds = self.nanoseconds.load(Ordering::Relaxed);
    }

    /// Returns where a row lies in the table's storage, if it is in memory, and notes that it is used.
    #[inline(always)]
    pub(super) fn place(&self, index: RowIndex) -> Option<RowIndex> {
        let frame = self.residence.frame(index.0)?;
        self.residence.set_used(frame);
        Some(RowIndex(frame))
    }

    /// As [`Tier::place`], of a row that is about to change.
    #[inline(always)]
    pub(super) fn place_to_change(&self, index: RowIndex) -> Option<RowIndex> {
        let frame = self.residence.frame(index.0)?;
        self.residence.set_dirty(frame);
        Some(RowIndex(frame))
    }

    /// Gives a row that was just made a free frame, if there is one.
    pub(super) fn place_new(&mut self, index: RowIndex) {
        if self.residence.frame(index.0).is_none()
            && let Some(frame) = self.residence.take_free()
        {
            self.residence.put(Resident { index: index.0, frame }, true);
        }
    }

    /// Forgets a row that was deleted.
    pub(super) fn release(&mut self, index: RowIndex) {
        self.residence.release(index.0);
    }

    /// Reads the records of rows on disk, the first of index `index` and the others behind it.
    ///
    /// # Errors
    /// [`Error::Disk`].
    pub(super) fn read(&self, index: RowIndex, records: &mut [f32]) -> Result<()> {
        self.fetched.fetch_add((records.len() / self.file.record_floats()) as u64, Ordering::Relaxed);
        self.file.read(index.0, records).map_err(|error| self.refused(&error))
    }

    /// Writes the record of a row that is not in memory.
    ///
    /// # Errors
    /// [`Error::Disk`].
    pub(super) fn write(&self, index: RowIndex, record: &[f32]) -> Result<()> {
        self.spilled.fetch_add(1, Ordering::Relaxed);
        self.file.write(index.0, record).map_err(|error| self.refused(&error))
    }

    /// Brings rows into memory, as many as there are frames; frames for `new` more are free afterwards, or as many as
    /// there are. Rows that are not among them go, but for pinned ones.
    fn exchange(
        &mut self,
        executor: &dyn Executor,
        storage: &mut SlotGroup,
        cold: &[u32],
        new: usize,
    ) -> Result<()> {
        let began = Instant::now();
        let missing = (cold.len() + new).saturating_sub(self.residence.num_free());
        let victims = self.residence.victims(missing);
        let exchanged =
            self.evict(executor, storage, victims).and_then(|()| self.fetch(executor, storage, cold));
        self.nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        exchanged
    }

    /// Frees the frames of rows; those that are dirty are written first, and all stay if that fails.
    fn evict(&mut self, executor: &dyn Executor, storage: &SlotGroup, victims: Vec<Resident>) -> Result<()> {
        let mut dirty: Vec<Resident> =
            victims.iter().filter(|victim| self.residence.is_dirty(victim.frame)).copied().collect();
        dirty.sort_unstable();
        write_back(executor, &self.file, storage, &dirty).map_err(|error| self.refused(&error))?;
        self.spilled.fetch_add(dirty.len() as u64, Ordering::Relaxed);
        victims.iter().for_each(|victim| self.residence.release(victim.index));
        Ok(())
    }

    /// Reads rows, sorted, into free frames, as many as there are.
    fn fetch(&mut self, executor: &dyn Executor, storage: &mut SlotGroup, cold: &[u32]) -> Result<()> {
        let take = |&index: &u32| self.residence.take_free().map(|frame| Resident { index, frame });
        let moves: Vec<Resident> = cold.iter().map_while(take).collect();
        if let Err(error) = read_in(executor, &self.file, storage, &moves) {
            moves.iter().for_each(|one| self.residence.give_back(one.frame));
            return Err(self.refused(&error));
        }
        self.fetched.fetch_add(moves.len() as u64, Ordering::Relaxed);
        for one in moves {
            self.residence.put(one, false);
            self.residence.pin(one.frame);
        }
        Ok(())
    }
}

fn disk_error(table: &str, directory: &str, error: &io::Error) -> Error {
    Error::Disk { table: table.to_owned(), path: directory.to_owned(), message: error.to_string() }
}

impl Rows {
    /// Brings the rows at `indices` that lie on disk into memory, as many as fit, and leaves frames for the `new` rows
    /// that are made next. Indices without a row may be among them. A table without a slot file is always ready.
    ///
    /// # Errors
    /// [`Error::Disk`]; then no row has changed.
    pub(super) fn make_ready(&mut self, executor: &dyn Executor, indices: &[u32], new: Growth) -> Result<()> {
        let Some(tier) = &self.tier else { return Ok(()) };
        tier.check()?;
        self.shrink_frames(executor, new)?;
        let cold = self.pin(indices);
        if cold.is_empty() && new.rows == 0 {
            return Ok(());
        }
        self.grow_frames(cold.len() + new.rows, new);
        let high_water = self.allocator.high_water_after(new.rows);
        let Some(tier) = &mut self.tier else { return Ok(()) };
        tier.exchange(executor, &mut self.storage, &cold, new.rows)?;
        if tier.residence.num_free() < new.rows
            || cold.iter().any(|&index| tier.residence.frame(index).is_none())
        {
            // What goes through the disk during the step must find room there: a step cannot be taken back.
            tier.file.reserve(high_water).map_err(|error| tier.refused(&error))?;
        }
        Ok(())
    }

    /// Pins the rows at `indices` that are in memory, and returns the others, sorted, each once.
    fn pin(&mut self, indices: &[u32]) -> Vec<u32> {
        let high_water = self.allocator.high_water();
        let Some(tier) = &mut self.tier else { return Vec::new() };
        tier.residence.unpin_all();
        let mut cold = Vec::new();
        for &index in indices.iter().filter(|&&index| (index as usize) < high_water) {
            match tier.residence.frame(index) {
                Some(frame) => tier.residence.pin(frame),
                None => cold.push(index),
            }
        }
        cold.sort_unstable();
        cold.dedup();
        cold
    }

    /// Returns how many slabs of frames there may be when there are `new` more rows.
    fn most_slabs(&self, new: Growth) -> usize {
        let records = self.storage.slab_records();
        let slab = self.storage.bytes_for(records) + Residence::bytes_for(0, records);
        let index = self.index_bytes_after(new) - self.frame_bytes();
        usize::try_from(self.limit).unwrap_or(usize::MAX).saturating_sub(index) / slab
    }

    /// Gives frames back that `new` rows leave no room for.
    pub(super) fn shrink_frames(&mut self, executor: &dyn Executor, new: Growth) -> Result<()> {
        if self.tier.is_none() {
            return Ok(());
        }
        let records = self.storage.slab_records();
        let mut slabs = self.most_slabs(new).max(1).min(self.storage.num_slabs());
        let index = self.index_bytes_after(new);
        while slabs > 1 && !self.account.raise((index + self.storage.bytes_for(slabs * records)) as u64) {
            slabs -= 1;
        }
        if slabs == self.storage.num_slabs() {
            return Ok(());
        }
        let frames = slabs * records;
        let Some(tier) = &mut self.tier else { return Ok(()) };
        let victims = tier.residence.residents_from(frames);
        tier.evict(executor, &self.storage, victims)?;
        tier.residence.shrink_frames(frames);
        self.storage.truncate(slabs);
        Ok(())
    }

    /// Adds frames until `wanted` are free, as far as the limits of table and store allow with `new` more rows.
    fn grow_frames(&mut self, wanted: usize, new: Growth) {
        let most = self.most_slabs(new).max(1);
        let records = self.storage.slab_records();
        let free = |rows: &Self| rows.tier.as_ref().map_or(usize::MAX, |tier| tier.residence.num_free());
        while free(self) < wanted && self.storage.num_slabs() < most {
            let slabs = self.storage.num_slabs() + 1;
            let bytes = self.index_bytes_after(new)
                + self.storage.bytes_for(slabs * records)
                + Residence::bytes_for(0, records);
            if !self.account.raise(bytes as u64) && slabs > 1 {
                return;
            }
            self.storage.reserve(slabs * records);
            if let Some(tier) = &mut self.tier {
                tier.residence.grow_frames(slabs * records);
            }
        }
    }

    /// Returns the bytes of what is noted of frames.
    fn frame_bytes(&self) -> usize {
        self.tier.as_ref().map_or(0, |tier| Residence::bytes_for(0, tier.residence.num_frames()))
    }

    /// Returns a row's record, read into `scratch` if it lies on disk.
    ///
    /// # Errors
    /// [`Error::Disk`].
    pub(super) fn record<'a>(&'a self, index: RowIndex, scratch: &'a mut Vec<f32>) -> Result<&'a [f32]> {
        let Some(tier) = &self.tier else { return Ok(self.storage.record(index)) };
        if let Some(place) = tier.place(index) {
            return Ok(self.storage.record(place));
        }
        scratch.resize(self.storage.stride(), 0.0);
        tier.read(index, scratch)?;
        Ok(scratch)
    }

    /// Changes weights and state of a row, which were not there before if it `is_new`.
    ///
    /// # Errors
    /// [`Error::Disk`], of a row that lies on disk; then no call uses the table's rows any more, since those of one call
    /// may have changed and others not.
    pub(super) fn change(
        &mut self,
        index: RowIndex,
        is_new: bool,
        change: impl FnOnce(&mut [f32], &mut [f32]),
    ) -> Result<()> {
        let key = self.key(index);
        let place = self.tier.as_ref().map_or(Some(index), |tier| tier.place_to_change(index));
        if let Some(place) = place {
            if !is_new {
                self.changes.before_change(index, || key, self.storage.record(place));
            }
            let (weights, state) = self.storage.record_mut(place);
            change(weights, state);
            return Ok(());
        }
        let mut scratch = vec![0.0; self.storage.stride()];
        let changed = self.change_on_disk(index, is_new, &mut scratch, change);
        if let (Err(error), Some(tier)) = (&changed, &self.tier) {
            tier.fail(error.clone());
        }
        changed
    }

    fn change_on_disk(
        &self,
        index: RowIndex,
        is_new: bool,
        record: &mut [f32],
        change: impl FnOnce(&mut [f32], &mut [f32]),
    ) -> Result<()> {
        let Some(tier) = &self.tier else { return Ok(()) };
        if !is_new {
            tier.read(index, record)?;
            self.changes.before_change(index, || self.key(index), record);
        }
        let (weights, state) = record.split_at_mut(self.storage.weight_words());
        change(weights, state);
        tier.write(index, record)
    }

    /// Copies rows that are about to be deleted for the snapshot under way: what lies on disk may fail to be read.
    ///
    /// # Errors
    /// [`Error::Disk`]; no row is lost.
    pub(super) fn copy_before_delete(&self, indices: impl Iterator<Item = RowIndex>) -> Result<()> {
        let mut scratch = Vec::new();
        for index in indices.filter(|&index| self.changes.needs_copy(index)) {
            let record = self.record(index, &mut scratch)?;
            self.changes.copy_now(index, self.key(index), record);
        }
        Ok(())
    }

    /// Checks that the rows are all of one step.
    pub(super) fn check_whole(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)?;
        self.tier.as_ref().map_or(Ok(()), |tier| tier.check())
    }
}
