//! What a table takes of memory, and whether more rows fit.

use super::row_ids::RowIds;
use super::usages::Usages;
use super::{Admission, Rows, Table};
use crate::memory::MemoryUse;
use crate::{Error, Result};

/// The ids of a call that may get a row.
pub(super) struct NewRows<'a> {
    /// No fewer than there will be.
    pub(super) at_most: usize,
    /// Counts the distinct ids without a row.
    pub(super) count: &'a dyn Fn(&Rows) -> usize,
}

/// Returns the distinct ids, in ascending order.
pub(super) fn distinct(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

impl Table {
    /// Checks that new rows fit the limits of table and store, and returns how many there may be. What they take is
    /// charged until [`Rows::settle`].
    ///
    /// # Errors
    /// [`Error::MemoryLimit`].
    pub(super) fn admit(
        &self,
        operation: &'static str,
        rows: &mut Rows,
        new_rows: &NewRows<'_>,
    ) -> Result<usize> {
        let at_most = new_rows.at_most;
        if at_most == 0 || rows.tier.is_none() && rows.admit(at_most).is_ok() {
            return Ok(at_most);
        }
        let count = (new_rows.count)(rows);
        if count == 0 {
            return Ok(0);
        }
        let refused = |refusal: Refusal| Error::MemoryLimit {
            operation,
            table: self.name.clone(),
            whose: refusal.whose,
            limit: refusal.limit,
            in_use: refusal.in_use,
            requested: refusal.requested,
        };
        rows.admit(count).map_err(refused).map(|()| count)
    }
}

/// Whose limit leaves no room, and for how much.
struct Refusal {
    whose: &'static str,
    limit: u64,
    in_use: u64,
    requested: u64,
}

impl Rows {
    /// Whether there is a limit, of the table or the store, that new rows must be held against.
    pub(super) fn is_limited(&self) -> bool {
        self.limit != u64::MAX || self.account.budget().limit().is_some()
    }

    /// Returns the most bytes of all but records when there are `more` rows.
    pub(super) fn index_bytes_after(&self, more: usize) -> usize {
        let len = self.allocator.high_water_after(more);
        self.ids.bytes_after(more)
            + RowIds::bytes_for(len)
            + self.changes.bytes_for(len)
            + self.allocator.bytes()
            + self.usages.as_ref().map_or(0, |_| Usages::bytes_for(len))
            + self.admission.as_ref().map_or(0, Admission::bytes)
            + self.indices.capacity() * size_of::<u32>()
            + self.tier.as_ref().map_or(0, |tier| tier.bytes_for(len))
    }

    /// Returns the least bytes with which there can be `more` rows. Of a table with a slot file they need one slab.
    fn bytes_after(&self, more: usize) -> u64 {
        let records = match self.tier {
            None => self.storage.bytes_for(self.allocator.high_water_after(more)),
            Some(_) => self.storage.bytes_for(self.storage.slab_records()),
        };
        (self.index_bytes_after(more) + records) as u64
    }

    fn admit(&mut self, more: usize) -> std::result::Result<(), Refusal> {
        let (in_use, needed) = (self.memory().bytes(), self.bytes_after(more));
        let requested = needed.saturating_sub(in_use);
        if needed > self.limit {
            return Err(Refusal { whose: "table's", limit: self.limit, in_use, requested });
        }
        if self.account.raise(needed) {
            return Ok(());
        }
        let budget = self.account.budget();
        let limit = budget.limit().unwrap_or(u64::MAX);
        Err(Refusal { whose: "store's", limit, in_use: budget.in_use(), requested })
    }

    /// Charges what the table takes now.
    pub(super) fn settle(&mut self) {
        let bytes = self.memory().bytes();
        self.account.settle(bytes);
    }

    /// Returns what the table takes, but for the disk.
    pub(super) fn memory(&self) -> MemoryUse {
        let record = (self.storage.stride() * size_of::<f32>()) as u64;
        let weights = (self.storage.weight_words() * size_of::<f32>()) as u64;
        let (resident, supplied) = match &self.tier {
            None => (self.ids.len(), self.storage.bytes_for(self.allocator.high_water())),
            Some(tier) => {
                let frames = self.storage.num_slabs() * self.storage.slab_records();
                (tier.num_resident(), self.storage.bytes_for(frames))
            }
        };
        let resident = resident as u64;
        let len = self.allocator.high_water();
        let reserved = self.ids.bytes_after(0) + self.changes.bytes_for(len);
        let index = self.index_bytes_after(0) - reserved + self.ids.bytes() + self.changes.bytes();
        MemoryUse {
            row_bytes: resident * weights,
            slot_bytes: resident * (record - weights),
            index_bytes: index as u64,
            free_bytes: (supplied as u64).saturating_sub(resident * record),
            memory_limit: Some(self.limit).filter(|&limit| limit != u64::MAX),
            resident_rows: resident,
            ..MemoryUse::default()
        }
    }
}
