//! Parameter servers: choosing them for this process's tables, and being one.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyConnectionError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use recstore::{Error, LocalStore, Serial, Shard};
use recstore_ps::{
    ClientTls, Combine, Consistency, Durability, FollowedServer, Handler, IdentityFiles, KeptState,
    RemoteConfig, RemoteStore, ServerConfig, ServerError, ServerTls, TlsError, WorkerState, WorkerSync,
};

use crate::checkpoint::from_json;
use crate::registry;

/// How long requests under way may take when a server is stopped.
const GRACE: Duration = Duration::from_secs(10);

/// Files of certificates and keys, and the name that servers' certificates are of.
#[derive(FromPyObject)]
pub(crate) struct TlsFiles {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
    server_name: Option<String>,
}

impl TlsFiles {
    fn identity(&self) -> Option<IdentityFiles> {
        let (certificate, key) = (self.certificate.clone()?, self.key.clone()?);
        Some(IdentityFiles { certificate, key })
    }

    pub(crate) fn of_client(&self) -> PyResult<ClientTls> {
        let ca = self
            .ca
            .as_deref()
            .ok_or_else(|| PyValueError::new_err("tls needs ca, the certificates to trust"))?;
        ClientTls::from_files(ca, self.identity().as_ref(), self.server_name.as_deref()).map_err(refuse)
    }

