//! What changed in tables, on its way to frozen tables that follow them.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};
use recstore::{ChangedRows, Encoding, Error, RowChanges};
use recstore_bridge::Failure;

use crate::optimizer_state::numbers;
use crate::{raise, registry};

/// Notes the changes of the tables of numbers from here on, and returns the number of this publication.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn begin_publication(py: Python<'_>, tables: Vec<i64>) -> PyResult<u64> {
    let registry = registry()?;
    py.detach(|| registry.begin_publication(&tables)).map_err(raise)
}

/// Returns for each table `(ids, rows, deleted)`, as bytes: the rows that changed since this was asked last, in the
/// encoding of the table's place among `encodings`, and the ids whose rows went. `None`: they are no longer noted.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn take_changes<'py>(
    py: Python<'py>,
    tables: Vec<i64>,
    encodings: Vec<String>,
    publication: u64,
    was_told: bool,
) -> PyResult<Option<Vec<Bound<'py, PyTuple>>>> {
    let registry = registry()?;
    let encodings = encodings.iter().map(|name| name.parse()).collect::<Result<Vec<Encoding>, Error>>();
    let encodings = encodings.map_err(raise)?;
    let taken = py.detach(|| {
        let changed = registry.take_changes(&tables, publication, was_told)?;
        let encode = |(changed, encoding): (ChangedRows, &Encoding)| {
            let rows = encoding.encode_all(&changed.ids, &changed.rows)?;
            Ok((changed, rows))
        };
        changed.into_iter().zip(&encodings).map(encode).collect::<Result<Vec<_>, Error>>()
    });
    let as_bytes = |(changed, rows): (ChangedRows, Vec<u8>)| {
        let ids = [&changed.ids, &changed.deleted].map(|ids| PyBytes::new(py, bytemuck::cast_slice(ids)));
        let [ids, deleted] = ids;
        PyTuple::new(py, [ids, PyBytes::new(py, &rows), deleted])
    };
    match taken {
        Err(Error::NotPublished { .. }) => Ok(None),
        taken => taken.map_err(raise)?.into_iter().map(as_bytes).collect::<PyResult<_>>().map(Some),
    }
}

/// Notes nothing for a publication any more.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn end_publication(py: Python<'_>, tables: Vec<i64>, publication: u64) -> PyResult<()> {
    let registry = registry()?;
    py.detach(|| registry.end_publication(&tables, publication)).map_err(raise)
}

/// Takes what [`take_changes`] told of the table that a frozen one was made of.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn change_frozen(
    py: Python<'_>,
    handle: Vec<i64>,
    ids: PyBackedBytes,
    rows: PyBackedBytes,
    deleted: PyBackedBytes,
) -> PyResult<()> {
    let registry = registry()?;
    let changes = RowChanges { ids: numbers(&ids)?, rows: &rows, deleted: numbers(&deleted)? };
    let changed = py.detach(|| registry.change_frozen(&handle, changes));
    changed.map_err(|failure| pyo3::exceptions::PyRuntimeError::new_err(Failure::to_string(&failure)))
}
