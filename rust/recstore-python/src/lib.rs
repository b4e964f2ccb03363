//! The Python module `recstore_ops._native`: importing it registers the operators.
//!
//! What goes through here is the management plane: names, configurations, statistics. Tensors go through the operators.

mod checkpoint;
mod log_lines;
mod optimizer_state;
mod servers;

use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use recstore::{EmbeddingStore, Error, SimdLevel, TableId, TableStatistics};
use recstore_bridge::Failure;

/// The native part of recstore_ops. Importing it registers `torch.ops.recstore`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::checkpoint::{
        CheckpointProgress, commit_parts, compact_directory, load_tables, new_snapshot_name,
        save_part_of_tables, save_tables,
    };
    #[pymodule_export]
    use super::log_lines::{LogLines, log_to_stderr};
    #[pymodule_export]
    use super::optimizer_state::put_optimizer_states;
    #[pymodule_export]
    use super::servers::{Server, barrier, leave_workers, move_servers, use_embedded, use_servers, workers};
    use super::*;
    #[pymodule_export]
    use super::{
        describe_table, evict_rows, find_table, learning_rate_of, set_memory_limit,
        set_optimizer_learning_rate, simd_levels, statistics_of, store_memory, table_names, table_slots,
        table_statistics,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let failed = |error: String| {
            PyImportError::new_err(format!("recstore_ops could not register its operators: {error}"))
        };
        recstore_bridge::registry().map_err(|error| failed(error.to_string()))?;
        recstore_bridge::register_ops().map_err(|error| failed(error.to_string()))?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// The number of the table `name`, which no other table ever has, or `None`.
#[pyfunction]
fn find_table(py: Python<'_>, name: &str) -> PyResult<Option<i64>> {
    let store = store()?;
    Ok(find(py, store, name)?.map(|table| table.0))
}

/// The names of all tables, sorted.
#[pyfunction]
fn table_names(py: Python<'_>) -> PyResult<Vec<String>> {
    let store = store()?;
    py.detach(|| store.table_names()).map_err(raise)
}

/// The dim of the table `name` and its configuration as JSON, or `None`.
#[pyfunction]
fn describe_table(py: Python<'_>, name: &str) -> PyResult<Option<(usize, String)>> {
    let store = store()?;
    let description = py.detach(|| {
        let Some(table) = store.find_table(name)? else {
            return Ok(None);
        };
        let config = store.describe(table)?.config;
        Ok(Some((config.dim, config.to_json()?)))
    });
    match description {
        Err(Error::UnknownHandle { .. }) => Ok(None), // Dropped since it was found.
        description => description.map_err(raise),
    }
}

/// What the table `name` holds and what was done to it, or `None`.
#[pyfunction]
fn table_statistics<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
    let store = store()?;
    match find(py, store, name)? {
        Some(table) => statistics_of(py, table.0),
        None => Ok(None),
    }
}

fn statistics_if_there(py: Python<'_>, table: i64) -> PyResult<Option<TableStatistics>> {
    let store = store()?;
    match py.detach(|| store.statistics(TableId(table))) {
        Err(Error::UnknownHandle { .. }) => Ok(None), // Dropped since it was found.
        found => found.map(Some).map_err(raise),
    }
}

