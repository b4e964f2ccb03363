//! Rows in memory and on disk, as calls see them: one record each, wherever it lies.

use super::growth::Growth;
use super::ids::row_index::RowIndex;
use super::rows::Rows;
use crate::Result;
use crate::disk::BufferPool;
use crate::kernel::parallel::Executor;

impl Rows {
    /// Brings the rows at `indices` that lie on disk into memory, as many as fit, and leaves frames for the `new` rows
    /// that are made next. Indices without a row may be among them. A table without a slot file is always ready.
    ///
    /// # Errors
    /// [`crate::Error::Disk`]; then no row has changed.
    pub(super) fn make_ready(&mut self, executor: &dyn Executor, indices: &[u32], new: Growth) -> Result<()> {
        let Some(tier) = &self.tier else { return Ok(()) };
        tier.check()?;
        // Before frames are counted: pages take their memory.
        self.gather_ids(new);
        // Before rows are pinned: a slab that goes back takes its rows along, pinned or not.
        self.shrink_frames(executor, new)?;
        let cold = self.pin(indices);
        if !cold.is_empty() || new.rows > 0 {
            self.grow_frames(cold.len() + new.rows, new);
        }
        let high_water = self.allocator.high_water_after(new.rows);
        let Some(tier) = &mut self.tier else { return Ok(()) };
        if !cold.is_empty() || new.rows > 0 {
            tier.exchange(executor, &mut self.storage, &cold, new.rows)?;
        }
        if !tier.note_step(&cold, new.rows) {
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
        let slab = self.storage.bytes_for(records) + BufferPool::bytes_for(0, records);
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
        // One slab stays whatever the store's limit says: without it no row could be brought in.
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
                + BufferPool::bytes_for(0, records);
            // The first slab was counted by `bytes_after`: without it no row could be brought in.
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
        self.tier.as_ref().map_or(0, |tier| BufferPool::bytes_for(0, tier.residence.num_frames()))
    }

    /// Returns a row's record, read into `scratch` if it lies on disk.
    ///
    /// # Errors
    /// [`crate::Error::Disk`].
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
    /// [`crate::Error::Disk`], of a row that lies on disk; then no call uses the table's rows any more, since those of one
    /// call may have changed and others not.
    pub(super) fn change(
        &mut self,
        index: RowIndex,
        is_new: bool,
        change: impl FnOnce(&mut [f32], &mut [f32]),
    ) -> Result<()> {
        let key = self.key(index);
        let place = self.tier.as_ref().map_or(Some(index), |tier| tier.place_to_change(index));
        if let Some(place) = place {
            // No snapshot has a bit for a new row, and its record holds what another row left there.
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
    /// [`crate::Error::Disk`]; no row is lost.
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
