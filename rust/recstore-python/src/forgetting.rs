//! Taking ids out of checkpoints, frozen tables and servers.

use std::path::PathBuf;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use recstore::{
    EmbeddingStore, EmbeddingTable, Error, Forgetting, Forgotten, Progress, Result, Serial,
    forget_in_checkpoint, freeze_without,
};
use recstore_ps::{RemoteConfig, RemoteStore};

use crate::checkpoint::CheckpointProgress;
use crate::servers::{self, TlsFiles};

/// The ids that are asked for at a time.
const IDS_AT_A_TIME: usize = 1 << 14;

/// What is to be left out, and the snapshots that have it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Left {
    tables: Vec<String>,
    ids: Vec<i64>,
    snapshots: Vec<String>,
    holding: Vec<String>,
}

impl Left {
    fn as_forgetting(&self) -> Forgetting<'_> {
        let Self { tables, ids, snapshots, holding } = self;
        Forgetting { tables, ids, snapshots, holding }
    }
}

/// Takes ids out of a checkpoint. Returns the rows that they had in its newest snapshot, and the bytes written.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn forget_in_directory(
    py: Python<'_>,
    directory: PathBuf,
    left: Left,
    progress: &Bound<'_, CheckpointProgress>,
) -> PyResult<(usize, u64)> {
    forget_shown(py, progress, |progress| forget_in_checkpoint(&directory, &left.as_forgetting(), progress))
}

/// The same in the directory of a server that does not run.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn forget_in_shard(
    py: Python<'_>,
    directory: PathBuf,
    left: Left,
    progress: &Bound<'_, CheckpointProgress>,
) -> PyResult<(usize, u64)> {
    forget_shown(py, progress, |progress| recstore_ps::forget(&directory, &left.as_forgetting(), progress))
}

fn forget_shown(
    py: Python<'_>,
    progress: &Bound<'_, CheckpointProgress>,
    forget: impl FnOnce(Option<&Progress>) -> Result<Forgotten> + Send,
) -> PyResult<(usize, u64)> {
    let progress = progress.get().store_progress();
    let forgotten = py.detach(|| forget(Some(progress))).map_err(raise)?;
    Ok((forgotten.rows, forgotten.written.map_or(0, |report| report.bytes)))
}

/// Writes a frozen table without the rows of ids to another file. Returns how many they were, and the bytes written.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn freeze_table_without(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    ids: Vec<i64>,
) -> PyResult<(usize, u64)> {
    py.detach(|| freeze_without(&source, &target, &ids)).map_err(raise)
}

/// Deletes ids on servers, unless it is a `dry_run`, and lets these save to their directories and drop their logs. Returns
/// for each table the ids that had a row, and for each server the bytes saved, or `None` without a directory.
#[pyfunction]
#[expect(clippy::too_many_arguments, clippy::type_complexity, reason = "keywords and tuples in Python")]
#[pyo3(signature = (servers, hash_method, token, tls, timeout, tables, ids, dry_run))]
pub(crate) fn forget_on_servers(
    py: Python<'_>,
    servers: Vec<String>,
    hash_method: &str,
    token: Option<String>,
    tls: Option<TlsFiles>,
    timeout: f64,
    tables: Vec<String>,
    ids: Vec<i64>,
    dry_run: bool,
) -> PyResult<(Vec<Vec<i64>>, Vec<Option<u64>>)> {
    let mut config = RemoteConfig::new(servers);
    config.hash_method = hash_method.parse().map_err(raise)?;
    config.token = token;
    config.tls = tls.map(|tls| tls.of_client()).transpose()?;
    config.timeout = crate::servers::seconds(timeout)?;
    py.detach(|| on_servers(config, &tables, &ids, dry_run)).map_err(raise)
}

#[expect(clippy::type_complexity, reason = "as its caller")]
fn on_servers(
    config: RemoteConfig,
    tables: &[String],
    ids: &[i64],
    dry_run: bool,
) -> Result<(Vec<Vec<i64>>, Vec<Option<u64>>)> {
    let store = RemoteStore::connect(config, Box::new(Serial))?;
    let mut opened = Vec::new();
    for name in tables {
        opened.push(store.find_table(name)?.ok_or_else(|| unknown(name, &store.table_names()))?);
    }
    let found = opened.iter().map(|table| with_rows(&**table, ids)).collect::<Result<_>>()?;
    if dry_run {
        return Ok((found, Vec::new()));
    }
    for (table, ids) in opened.iter().flat_map(|table| ids.chunks(IDS_AT_A_TIME).map(move |ids| (table, ids)))
    {
        table.delete(ids)?;
    }
    let saved = store.checkpoint()?;
    Ok((found, saved.into_iter().map(|report| report.map(|report| report.bytes)).collect()))
}

/// Returns the ids that have a row.
fn with_rows(table: &dyn EmbeddingTable, ids: &[i64]) -> Result<Vec<i64>> {
    let limit = table.describe()?.config.num_embeddings;
    let is_possible = |id: i64| limit.is_none_or(|limit| u64::try_from(id).is_ok_and(|id| id < limit));
    let possible: Vec<i64> = ids.iter().copied().filter(|id| is_possible(*id)).collect();
    let mut found = Vec::new();
    for ids in possible.chunks(IDS_AT_A_TIME) {
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * table.dim()]);
        table.lookup(ids, false, &mut indices, &mut rows)?;
        found.extend(ids.iter().zip(&indices).filter(|(_, index)| **index >= 0).map(|(id, _)| *id));
    }
    Ok(found)
}

fn unknown(name: &str, names: &Result<Vec<String>>) -> Error {
    let names = names.as_ref().map_or_else(|_| String::new(), |names| names.join(", "));
    let message = format!(
        "the servers have no table \"{name}\", but {}",
        if names.is_empty() { "none" } else { &names }
    );
    Error::InvalidConfig { message }
}

fn raise(error: Error) -> PyErr {
    match error {
        Error::Frozen { .. } => PyOSError::new_err(error.to_string()),
        error => servers::raise(error),
    }
}
