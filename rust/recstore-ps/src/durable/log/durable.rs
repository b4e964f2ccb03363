//! Waiting for the disk together: one syncs for all that have appended by then.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::appended::Appended;

/// How far the log is on the disk.
#[derive(Debug)]
pub(super) struct Durable {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The last change that the disk has.
    last: u64,
    somebody_syncs: bool,
    failure: Option<String>,
}

impl Durable {
    pub(super) fn new(last: u64) -> Self {
        let state = State { last, somebody_syncs: false, failure: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Returns the last change that the disk has.
    pub(super) fn last(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).last
    }

    /// Begins anew: the disk has change `last`, and none behind it.
    pub(super) fn restart(&self, last: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).last = last;
    }

    /// Says why no more changes are taken, if the disk failed.
    pub(super) fn check(&self) -> Result<(), String> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Says why no more changes are to be taken.
    pub(super) fn fail(&self, message: &str) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failure.get_or_insert_with(|| message.to_owned());
        self.changed.notify_all();
    }

    /// Waits until the disk has change `number`. `tail` gives the file and the number of its last change.
    ///
    /// # Errors
    /// Why the disk will not have it.
    pub(super) fn wait(&self, number: u64, tail: impl Fn() -> (Arc<Appended>, u64)) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.last >= number {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.somebody_syncs {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.somebody_syncs = true;
            drop(state);
            // Before the sync: changes that are appended during it may not be on the disk. The lock is free
            // meanwhile, so that they can be appended.
            let (file, last) = tail();
            let synced = file.sync();
            state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.somebody_syncs = false;
            match synced {
                Ok(()) => state.last = state.last.max(last),
                Err(error) => {
                    let message = format!(
                        "the log could not be brought to the disk ({error}): no more changes are taken"
                    );
                    // For good: after a failed sync the content of the file is unknown, and a later success
                    // would prove nothing.
                    state.failure = Some(message);
                }
            }
            self.changed.notify_all();
        }
    }
}
