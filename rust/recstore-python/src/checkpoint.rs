//! Checkpoints of the process's tables.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use recstore::{
    LoadOptions, LoadReport, Metadata, Progress, Pruning, SaveKind, SaveOptions, SaveReport, Shard,
    checkpoint_snapshots, commit_snapshot, compact, verify_checkpoint,
};
use recstore_object_store::ObjectCheckpoint;

use crate::directories::refusal;
use crate::{raise, registry};

/// How far a save or a load is, which another thread may ask while it runs.
#[pyclass(frozen)]
pub(crate) struct CheckpointProgress(Progress);

impl CheckpointProgress {
    pub(crate) fn store_progress(&self) -> &Progress {
        &self.0
    }
}

#[pymethods]
impl CheckpointProgress {
    #[new]
    fn new() -> Self {
        Self(Progress::default())
    }

    /// The bytes done and the bytes in all; 0 of 0 before these are known.
    fn bytes(&self) -> (u64, u64) {
        self.0.bytes()
    }

    /// Whether what this process changes from now on is no part of a save.
    fn has_begun(&self) -> bool {
        self.0.has_begun()
    }
}

/// The keys of a dict that says how to save.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct SaveArguments {
    /// `full`, `delta` or `auto`.
    kind: String,
    keep: usize,
    /// JSON.
    metadata: String,
    /// The level of zstd; plain files without it.
    compression: Option<i32>,
    /// Whether the snapshots of other stores go.
    replace: bool,
}

impl SaveArguments {
    fn options<'a>(&self, progress: Option<&'a CheckpointProgress>) -> PyResult<SaveOptions<'a>> {
        let kind = &self.kind;
        let mut options = SaveOptions::default();
        options.kind = match kind.as_str() {
            "full" => SaveKind::Full,
            "delta" => SaveKind::Delta,
            "auto" => SaveKind::Auto,
            _ => return Err(invalid(format!("kind must be full, delta or auto, got \"{kind}\""))),
        };
        options.keep = self.keep;
        options.metadata = Metadata::parse(&self.metadata).map_err(invalid)?;
        options.compression = self.compression.into();
        options.replace = self.replace;
        options.progress = progress.map(|progress| &progress.0);
        Ok(options)
    }
}

/// Where a checkpoint is: a directory, or an object store.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CheckpointLocation {
    path: PathBuf,
    /// The URL of an object store, which `path` has no part in.
    url: Option<String>,
    storage_options: BTreeMap<String, String>,
}

impl CheckpointLocation {
    fn objects(&self) -> PyResult<Option<ObjectCheckpoint>> {
        let Some(url) = &self.url else { return Ok(None) };
        let options = self.storage_options.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        ObjectCheckpoint::from_url(url, options).map(Some).map_err(|error| invalid(error.to_string()))
    }
}

/// Saves all tables.
#[pyfunction]
pub(crate) fn save_tables<'py>(
    py: Python<'py>,
    place: CheckpointLocation,
    arguments: SaveArguments,
    progress: &Bound<'py, CheckpointProgress>,
) -> PyResult<Bound<'py, PyDict>> {
    let (store, options) = (registry()?.store(), arguments.options(Some(progress.get()))?);
    let objects = place.objects()?;
    // Without the GIL, so that another thread can ask `progress` meanwhile.
    let saved = py.detach(|| match &objects {
        Some(objects) => objects.save(&*store, &options).map_err(raise_object),
        None => store.save(&place.path, &options).map_err(raise),
    });
    save_report(py, saved?)
}

/// Saves all tables as the part that shard `number` of `of` has in a snapshot.
#[pyfunction]
pub(crate) fn save_part_of_tables<'py>(
    py: Python<'py>,
    directory: PathBuf,
    snapshot: &str,
    shard: (usize, usize),
    arguments: SaveArguments,
    progress: &Bound<'py, CheckpointProgress>,
) -> PyResult<Bound<'py, PyDict>> {
    let (store, options) = (registry()?.store(), arguments.options(Some(progress.get()))?);
    let shard = Shard { number: shard.0, of: shard.1 };
    let saved = py.detach(|| {
        let message = "the servers are the shards of a snapshot: save all of them together";
        store.needs_process("save", message)?.save_part(&directory, snapshot, shard, &options)
    });
    save_report(py, saved.map_err(raise)?)
}

/// Makes the parts that all shards saved the directory's newest snapshot. Returns the newest of another store's that stay
/// beside it, where there are any.
#[pyfunction]
pub(crate) fn commit_parts(
    py: Python<'_>,
    directory: PathBuf,
    snapshot: &str,
    of: usize,
    arguments: SaveArguments,
) -> PyResult<Option<String>> {
    let options = arguments.options(None)?;
    py.detach(|| commit_snapshot(&directory, snapshot, of, &options)).map_err(raise)
}

