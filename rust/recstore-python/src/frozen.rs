//! Tables that are frozen into files, and read from them.

use std::path::PathBuf;

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use recstore::{Error, freeze_parts, open_file};
use recstore_bridge::Failure;

use crate::directories::{Directory, refusal};
use crate::registry;

/// Writes the rows that the table of a number has now to a file, and returns its bytes.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn freeze_table(py: Python<'_>, table: i64, path: PathBuf, encoding: &str) -> PyResult<u64> {
    let registry = registry()?;
    let encoding = encoding.parse().map_err(raise)?;
    py.detach(|| registry.freeze(table, &path, encoding)).map_err(raise)
}

/// Writes the rows of the frozen tables at `parts`, each of which has some, to one at `path`, and returns its bytes.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn merge_frozen(py: Python<'_>, parts: Vec<PathBuf>, path: PathBuf) -> PyResult<u64> {
    py.detach(|| freeze_parts(&parts, &path)).map_err(raise)
}

/// Opens the file of a frozen table, and returns what it says of itself beside the words of its handle. In a `directory`
/// the path is a name.
#[pyfunction]
#[pyo3(signature = (path, memory, directory=None))]
pub(crate) fn open_frozen<'py>(
    py: Python<'py>,
    path: PathBuf,
    memory: &str,
    directory: Option<&Directory>,
) -> PyResult<Bound<'py, PyDict>> {
    let registry = registry()?;
    let memory = memory.parse().map_err(raise)?;
    let (file, path) = match directory {
        Some(directory) => (directory.file(py, &path)?, directory.path().join(&path)),
        None => (py.detach(|| open_file(&path)).map_err(|error| refusal(py, &error))?, path),
    };
    let opened = py.detach(|| registry.open_frozen(&file, &path, memory)).map_err(raise)?;
    let described = opened.table.describe().map_err(raise)?;
    let told = PyDict::new(py);
    told.set_item("handle", opened.handle)?;
    told.set_item("name", described.name)?;
    told.set_item("dim", opened.table.dim())?;
    told.set_item("config", described.config.to_json().map_err(raise)?)?;
    told.set_item("rows", opened.table.num_rows().map_err(raise)?)?;
    told.set_item("encoding", opened.encoding.to_string())?;
    told.set_item("fingerprint", opened.fingerprint)?;
    Ok(told)
}

/// Closes the frozen table of a handle's words.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn close_frozen(handle: Vec<i64>) -> PyResult<()> {
    registry()?.close_frozen(&handle).map_err(|failure| PyRuntimeError::new_err(Failure::to_string(&failure)))
}

#[expect(clippy::needless_pass_by_value, reason = "it is mapped over errors")]
fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Frozen { .. } => PyOSError::new_err(message),
        Error::InvalidConfig { .. } => PyValueError::new_err(message),
        _ => PyRuntimeError::new_err(message),
    }
}
