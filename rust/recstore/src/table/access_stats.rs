//! The usage of each row, in a table from which rows may leave.

use std::sync::atomic::{AtomicU64, Ordering};

use super::ids::row_index::RowIndex;
use crate::lifecycle::Usage;

/// The usage of rows by index. Threads that share them change different ones.
#[derive(Debug, Default)]
pub(super) struct Usages {
    of: Vec<AtomicU64>,
}

impl Usages {
    /// Makes room for the indices below `len`.
    pub(super) fn grow(&mut self, len: usize) {
        if len > self.of.len() {
            self.of.resize_with(len, AtomicU64::default);
        }
    }

    #[inline(always)]
    pub(super) fn of(&self, index: RowIndex) -> Usage {
        Usage(self.of[index.0 as usize].load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(super) fn set(&self, index: RowIndex, usage: Usage) {
        self.of[index.0 as usize].store(usage.0, Ordering::Relaxed);
    }

    /// Returns the bytes that `len` rows take.
    pub(super) fn bytes_for(len: usize) -> usize {
        len * size_of::<AtomicU64>()
    }
}
