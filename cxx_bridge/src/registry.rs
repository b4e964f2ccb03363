//! The process's tables and collectors, by the handles that operators take. A handle is never given out twice.

use std::collections::BTreeMap;
use std::env;
use std::sync::{Arc, PoisonError, RwLock};

use once_cell::sync::OnceCell;
use recstore::{
    EmbeddingStore, Error, GradientCollector, InitializerConfig, LocalStore, PrefetchId, PrefetchRequest,
    PrefetchingStore, Serial, TableConfig, TableId, fork,
};
use recstore_ps::{RemoteConfig, RemoteStore};

use crate::executor::TorchThreads;
use crate::guard::Failure;
use crate::switching::SwitchingStore;

/// Names a [`recstore::SimdLevel`] to run with instead of the machine's widest.
const SIMD_VARIABLE: &str = "RECSTORE_SIMD";

/// Reads ahead wait for memory or a network, not for a core.
const PREFETCH_THREADS: usize = 2;

/// Prefetches that nobody consumes are dropped beyond this number, oldest first.
const MOST_PREFETCHES: usize = 1024;

static REGISTRY: OnceCell<Registry> = OnceCell::new();

/// The store of the process and the handles into it.
pub struct Registry {
    store: PrefetchingStore,
    /// The same, without reads ahead.
    stores: Arc<SwitchingStore>,
    handles: RwLock<Handles>,
}

/// Ordered maps: among so few numbers a search takes less time than a hash.
#[derive(Default)]
struct Handles {
    last: i64,
    tables: BTreeMap<i64, OpenTable>,
    of_table: BTreeMap<TableId, i64>,
    collectors: BTreeMap<i64, Arc<GradientCollector>>,
    /// Prefetches of default tables that did not exist when they were issued: read when they are consumed.
    deferred: BTreeMap<PrefetchId, (Vec<i64>, usize)>,
}

struct OpenTable {
    id: TableId,
    name: Arc<str>,
    dim: usize,
    references: usize,
}

/// Returns the process's registry, made at the first call.
///
/// # Errors
/// `RECSTORE_SIMD` names a level that is unknown or that this machine lacks.
pub fn registry() -> Result<&'static Registry, Failure> {
    REGISTRY.get_or_try_init(|| {
        let store = LocalStore::new(Box::new(TorchThreads));
        let store = match env::var(SIMD_VARIABLE) {
            Ok(level) => {
                let level =
                    level.parse().map_err(|error| Failure::Runtime(format!("{SIMD_VARIABLE}: {error}")))?;
                store.with_simd(level)?
            }
            Err(_) => store,
        };
        let stores = Arc::new(SwitchingStore::new(Arc::new(store)));
        let store = PrefetchingStore::new(stores.clone(), PREFETCH_THREADS, MOST_PREFETCHES);
        Ok(Registry { store, stores, handles: RwLock::default() })
    })
}

impl Registry {
    /// Returns the store.
    pub fn store(&self) -> &dyn EmbeddingStore {
        &self.store
    }

    /// Connects to servers, where tables are opened from then on; those that are open stay where they are. Returns a
    /// number of these servers.
    ///
    /// # Errors
    /// As [`RemoteStore::connect`]; then nothing has changed.
    pub fn use_servers(&self, config: RemoteConfig) -> recstore::Result<usize> {
        Ok(self.stores.choose_servers(Arc::new(RemoteStore::connect(config, Box::new(TorchThreads))?)))
    }

    /// Calls servers at other addresses from now on: those that [`Registry::use_servers`] gave this number.
    ///
    /// # Errors
    /// As [`RemoteStore::move_servers`]; [`recstore::Error::InvalidConfig`] for a number that it did not give.
    pub fn move_servers(&self, number: usize, addresses: &[String]) -> recstore::Result<()> {
        let unknown = || format!("no servers were chosen under the number {number}");
        let found = self.stores.servers_numbered(number);
        found.ok_or_else(|| recstore::Error::InvalidConfig { message: unknown() })?.move_servers(addresses)
    }

    /// Returns the servers on which tables are opened, if they are.
    pub fn servers(&self) -> Option<Arc<RemoteStore>> {
        self.stores.servers()
    }

    /// Opens tables in this process from now on; those that are open stay where they are.
    pub fn use_embedded(&self) {
        self.stores.choose_embedded();
    }