    pub(crate) fn of_server(&self) -> PyResult<ServerTls> {
        let missing = || PyValueError::new_err("tls of a server needs certificate and key");
        ServerTls::from_files(&self.identity().ok_or_else(missing)?, self.ca.as_deref()).map_err(refuse)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is mapped over errors")]
fn refuse(error: TlsError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Connects to the servers at `servers`, `host:port` each in the order of the shards; tables are opened there from then
/// on. `timeout` is the seconds a call may take with all its attempts. Returns a number of these servers.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are those of the call in Python")]
pub(crate) fn use_servers(
    py: Python<'_>,
    servers: Vec<String>,
    hash_method: &str,
    token: Option<String>,
    timeout: f64,
    tls: Option<TlsFiles>,
    worker: Option<u32>,
    wire_dtype: &str,
    shared_memory: bool,
) -> PyResult<usize> {
    let mut config = RemoteConfig::new(servers);
    config.wire_dtype = wire_dtype.parse().map_err(raise)?;
    config.worker = worker;
    config.shared_memory = shared_memory;
    config.hash_method = hash_method.parse().map_err(raise)?;
    config.token = token;
    config.tls = tls.map(|tls| tls.of_client()).transpose()?;
    config.timeout = seconds(timeout)?;
    let registry = registry()?;
    py.detach(|| registry.use_servers(config)).map_err(raise)
}

/// Connects to servers as [`use_servers`] does, and leaves tables where they are opened.
#[pyfunction]
pub(crate) fn try_servers(
    py: Python<'_>,
    servers: Vec<String>,
    hash_method: &str,
    token: Option<String>,
    timeout: f64,
    tls: Option<TlsFiles>,
) -> PyResult<()> {
    let mut config = RemoteConfig::new(servers);
    config.hash_method = hash_method.parse().map_err(raise)?;
    config.token = token;
    config.tls = tls.map(|tls| tls.of_client()).transpose()?;
    config.timeout = seconds(timeout)?;
    py.detach(|| RemoteStore::connect(config, Box::new(Serial)).map(drop)).map_err(raise)
}

/// Calls servers at other addresses from now on: those that `use_servers` gave this number.
#[pyfunction]
pub(crate) fn move_servers(py: Python<'_>, number: usize, servers: Vec<String>) -> PyResult<()> {
    let registry = registry()?;
    py.detach(|| registry.move_servers(number, &servers)).map_err(raise)
}

/// Opens tables in this process from now on.
#[pyfunction]
pub(crate) fn use_embedded() -> PyResult<()> {
    registry()?.use_embedded();
    Ok(())
}

/// Waits until all workers have come to the barrier `name`, at most `timeout` seconds.
#[pyfunction]
pub(crate) fn barrier(py: Python<'_>, name: &str, timeout: f64) -> PyResult<()> {
    let patience = seconds(timeout)?;
    let servers = servers()?;
    py.detach(|| servers.barrier(name, patience)).map_err(raise)
}

/// Says that this worker has finished.
#[pyfunction]
pub(crate) fn leave_workers(py: Python<'_>) -> PyResult<()> {
    let servers = servers()?;
    py.detach(|| servers.leave()).map_err(raise)
}

/// Returns for each shard its workers, as number, steps and seconds of silence, and the most steps that one was ahead.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "tuples in Python")]
pub(crate) fn workers(py: Python<'_>) -> PyResult<Vec<(Vec<(u32, u64, f64)>, u64)>> {
    let servers = servers()?;
    let known = py.detach(|| servers.workers()).map_err(raise)?;
    let tuple = |state: WorkerState| (state.worker, state.steps, state.silent_for);
    Ok(known.into_iter().map(|(states, ahead)| (states.into_iter().map(tuple).collect(), ahead)).collect())
}

/// Returns the servers on which tables are opened.
fn servers() -> PyResult<Arc<RemoteStore>> {
    let missing =
        || PyRuntimeError::new_err("tables are not opened on servers: choose them with set_ps_servers");
    registry()?.servers().ok_or_else(missing)
}

/// How the updates of workers go together, in the words of the command line.
#[derive(FromPyObject)]
pub(crate) struct Workers {
    workers: Option<u32>,
    consistency: String,
    combine: String,
    staleness: u64,
    worker_timeout: f64,
    heartbeat_timeout: f64,
}

impl Workers {
    fn worker_sync(&self) -> PyResult<WorkerSync> {
        let unknown =
            |what: &str, word: &str| Err(PyValueError::new_err(format!("unknown {what} \"{word}\"")));
        let combine = match self.combine.as_str() {
            "sum" => Combine::Sum,
            "mean" => Combine::Mean,
            word => return unknown("combine", word),
        };
        let mut worker_sync = WorkerSync::default();
        worker_sync.consistency = match self.consistency.as_str() {
            "asynchronous" => Consistency::Asynchronous,
            "synchronous" => Consistency::Synchronous { combine },
            "bounded" => Consistency::Bounded { staleness: self.staleness },
            word => return unknown("consistency", word),
        };
        worker_sync.workers = self.workers;
        worker_sync.patience = seconds(self.worker_timeout)?;
        worker_sync.silence = seconds(self.heartbeat_timeout)?;
        Ok(worker_sync)
    }
}

/// One shard served by this process, over a store of its own.
#[pyclass(frozen)]
pub(crate) struct Server {
    running: Mutex<Option<recstore_ps::Server>>,
    handler: Arc<Handler>,
    address: String,
    grpc_address: Option<String>,
    health_address: Option<String>,
    metrics_address: Option<String>,
}

#[pymethods]
impl Server {
    /// Starts serving; a port 0 takes any that is free, none of `grpc_port`, `health_port` and `metrics_port` has no such
    /// service.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    #[pyo3(signature = (*, host, port, shard, num_shards, grpc_port, health_port, metrics_host, metrics_port, max_connections, token, tls, insecure, directory, durability, workers, follow, synchronous, unix_socket=None))]
    fn new(
        py: Python<'_>,
        host: String,
        port: u16,
        shard: usize,
        num_shards: usize,
        grpc_port: Option<u16>,
        health_port: Option<u16>,
        metrics_host: String,
        metrics_port: Option<u16>,
        max_connections: usize,
        token: Option<String>,
        tls: Option<TlsFiles>,
        insecure: bool,
        directory: Option<PathBuf>,
        durability: &str,
        workers: Workers,
        follow: Option<String>,
        synchronous: bool,
        unix_socket: Option<PathBuf>,
    ) -> PyResult<Self> {
        let store = Arc::new(LocalStore::default());
        let mut config = ServerConfig::default();
        (config.host, config.port, config.grpc_port) = (host, port, grpc_port);
        (config.unix_socket, config.health_port) = (unix_socket, health_port);
        (config.metrics_host, config.metrics_port) = (metrics_host, metrics_port);
        (config.token, config.insecure, config.max_connections) = (token, insecure, max_connections);
        // The same files serve both ends: a follower is a client of its leader.
        let to_leader = tls.as_ref().filter(|_| follow.is_some()).map(TlsFiles::of_client).transpose()?;
        config.tls = tls.map(|tls| tls.of_server()).transpose()?;
        let durability = durability_of(durability)?;
        if follow.is_some() && directory.is_none() {
            return Err(PyValueError::new_err("follow needs directory, the place of the copy"));
        }
        let follows = follow.map(|address| FollowedServer { address, tls: to_leader, synchronous });
        config.kept = directory.map(|directory| KeptState { directory, durability, follows });
        config.worker_sync = workers.worker_sync()?;
        config.shard = Shard { number: shard, of: num_shards };
        let server = py.detach(|| recstore_ps::Server::start(store, config)).map_err(cannot_start)?;
        let address = server.address().to_string();
        let grpc_address = server.grpc_address().map(|address| address.to_string());
        let health_address = server.health_address().map(|address| address.to_string());
        let metrics_address = server.metrics_address().map(|address| address.to_string());
        let handler = Arc::clone(server.handler());
        let running = Mutex::new(Some(server));
        Ok(Self { running, handler, address, grpc_address, health_address, metrics_address })
    }

    /// `host:port` of the bulk port, or `unix:` and the path of its socket.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// `host:port` of the gRPC port, or `None`.
    #[getter]
    fn grpc_address(&self) -> Option<&str> {
        self.grpc_address.as_deref()
    }

    /// `host:port` of the health check alone, or `None`.
    #[getter]
    fn health_address(&self) -> Option<&str> {
        self.health_address.as_deref()
    }

    /// `host:port` of the port of metrics, or `None`.
    #[getter]
    fn metrics_address(&self) -> Option<&str> {
        self.metrics_address.as_deref()
    }

    /// Returns for how many seconds nobody has been connected, or `None` while somebody is.
    fn unused_for(&self) -> Option<f64> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.as_ref()?.unused_for().map(|time| time.as_secs_f64())
    }

    /// Saves the tables to the server's directory, drops the log before, and returns the number of rows; one that was
    /// stopped still can.
    fn checkpoint(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| self.handler.checkpoint()).map(|report| report.rows).map_err(raise)
    }

    /// Answers what is under way, and then no more.
    fn stop(&self, py: Python<'_>) {
        // The lock is free again before the wait: `unused_for` of another thread takes it with the GIL held,
        // and both would wait for each other.
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = running {
            py.detach(|| server.stop(GRACE));
        }
    }
}

/// Makes the follower at `address` lead its shard. Returns the number of the shard and of how many it is, the epoch, and the
/// number of the last change that it has.
#[pyfunction]
pub(crate) fn promote(
    py: Python<'_>,
    address: String,
    token: Option<String>,
    tls: Option<TlsFiles>,
) -> PyResult<(usize, usize, u64, u64)> {
    let mut config = RemoteConfig::new(vec![address]);
    config.token = token;
    config.tls = tls.map(|tls| tls.of_client()).transpose()?;
    let done = py.detach(|| recstore_ps::promote(&config)).map_err(raise)?;
    Ok((done.shard.number, done.shard.of, done.epoch, done.last))
}

/// Spreads the rows in `source` over so many shards in `target`. Returns how many shards there were, or `None`, the rows on
/// each new one, how ids are spread, and where the shards before are now, or `None`.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a tuple in Python")]
pub(crate) fn reshard(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    shards: usize,
    hash_method: Option<&str>,
) -> PyResult<(Option<usize>, Vec<usize>, String, Option<PathBuf>)> {
    let hash_method = hash_method.map(str::parse).transpose().map_err(raise)?;
    let done = py.detach(|| recstore_ps::reshard(&source, &target, shards, hash_method)).map_err(raise)?;
    Ok((done.before, done.rows, done.hash_method.to_string(), done.moved_to))
}

/// Returns the numbers of shards that there are in a directory of servers, ascending.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 gives it so")]
pub(crate) fn shard_counts(data: PathBuf) -> PyResult<Vec<usize>> {
    Ok(recstore_ps::shard_counts(&data).map_err(raise)?.into_iter().collect())
}

/// Returns what a start left out of the end of the log of a server's directory, or `None`.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 gives it so")]
pub(crate) fn left_out_of_log(py: Python<'_>, directory: PathBuf) -> PyResult<Option<Bound<'_, PyAny>>> {
    let found = py.detach(|| recstore_ps::left_out_of_log(&directory)).map_err(raise)?;
    found.map(|left_out| from_json(py, serde_json::to_string(&left_out))).transpose()
}

/// Returns a time that may be waited.
pub(crate) fn seconds(value: f64) -> PyResult<Duration> {
    const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
    let found = Duration::try_from_secs_f64(value).ok().filter(|&time| time <= LONGEST);
    let longest = LONGEST.as_secs();
    found.ok_or_else(|| {
        PyValueError::new_err(format!("a time must be from 0 to {longest} seconds, got {value}"))
    })
}

#[expect(clippy::needless_pass_by_value, reason = "it is mapped over errors")]
pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Unavailable { .. } => PyConnectionError::new_err(message),
        Error::InvalidConfig { .. } => PyValueError::new_err(message),
        _ => PyRuntimeError::new_err(message),
    }
}

fn durability_of(word: &str) -> PyResult<Durability> {
    match word {
        "checkpoint" => Ok(Durability::Checkpoint),
        "wal" => Ok(Durability::Wal),
        _ => Err(PyValueError::new_err(format!("durability must be checkpoint or wal, got \"{word}\""))),
    }
}

fn cannot_start(error: ServerError) -> PyErr {
    match error {
        ServerError::Bind { .. } => PyOSError::new_err(error.to_string()),
        ServerError::Store(error) => raise(error),
        ServerError::Insecure { .. } | ServerError::EncryptedSocket { .. } | ServerError::Shard { .. } => {
            PyValueError::new_err(error.to_string())
        }
    }
}
