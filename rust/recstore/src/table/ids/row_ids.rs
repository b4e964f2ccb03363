//! The id of each row: the way back from an index, for whoever goes through all rows of a table.

use super::row_index::RowIndex;
use crate::kernel::bits::Bits;
use crate::kernel::pages::{Pages, supplied_bytes};

/// The ids of rows by index.
#[derive(Debug, Default)]
pub(crate) struct RowIds {
    ids: Pages<i64>,
    /// The indices there is room for.
    len: usize,
    /// Which indices have a row. Every int64 is an id, so none can stand for "no row".
    used: Bits,
}

impl RowIds {
    /// Makes room for the indices below `len`.
    pub(crate) fn grow(&mut self, len: usize) {
        if len > self.ids.len() {
            self.ids.grow(len.next_power_of_two());
        }
        if len > self.len {
            self.used.grow(len);
            self.len = len;
        }
    }

    /// Notes whose row an index is.
    pub(crate) fn set(&mut self, index: RowIndex, id: i64) {
        self.ids[index.0 as usize] = id;
        self.used.set(index.0 as usize);
    }

    /// Notes that an index has no row any more.
    pub(crate) fn clear(&mut self, index: RowIndex) {
        self.used.take(index.0 as usize);
    }

    /// Returns the id at an index that has a row.
    #[inline(always)]
    pub(crate) fn of(&self, index: RowIndex) -> i64 {
        self.ids[index.0 as usize]
    }

    /// Returns which indices have a row.
    pub(crate) fn used(&self) -> &Bits {
        &self.used
    }

    /// Returns all ids in the order of their indices.
    pub(crate) fn all(&self) -> Vec<i64> {
        self.used.ones_from(0).map(|index| self.ids[index]).collect()
    }

    /// Returns the bytes in use for so many indices: behind them the system has supplied nothing.
    pub(crate) fn bytes_for(len: usize) -> usize {
        let (used, all) = (len * size_of::<i64>(), len.next_power_of_two() * size_of::<i64>());
        supplied_bytes(used, 0, all) + len.div_ceil(8)
    }
}
