//! Requests on one table that a thread carries out: the GIL is held for callbacks alone.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyInt};
use recstore::{Error, TableId};
use recstore_bridge::Registry;
use recstore_ps::{AsyncConfig, AsyncError, AsyncStore, Callback, Timestamp};

use crate::optimizer_state::numbers;
use crate::registry;

/// How long Python waits before it looks for a signal, as of Ctrl-C.
const BETWEEN_SIGNALS: Duration = Duration::from_millis(100);

/// The exceptions that callbacks ended with, by request.
type Raised = Arc<Mutex<HashMap<Timestamp, PyErr>>>;

/// Requests on the table of a number. Keys are int64, gradients and rows float32, in bytes of the machine's order.
#[pyclass(frozen)]
pub(crate) struct Requests {
    /// None once it is dropped.
    store: Option<AsyncStore<&'static Registry>>,
    table: TableId,
    /// The table's, for messages.
    name: String,
    issue_timeout: Duration,
    raised: Raised,
}

#[pymethods]
impl Requests {
    #[new]
    fn new(
        table: i64,
        name: String,
        max_pending: usize,
        max_pending_bytes: u64,
        issue_timeout: f64,
    ) -> PyResult<Self> {
        let mut config = AsyncConfig::default();
        (config.max_pending, config.max_pending_bytes) = (max_pending, max_pending_bytes);
        let issue_timeout = duration(issue_timeout);
        // The store waits for room by this, `patiently` repeats that until the caller's own time is over.
        config.issue_timeout = issue_timeout.min(BETWEEN_SIGNALS);
        let store = AsyncStore::new(registry()?, config);
        let store = Some(store.map_err(|error| PyRuntimeError::new_err(error.to_string()))?);
        Ok(Self { store, table: TableId(table), name, issue_timeout, raised: Raised::default() })
    }

    /// Issues a push of gradients, a pull of rows or both. The callback gets the timestamp, the rows or `None`, and an
    /// exception or `None`; what it raises is what the request failed with.
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn issue(
        &self,
        py: Python<'_>,
        keys: PyBackedBytes,
        gradients: Option<PyBackedBytes>,
        gives_rows: bool,
        priority: i32,
        callback: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let keys: &[i64] = numbers(&keys)?;
        let gradients: Option<&[f32]> = gradients.as_deref().map(numbers).transpose()?;
        let issued = self.patiently(py, Some(self.issue_timeout), |store, _| {
            // The callback wants the timestamp, which there is only once the store has taken the request; by
            // then its thread may already have called back.
            let (send, timestamp) = mpsc::channel();
            // Cloned anew each time: a call that found no room has dropped its callback.
            let callback = Python::attach(|py| callback.as_ref().map(|callback| callback.clone_ref(py)));
            let callback = callback.map(|callback| self.callback(callback, timestamp, gives_rows));
            let issued = match gradients {
                None => store.pull(self.table, keys, priority, callback),
                Some(gradients) if gives_rows => {
                    store.push_pull(self.table, keys, gradients, priority, callback)
                }
                Some(gradients) => store.push(self.table, keys, gradients, priority, callback),
            };
            // Without a callback nobody waits for it.
            issued.inspect(|timestamp| _ = send.send(*timestamp))
        })?;
        Ok(issued.0)
    }

    /// Waits until a request is finished; raises what it failed with.
    fn wait(&self, py: Python<'_>, timestamp: &Bound<'_, PyInt>, timeout: Option<f64>) -> PyResult<()> {
        let timestamp = request(timestamp)?;
        let wait = |store: &AsyncStore<_>, slice| store.wait(timestamp, slice);
        self.patiently(py, timeout.map(duration), wait)
    }

    /// Waits for the rows of a request and takes them.
    fn wait_rows<'py>(
        &self,
        py: Python<'py>,
        timestamp: &Bound<'_, PyInt>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let timestamp = request(timestamp)?;
        let wait = |store: &AsyncStore<_>, slice| store.wait_rows(timestamp, slice);
        self.patiently(py, timeout.map(duration), wait).map(|rows| bytes(py, &rows))
    }

    /// Waits until all requests are finished. Returns the timestamps of those of whose failure nobody was told, and what
    /// they failed with.
    fn wait_all(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<(u64, PyErr)>> {
        let untold = self.patiently(py, timeout.map(duration), AsyncStore::wait_untold)?;
        Ok(self.by_timestamp(py, &untold))
    }

    /// Takes no more requests, waits until those that are pending are finished, and returns what `wait_all` does. A
    /// callback, which is one of them, does not wait.
    fn close(&self, py: Python<'_>) -> PyResult<Vec<(u64, PyErr)>> {
        let untold = self.patiently(py, None, |store, slice| {
            store.close()?;
            match store.wait_untold(slice) {
                // It would wait for itself. Requests are refused from here on all the same.
                Err(AsyncError::InCallback { .. }) => Ok(Vec::new()),
                waited => waited,
            }
        })?;
        Ok(self.by_timestamp(py, &untold))
    }

    fn num_pending(&self, py: Python<'_>) -> PyResult<usize> {
        self.patiently(py, None, |store, _| store.num_pending())
    }
}