    /// Creates or opens a table, adds a reference and returns its handle.
    pub(crate) fn open(&self, name: &str, config: &TableConfig) -> Result<i64, Failure> {
        let id = self.store.open_table(name, config)?;
        Ok(self.with_handles(|handles| {
            let handle = handles.of_table.get(&id).copied().unwrap_or_else(|| {
                let handle = handles.next();
                handles.of_table.insert(id, handle);
                handles
                    .tables
                    .insert(handle, OpenTable { id, name: name.into(), dim: config.dim, references: 0 });
                handle
            });
            if let Some(table) = handles.tables.get_mut(&handle) {
                table.references += 1;
            }
            handle
        }))
    }

    /// Takes a reference away; without any the handle is unknown from then on, and the rows stay.
    pub(crate) fn release(&self, handle: i64) -> Result<(), Failure> {
        self.with_handles(|handles| {
            let table =
                handles.tables.get_mut(&handle).ok_or_else(|| unknown("hashtable_release", handle))?;
            table.references -= 1;
            if table.references == 0 {
                let id = table.id;
                handles.tables.remove(&handle);
                handles.of_table.remove(&id);
            }
            Ok(())
        })
    }

    /// Calls `work` with the store and the table behind a handle.
    pub(crate) fn with_table<R>(
        &self,
        operation: &'static str,
        handle: i64,
        work: impl FnOnce(&dyn EmbeddingStore, TableId) -> recstore::Result<R>,
    ) -> Result<R, Failure> {
        let found = self.read_handles(|handles| handles.tables.get(&handle).map(|table| table.id));
        let id = found.ok_or_else(|| unknown(operation, handle))?;
        work(self.store(), id).map_err(|error| self.name_dropped(operation, error))
    }

    /// Calls `work` with the store and the tables behind handles.
    pub(crate) fn with_tables<R>(
        &self,
        operation: &'static str,
        handles: &[i64],
        work: impl FnOnce(&dyn EmbeddingStore, &[TableId]) -> recstore::Result<R>,
    ) -> Result<R, Failure> {
        let ids: Result<Vec<TableId>, Failure> = self.read_handles(|open| {
            let of_handle = |handle| open.tables.get(handle).map(|table| table.id);
            handles
                .iter()
                .map(|handle| of_handle(handle).ok_or_else(|| unknown(operation, *handle)))
                .collect()
        });
        work(self.store(), &ids?).map_err(|error| self.name_dropped(operation, error))
    }

    /// Checks that there is a table behind a handle.
    pub(crate) fn check_open(&self, operation: &'static str, handle: i64) -> Result<(), Failure> {
        self.with_table(operation, handle, |store, table| store.dim(table).map(drop))
    }

    /// Checks that rows of a table have `dim` elements, before anything of that size is made.
    pub(crate) fn check_dim(
        &self,
        operation: &str,
        what: &str,
        handle: i64,
        dim: usize,
    ) -> Result<(), Failure> {
        self.read_handles(|handles| match handles.tables.get(&handle) {
            None => Err(unknown(operation, handle)),
            Some(table) if table.dim == dim => Ok(()),
            Some(table) => Err(Failure::Runtime(format!(
                "{operation}: table \"{}\" has dim {}, got {what} of {dim}",
                table.name, table.dim
            ))),
        })
    }

    /// Turns an error about a table that the store does not know into one that names it.
    pub(crate) fn name_dropped(&self, operation: &'static str, error: Error) -> Failure {
        let Error::UnknownHandle { handle: id, .. } = error else {
            return error.into();
        };
        self.read_handles(|handles| {
            let table = handles.of_table.get(&TableId(id)).and_then(|handle| handles.tables.get(handle));
            table.map_or_else(|| error.into(), |table| dropped(operation, &table.name))
        })
    }

    /// Returns how messages speak of the table behind a handle.
    pub(crate) fn table_text(&self, handle: i64) -> String {
        self.read_handles(|handles| match handles.tables.get(&handle) {
            Some(table) => format!("table \"{}\"", table.name),
            None => format!("unknown table handle {handle}"),
        })
    }

    /// Returns the table `default/<dim>`, which its first write or update creates.
    pub(crate) fn default_table(&self, dim: usize) -> Result<Option<TableId>, Failure> {
        Ok(self.store.find_table(&default_name(dim))?)
    }

