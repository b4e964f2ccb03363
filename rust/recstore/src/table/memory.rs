//! What a table takes of memory, and whether more rows fit.

use super::access_stats::Usages;
use super::admission::Admission;
use super::growth::Growth;
use super::ids::id_allocator::IdAllocator;
use super::ids::row_ids::RowIds;
use super::rows::Rows;
use super::table::Table;
use crate::calls::MemoryUse;
use crate::{Error, Result};

/// Gives indices of rows.
pub(super) type Indices<'a> = dyn Fn(&Rows) -> Vec<u32> + 'a;

/// The ids of a call that may get a row.
pub(super) struct NewRows<'a> {
    /// No less than there will be.
    pub(super) at_most: Growth,
    /// Counts the distinct ids without a row.
    pub(super) count: &'a dyn Fn(&Rows) -> Growth,
    /// The indices of rows that the call needs, where others may leave for the new ones.
    pub(super) needed: Option<&'a Indices<'a>>,
}

/// Returns the distinct ids, in ascending order.
pub(super) fn distinct(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

impl Table {
    /// Sees that new rows fit the limits of table and store, and returns how many there may be. What they take is charged
    /// until [`Rows::settle`]. Of a table with eviction others leave for them, if need be.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`], [`Error::Disk`].
    pub(super) fn admit(
        &self,
        operation: &'static str,
        rows: &mut Rows,
        new_rows: &NewRows<'_>,
    ) -> Result<Growth> {
        let at_most = new_rows.at_most;
        // Each position as a new row is a bound that costs nothing. Distinct ids are counted only near the
        // limit, so that a batch of known ids is never refused.
        if at_most == Growth::NONE || rows.tier.is_none() && rows.fits(at_most) {
            return Ok(at_most);
        }
        let count = (new_rows.count)(rows);
        if count == Growth::NONE {
            return Ok(count);
        }
        let Err(refusal) = rows.admit(count) else { return Ok(count) };
        if let (Some(eviction), Some(needed)) = (&self.config.eviction, new_rows.needed) {
            let needed = needed(rows);
            if rows.displace(eviction, count, &needed)? && rows.fits(count) {
                return Ok(count);
            }
        }
        Err(Error::MemoryLimit {
            operation,
            table: self.name.clone(),
            whose: refusal.whose,
            limit: refusal.limit,
            in_use: refusal.in_use,
            requested: refusal.requested,
        })
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

    /// Returns the most bytes of all but records after `growth`.
    pub(super) fn index_bytes_after(&self, growth: Growth) -> usize {
        let len = self.allocator.high_water_after(growth.rows);
        self.ids.bytes_after(growth.rows)
            + RowIds::bytes_for(len)
            + self.changes.bytes_for(len)
            + self.bytes_of_freed(len)
            + self.usages.as_ref().map_or(0, |_| Usages::bytes_for(len))
            + self.admission.as_ref().map_or(0, |admission| admission.bytes_after(growth.candidates))
            + self.shared.as_ref().map_or(0, |shared| shared.reserved_bytes())
            + self.indices.capacity() * size_of::<u32>()
            + self.tier.as_ref().map_or(0, |tier| tier.bytes_for(len))
    }

    /// Returns what is set aside for the indices of deleted rows, below `len`: all of them, so that a deletion never makes
    /// a table too large. With a slot file, frames make room for them.
    fn bytes_of_freed(&self, len: usize) -> usize {
        if self.tier.is_some() { self.allocator.bytes() } else { IdAllocator::bytes_for(len) }
    }

    /// Returns the least bytes with which there can be `growth`. Rows of a table with a slot file need one slab.
    pub(super) fn bytes_after(&self, growth: Growth) -> u64 {
        let records = match self.tier {
            None => self.storage.bytes_for(self.allocator.high_water_after(growth.rows)),
            Some(_) => self.storage.bytes_for(self.storage.slab_records()),
        };
        (self.index_bytes_after(growth) + records) as u64
    }

    /// Sees that `growth` fits the limits, and charges it.
    pub(super) fn fits(&mut self, growth: Growth) -> bool {
        self.admit(growth).is_ok()
    }

    fn admit(&mut self, growth: Growth) -> std::result::Result<(), Refusal> {
        self.ids.note_leaving(self.usages.is_some() && self.is_limited());
        let (in_use, needed) = (self.memory().bytes(), self.bytes_after(growth));
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

    /// Returns the bytes that table and store may still take.
    pub(super) fn room(&self) -> u64 {
        self.room_beside(self.bytes_after(Growth::NONE))
    }

    /// Returns what table and store may take besides so many bytes of the table's.
    pub(super) fn room_beside(&self, needed: u64) -> u64 {
        let own = self.memory().bytes();
        let budget = self.account.budget();
        let others = budget.in_use().saturating_sub(own);
        let of_store = budget.limit().map_or(u64::MAX, |limit| limit.saturating_sub(others));
        self.limit.min(of_store).saturating_sub(needed)
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
        let counted = |bytes: fn(&Admission) -> usize| self.admission.as_ref().map_or(0, bytes);
        let reserved = self.ids.bytes_after(0)
            + self.changes.bytes_for(len)
            + self.bytes_of_freed(len)
            + counted(|admission| admission.bytes_after(0))
            + self.shared.as_ref().map_or(0, |shared| shared.reserved_bytes());
        let [shared_weights, shared_slots, of_shared] =
            self.shared.as_ref().map_or([0; 3], |shared| shared.bytes());
        let used =
            self.ids.bytes() + self.changes.bytes() + self.allocator.bytes() + counted(Admission::bytes);
        let index = self.index_bytes_after(Growth::NONE) - reserved + used;
        let [linear_ids, array_ids, hash_ids] = self.ids.ids_by_kind().map(|count| count as u64);
        MemoryUse {
            row_bytes: resident * weights + shared_weights,
            slot_bytes: resident * (record - weights) + shared_slots,
            index_bytes: index as u64,
            free_bytes: (supplied as u64).saturating_sub(resident * record)
                + of_shared.saturating_sub(shared_weights + shared_slots),
            memory_limit: Some(self.limit).filter(|&limit| limit != u64::MAX),
            resident_rows: resident,
            linear_ids,
            array_ids,
            hash_ids,
            ..MemoryUse::default()
        }
    }
}
