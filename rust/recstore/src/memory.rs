//! What the tables of a store may take of memory together, and what each takes of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The limit of a store that has none.
const NO_LIMIT: u64 = u64::MAX;

/// What a table takes of memory, in bytes, and how its rows lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct MemoryUse {
    /// The weights of the rows in memory.
    pub row_bytes: u64,
    /// The optimizer's slots of the rows in memory, and what rounds records up to whole cache lines.
    pub slot_bytes: u64,
    /// The id map, the ids of rows, and what is noted of rows for saves, for the disk and for the next step.
    pub index_bytes: u64,
    /// Records that hold no row: freed ones, and those of pages that the system supplied ahead of use.
    pub free_bytes: u64,
    /// What the slot file takes of the disk.
    pub disk_bytes: u64,
    /// The limit of this table.
    pub memory_limit: Option<u64>,
    /// The rows that lie in memory.
    pub resident_rows: u64,
    /// Rows read from the slot file since the table was made.
    pub rows_fetched: u64,
    /// Rows written to the slot file since the table was made.
    pub rows_spilled: u64,
    /// The time that calls spent on moving rows between memory and disk, in nanoseconds.
    pub disk_nanoseconds: u64,
}

impl MemoryUse {
    /// Adds what another table, or another server's part of the table, takes.
    pub fn add(&mut self, other: &Self) {
        self.row_bytes += other.row_bytes;
        self.slot_bytes += other.slot_bytes;
        self.index_bytes += other.index_bytes;
        self.free_bytes += other.free_bytes;
        self.disk_bytes += other.disk_bytes;
        self.memory_limit = self.memory_limit.zip(other.memory_limit).map(|(own, other)| own + other);
        self.resident_rows += other.resident_rows;
        self.rows_fetched += other.rows_fetched;
        self.rows_spilled += other.rows_spilled;
        self.disk_nanoseconds += other.disk_nanoseconds;
    }

    /// Returns all bytes of memory.
    pub fn bytes(&self) -> u64 {
        self.row_bytes + self.slot_bytes + self.index_bytes + self.free_bytes
    }
}

/// The memory limit of a store and what its tables take together.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit: AtomicU64,
    in_use: AtomicU64,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self { limit: AtomicU64::new(NO_LIMIT), in_use: AtomicU64::new(0) }
    }
}

impl MemoryBudget {
    /// Sets the limit from the next call on. What is taken already stays.
    pub(crate) fn set_limit(&self, limit: Option<u64>) {
        self.limit.store(limit.unwrap_or(NO_LIMIT), Ordering::Relaxed);
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|&limit| limit != NO_LIMIT)
    }

    pub(crate) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    /// Takes `bytes` if they fit.
    fn take(&self, bytes: u64) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let more = |in_use: u64| in_use.checked_add(bytes).filter(|&sum| sum <= limit);
        self.in_use.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }
}

/// What one table takes of a budget; given back when the table is dropped.
#[derive(Debug)]
pub(crate) struct Account {
    budget: Arc<MemoryBudget>,
    charged: u64,
}

impl Account {
    pub(crate) fn new(budget: Arc<MemoryBudget>) -> Self {
        Self { budget, charged: 0 }
    }

    pub(crate) fn budget(&self) -> &MemoryBudget {
        &self.budget
    }

    /// Takes what is missing to `bytes`, if that fits; fewer bytes are not given back.
    pub(crate) fn raise(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.charged);
        let fits = more == 0 || self.budget.take(more);
        if fits {
            self.charged += more;
        }
        fits
    }

    /// Charges what is in use, whether it fits or not.
    pub(crate) fn settle(&mut self, bytes: u64) {
        self.budget.in_use.fetch_add(bytes.wrapping_sub(self.charged), Ordering::Relaxed);
        self.charged = bytes;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.settle(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_share_a_budget_and_give_back_what_they_took() {
        let budget = Arc::new(MemoryBudget::default());
        let [mut one, mut two] = [(); 2].map(|()| Account::new(Arc::clone(&budget)));
        assert!(one.raise(70) && two.raise(40));
        budget.set_limit(Some(120));
        assert!(!one.raise(81) && one.raise(80) && !two.raise(41));
        one.settle(10);
        assert_eq!((budget.in_use(), budget.limit()), (50, Some(120)));
        assert!(two.raise(110));
        drop(two);
        assert_eq!(budget.in_use(), 10);
    }
}
