//! The rows of tables at one moment, on their way to files and states: bytes, some rows at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyDict};
use recstore::{CutRows, Error};

use crate::optimizer_state::numbers;
use crate::{raise, registry};

/// The rows that a table of this process had at one moment, until it is closed.
#[pyclass(frozen, module = "recstore_ops._native")]
pub(crate) struct TableCut {
    rows: Mutex<Option<CutRows>>,
}

impl TableCut {
    fn rows(&self) -> MutexGuard<'_, Option<CutRows>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` without Python's lock, which a rule of the program's own may wait for.
    fn with_rows<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&CutRows) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let closed = || PyRuntimeError::new_err("the rows of this moment were closed");
        py.detach(|| self.rows().as_ref().map(work)).ok_or_else(closed)?.map_err(raise)
    }
}

#[pymethods]
impl TableCut {
    /// The ids that had a row, int64, rising.
    fn ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        let ids = self.with_rows(py, |rows| Ok(rows.ids().to_vec()))?;
        Ok(PyByteArray::new(py, bytemuck::cast_slice(&ids)))
    }

    /// The rows that ids had, float32; an id that had none reads as its initial value.
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn rows_of<'py>(&self, py: Python<'py>, ids: PyBackedBytes) -> PyResult<Bound<'py, PyByteArray>> {
        let ids = numbers(&ids)?;
        let rows = self.with_rows(py, |rows| {
            let mut read = vec![0f32; ids.len() * rows.dim()];
            rows.read(ids, &mut read)?;
            Ok(read)
        })?;
        Ok(PyByteArray::new(py, bytemuck::cast_slice(&rows)))
    }

    /// The values that a slot of the optimizer had for ids, float32; `None` for an unknown slot.
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn slot_of<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        ids: PyBackedBytes,
    ) -> PyResult<Option<Bound<'py, PyByteArray>>> {
        let ids = numbers(&ids)?;
        let values = self.with_rows(py, |rows| rows.read_slot(name, ids))?;
        Ok(values.map(|values| PyByteArray::new(py, bytemuck::cast_slice(&values))))
    }

    /// The step, the learning rate and what belongs to them, by the names that statistics have for them.
    fn progress<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.with_rows(py, |rows| Ok(rows.progress()))?;
        let progress = PyDict::new(py);
        progress.set_item("step", found.step)?;
        progress.set_item("learning_rate", found.learning_rate)?;
        progress.set_item("learning_rate_was_set", found.learning_rate_was_set)?;
        if let Some(idle_kept) = found.idle_kept {
            progress.set_item("idle_kept", idle_kept.to_vec())?;
        }
        Ok(progress)
    }

    /// Ends it: no copies of rows that change are kept any more.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.rows().take()));
    }
}

impl Drop for TableCut {
    fn drop(&mut self) {
        let rows = self.rows.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(rows) = rows {
            // Not as an interpreter ends.
            _ = Python::try_attach(|py| py.detach(|| drop(rows)));
        }
    }
}

/// The rows of the tables of some numbers, all at one moment; `None` for a table on servers.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn cut_tables(py: Python<'_>, tables: Vec<i64>) -> PyResult<Vec<Option<TableCut>>> {
    let registry = registry()?;
    let cuts = py.detach(|| registry.cut_rows(&tables)).map_err(raise)?;
    Ok(cuts.into_iter().map(|rows| rows.map(|rows| TableCut { rows: Mutex::new(Some(rows)) })).collect())
}
