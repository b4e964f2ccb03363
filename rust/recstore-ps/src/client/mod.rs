//! The store whose tables lie on servers.

mod addresses;
mod agreement;
mod call;
mod changes;
mod checkpoints;
mod config;
pub(crate) mod connection;
mod distinct;
mod errors;
mod failed;
mod fetch;
mod level;
mod management;
mod moving;
mod publications;
mod session;
mod sharing;
mod store;
mod table;
mod tables;
mod worker;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use recstore::{Executor, Result, fork};

use crate::router::Router;
use crate::wire::codec::{Management, Request};
use crate::wire::token::check_token;
use call::Call;
pub use config::{RemoteConfig, WireDtype};
use publications::Publications;
use session::Session;
pub(crate) use session::new_client;
use tables::{RemoteTable, Tables};

/// A store whose tables lie on servers, each row on one of them.
///
/// What a call is given is checked here, before anything is sent, with the errors of a store in this process. Reads are
/// repeated until the deadline; changes too, and no server makes one twice.
///
/// **A change that fails with [`recstore::Error::Unavailable`]** may have reached some servers. Repeat the same call
/// with equal content: it goes only to the servers that have not made it. Another change in between, or a load, gives it
/// up as it is. Changes of one store come one by one; reads go on beside them.
///
/// Several clients may share servers. Each sees its own changes; between tables or shards there is no common moment. A
/// clone is the same client.
#[derive(Clone)]
pub struct RemoteStore {
    config: Arc<RemoteConfig>,
    router: Router,
    executor: Arc<dyn Executor>,
    session: Arc<RwLock<Arc<Session>>>,
    publications: Arc<Publications>,
    /// How long servers may let this worker wait for others; zero for one that is none.
    borne: Duration,
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStore").field("config", &self.config).finish_non_exhaustive()
    }
}

impl RemoteStore {
    /// Connects to all servers; bags are pooled on `executor`.
    ///
    /// # Errors
    /// [`recstore::Error::Unavailable`] names the first server that does not answer, or refuses;
    /// [`recstore::Error::InvalidConfig`] without any server, or for a worker that the servers do not expect.
    pub fn connect(config: RemoteConfig, executor: Box<dyn Executor>) -> Result<Self> {
        if config.servers.is_empty() {
            let message = "a store on servers needs at least one server".to_owned();
            return Err(recstore::Error::InvalidConfig { message });
        }
        check_token(config.token.as_deref())?;
        let router = Router::new(config.hash_method, config.servers.len());
        let session = Arc::new(Session::new(&config, Tables::default()));
        session.limits("connect")?;
        let current = Arc::new(RwLock::new(Arc::clone(&session)));
        let (config, executor) = (Arc::new(config), Arc::from(executor));
        let (publications, borne) = (Arc::default(), Duration::ZERO);
        let mut store = Self { config, router, executor, session: current, publications, borne };
        if let Some(worker) = store.config.worker {
            store.borne = store.join(&session, worker)?;
        }
        Ok(store)
    }

    /// Returns how it was connected; [`RemoteStore::addresses`] says where the servers are now.
    pub fn config(&self) -> &RemoteConfig {
        &self.config
    }

    /// Returns the session of this process. In a forked child it begins one: connections and changes under way are its
    /// parent's.
    fn session(&self) -> Result<Arc<Session>> {
        let session = Arc::clone(&self.session.read().unwrap_or_else(PoisonError::into_inner));
        if session.process == std::process::id() {
            return Ok(session);
        }
        let mut current = self.session.write().unwrap_or_else(PoisonError::into_inner);
        // Asked again: another thread may have begun the session between the two locks.
        if current.process != std::process::id() {
            let tables = current.lock_tables().for_child()?;
            let config = RemoteConfig { servers: current.addresses(), ..(*self.config).clone() };
            *current = Arc::new(Session::new(&config, tables));
        }
        Ok(Arc::clone(&current))
    }

    /// Calls `work` with this process's session; a fork waits until it is done.
    fn with_session<R>(&self, work: impl FnOnce(&Session) -> Result<R>) -> Result<R> {
        let _gate = fork::enter();
        work(&*self.session()?)
    }

    fn shards(&self) -> std::ops::Range<usize> {
        0..self.router.shards()
    }

    fn patience(&self) -> Duration {
        self.config.timeout + self.borne
    }
}

/// Returns a request about one table to one server.
fn table_call<'a>(table: &RemoteTable, shard: usize, request: Request<'a>) -> Call<'a> {
    Call { shard, incarnations: vec![table.on(shard).incarnation], sequence: 0, request }
}

/// Returns a management request about one table to one server.
fn table_management(table: &RemoteTable, shard: usize, request: impl Fn(i64) -> Management) -> Call<'static> {
    table_call(table, shard, Request::Manage(request(table.on(shard).number.0)))
}
