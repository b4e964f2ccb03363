//! Where servers of this process tell what they do.

use std::io::stderr;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tracing_appender::non_blocking;
use tracing_appender::non_blocking::WorkerGuard;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Lines that are on their way to the error stream.
#[pyclass(frozen)]
pub(crate) struct LogLines(Mutex<Option<WorkerGuard>>);

#[pymethods]
impl LogLines {
    /// Writes what is on its way, as far as somebody reads it within a second. What is told from then on is lost.
    fn end(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

/// Writes what servers of this process do to its error stream from now on: lines of `level` (`off`, `error`, `warn`,
/// `info`, `debug` or `trace`) and above. Where nobody reads the stream lines are lost, and no server waits. Can be called
/// once in a process.
#[pyfunction]
pub(crate) fn log_to_stderr(level: &str) -> PyResult<LogLines> {
    let level: LevelFilter =
        level.parse().map_err(|_| PyValueError::new_err(format!("there is no log level \"{level}\"")))?;
    // What other crates say at these levels is about their own working.
    let servers = Targets::new().with_target("recstore_ps", level);
    let (writer, guard) = non_blocking(stderr());
    let lines = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false);
    let begun = tracing_subscriber::registry().with(servers).with(lines).try_init();
    begun.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    Ok(LogLines(Mutex::new(Some(guard))))
}
