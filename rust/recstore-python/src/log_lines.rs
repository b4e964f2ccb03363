//! Where servers of this process tell what they do.

use std::io::stderr;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Writes what servers of this process do to its error stream from now on: lines of `level` (`off`, `error`, `warn`,
/// `info`, `debug` or `trace`) and above. Can be called once in a process.
#[pyfunction]
pub(crate) fn log_to_stderr(level: &str) -> PyResult<()> {
    let level: LevelFilter =
        level.parse().map_err(|_| PyValueError::new_err(format!("there is no log level \"{level}\"")))?;
    // What other crates say at these levels is about their own working.
    let servers = Targets::new().with_target("recstore_ps", level);
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(false);
    tracing_subscriber::registry()
        .with(servers)
        .with(lines)
        .try_init()
        .map_err(|error| PyRuntimeError::new_err(error.to_string()))
}
