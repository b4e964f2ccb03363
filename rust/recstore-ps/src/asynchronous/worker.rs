//! The thread that carries requests out, and what it shares with callers.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::queue::{Queue, Queued};
use super::request::{AsyncTarget, call_back};
use super::{AsyncConfig, AsyncError};

/// What callers and the thread share.
pub(super) struct Shared<T> {
    pub(super) target: T,
    pub(super) config: AsyncConfig,
    pub(super) queue: Mutex<Queue>,
    /// A request was issued, or none will be any more.
    pub(super) issued: Condvar,
    /// A request finished, or its rows were taken.
    pub(super) finished: Condvar,
}

impl<T: AsyncTarget> Shared<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries requests out until there are no more.
    pub(super) fn work(&self) {
        while let Some(queued) = self.next() {
            let outcome = queued.request.carry_out(&self.target, queued.timestamp);
            self.finish(queued, outcome);
        }
        if self.lock().is_dropped {
            self.report_untold();
        }
    }

    /// Writes to the error stream what is told nobody else.
    pub(super) fn report_untold(&self) {
        if let Err(error) = AsyncError::together(self.lock().untold()) {
            eprintln!("recstore: an AsyncStore was dropped, and nobody was told: {error}");
        }
    }

    fn next(&self) -> Option<Queued> {
        let mut queue = self.lock();
        loop {
            match queue.take_next() {
                Some(next) => return Some(next),
                None if queue.is_closed => return None,
                None => queue = self.issued.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Calls the callback and notes what came of the request.
    pub(super) fn finish(&self, queued: Queued, outcome: Result<Vec<f32>, AsyncError>) {
        let Queued { timestamp, request, callback } = queued;
        let (outcome, is_told) = match callback {
            None => (outcome.map(|rows| request.gives_rows.then_some(rows)), false),
            Some(callback) => {
                let error = outcome.as_ref().err().cloned();
                match (call_back(timestamp, callback, outcome), error) {
                    (Ok(()), None) => (Ok(None), true),
                    (Ok(()), Some(error)) => (Err(error), true),
                    // The panic tells that the callback could not deal with what it got.
                    (Err(panic), error) => (Err(error.unwrap_or(panic)), false),
                }
            }
        };
        self.lock().finish(timestamp, request.bytes(), outcome, is_told);
        self.finished.notify_all();
    }
}
