//! How far a save or a load is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How far a save or a load is, for whoever shows it from another thread.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    has_begun: AtomicBool,
}

impl Progress {
    /// Returns the bytes done and the bytes in all; 0 of 0 before these are known.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Notes that what this program changes from now on is no part of a save.
    pub fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    /// Returns whether what this program changes from now on is no part of a save: bytes in all are known then too.
    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire) || self.bytes().1 > 0
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
            progress.has_begun.store(false, Ordering::Relaxed);
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
