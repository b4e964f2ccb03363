//! The process's stores, and the handles into them.

use std::env;
use std::sync::{Arc, PoisonError, RwLock};

use once_cell::sync::OnceCell;
use recstore::{EmbeddingStore, Error, FrozenStore, LocalStore, Prefetches, SimdLevel, UpdateRule, fork};
use recstore_ps::{RemoteConfig, RemoteStore};

use crate::executor::TorchThreads;
use crate::guard::Failure;
use crate::handles::Handles;
use crate::replicas::Replicas;
use crate::stores::{Placed, Stores, TableLocation};

/// Names a [`recstore::SimdLevel`] to run with instead of the machine's widest.
const SIMD_VARIABLE: &str = "RECSTORE_SIMD";

/// Reads ahead wait for memory or a network, not for a core.
const PREFETCH_THREADS: usize = 2;

/// Prefetches that nobody consumes are dropped beyond this number, oldest first.
pub(crate) const MAX_PREFETCHES: usize = 1024;

static REGISTRY: OnceCell<Registry> = OnceCell::new();

/// The stores of the process and the handles into them.
pub struct Registry {
    embedded: Arc<LocalStore>,
    state: RwLock<State>,
    pub(crate) prefetches: Prefetches<TableLocation>,
}

pub(crate) struct State {
    pub(crate) stores: Stores,
    pub(crate) handles: Handles,
    pub(crate) replicas: Replicas,
}

impl State {
    pub(crate) fn find(&self, operation: &str, words: &[i64]) -> Result<(i64, &Placed), Failure> {
        let found = self.handles.find(operation, words, self.stores.current_number())?;
        self.replicas.check(operation, found.1)?;
        Ok(found)
    }
}

/// Returns the process's registry, made at the first call.
///
/// # Errors
/// `RECSTORE_SIMD` names a level that is unknown or that this machine lacks.
pub fn registry() -> Result<&'static Registry, Failure> {
    // A failure is not kept: the next call reads the variable again.
    REGISTRY.get_or_try_init(|| {
        let simd = match env::var(SIMD_VARIABLE) {
            Ok(level) => {
                level.parse().map_err(|error| Failure::Runtime(format!("{SIMD_VARIABLE}: {error}")))?
            }
            Err(_) => SimdLevel::detect(),
        };
        let store = LocalStore::new(Box::new(TorchThreads)).with_simd(simd)?;
        let frozen = FrozenStore::new(Box::new(TorchThreads)).with_simd(simd)?;
        Ok(Registry::new(Arc::new(store), Arc::new(frozen)))
    })
}

impl Registry {
    pub(crate) fn new(embedded: Arc<LocalStore>, frozen: Arc<FrozenStore>) -> Self {
        let stores = Stores::new(embedded.clone(), frozen);
        let state = State { stores, handles: Handles::default(), replicas: Replicas::default() };
        let prefetches = Prefetches::new(PREFETCH_THREADS, MAX_PREFETCHES);
        Self { embedded, state: RwLock::new(state), prefetches }
    }

    /// Gives the store of this process an update rule of the program's own.
    ///
    /// # Errors
    /// As [`LocalStore::register_rule`].
    pub fn register_rule(&self, name: &str, rule: Arc<dyn UpdateRule>) -> recstore::Result<()> {
        self.embedded.register_rule(name, rule)
    }

    /// Connects to servers, where tables are opened from then on; those that are open stay where they are. Returns a
    /// number of these servers.
    ///
    /// # Errors
    /// As [`RemoteStore::connect`]; then nothing has changed.
    pub fn use_servers(&self, config: RemoteConfig) -> recstore::Result<usize> {
        let servers = Arc::new(RemoteStore::connect(config, Box::new(TorchThreads))?);
        Ok(self.change_state(|state| state.stores.choose_servers(servers)))
    }

    /// Calls servers at other addresses from now on: those that [`Registry::use_servers`] gave this number.
    ///
    /// # Errors
    /// As [`RemoteStore::move_servers`]; [`recstore::Error::InvalidConfig`] for a number that it did not give.
    pub fn move_servers(&self, number: usize, addresses: &[String]) -> recstore::Result<()> {
        let unknown = || format!("no servers were chosen under the number {number}");
        let found = self.read_state(|state| state.stores.servers_numbered(number));
        found.ok_or_else(|| Error::InvalidConfig { message: unknown() })?.move_servers(addresses)
    }

    /// Returns the servers on which tables are opened, if they are.
    pub fn servers(&self) -> Option<Arc<RemoteStore>> {
        self.read_state(|state| state.stores.servers())
    }

    /// Opens tables in this process from now on; those that are open stay where they are.
    pub fn use_embedded(&self) {
        self.change_state(|state| state.stores.choose_embedded());
    }

    #[cfg(test)]
    pub(crate) fn choose(&self, store: Arc<dyn EmbeddingStore>) {
        self.change_state(|state| state.stores.choose(store));
    }

    /// Returns the store in which tables are opened now.
    pub fn store(&self) -> Arc<dyn EmbeddingStore> {
        self.read_state(|state| state.stores.current().1)
    }

    /// Returns the store of this process.
    pub fn embedded(&self) -> Arc<LocalStore> {
        Arc::clone(&self.embedded)
    }

    pub(crate) fn store_numbered(&self, number: usize) -> Arc<dyn EmbeddingStore> {
        self.read_state(|state| state.stores.store(number))
    }

    pub(crate) fn read_state<R>(&self, work: impl FnOnce(&State) -> R) -> R {
        // The gate: no process forks while one of its threads holds the lock, for the child's would stay locked.
        let _gate = fork::enter();
        work(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn change_state<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let _gate = fork::enter();
        work(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }
}
