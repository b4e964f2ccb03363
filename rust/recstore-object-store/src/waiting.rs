//! Waits for what object stores do, wherever the caller is.

use std::io;
use std::thread;

use tokio::runtime::{Builder, Runtime};

use crate::location::Location;
use crate::{Error, Result};

/// The thread on which requests are made.
#[derive(Debug)]
pub(crate) struct Requests(Runtime);

impl Requests {
    /// Begins the thread for requests to a location.
    ///
    /// # Errors
    /// [`Error::Url`]: no thread can be started.
    pub(crate) fn to(location: &Location) -> Result<Self> {
        let (of, url) = (location.of, location.url.clone());
        Self::new().map_err(|error| Error::Url { of, url, message: format!("no thread: {error}") })
    }

    fn new() -> io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("recstore-requests").enable_all();
        Ok(Self(builder.build()?))
    }

    /// Runs `work` to its end. It runs in a thread of its own, for a caller may itself be within a runtime.
    pub(crate) fn wait<F: Future<Output: Send>>(&self, work: impl FnOnce() -> F + Send) -> F::Output {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| self.0.block_on(work()));
            match waiting.join() {
                Ok(output) => output,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}
