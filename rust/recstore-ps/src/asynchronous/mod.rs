//! Requests that are issued now and carried out by a thread: push, pull, wait.
//!
//! Source: ps-lite's `KVWorker`, whose timestamps, callbacks and priorities these are. Unlike there, requests of equal
//! priority keep their order, a wait has an end, and errors are given instead of ending the process.

mod config;
mod error;
mod queue;
mod request;
mod worker;

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use recstore::{EmbeddingStore, TableId};

pub use config::AsyncConfig;
pub use error::AsyncError;
use queue::Queue;
use request::Request;
pub use request::{AsyncTarget, Callback};
use worker::Shared;

/// The number of a request, from 0 in the order in which they were issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub u64);

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Pushes gradients and pulls rows while the caller goes on, over any store.
///
/// One thread carries requests out, one after another: those of a higher priority first, and of one priority as they were
/// issued. So a pull sees the pushes before it, unless it overtakes them by its priority. The pushes of a table always
/// keep their order: one of a higher priority takes those before it along.
///
/// **Errors are not lost.** What a request fails with is given to its callback and to every wait for it;
/// [`AsyncStore::wait_all`] gives what nobody was told of, and so does dropping, on standard error.
///
/// **Dropping** finishes what is pending. A forked child has not the thread: every call there fails at once.
///
/// ```
/// use recstore::{EmbeddingStore, LocalStore, TableConfig};
/// use recstore_ps::{AsyncConfig, AsyncStore};
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), recstore_ps::AsyncError> {
/// let store = Arc::new(LocalStore::default());
/// let weights = store.open_table("w", &TableConfig::from_json(1, r#"{"initializer": {"kind": "zeros"}}"#)?)?.id();
/// let requests = AsyncStore::new(store, AsyncConfig::default())?;
/// requests.push(weights, [7, 8], [-100.0, 100.0], 0, None)?;
/// let pulled = requests.pull(weights, [8, 7], 0, None)?;
/// assert_eq!(requests.wait_rows(pulled, None)?, [-1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub struct AsyncStore<T: AsyncTarget = Arc<dyn EmbeddingStore>> {
    shared: Arc<Shared<T>>,
    process: u32,
    thread: Option<JoinHandle<()>>,
}

