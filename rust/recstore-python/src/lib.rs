//! The Python module `recstore_ops._native`: importing it registers the operators.
//!
//! What goes through here is the management plane: names, configurations, statistics. Tensors go through the operators.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod checkpoint;
mod directories;
mod forgetting;
mod front;
mod frozen;
mod log_lines;
mod object_folder;
mod optimizer_state;
mod own_rule;
mod publishing;
mod requests;
mod servers;
mod table_cut;
mod text_rows;

use std::sync::Arc;

use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use recstore::{EmbeddingTable, Error, InProcessStore, SimdLevel};
use recstore_bridge::{Failure, Registry};

/// The native part of recstore_ops. Importing it registers `torch.ops.recstore`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::checkpoint::{
        CheckpointProgress, commit_parts, compact_directory, load_tables, manifest, new_snapshot_name, prune,
        save_part_of_tables, save_tables, verify,
    };
    #[pymodule_export]
    use super::directories::{Directory, check_file_name};
    #[pymodule_export]
    use super::forgetting::{
        delete_ids, forget_on_servers, freeze_table_without, ids_in, ids_in_bytes, ids_in_tensors,
        is_server_directory, tables_in,
    };
    #[pymodule_export]
    use super::front::{Front, raise_descriptor_limit};
    #[pymodule_export]
    use super::frozen::{close_frozen, freeze_table, merge_frozen, open_frozen};
    #[pymodule_export]
    use super::log_lines::{LogLines, log_to_stderr};
    #[pymodule_export]
    use super::object_folder::PublicationFolder;
    #[pymodule_export]
    use super::optimizer_state::put_optimizer_states;
    #[pymodule_export]
    use super::own_rule::register_rule;
    #[pymodule_export]
    use super::publishing::{begin_publication, change_frozen, end_publication, take_changes};
    #[pymodule_export]
    use super::requests::Requests;
    #[pymodule_export]
    use super::servers::{
        Server, barrier, leave_workers, left_out_of_log, move_servers, promote, reshard, shard_counts,
        try_servers, use_embedded, use_servers, workers,
    };
    #[pymodule_export]
    use super::table_cut::{TableCut, cut_tables};
    #[pymodule_export]
    use super::text_rows::parse_delimited;
    use super::*;
    #[pymodule_export]
    use super::{
        copy_table, describe_table, disk_reading_way, evict_rows, failed_operator, find_table,
        learning_rates_of, optimizers, set_job_size, set_memory_limit, set_optimizer_learning_rate,
        set_shards, simd_levels, statistics_of, store_memory, table_names, table_slots, table_statistics,
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
    Ok(find(py, name)?.map(|(number, _)| number))
}

/// Copies the table of a number, with all that it holds and counts, under a name that no table has.
#[pyfunction]
fn copy_table(py: Python<'_>, table: i64, name: &str) -> PyResult<()> {
    let registry = registry()?;
    py.detach(|| registry.copy_table(table, name)).map_err(raise)
}

/// Notes of how many processes the job consists that this process belongs to; 1 without a job.
#[pyfunction]
fn set_job_size(processes: usize) -> PyResult<()> {
    registry()?.set_job_size(processes);
    Ok(())
}

/// The names of all tables, sorted.
#[pyfunction]
fn table_names(py: Python<'_>) -> PyResult<Vec<String>> {
    let store = registry()?.store();
    py.detach(|| store.table_names()).map_err(raise)
}

