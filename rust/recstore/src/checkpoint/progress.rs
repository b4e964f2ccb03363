//! How far a save or a load is.

use std::sync::atomic::{AtomicU64, Ordering};

/// How far a save or a load is, for whoever shows it from another thread.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Returns the bytes done and the bytes in all; 0 of 0 before these are known.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Counts bytes that were written or read elsewhere, by a server.
    pub fn add_done(&self, bytes: u64) {
        Self::expect(Some(self), bytes);
        Self::advance(Some(self), bytes);
    }

    pub(super) fn restart(progress: Option<&Self>) {
        if let Some(progress) = progress {
            progress.done.store(0, Ordering::Relaxed);
            progress.total.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn expect(progress: Option<&Self>, bytes: u64) {
        if let Some(progress) = progress {
            progress.total.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn advance(progress: Option<&Self>, bytes: u64) {
        if let Some(progress) = progress {
            progress.done.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}
