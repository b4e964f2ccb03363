//! Finding ids, and taking them out of checkpoints, frozen tables and servers.

use std::io::{self, Read};
use std::path::PathBuf;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use recstore::{EmbeddingStore, EmbeddingTable, Error, Forgetting, IdTally, Result, Serial, freeze_without};
use recstore_ps::{RemoteConfig, RemoteStore};

use crate::checkpoint::{CheckpointProgress, from_json};
use crate::servers::{self, TlsFiles};

/// The ids that are asked for at a time.
const IDS_PER_CHUNK: usize = 1 << 14;

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

/// Takes ids out of a checkpoint, or out of the directory of a server that does not run. Returns the rows that they had in
/// the newest state, and the bytes written.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn delete_ids(
    py: Python<'_>,
    directory: PathBuf,
    left: Left,
    progress: &Bound<'_, CheckpointProgress>,
) -> PyResult<(usize, u64)> {
    let progress = Some(progress.get().store_progress());
    let forgotten = py.detach(|| recstore_ps::forget(&directory, &left.as_forgetting(), progress));
    let forgotten = forgotten.map_err(raise)?;
    Ok((forgotten.rows, forgotten.written.map_or(0, |report| report.bytes)))
}

/// What a checkpoint, or the directory of a server that does not run, has of ids of tables.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn ids_in(
    py: Python<'_>,
    directory: PathBuf,
    tables: Vec<String>,
    ids: Vec<i64>,
) -> PyResult<Bound<'_, PyAny>> {
    let found = py.detach(|| recstore_ps::ids_in(&directory, &tables, &mut IdTally::new(&ids)));
    from_json(py, serde_json::to_string(&found.map_err(raise)?))
}

/// The tables of such a directory, and the files that `ids_in` reads or that cannot have ids.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn tables_in(py: Python<'_>, directory: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let found = py.detach(|| recstore_ps::tables_in(&directory)).map_err(raise)?;
    from_json(py, serde_json::to_string(&found))
}

/// Whether a directory is a server's.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn is_server_directory(directory: PathBuf) -> bool {
    recstore_ps::is_server_directory(&directory)
}

/// How often ids are in the tensors of 64-bit integers of an open file, which is read to its end; `None`: it is no whole
/// safetensors file. Of a frozen table they count if it is one of `tables`.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn ids_in_tensors(
    file: Bound<'_, PyAny>,
    tables: Vec<String>,
    ids: Vec<i64>,
) -> PyResult<Option<Vec<(i64, u64)>>> {
    let mut ids = IdTally::new(&ids);
    let is_whole = recstore::ids_in_tensors(&mut OpenFile(file), &tables, &mut ids)?;
    Ok(is_whole.then(|| ids.take()))
}

/// How often ids are in an open file, which is read to its end: as eight bytes, little-endian, wherever they begin.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn ids_in_bytes(file: Bound<'_, PyAny>, ids: Vec<i64>) -> PyResult<Vec<(i64, u64)>> {
    let mut ids = IdTally::new(&ids);
    ids.add_within(&mut OpenFile(file))?;
    Ok(ids.take())
}

/// A file object of Python. What it raises comes back as it is.
struct OpenFile<'py>(Bound<'py, PyAny>);

impl Read for OpenFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Asked for no more than fits, but any object with a `read` may give more, which is refused below.
        let part = self.0.call_method1("read", (buffer.len(),))?;
        let part: &[u8] = part.extract().map_err(PyErr::from)?;
        let room = buffer.get_mut(..part.len()).ok_or(io::ErrorKind::InvalidData)?;
        room.copy_from_slice(part);
        Ok(part.len())
    }
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
    // Looked up first: once they are deleted, it cannot be seen which had a row.
    let found = opened.iter().map(|table| with_rows(&**table, ids)).collect::<Result<_>>()?;
    if dry_run {
        return Ok((found, Vec::new()));
    }
    for (table, ids) in opened.iter().flat_map(|table| ids.chunks(IDS_PER_CHUNK).map(move |ids| (table, ids)))
    {
        table.delete(ids)?;
    }
    // Only now: the logs hold the deleted rows until the servers drop them for a checkpoint.
    let saved = store.checkpoint()?;
    Ok((found, saved.into_iter().map(|report| report.map(|report| report.bytes)).collect()))
}

/// Returns the ids that have a row.
fn with_rows(table: &dyn EmbeddingTable, ids: &[i64]) -> Result<Vec<i64>> {
    let limit = table.describe()?.config.num_embeddings;
    // A lookup would refuse the others, and all ids with them.
    let is_possible = |id: i64| limit.is_none_or(|limit| u64::try_from(id).is_ok_and(|id| id < limit));
    let possible: Vec<i64> = ids.iter().copied().filter(|id| is_possible(*id)).collect();
    let mut found = Vec::new();
    for ids in possible.chunks(IDS_PER_CHUNK) {
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * table.dim()]);
        // `false`: asking must not create rows.
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