/// The name of a snapshot that does not exist yet.
#[pyfunction]
pub(crate) fn new_snapshot_name() -> String {
    recstore::new_snapshot_name()
}

/// Makes one full snapshot of a chain of deltas; `None` if the newest snapshot follows none.
#[pyfunction]
pub(crate) fn compact_directory<'py>(
    py: Python<'py>,
    directory: PathBuf,
    progress: &Bound<'py, CheckpointProgress>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let progress = &progress.get().0;
    let compacted = py.detach(|| compact(&directory, Some(progress))).map_err(raise)?;
    compacted.map(|saved| save_report(py, saved)).transpose()
}

/// The keys of a dict that says what to load.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct LoadArguments {
    /// Only the rows of shard `number` of `of`, of which the first has the tables' counts.
    shard: Option<(usize, usize)>,
    tables: Option<BTreeSet<String>>,
    without_rules: bool,
    /// The newest without it.
    snapshot: Option<String>,
}

/// Loads a snapshot.
#[pyfunction]
pub(crate) fn load_tables<'py>(
    py: Python<'py>,
    place: CheckpointLocation,
    arguments: LoadArguments,
    progress: &Bound<'py, CheckpointProgress>,
) -> PyResult<Bound<'py, PyDict>> {
    let LoadArguments { shard, tables, without_rules, snapshot } = arguments;
    let registry = registry()?;
    // `keeps` chooses rows by their ids, `shard` the shared rows, which have none.
    let keeps = shard.map(|(number, of)| move |id| Shard { number, of }.holds(id));
    let mut options = LoadOptions::default();
    options.keeps = keeps.as_ref().map(|keeps| keeps as &(dyn Fn(i64) -> bool + Sync));
    options.shard = shard.map(|(number, of)| Shard { number, of });
    options.without_counts = shard.is_some_and(|(number, _)| number > 0);
    options.tables = tables.as_ref();
    options.snapshot = snapshot.as_deref();
    options.without_rules = without_rules;
    options.progress = Some(&progress.get().0);
    let objects = place.objects()?;
    let loaded = py.detach(|| match &objects {
        Some(objects) => registry.load(|store| objects.load(store, &options)).map_err(raise_object),
        None => registry.load(|store| store.load(&place.path, &options)).map_err(raise),
    });
    load_report(py, loaded?)
}

/// The snapshots of a directory as its manifest has them, the oldest first.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn manifest(py: Python<'_>, directory: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let snapshots = py.detach(|| checkpoint_snapshots(&directory)).map_err(raise)?;
    from_json(py, Ok(snapshots))
}

/// Compares all files of a directory with its manifest.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn verify(py: Python<'_>, directory: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let verified = py.detach(|| verify_checkpoint(&directory)).map_err(raise)?;
    from_json(py, serde_json::to_string(&verified))
}

/// Takes all but the newest snapshots out of a directory. `on_plan` is called with what goes, before it does.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn prune<'py>(
    py: Python<'py>,
    directory: PathBuf,
    keep: usize,
    dry_run: bool,
    on_plan: &Bound<'py, PyAny>,
) -> PyResult<()> {
    // The plan is kept while Python is called in between, so that exactly what `on_plan` saw goes.
    let pruning = py.detach(|| Pruning::plan(&directory, keep, dry_run)).map_err(raise)?;
    on_plan.call1((from_json(py, serde_json::to_string(pruning.pruned()))?,))?;
    match dry_run {
        true => Ok(()),
        false => py.detach(|| pruning.carry_out()).map_err(|error| refusal(py, &error)),
    }
}

/// Makes what the store tells as JSON an object of Python.
pub(crate) fn from_json(py: Python<'_>, text: serde_json::Result<String>) -> PyResult<Bound<'_, PyAny>> {
    let text = text.map_err(|error| invalid(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

fn save_report(py: Python<'_>, saved: SaveReport) -> PyResult<Bound<'_, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("snapshot", saved.snapshot)?;
    report.set_item("is_delta", saved.is_delta)?;
    report.set_item("rows", saved.rows)?;
    report.set_item("deleted", saved.deleted)?;
    report.set_item("bytes", saved.bytes)?;
    report.set_item("kept", saved.kept)?;
    Ok(report)
}

/// The report's `metadata` is JSON.
fn load_report(py: Python<'_>, loaded: LoadReport) -> PyResult<Bound<'_, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("snapshot", loaded.snapshot)?;
    report.set_item("metadata", loaded.metadata.as_str())?;
    report.set_item("tables", loaded.tables)?;
    Ok(report)
}

fn raise_object(error: recstore_object_store::Error) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

fn invalid(message: String) -> PyErr {
    PyValueError::new_err(message)
}
