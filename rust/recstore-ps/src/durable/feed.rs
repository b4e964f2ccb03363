//! How far something has come, for those who wait for more of it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A number that only rises.
#[derive(Debug)]
pub(crate) struct Feed {
    last: Mutex<u64>,
    changed: Condvar,
}

impl Feed {
    pub(crate) fn new(last: u64) -> Self {
        Self { last: Mutex::new(last), changed: Condvar::new() }
    }

    pub(crate) fn last(&self) -> u64 {
        *self.lock()
    }

    pub(crate) fn advance(&self, number: u64) {
        let mut last = self.lock();
        if number > *last {
            *last = number;
            // Unlocked first, as those that wake take the lock.
            drop(last);
            self.changed.notify_all();
        }
    }

    /// Begins anew at a number that may be lower.
    pub(crate) fn restart(&self, number: u64) {
        *self.lock() = number;
    }

    /// Returns the number once it is beyond `number`, or as it is after `patience`.
    pub(crate) fn wait_beyond(&self, number: u64, patience: Duration) -> u64 {
        let waited = self.changed.wait_timeout_while(self.lock(), patience, |last| *last <= number);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
