//! A table's rows in two places: the hot ones in memory, the others in the slot file.
//!
//! Which rows lie where never shows in what a call gives. A row that is not in memory has its record in the file; one
//! that is may differ from the file, and then it is *dirty*. Before rows change, `Rows::make_ready` brings as many of
//! them into memory as fit, and from there on a step fails only if it has more rows than memory holds.

use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::slot_group::SlotGroup;
use super::transfer::{read_in, write_back};
use crate::calls::MemoryUse;
use crate::disk::{BufferPool, Reads, Resident, Slot, SlotFile};
use crate::kernel::parallel::Executor;
use crate::table::ids::row_index::RowIndex;
use crate::{Error, Result};

/// Where the rows of a table with a slot file lie.
#[derive(Debug)]
pub(crate) struct Tier {
    table: String,
    directory: String,
    pub(crate) residence: BufferPool,
    pub(crate) file: SlotFile,
    /// Whether all rows of the step under way are in memory, and there are frames for the new ones.
    has_step: bool,
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
    pub(crate) fn new(table: &str, directory: &str, record_floats: usize) -> Result<Self> {
        let refused = |error| disk_error(table, directory, &error);
        let file = SlotFile::create(Path::new(directory), record_floats).map_err(refused)?;
        Ok(Self {
            table: table.to_owned(),
            directory: directory.to_owned(),
            residence: BufferPool::default(),
            file,
            has_step: false,
            failure: OnceLock::new(),
            fetched: AtomicU64::new(0),
            spilled: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        })
    }

    pub(crate) fn refused(&self, error: &io::Error) -> Error {
        disk_error(&self.table, &self.directory, error)
    }

    /// Checks that no step was cut short.
    pub(crate) fn check(&self) -> Result<()> {
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
    pub(crate) fn fail(&self, error: Error) {
        _ = self.failure.set(error);
    }

    /// Returns what cut the step short that was just taken.
    pub(crate) fn cut_short(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Whether all rows of the step under way are in memory, and there are frames for the new ones.
    pub(crate) fn has_step(&self) -> bool {
        self.has_step
    }

    /// Notes whether the rows at `cold`, and `new` ones, have frames.
    pub(crate) fn note_step(&mut self, cold: &[u32], new: usize) -> bool {
        let has_frame = |&index: &u32| self.residence.frame(index).is_some();
        self.has_step = self.residence.num_free() >= new && cold.iter().all(has_frame);
        self.has_step
    }

    /// Makes room for the indices below `len`.
    pub(crate) fn grow(&mut self, len: usize) {
        self.residence.grow_indices(len);
    }

    pub(crate) fn bytes_for(&self, indices: usize) -> usize {
        BufferPool::bytes_for(indices, self.residence.num_frames())
    }

    pub(crate) fn num_resident(&self) -> usize {
        self.residence.num_resident()
    }

    /// Adds what is known of the disk.
    pub(crate) fn add_to(&self, memory: &mut MemoryUse) {
        memory.disk_bytes = self.file.bytes();
        memory.rows_fetched = self.fetched.load(Ordering::Relaxed);
        memory.rows_spilled = self.spilled.load(Ordering::Relaxed);
        memory.disk_nanoseconds = self.nanoseconds.load(Ordering::Relaxed);
    }

    /// Returns where a row lies in the table's storage, if it is in memory, and notes that it is used.
    #[inline(always)]
    pub(crate) fn place(&self, index: RowIndex) -> Option<RowIndex> {
        let frame = self.residence.frame(index.0)?;
        self.residence.set_used(frame);
        Some(RowIndex(frame))
    }

    /// As [`Tier::place`], of a row that is about to change.
    #[inline(always)]
    pub(crate) fn place_to_change(&self, index: RowIndex) -> Option<RowIndex> {
        let frame = self.residence.frame(index.0)?;
        self.residence.set_dirty(frame);
        Some(RowIndex(frame))
    }

    /// Gives a row that was just made a free frame, if there is one.
    pub(crate) fn place_new(&mut self, index: RowIndex) {
        if self.residence.frame(index.0).is_none()
            && let Some(frame) = self.residence.take_free()
        {
            self.residence.put(Resident { index: index.0, frame }, true);
        }
    }

    /// Forgets a row that was deleted.
    pub(crate) fn release(&mut self, index: RowIndex) {
        self.residence.release(index.0);
    }

    /// Reads the record of a row on disk.
    ///
    /// # Errors
    /// [`Error::Disk`].
    pub(crate) fn read(&self, index: RowIndex, record: &mut [f32]) -> Result<()> {
        self.fetched.fetch_add(1, Ordering::Relaxed);
        self.file.read(Slot::of(index.0), record).map_err(|error| self.refused(&error))
    }

    /// Reads the records of rows on disk.
    ///
    /// # Errors
    /// [`Error::Disk`]; some may have been read or not.
    pub(crate) fn read_all(&self, reads: Reads<'_>) -> Result<()> {
        self.fetched.fetch_add(reads.len() as u64, Ordering::Relaxed);
        self.file.read_all(reads).map_err(|error| self.refused(&error))
    }

    /// Writes the record of a row that is not in memory.
    ///
    /// # Errors
    /// [`Error::Disk`].
    pub(crate) fn write(&self, index: RowIndex, record: &[f32]) -> Result<()> {
        self.spilled.fetch_add(1, Ordering::Relaxed);
        self.file.write(Slot::of(index.0), record).map_err(|error| self.refused(&error))
    }

    /// Brings rows into memory, as many as there are frames; frames for `new` more are free afterwards, or as many as
    /// there are. Rows that are not among them go, but for pinned ones.
    pub(crate) fn exchange(
        &mut self,
        executor: &dyn Executor,
        storage: &mut SlotGroup,
        cold: &[u32],
        new: usize,
    ) -> Result<()> {
        let began = Instant::now();
        let missing = (cold.len() + new).saturating_sub(self.residence.num_free());
        // Only as many as are lacking: what stays may be wanted by the next step.
        let victims = self.residence.victims(missing);
        let exchanged =
            self.evict(executor, storage, victims).and_then(|()| self.fetch(executor, storage, cold));
        self.nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        exchanged
    }

    /// Frees the frames of rows; those that are dirty are written first, and all stay if that fails.
    pub(crate) fn evict(
        &mut self,
        executor: &dyn Executor,
        storage: &SlotGroup,
        victims: Vec<Resident>,
    ) -> Result<()> {
        let is_dirty = |victim: &&Resident| self.residence.is_dirty(victim.frame);
        let dirty: Vec<Resident> = victims.iter().filter(is_dirty).copied().collect();
        write_back(executor, &self.file, storage, &dirty).map_err(|error| self.refused(&error))?;
        self.spilled.fetch_add(dirty.len() as u64, Ordering::Relaxed);
        // Only now: a frame that is free may be overwritten, and its row must be in the file by then.
        victims.iter().for_each(|victim| self.residence.release(victim.index));
        Ok(())
    }

    /// Reads rows into free frames, as many as there are.
    fn fetch(&mut self, executor: &dyn Executor, storage: &mut SlotGroup, cold: &[u32]) -> Result<()> {
        let take = |&index: &u32| self.residence.take_free().map(|frame| Resident { index, frame });
        let moves: Vec<Resident> = cold.iter().map_while(take).collect();
        if let Err(error) = read_in(executor, &self.file, storage, &moves) {
            // They never belonged to a row, whatever was read into them.
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