/// What the table of a number holds and what was done to it, or `None` if it was dropped.
#[pyfunction]
fn statistics_of(py: Python<'_>, table: i64) -> PyResult<Option<Bound<'_, PyDict>>> {
    let Some(found) = statistics_if_there(py, table)? else { return Ok(None) };
    let statistics = PyDict::new(py);
    statistics.set_item("rows", found.rows)?;
    statistics.set_item("bytes", found.bytes)?;
    for (name, bytes) in [
        ("row_bytes", found.memory.row_bytes),
        ("slot_bytes", found.memory.slot_bytes),
        ("index_bytes", found.memory.index_bytes),
        ("free_bytes", found.memory.free_bytes),
        ("disk_bytes", found.memory.disk_bytes),
        ("resident_rows", found.memory.resident_rows),
        ("rows_fetched", found.memory.rows_fetched),
        ("rows_spilled", found.memory.rows_spilled),
        ("disk_nanoseconds", found.memory.disk_nanoseconds),
    ] {
        statistics.set_item(name, bytes)?;
    }
    statistics.set_item("memory_limit", found.memory.memory_limit)?;
    statistics.set_item("inserts", found.inserts)?;
    statistics.set_item("updates", found.updates)?;
    statistics.set_item("deletes", found.deletes)?;
    statistics.set_item("rejections", found.rejections)?;
    statistics.set_item("evictions", found.evictions)?;
    statistics.set_item("candidates", found.candidates)?;
    statistics.set_item("refusals", found.refusals)?;
    statistics.set_item("step", found.step)?;
    statistics.set_item("learning_rate", found.learning_rate)?;
    statistics.set_item("learning_rate_was_set", found.learning_rate_was_set)?;
    Ok(Some(statistics))
}

/// Takes away the rows that the eviction of the table `name` chooses, unless it is a `dry_run`, and returns their ids.
#[pyfunction]
fn evict_rows(py: Python<'_>, name: &str, dry_run: bool) -> PyResult<Vec<i64>> {
    let store = store()?;
    let unknown = || raise(Error::UnknownTable { operation: "evict", table: name.to_owned() });
    let table = py.detach(|| store.find_table(name)).map_err(raise)?.ok_or_else(unknown)?;
    py.detach(|| store.evict(table, dry_run)).map_err(raise)
}

/// Limits the memory of all tables together, in bytes; `None` takes the limit away.
#[pyfunction]
fn set_memory_limit(py: Python<'_>, limit: Option<u64>) -> PyResult<()> {
    let store = store()?;
    py.detach(|| store.set_memory_limit(limit)).map_err(raise)
}

/// The memory limit of all tables together, and the bytes in use.
#[pyfunction]
fn store_memory(py: Python<'_>) -> PyResult<(Option<u64>, u64)> {
    let store = store()?;
    let memory = py.detach(|| store.memory());
    Ok((memory.limit, memory.in_use))
}

/// The learning rate of the table of a number, and whether it was set by hand; `None` if it was dropped.
#[pyfunction]
fn learning_rate_of(py: Python<'_>, table: i64) -> PyResult<Option<(f64, bool)>> {
    let found = statistics_if_there(py, table)?;
    Ok(found.map(|found| (found.learning_rate, found.learning_rate_was_set)))
}

/// Sets a table's learning rate without marking it as set by hand.
#[pyfunction]
fn set_optimizer_learning_rate(py: Python<'_>, table: i64, lr: f64) -> PyResult<()> {
    let store = store()?;
    py.detach(|| store.set_learning_rate(TableId(table), lr, false)).map_err(raise)
}

/// The names of the optimizer's slots of the table `name` and their elements a row, or `None`.
#[pyfunction]
fn table_slots(py: Python<'_>, name: &str) -> PyResult<Option<Vec<(String, usize)>>> {
    let store = store()?;
    let Some(table) = find(py, store, name)? else {
        return Ok(None);
    };
    py.detach(|| store.describe(table)).map(|found| Some(found.slots)).map_err(raise)
}

/// The SIMD levels that this machine can run, lowest first.
#[pyfunction]
fn simd_levels() -> Vec<String> {
    SimdLevel::available().iter().map(ToString::to_string).collect()
}

fn find(py: Python<'_>, store: &dyn EmbeddingStore, name: &str) -> PyResult<Option<TableId>> {
    py.detach(|| store.find_table(name)).map_err(raise)
}

fn store() -> PyResult<&'static dyn EmbeddingStore> {
    match recstore_bridge::registry() {
        Ok(registry) => Ok(registry.store()),
        Err(failure) => Err(PyRuntimeError::new_err(Failure::to_string(&failure))),
    }
}

fn raise(error: Error) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