impl Requests {
    /// Makes a call that may wait, again and again until its time is over, so that signals are looked for in between.
    fn patiently<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        call: impl Fn(&AsyncStore<&'static Registry>, Option<Duration>) -> Result<R, AsyncError> + Sync,
    ) -> PyResult<R> {
        let Some(store) = &self.store else {
            return Err(PyRuntimeError::new_err("the requests were dropped"));
        };
        let began = Instant::now();
        loop {
            // By the clock, not by slices counted: the time that the calls themselves take counts as well.
            let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(began.elapsed()));
            match py.detach(|| call(store, Some(left.min(BETWEEN_SIGNALS)))) {
                Err(AsyncError::TimedOut { .. }) if left > BETWEEN_SIGNALS => py.check_signals()?,
                // Only a callback does not wait at all. Its call is not repeated: it would hold up the thread
                // that makes room.
                Err(AsyncError::Full { waited, .. }) if left > BETWEEN_SIGNALS && !waited.is_zero() => {
                    py.check_signals()?;
                }
                done => return done.map_err(|error| self.raise(py, &of_all(error, timeout))),
            }
        }
    }

    /// Returns a callback of the store that calls one of Python's.
    fn callback(
        &self,
        callback: Py<PyAny>,
        timestamp: mpsc::Receiver<Timestamp>,
        gives_rows: bool,
    ) -> Callback {
        let (raised, name) = (Arc::clone(&self.raised), self.name.clone());
        Box::new(move |outcome| {
            let Ok(timestamp) = timestamp.recv() else { return };
            let called = Python::attach(|py| {
                // Made before `outcome` is taken apart for its rows.
                let error = outcome.as_ref().err().map(|error| exception(&name, error));
                let rows = outcome.ok().filter(|_| gives_rows).map(|rows| bytes(py, &rows));
                callback.call1(py, (timestamp.0, rows, error)).map(drop)
            });
            if let Err(error) = called {
                // Kept as the object it is, so that whoever waits gets this exception and its traceback; the
                // panic only makes the store count the request as failed.
                locked(&raised).insert(timestamp, error);
                resume_unwind(Box::new("it raised an exception"));
            }
        })
    }

    fn by_timestamp(&self, py: Python<'_>, failures: &[AsyncError]) -> Vec<(u64, PyErr)> {
        let number = |error: &AsyncError| error.failed_request().map_or(0, |timestamp| timestamp.0);
        failures.iter().map(|error| (number(error), self.raise(py, error))).collect()
    }

    fn raise(&self, py: Python<'_>, error: &AsyncError) -> PyErr {
        let raised = locked(&self.raised);
        let own = error.failed_request().and_then(|timestamp| raised.get(&timestamp));
        own.map_or_else(|| exception(&self.name, error), |own| own.clone_ref(py))
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // Its thread may be within a callback, and so wait for the GIL.
        let store = self.store.take();
        Python::attach(|py| py.detach(|| drop(store)));
    }
}

fn locked(raised: &Raised) -> MutexGuard<'_, HashMap<Timestamp, PyErr>> {
    raised.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bytes<'py>(py: Python<'py>, rows: &[f32]) -> Bound<'py, PyByteArray> {
    PyByteArray::new(py, bytemuck::cast_slice(rows))
}

/// Returns the request of a timestamp; of one below zero there is none.
fn request(timestamp: &Bound<'_, PyInt>) -> PyResult<Timestamp> {
    let unknown = |_| PyValueError::new_err(format!("request {timestamp} was never issued"));
    timestamp.extract().map(Timestamp).map_err(unknown)
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// Returns what a caller is told whose call waited in several pieces.
fn of_all(error: AsyncError, timeout: Option<Duration>) -> AsyncError {
    match (error, timeout) {
        (AsyncError::TimedOut { timestamp, pending, .. }, Some(waited)) => {
            AsyncError::TimedOut { timestamp, waited, pending }
        }
        (AsyncError::Full { operation, limit_name, limit, in_use, requested, waited }, Some(timeout)) => {
            let waited = if waited.is_zero() { waited } else { timeout };
            AsyncError::Full { operation, limit_name, limit, in_use, requested, waited }
        }
        (error, _) => error,
    }
}

/// Returns the exception that says of a request on the table `name` what an operator would.
fn exception(name: &str, error: &AsyncError) -> PyErr {
    let message = error.to_string();
    match error {
        AsyncError::Failed { error: error @ Error::IdOutOfRange { .. }, .. } => {
            PyIndexError::new_err(error.to_string())
        }
        AsyncError::Store(Error::UnknownHandle { operation, .. })
        | AsyncError::Failed { error: Error::UnknownHandle { operation, .. }, .. } => {
            PyRuntimeError::new_err(format!("{operation}: table \"{name}\" was dropped"))
        }
        AsyncError::Store(error) | AsyncError::Failed { error, .. } => {
            PyRuntimeError::new_err(error.to_string())
        }
        AsyncError::Full { .. } | AsyncError::TimedOut { .. } => PyTimeoutError::new_err(message),
        AsyncError::NoRows { timestamp } => PyValueError::new_err(format!(
            "request {timestamp} has no rows to give: it is a push, out or its callback got them, or they were taken"
        )),
        AsyncError::TooLarge { .. } | AsyncError::Unknown { .. } => PyValueError::new_err(message),
        _ => PyRuntimeError::new_err(message),
    }
}
