//! What the tables of a store may take: of memory together, and of the rows that are spread over several stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The limit of a store that has none.
const NO_LIMIT: u64 = u64::MAX;

/// The memory limit of a store, what its tables take together, and over how many stores their rows are spread.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit: AtomicU64,
    in_use: AtomicU64,
    shards: AtomicUsize,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self { limit: AtomicU64::new(NO_LIMIT), in_use: AtomicU64::new(0), shards: AtomicUsize::new(1) }
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

    /// Sets over how many stores the rows of tables are spread that are made from now on.
    pub(crate) fn set_shards(&self, shards: usize) {
        self.shards.store(shards, Ordering::Relaxed);
    }

    pub(crate) fn shards(&self) -> usize {
        self.shards.load(Ordering::Relaxed)
    }

    /// Takes `bytes` if they fit.
    fn take(&self, bytes: u64) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let more = |in_use: u64| in_use.checked_add(bytes).filter(|&sum| sum <= limit);
        // Compared and taken in one: tables that ask at the same time must not pass the limit together.
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
        // Wrapping, so that one addition serves more bytes and fewer.
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
