//! The lock of saves and loads, which come one after another, across forks.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::checkpoint::Saves;
use crate::fork;

/// A fork copies a lock that is held, and not the thread that would release it.
#[derive(Default)]
pub(crate) struct SaveLock {
    saves: Mutex<Saves>,
    /// The generation of the process that locked `saves` last without waiting. Who waits is of the same process.
    locked_by: Mutex<u32>,
}

impl SaveLock {
    /// Waits for the save or load under way; `None` if it is that of a parent, which never ends here.
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Saves>> {
        {
            // No fork comes between the lock and the note of it.
            let _gate = fork::enter();
            let mut locked_by = self.locked_by.lock().unwrap_or_else(PoisonError::into_inner);
            let saves = match self.saves.try_lock() {
                Err(TryLockError::WouldBlock) if *locked_by != fork::generation() => return None,
                Err(TryLockError::WouldBlock) => None,
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Ok(saves) => Some(saves),
            };
            if saves.is_some() {
                *locked_by = fork::generation();
                return saves;
            }
        }
        // Outside the gate: a save lasts long, and a fork need not wait for it.
        Some(self.saves.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