/// The dim of the table `name` and its configuration as JSON, or `None`.
#[pyfunction]
fn describe_table(py: Python<'_>, name: &str) -> PyResult<Option<(usize, String)>> {
    let registry = registry()?;
    let description = py.detach(|| {
        let Some((_, table)) = registry.find_table(name)? else {
            return Ok(None);
        };
        let config = table.describe()?.config;
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
    match find(py, name)? {
        Some((number, _)) => statistics_of(py, number),
        None => Ok(None),
    }
}

/// Calls `work` with the table of a number, and returns nothing if it was dropped.
fn if_there<R: Send>(
    py: Python<'_>,
    table: i64,
    work: impl FnOnce(&dyn EmbeddingTable) -> recstore::Result<R> + Send,
) -> PyResult<Option<R>> {
    let registry = registry()?;
    match py.detach(|| work(&*registry.numbered_table("statistics", table)?)) {
        Err(Error::UnknownHandle { .. }) => Ok(None),
        found => found.map(Some).map_err(raise),
    }
}

/// What the table of a number holds and what was done to it, or `None` if it was dropped.
#[pyfunction]
fn statistics_of(py: Python<'_>, table: i64) -> PyResult<Option<Bound<'_, PyDict>>> {
    let Some(found) = if_there(py, table, |table| table.statistics())? else { return Ok(None) };
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
        ("linear_ids", found.memory.linear_ids),
        ("array_ids", found.memory.array_ids),
        ("hash_ids", found.memory.hash_ids),
    ] {
        statistics.set_item(name, bytes)?;
    }
    statistics.set_item("memory_limit", found.memory.memory_limit)?;
    statistics.set_item("inserts", found.inserts)?;
    statistics.set_item("updates", found.updates)?;
    statistics.set_item("deletes", found.deletes)?;
    statistics.set_item("writes", found.writes)?;
    statistics.set_item("rejections", found.rejections)?;
    statistics.set_item("evictions", found.evictions)?;
    statistics.set_item("candidates", found.candidates)?;
    statistics.set_item("shared_rows", found.shared_rows)?;
    statistics.set_item("refusals", found.refusals)?;
    statistics.set_item("step", found.step)?;
    statistics.set_item("learning_rate", found.learning_rate)?;
    statistics.set_item("learning_rate_was_set", found.learning_rate_was_set)?;
    if let Some(idle_kept) = found.idle_kept {
        statistics.set_item("idle_kept", idle_kept.to_vec())?;
    }
    if let Some(share) = found.capacity_share {
        statistics.set_item("capacity_share", share)?;
    }
    Ok(Some(statistics))
}

/// Takes away the rows that the eviction of the table `name` chooses, unless it is a `dry_run`, and returns their ids.
/// A `ttl` takes the place of the table's own.
#[pyfunction]
fn evict_rows(py: Python<'_>, name: &str, dry_run: bool, ttl: Option<u64>) -> PyResult<Vec<i64>> {
    let registry = registry()?;
    py.detach(|| registry.evict(name, ttl, dry_run)).map_err(raise)
}

/// Limits the memory of all tables together, in bytes; `None` takes the limit away.
#[pyfunction]
fn set_memory_limit(py: Python<'_>, limit: Option<u64>) -> PyResult<()> {
    let store = registry()?.embedded();
    py.detach(|| store.set_memory_limit(limit)).map_err(raise)
}

/// Says that the rows of the table of a number are spread over so many processes.
#[pyfunction]
fn set_shards(py: Python<'_>, table: i64, shards: usize) -> PyResult<()> {
    let registry = registry()?;
    py.detach(|| registry.set_shards(table, shards)).map_err(raise)
}

/// The memory limit of all tables together, and the bytes in use.
#[pyfunction]
fn store_memory(py: Python<'_>) -> PyResult<(Option<u64>, u64)> {
    let store = registry()?.embedded();
    let memory = py.detach(|| store.memory());
    Ok((memory.limit, memory.in_use))
}

/// The learning rates of the tables of some numbers, and whether each was set by hand; `None` for one that was dropped.
/// On servers, as this process last set or asked for them, unless it `asks` them.
#[pyfunction]
fn learning_rates_of(py: Python<'_>, tables: Vec<i64>, asks: bool) -> PyResult<Vec<Option<(f64, bool)>>> {
    let rate = |table: &dyn EmbeddingTable| {
        if !asks {
            return table.learning_rate();
        }
        table.statistics().map(|found| (found.learning_rate, found.learning_rate_was_set))
    };
    tables.into_iter().map(|table| if_there(py, table, rate)).collect()
}

/// Sets a table's learning rate without marking it as set by hand.
#[pyfunction]
fn set_optimizer_learning_rate(py: Python<'_>, table: i64, lr: f64) -> PyResult<()> {
    let registry = registry()?;
    let set = || registry.numbered_table("set_learning_rate", table)?.set_learning_rate(lr, false);
    py.detach(set).map_err(raise)
}

/// The names of the optimizer's slots of the table `name` and their elements a row, or `None`.
#[pyfunction]
fn table_slots(py: Python<'_>, name: &str) -> PyResult<Option<Vec<(String, usize)>>> {
    let Some((_, table)) = find(py, name)? else {
        return Ok(None);
    };
    py.detach(|| table.describe()).map(|found| Some(found.slots)).map_err(raise)
}

/// The optimizers of the store as a list in JSON: `kind`, `about`, `options`, `slots`, `training` and `forms` of each.
#[pyfunction]
fn optimizers() -> PyResult<String> {
    serde_json::to_string(&recstore::optimizers()).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// How rows of tables larger than memory are read from the disk: `io_uring`, or `pread` and why.
#[pyfunction]
fn disk_reading_way() -> String {
    recstore::reading_way()
}

/// The SIMD levels that this machine can run, lowest first.
#[pyfunction]
fn simd_levels() -> Vec<String> {
    SimdLevel::available().iter().map(ToString::to_string).collect()
}

/// The operator of the store that raised the error of this text, on whatever thread: one of the last of the process.
#[pyfunction]
fn failed_operator(message: &str) -> Option<String> {
    Failure::recent(message)?.operation().map(str::to_owned)
}

fn find(py: Python<'_>, name: &str) -> PyResult<Option<(i64, Arc<dyn EmbeddingTable>)>> {
    let registry = registry()?;
    py.detach(|| registry.find_table(name)).map_err(raise)
}

fn registry() -> PyResult<&'static Registry> {
    recstore_bridge::registry().map_err(|failure| PyRuntimeError::new_err(Failure::to_string(&failure)))
}

fn raise(error: Error) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
