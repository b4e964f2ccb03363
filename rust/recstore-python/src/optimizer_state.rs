//! What optimizers keep, put into tables by `load_state_dict`: bytes, for it is done once a run.

use bytemuck::Pod;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use recstore::{OptimizerState, TableId};

use crate::{raise, registry};

/// The keys of a dict that holds the state of a table's optimizer.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct StateOfTable {
    /// The table's number.
    table: i64,
    /// int64.
    ids: PyBackedBytes,
    /// float32, of each slot in the table's order.
    slots: Vec<PyBackedBytes>,
    step: u64,
    learning_rate: f64,
    learning_rate_was_set: bool,
    idle_kept: Option<[f64; 2]>,
}

impl StateOfTable {
    fn as_state(&self) -> PyResult<OptimizerState<'_>> {
        Ok(OptimizerState {
            table: TableId(self.table),
            ids: numbers(&self.ids)?,
            slots: self.slots.iter().map(|slot| numbers(slot)).collect::<PyResult<_>>()?,
            step: self.step,
            learning_rate: self.learning_rate,
            learning_rate_was_set: self.learning_rate_was_set,
            idle_kept: self.idle_kept,
        })
    }
}

pub(crate) fn numbers<T: Pod>(bytes: &[u8]) -> PyResult<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|error| {
        PyValueError::new_err(format!("{} bytes are no numbers of {}: {error}", bytes.len(), size_of::<T>()))
    })
}

/// Puts what optimizers keep into several tables, all at one moment.
#[pyfunction]
pub(crate) fn put_optimizer_states(py: Python<'_>, states: Vec<StateOfTable>) -> PyResult<()> {
    let registry = registry()?;
    let states = states.iter().map(StateOfTable::as_state).collect::<PyResult<Vec<_>>>()?;
    py.detach(|| registry.put_optimizer_states(states)).map_err(raise)
}
