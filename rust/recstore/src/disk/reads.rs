//! Records to be read together: those that are neighbours in the file in one call, each into memory of its own.

use std::io::IoSliceMut;

use super::slot::Slot;

/// The records read in one call at most; the system takes no more.
const RECORDS_PER_CALL: usize = 1024;

/// Records that are neighbours in the file.
pub(super) struct Run {
    pub(super) first: Slot,
    pub(super) last: Slot,
    pub(super) len: usize,
}

/// Records to be read, in the order of the file, and where each goes.
#[derive(Default)]
pub(crate) struct Reads<'a> {
    pub(super) runs: Vec<Run>,
    /// For each record where it goes, run by run.
    pub(super) places: Vec<IoSliceMut<'a>>,
}

impl<'a> Reads<'a> {
    /// Adds a record that lies behind all before.
    pub(crate) fn push(&mut self, slot: Slot, record: &'a mut [f32]) {
        self.places.push(IoSliceMut::new(bytemuck::cast_slice_mut(record)));
        match self.runs.last_mut() {
            Some(run) if run.last.is_before(slot) && run.len < RECORDS_PER_CALL => {
                (run.last, run.len) = (slot, run.len + 1);
            }
            _ => self.runs.push(Run { first: slot, last: slot, len: 1 }),
        }
    }

    /// Returns how many records there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Calls `read` with each run and where its records go.
    pub(super) fn each<'b>(&'b mut self, mut read: impl FnMut(&Run, &'b mut [IoSliceMut<'a>])) {
        let mut rest = &mut self.places[..];
        for run in &self.runs {
            let (own, behind) = std::mem::take(&mut rest).split_at_mut(run.len);
            rest = behind;
            read(run, own);
        }
    }
}