    /// Calls `work` with the store and the table `default/<dim>`, whose rows start at zero. Where the table is missing
    /// `work` is tried on a scratch store first: a call that fails leaves no table behind.
    pub(crate) fn with_default_table(
        &self,
        dim: usize,
        work: impl Fn(&dyn EmbeddingStore, TableId) -> recstore::Result<()>,
    ) -> Result<(), Failure> {
        if let Some(table) = self.default_table(dim)? {
            return Ok(work(self.store(), table)?);
        }
        let config = TableConfig { initializer: InitializerConfig::Zeros {}, ..TableConfig::new(dim) };
        let scratch = LocalStore::new(Box::new(Serial));
        work(&scratch, scratch.open_table(&default_name(dim), &config)?)?;
        Ok(work(self.store(), self.store.open_table(&default_name(dim), &config)?)?)
    }

    /// Returns a handle to a new collector.
    pub(crate) fn add_collector(&self) -> i64 {
        self.with_handles(|handles| {
            let handle = handles.next();
            handles.collectors.insert(handle, Arc::default());
            handle
        })
    }

    pub(crate) fn remove_collector(&self, handle: i64) -> Result<(), Failure> {
        let removed = self.with_handles(|handles| handles.collectors.remove(&handle));
        removed.map(|_| ()).ok_or_else(|| unknown_collector("collector_release", handle))
    }

    pub(crate) fn collector(
        &self,
        operation: &'static str,
        handle: i64,
    ) -> Result<Arc<GradientCollector>, Failure> {
        let found = self.read_handles(|handles| handles.collectors.get(&handle).cloned());
        found.ok_or_else(|| unknown_collector(operation, handle))
    }

    /// Returns the store as one whose reads can be issued ahead.
    pub(crate) fn prefetching(&self) -> &PrefetchingStore {
        &self.store
    }

    /// Issues a read of the table behind a handle.
    pub(crate) fn request(&self, handle: i64, ids: &[i64]) -> Result<PrefetchRequest, Failure> {
        let found =
            self.read_handles(|handles| handles.tables.get(&handle).map(|table| (table.id, table.dim)));
        let (table, dim) = found.ok_or_else(|| unknown("emb_prefetch", handle))?;
        Ok(PrefetchRequest { table, ids: ids.to_vec(), dim })
    }

    /// Issues a read of the table `default/<dim>`; where it is missing the ids are kept until they are asked for.
    pub(crate) fn prefetch_default(&self, dim: usize, ids: &[i64]) -> Result<PrefetchId, Failure> {
        if let Some(table) = self.default_table(dim)? {
            return Ok(self.store.issue(vec![PrefetchRequest { table, ids: ids.to_vec(), dim }])?);
        }
        let id = self.store.issue(vec![])?;
        self.with_handles(|handles| {
            handles.deferred.insert(id, (ids.to_vec(), dim));
            if handles.deferred.len() > MOST_PREFETCHES {
                // The store keeps no more than that, the newest: it has dropped this one.
                handles.deferred.pop_first();
            }
        });
        Ok(id)
    }

    /// Returns the dims of the tables of a prefetch.
    pub(crate) fn issued_dims(&self, id: PrefetchId) -> Result<Vec<usize>, Failure> {
        let deferred = self.read_handles(|handles| handles.deferred.get(&id).map(|(_, dim)| vec![*dim]));
        let issued = self.store.dims(id)?;
        Ok(deferred.unwrap_or(issued))
    }

    /// Takes the ids of a prefetch whose table did not exist when it was issued.
    pub(crate) fn take_deferred(&self, id: PrefetchId) -> Option<(Vec<i64>, usize)> {
        self.with_handles(|handles| handles.deferred.remove(&id))
    }

    /// Returns the handle of an open table, and 0 for one whose handle was released.
    pub(crate) fn handle_of(&self, id: TableId) -> i64 {
        self.read_handles(|handles| handles.of_table.get(&id).copied().unwrap_or_default())
    }

    fn read_handles<R>(&self, work: impl FnOnce(&Handles) -> R) -> R {
        let _gate = fork::enter();
        work(&self.handles.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn with_handles<R>(&self, work: impl FnOnce(&mut Handles) -> R) -> R {
        let _gate = fork::enter();
        work(&mut self.handles.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Handles {
    fn next(&mut self) -> i64 {
        self.last += 1;
        self.last
    }
}

fn default_name(dim: usize) -> String {
    format!("default/{dim}")
}

fn unknown(operation: &str, handle: i64) -> Failure {
    Failure::Runtime(format!("{operation}: table handle {handle} is unknown, released or dropped"))
}

fn dropped(operation: &str, name: &str) -> Failure {
    Failure::Runtime(format!("{operation}: table \"{name}\" was dropped"))
}

fn unknown_collector(operation: &str, handle: i64) -> Failure {
    Failure::Runtime(format!("{operation}: collector handle {handle} is unknown or released"))
}