impl<T: AsyncTarget> fmt::Debug for AsyncStore<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncStore").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl<T: AsyncTarget> AsyncStore<T> {
    /// Starts a thread for requests to `store`.
    ///
    /// # Errors
    /// [`AsyncError::NoThread`].
    pub fn new(target: T, config: AsyncConfig) -> Result<Self, AsyncError> {
        let (queue, issued, finished) = Default::default();
        let shared = Arc::new(Shared { target, config, queue, issued, finished });
        let worker = Arc::clone(&shared);
        let thread = thread::Builder::new().name("recstore-requests".into()).spawn(move || worker.work());
        let thread = thread.map_err(|error| AsyncError::NoThread { message: error.to_string() })?;
        Ok(Self { shared, process: std::process::id(), thread: Some(thread) })
    }

    /// Returns the store.
    pub fn store(&self) -> &T {
        &self.shared.target
    }

    /// Issues an optimizer step with the gradients of `ids`, row-major, duplicates summed first.
    ///
    /// # Errors
    /// [`AsyncError::Store`] for a table that does not exist; [`AsyncError::Full`] and [`AsyncError::TooLarge`];
    /// [`AsyncError::Closed`]; [`AsyncError::ForkedChild`]. Then nothing was issued.
    pub fn push(
        &self,
        table: TableId,
        ids: impl Into<Vec<i64>>,
        gradients: impl Into<Vec<f32>>,
        priority: i32,
        callback: Option<Callback>,
    ) -> Result<Timestamp, AsyncError> {
        let request = self.request("push", table, ids.into(), Some(gradients.into()), false)?;
        self.issue("push", request, priority, callback)
    }

    /// Issues a read of the rows of `ids`. The callback gets them; without one [`AsyncStore::wait_rows`] does.
    ///
    /// # Errors
    /// As [`AsyncStore::push`].
    pub fn pull(
        &self,
        table: TableId,
        ids: impl Into<Vec<i64>>,
        priority: i32,
        callback: Option<Callback>,
    ) -> Result<Timestamp, AsyncError> {
        let request = self.request("pull", table, ids.into(), None, true)?;
        self.issue("pull", request, priority, callback)
    }

    /// Issues a push and a pull of the same ids, with no request of this client in between.
    ///
    /// # Errors
    /// As [`AsyncStore::push`].
    pub fn push_pull(
        &self,
        table: TableId,
        ids: impl Into<Vec<i64>>,
        gradients: impl Into<Vec<f32>>,
        priority: i32,
        callback: Option<Callback>,
    ) -> Result<Timestamp, AsyncError> {
        let request = self.request("push_pull", table, ids.into(), Some(gradients.into()), true)?;
        self.issue("push_pull", request, priority, callback)
    }

    /// Waits until a request is finished, its callback included; without a `timeout` for as long as it takes.
    ///
    /// # Errors
    /// What the request failed with; [`AsyncError::TimedOut`]; [`AsyncError::Unknown`]; [`AsyncError::InCallback`];
    /// [`AsyncError::ForkedChild`].
    pub fn wait(&self, timestamp: Timestamp, timeout: Option<Duration>) -> Result<(), AsyncError> {
        self.wait_for("wait", timeout, |queue| queue.outcome(timestamp), |_| timestamp)
    }

    /// Waits for the rows of a request and takes them.
    ///
    /// # Errors
    /// As [`AsyncStore::wait`]; [`AsyncError::NoRows`].
    pub fn wait_rows(&self, timestamp: Timestamp, timeout: Option<Duration>) -> Result<Vec<f32>, AsyncError> {
        let rows = |queue: &mut Queue| {
            let outcome = queue.outcome(timestamp)?;
            Some(outcome.and_then(|()| queue.take_rows(timestamp)))
        };
        let taken = self.wait_for("wait_rows", timeout, rows, |_| timestamp);
        // The rows' bytes are free again, for which an issue may be waiting.
        self.shared.finished.notify_all();
        taken
    }

    /// Waits until every request is finished.
    ///
    /// # Errors
    /// What requests failed with of which nobody was told; as [`AsyncStore::wait`].
    pub fn wait_all(&self, timeout: Option<Duration>) -> Result<(), AsyncError> {
        self.wait_untold(timeout).and_then(AsyncError::together)
    }

    /// Waits until every request is finished and returns what requests failed with of which nobody was told.
    ///
    /// # Errors
    /// As [`AsyncStore::wait`], of the wait itself.
    pub fn wait_untold(&self, timeout: Option<Duration>) -> Result<Vec<AsyncError>, AsyncError> {
        let all = |queue: &mut Queue| (queue.pending().0 == 0).then(|| Ok(queue.untold()));
        self.wait_for("wait_all", timeout, all, |queue| queue.pending().1.unwrap_or(Timestamp(0)))
    }

    /// Takes no more requests; the thread finishes those that are pending, and ends.
    ///
    /// # Errors
    /// [`AsyncError::ForkedChild`].
    pub fn close(&self) -> Result<(), AsyncError> {
        self.check_process("close")?;
        self.shared.lock().is_closed = true;
        self.shared.issued.notify_one();
        Ok(())
    }

    /// Takes back all requests that have not begun and returns how many. Each fails with [`AsyncError::Cancelled`]; their
    /// callbacks are called here.
    ///
    /// # Errors
    /// [`AsyncError::ForkedChild`].
    pub fn cancel(&self) -> Result<usize, AsyncError> {
        self.check_process("cancel")?;
        // The lock is free again before the callbacks, which may call this store.
        let all = self.shared.lock().take_all();
        let count = all.len();
        for queued in all {
            let timestamp = queued.timestamp;
            self.shared.finish(queued, Err(AsyncError::Cancelled { timestamp }));
        }
        Ok(count)
    }

    /// Returns how many requests are pending.
    ///
    /// # Errors
    /// [`AsyncError::ForkedChild`].
    pub fn num_pending(&self) -> Result<usize, AsyncError> {
        self.check_process("num_pending")?;
        Ok(self.shared.lock().pending().0)
    }

    fn request(
        &self,
        operation: &'static str,
        table: TableId,
        ids: Vec<i64>,
        gradients: Option<Vec<f32>>,
        gives_rows: bool,
    ) -> Result<Request, AsyncError> {
        self.check_process(operation)?;
        let dim = self.shared.target.dim(table)?;
        Ok(Request { table, dim, ids, gradients, gives_rows })
    }

    fn issue(
        &self,
        operation: &'static str,
        request: Request,
        priority: i32,
        callback: Option<Callback>,
    ) -> Result<Timestamp, AsyncError> {
        let (config, bytes) = (&self.shared.config, request.bytes());
        if bytes > config.max_pending_bytes {
            return Err(AsyncError::TooLarge { operation, bytes, limit: config.max_pending_bytes });
        }
        // The thread would wait for itself.
        let patience = if self.is_worker() { Duration::ZERO } else { config.issue_timeout };
        let full = |queue: &mut Queue| !queue.is_closed && queue.lacks(bytes, config).is_some();
        let waited = self.shared.finished.wait_timeout_while(self.shared.lock(), patience, full);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if queue.is_closed {
            return Err(AsyncError::Closed { operation });
        }
        if let Some((limit_name, limit, in_use)) = queue.lacks(bytes, config) {
            let requested = if limit_name == "max_pending" { 1 } else { bytes };
            return Err(AsyncError::Full {
                operation,
                limit_name,
                limit,
                in_use,
                requested,
                waited: patience,
            });
        }
        let timestamp = queue.add(request, priority, callback);
        self.shared.issued.notify_one();
        Ok(timestamp)
    }

    /// Waits until `found` gives something; if it takes too long, `late` names a request that did.
    fn wait_for<R>(
        &self,
        operation: &'static str,
        timeout: Option<Duration>,
        mut found: impl FnMut(&mut Queue) -> Option<Result<R, AsyncError>>,
        late: impl Fn(&Queue) -> Timestamp,
    ) -> Result<R, AsyncError> {
        self.check_process(operation)?;
        let began = Instant::now();
        let mut queue = self.shared.lock();
        loop {
            if let Some(found) = found(&mut queue) {
                return found;
            }
            let timestamp = late(&queue);
            // A callback may look and must not wait: its own thread would have to finish the request.
            if self.is_worker() {
                return Err(AsyncError::InCallback { timestamp });
            }
            let Some(timeout) = timeout else {
                queue = self.shared.finished.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(AsyncError::TimedOut { timestamp, waited: timeout, pending: queue.pending().0 });
            }
            let waited = self.shared.finished.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Nothing is locked in a forked child: the parent's threads may have held any lock.
    fn check_process(&self, operation: &'static str) -> Result<(), AsyncError> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(AsyncError::ForkedChild { operation }),
        }
    }

    fn is_worker(&self) -> bool {
        self.thread.as_ref().is_some_and(|worker| worker.thread().id() == thread::current().id())
    }
}

impl<T: AsyncTarget> Drop for AsyncStore<T> {
    fn drop(&mut self) {
        let (is_worker, thread) = (self.is_worker(), self.thread.take());
        if self.check_process("drop").is_err() {
            // It is not a thread of this process: there is nothing to join or to let go.
            std::mem::forget(thread);
            return;
        }
        {
            let mut queue = self.shared.lock();
            (queue.is_closed, queue.is_dropped) = (true, true);
        }
        self.shared.issued.notify_one();
        // The last callback may be what drops this: its thread finishes what is left.
        if let Some(thread) = thread.filter(|_| !is_worker) {
            _ = thread.join();
            self.shared.report_untold();
        }
    }
}
