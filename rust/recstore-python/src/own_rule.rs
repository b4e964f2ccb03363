//! Update rules written in Python, for trying them out: a call of Python for each row.

use std::panic::resume_unwind;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use recstore::UpdateRule;

use crate::registry;

/// Gives the embedded store a rule whose steps are calls of Python.
///
/// `slots(dim)` returns names and widths. `apply(row, slots, gradient, step, lr)` returns the new row and the new slots,
/// `adopt(row, slots, lr)` the new slots; all are float32 in bytes of the machine's order.
#[pyfunction]
pub(crate) fn register_rule(
    py: Python<'_>,
    name: &str,
    slots: Py<PyAny>,
    apply: Py<PyAny>,
    adopt: Option<Py<PyAny>>,
) -> PyResult<()> {
    let registry = registry()?;
    let rule = Arc::new(PythonRule { slots, apply, adopt });
    py.detach(|| registry.register_rule(name, rule)).map_err(|error| PyValueError::new_err(error.to_string()))
}

struct PythonRule {
    slots: Py<PyAny>,
    apply: Py<PyAny>,
    adopt: Option<Py<PyAny>>,
}

impl UpdateRule for PythonRule {
    fn slots(&self, dim: usize) -> Vec<(String, usize)> {
        in_python(|py| self.slots.call1(py, (dim,))?.extract(py))
    }

    fn apply(&self, row: &mut [f32], slots: &mut [f32], gradient: &[f32], step: u64, learning_rate: f64) {
        in_python(|py| {
            let arguments = (bytes(py, row), bytes(py, slots), bytes(py, gradient), step, learning_rate);
            let (new_row, new_slots): (PyBackedBytes, PyBackedBytes) =
                self.apply.call1(py, arguments)?.extract(py)?;
            replace(row, &new_row).and_then(|()| replace(slots, &new_slots))
        });
    }

    fn adopt(&self, row: &[f32], slots: &mut [f32], learning_rate: f64) {
        let Some(adopt) = &self.adopt else { return };
        in_python(|py| {
            let arguments = (bytes(py, row), bytes(py, slots), learning_rate);
            replace(slots, &adopt.call1(py, arguments)?.extract::<PyBackedBytes>(py)?)
        });
    }
}

/// Calls Python. Its exception becomes the panic by which a table refuses its steps, without a word on the error stream.
fn in_python<R>(call: impl FnOnce(Python<'_>) -> PyResult<R>) -> R {
    Python::attach(call).unwrap_or_else(|error| resume_unwind(Box::new(error.to_string())))
}

fn bytes<'py>(py: Python<'py>, values: &[f32]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, bytemuck::cast_slice(values))
}

fn replace(values: &mut [f32], bytes: &[u8]) -> PyResult<()> {
    if bytes.len() != size_of_val(values) {
        let (expected, actual) = (size_of_val(values), bytes.len());
        return Err(PyValueError::new_err(format!("expected {expected} bytes, got {actual}")));
    }
    bytemuck::cast_slice_mut(values).copy_from_slice(bytes);
    Ok(())
}
