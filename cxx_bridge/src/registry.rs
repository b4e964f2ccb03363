//! The process's stores, tables and collectors, by the handles that operators take.

use std::env;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use once_cell::sync::OnceCell;
use recstore::{
    ChangedRows, EmbeddingStore, EmbeddingTable, Encoding, Error, FrozenMemory, FrozenSpec, FrozenStore,
    GradientCollector, InitializerConfig, LoadReport, LocalStore, OptimizerState, PrefetchId,
    PrefetchRequest, Prefetches, RowChanges, Serial, SimdLevel, TableConfig, TableId, UpdateRule, fork,
    freeze,
};
use recstore_ps::{RemoteConfig, RemoteStore};

use crate::executor::TorchThreads;
use crate::guard::Failure;
use crate::handle_words::HandleWords;
use crate::handles::Handles;
use crate::stores::{FROZEN, Place, Placed, Stores};

/// Names a [`recstore::SimdLevel`] to run with instead of the machine's widest.
const SIMD_VARIABLE: &str = "RECSTORE_SIMD";

/// Reads ahead wait for memory or a network, not for a core.
const PREFETCH_THREADS: usize = 2;

/// Prefetches that nobody consumes are dropped beyond this number, oldest first.
const MOST_PREFETCHES: usize = 1024;

static REGISTRY: OnceCell<Registry> = OnceCell::new();

/// The stores of the process and the handles into them.
pub struct Registry {
    embedded: Arc<LocalStore>,
    state: RwLock<State>,
    prefetches: Prefetches<Place>,
}

/// A frozen table that was opened.
pub struct OpenedFrozen {
    /// The words of its handle.
    pub handle: Vec<i64>,
    /// The table.
    pub table: Arc<dyn EmbeddingTable>,
    /// How its rows are kept.
    pub encoding: Encoding,
    /// A number that tells its file from others.
    pub fingerprint: u32,
}

struct State {
    stores: Stores,
    handles: Handles,
}

impl State {
    fn find(&self, operation: &str, words: &[i64]) -> Result<(i64, &Placed), Failure> {
        self.handles.find(operation, words, self.stores.current_number())
    }
}

/// Returns the process's registry, made at the first call.
///
/// # Errors
/// `RECSTORE_SIMD` names a level that is unknown or that this machine lacks.
pub fn registry() -> Result<&'static Registry, Failure> {
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

/// What whoever speaks of tables by name or number asks for.
impl Registry {
    pub(crate) fn new(embedded: Arc<LocalStore>, frozen: Arc<FrozenStore>) -> Self {
        let stores = Stores::new(embedded.clone(), frozen);
        let state = State { stores, handles: Handles::default() };
        let prefetches = Prefetches::new(PREFETCH_THREADS, MOST_PREFETCHES);
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
    pub fn embedded(&self) -> Arc<dyn EmbeddingStore> {
        self.read_state(|state| state.stores.embedded())
    }

    /// Returns the table `name` of the store in which tables are opened now, and its number, which no other table has.
    ///
    /// # Errors
    /// As [`EmbeddingStore::find_table`].
    pub fn find_table(&self, name: &str) -> recstore::Result<Option<(i64, Arc<dyn EmbeddingTable>)>> {
        let found = self.find(name)?;
        Ok(found
            .map(|Placed { place, table }| (self.change_state(|state| state.stores.number(place)), table)))
    }

    /// Returns the table that has a number, for a call of the name `operation`.
    ///
    /// # Errors
    /// [`recstore::Error::UnknownHandle`] for one that was dropped, or that no table has.
    pub fn numbered_table(
        &self,
        operation: &'static str,
        number: i64,
    ) -> recstore::Result<Arc<dyn EmbeddingTable>> {
        let (store, place) = self.place_of(operation, number)?;
        store.table(operation, place.table)
    }

    /// Takes away the rows that the eviction of the table `name` chooses, with this `ttl` in place of its own where it is
    /// given; a `dry_run` only tells their ids.
    ///
    /// # Errors
    /// As [`EmbeddingTable::evict`]; [`recstore::Error::UnknownTable`].
    pub fn evict(&self, name: &str, ttl: Option<u64>, dry_run: bool) -> recstore::Result<Vec<i64>> {
        let unknown = || Error::UnknownTable { operation: "evict", table: name.to_owned() };
        let Placed { place, table } = self.find(name)?.ok_or_else(unknown)?;
        let evicted = table.evict(ttl, dry_run)?;
        if !dry_run {
            self.note(place, Some(&evicted));
        }
        Ok(evicted)
    }

    /// Has `load` load a checkpoint into the store in which tables are opened now.
    ///
    /// # Errors
    /// Those of `load`; [`recstore::Error::Unavailable`], of a store on servers.
    pub fn load<E: From<Error>>(
        &self,
        load: impl FnOnce(&dyn EmbeddingStore) -> Result<LoadReport, E>,
    ) -> Result<LoadReport, E> {
        let report = load(&*self.store())?;
        for (name, _) in &report.tables {
            if let Some(table) = self.find(name)? {
                self.note(table.place, None);
            }
        }
        Ok(report)
    }

    /// Puts what optimizers keep into tables, whose numbers the states have; of each store at one moment. Of several
    /// stores those on servers come first, for they may refuse.
    ///
    /// # Errors
    /// As [`EmbeddingStore::put_optimizer_states`].
    pub fn put_optimizer_states(&self, states: Vec<OptimizerState<'_>>) -> recstore::Result<()> {
        let placed = states.into_iter().map(|state| {
            let (_, place) = self.place_of("put_optimizer_states", state.table.0)?;
            Ok((place, OptimizerState { table: place.table, ..state }))
        });
        let groups = by_store(placed.collect::<recstore::Result<Vec<_>>>()?);
        groups.iter().try_for_each(|(store, states)| self.store_numbered(*store).put_optimizer_states(states))
    }

    /// Copies the table of a number, within its store, under a name that is free there.
    ///
    /// # Errors
    /// As [`EmbeddingStore::copy_table`].
    pub fn copy_table(&self, number: i64, name: &str) -> recstore::Result<()> {
        let (store, place) = self.place_of("copy_table", number)?;
        store.copy_table(place.table, name).map(drop)
    }

    pub(crate) fn place_of(
        &self,
        operation: &'static str,
        number: i64,
    ) -> recstore::Result<(Arc<dyn EmbeddingStore>, Place)> {
        self.read_state(|state| {
            let place =
                state.stores.place(number).ok_or(Error::UnknownHandle { operation, handle: number })?;
            Ok((state.stores.store(place.store), place))
        })
    }

    fn find(&self, name: &str) -> recstore::Result<Option<Placed>> {
        let (number, store) = self.read_state(|state| state.stores.current());
        Ok(store.find_table(name)?.map(|table| Placed::new(number, table)))
    }

    fn open_placed(&self, name: &str, config: &TableConfig) -> recstore::Result<Placed> {
        let (number, store) = self.read_state(|state| state.stores.current());
        Ok(Placed::new(number, store.open_table(name, config)?))
    }

    pub(crate) fn store_numbered(&self, number: usize) -> Arc<dyn EmbeddingStore> {
        self.read_state(|state| state.stores.store(number))
    }
}

/// What operators ask for.
impl Registry {
    /// Creates or opens a table, adds a reference and returns its handle.
    pub(crate) fn open(&self, name: &str, config: &TableConfig) -> Result<HandleWords, Failure> {
        let placed = self.open_placed(name, config)?;
        Ok(self.change_state(|state| state.handles.open(placed)))
    }

    /// Takes a reference away; without any the handle's number is unknown from then on. The rows stay; a frozen table is
    /// closed.
    pub(crate) fn release(&self, handle: HandleWords) -> Result<(), Failure> {
        let (unused, frozen) = self.change_state(|state| {
            state.handles.release(handle).map(|unused| (unused, state.stores.frozen()))
        })?;
        if let Some(place) = unused.filter(|place| place.store == FROZEN) {
            frozen.close(place.table);
        }
        Ok(())
    }

    /// Opens the file of a frozen table. Its handle is open once, and closes the table when it is released.
    ///
    /// # Errors
    /// As [`FrozenStore::open`].
    pub fn open_frozen(
        &self,
        file: &File,
        path: &Path,
        memory: FrozenMemory,
    ) -> recstore::Result<OpenedFrozen> {
        let store = self.read_state(|state| state.stores.frozen());
        let table = store.open(file, path, memory)?;
        let (encoding, fingerprint) = store.describe_file(table.id())?;
        let placed = Placed::new(FROZEN, Arc::clone(&table));
        let handle = self.change_state(|state| state.handles.open(placed)).to_words().to_vec();
        Ok(OpenedFrozen { handle, table, encoding, fingerprint })
    }

    /// Writes the rows that the table of a number has now to a file, and returns its bytes.
    ///
    /// # Errors
    /// As [`recstore::freeze`]; [`Error::UnknownHandle`].
    pub fn freeze(&self, number: i64, path: &Path, encoding: Encoding) -> recstore::Result<u64> {
        let table = self.numbered_table("freeze", number)?;
        let described = table.describe()?;
        let spec = FrozenSpec { name: &described.name, config: &described.config, encoding };
        freeze(path, spec, &table.ids()?, |ids, rows| table.read(ids, rows))
    }

    /// Closes a frozen table, as the operator does that releases its handle: from a thread that traces operators too.
    ///
    /// # Errors
    /// [`Failure::Runtime`] for the words of no handle, or of one that was released.
    pub fn close_frozen(&self, handle: &[i64]) -> Result<(), Failure> {
        self.release(HandleWords::read("hashtable_release", handle)?)
    }

    /// Takes what changed in the table that a frozen one was made of.
    ///
    /// # Errors
    /// As [`FrozenStore::change`]; [`Failure::Runtime`] for the words of no handle.
    pub fn change_frozen(&self, handle: &[i64], changes: RowChanges<'_>) -> Result<(), Failure> {
        let (place, frozen) = self.read_state(|state| {
            state.find("follow", handle).map(|(_, placed)| (placed.place, state.stores.frozen()))
        })?;
        if place.store != FROZEN {
            return Err(Failure::Runtime("follow: only frozen tables follow others".to_owned()));
        }
        frozen.change(place.table, changes)?;
        self.note(place, None);
        Ok(())
    }

    /// Notes the changes of the tables of numbers for a publication, of each store; see
    /// [`EmbeddingStore::begin_publication`].
    ///
    /// # Errors
    /// As [`EmbeddingStore::begin_publication`]; [`Error::Unsupported`] for tables of several stores.
    pub fn begin_publication(&self, tables: &[i64]) -> recstore::Result<u64> {
        let (store, tables) = self.of_one_store(tables)?;
        store.begin_publication(&tables)
    }

    /// Returns what changed in tables, see [`EmbeddingStore::take_changes`].
    ///
    /// # Errors
    /// As [`EmbeddingStore::take_changes`], and as [`Registry::begin_publication`].
    pub fn take_changes(
        &self,
        tables: &[i64],
        publication: u64,
        was_told: bool,
    ) -> recstore::Result<Vec<ChangedRows>> {
        let (store, tables) = self.of_one_store(tables)?;
        store.take_changes(&tables, publication, was_told)
    }

    /// Notes nothing for a publication any more.
    ///
    /// # Errors
    /// As [`Registry::begin_publication`].
    pub fn end_publication(&self, tables: &[i64], publication: u64) -> recstore::Result<()> {
        let (store, tables) = self.of_one_store(tables)?;
        store.end_publication(&tables, publication)
    }

    fn of_one_store(&self, numbers: &[i64]) -> recstore::Result<(Arc<dyn EmbeddingStore>, Vec<TableId>)> {
        const OPERATION: &str = "publish";
        let places = numbers.iter().map(|&number| self.place_of(OPERATION, number));
        let places = places.collect::<recstore::Result<Vec<_>>>()?;
        let Some((store, first)) = places.first().map(|(store, place)| (Arc::clone(store), *place)) else {
            return Ok((self.embedded(), Vec::new()));
        };
        if places.iter().any(|(_, place)| place.store != first.store) {
            let message = "tables of several stores have no moment in common".to_owned();
            return Err(Error::Unsupported { operation: OPERATION, message });
        }
        Ok((store, places.into_iter().map(|(_, place)| place.table).collect()))
    }

    /// Returns the number of the table that the words of a handle mean: what all calls below take for a handle.
    pub(crate) fn number_of(&self, operation: &str, words: &[i64]) -> Result<i64, Failure> {
        self.read_state(|state| state.find(operation, words).map(|(number, _)| number))
    }

    /// Returns the table behind a handle.
    pub(crate) fn table(&self, operation: &str, handle: i64) -> Result<Placed, Failure> {
        self.read_state(|state| state.handles.table(operation, handle).cloned())
    }

    /// Calls `work` with the table behind a handle and where it lies.
    pub(crate) fn with_placed<R>(
        &self,
        operation: &'static str,
        handle: i64,
        work: impl FnOnce(Place, &dyn EmbeddingTable) -> recstore::Result<R>,
    ) -> Result<R, Failure> {
        let Placed { place, table } = self.table(operation, handle)?;
        work(place, &*table).map_err(|error| self.name_dropped(operation, place.store, error))
    }

    /// Calls `work` with the table behind a handle.
    pub(crate) fn with_table<R>(
        &self,
        operation: &'static str,
        handle: i64,
        work: impl FnOnce(&dyn EmbeddingTable) -> recstore::Result<R>,
    ) -> Result<R, Failure> {
        self.with_placed(operation, handle, |_, table| work(table))
    }

    /// Calls `work`, which changes the rows of `ids`, or of all ids, with the table behind a handle.
    pub(crate) fn change_table(
        &self,
        operation: &'static str,
        handle: i64,
        ids: Option<&[i64]>,
        work: impl FnOnce(&dyn EmbeddingTable) -> recstore::Result<()>,
    ) -> Result<(), Failure> {
        self.with_placed(operation, handle, |place, table| {
            work(table)?;
            self.note(place, ids);
            Ok(())
        })
    }

    /// Calls `work` with the tables behind handles and the one store that they lie in.
    pub(crate) fn with_tables<R>(
        &self,
        operation: &'static str,
        handles: &[i64],
        work: impl FnOnce(&dyn EmbeddingStore, &[TableId]) -> recstore::Result<R>,
    ) -> Result<R, Failure> {
        let (number, store, tables) = self.read_state(|state| {
            let places = handles.iter().map(|&handle| Ok(state.handles.table(operation, handle)?.place));
            let places = places.collect::<Result<Vec<Place>, Failure>>()?;
            let number = places.first().map_or(0, |place| place.store);
            if places.iter().any(|place| place.store != number) {
                return Err(lie_apart(operation));
            }
            let tables: Vec<TableId> = places.iter().map(|place| place.table).collect();
            Ok((number, state.stores.store(number), tables))
        })?;
        work(&*store, &tables).map_err(|error| self.name_dropped(operation, number, error))
    }

    /// Checks that rows of a table have `dim` elements, before anything of that size is made, and returns the table's
    /// number: one search for both.
    pub(crate) fn check_dim(
        &self,
        operation: &str,
        what: &str,
        words: &[i64],
        dim: usize,
    ) -> Result<i64, Failure> {
        self.read_state(|state| {
            let (number, Placed { table, .. }) = state.find(operation, words)?;
            if table.dim() == dim {
                return Ok(number);
            }
            let (name, expected) = (table.name(), table.dim());
            Err(Failure::Runtime(format!(
                "{operation}: table \"{name}\" has dim {expected}, got {what} of {dim}"
            )))
        })
    }

    /// Turns an error about a table that a store does not know into one that names it.
    pub(crate) fn name_dropped(&self, operation: &'static str, store: usize, error: Error) -> Failure {
        let Error::UnknownHandle { handle: id, .. } = error else {
            return error.into();
        };
        self.read_state(|state| match state.handles.table_at(Place { store, table: TableId(id) }) {
            Some(placed) => dropped(operation, placed.table.name()),
            None => error.into(),
        })
    }

    /// Returns the table `default/<dim>`, which its first write or update creates.
    pub(crate) fn default_table(&self, dim: usize) -> Result<Option<Placed>, Failure> {
        Ok(self.find(&default_name(dim))?)
    }

    /// Calls `work`, which changes the rows of `ids`, with the table `default/<dim>`, whose rows start at zero, and its
    /// store. Where the table is missing `work` is tried on a scratch store first: a call that fails leaves no table
    /// behind.
    pub(crate) fn change_default_table(
        &self,
        dim: usize,
        ids: &[i64],
        work: impl Fn(&dyn EmbeddingStore, &dyn EmbeddingTable) -> recstore::Result<()>,
    ) -> Result<(), Failure> {
        let placed = match self.default_table(dim)? {
            Some(placed) => placed,
            None => {
                let config =
                    TableConfig { initializer: InitializerConfig::Zeros {}, ..TableConfig::new(dim) };
                let scratch = LocalStore::new(Box::new(Serial));
                work(&scratch, &*scratch.open_table(&default_name(dim), &config)?)?;
                self.open_placed(&default_name(dim), &config)?
            }
        };
        work(&*self.store_numbered(placed.place.store), &*placed.table)?;
        self.note(placed.place, Some(ids));
        Ok(())
    }

    /// Returns a handle to a new collector.
    pub(crate) fn add_collector(&self) -> i64 {
        self.change_state(|state| state.handles.add_collector())
    }

    pub(crate) fn remove_collector(&self, handle: i64) -> Result<(), Failure> {
        // Outside the lock: what it keeps may have a destructor of its own.
        self.change_state(|state| state.handles.remove_collector(handle)).map(drop)
    }

    pub(crate) fn collector(
        &self,
        operation: &'static str,
        handle: i64,
    ) -> Result<Arc<GradientCollector<Place>>, Failure> {
        self.read_state(|state| state.handles.collector(operation, handle))
    }

    /// Returns the handle of an open table, and none for one whose handle was released.
    pub(crate) fn handle_of(&self, place: Place) -> Option<HandleWords> {
        self.read_state(|state| state.handles.handle_of(place))
    }

    fn read_state<R>(&self, work: impl FnOnce(&State) -> R) -> R {
        // The gate: no process forks while one of its threads holds the lock, for the child's would stay locked.
        let _gate = fork::enter();
        work(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change_state<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let _gate = fork::enter();
        work(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Reads issued ahead.
impl Registry {
    /// Returns the prefetches of all tables.
    pub(crate) fn prefetches(&self) -> &Prefetches<Place> {
        &self.prefetches
    }

    /// Notes that the rows of `ids`, or all rows of a table, have changed.
    pub(crate) fn note(&self, place: Place, ids: Option<&[i64]>) {
        match ids {
            Some(ids) => self.prefetches.note(&place, Some(&mut ids.iter().copied())),
            None => self.prefetches.note(&place, None),
        }
    }

    /// Returns a read of the table behind a handle.
    pub(crate) fn request(&self, handle: i64, ids: &[i64]) -> Result<PrefetchRequest<Place>, Failure> {
        Ok(self.request_of(self.table("emb_prefetch", handle)?, ids))
    }

    fn request_of(&self, placed: Placed, ids: &[i64]) -> PrefetchRequest<Place> {
        let store = self.store_numbered(placed.place.store);
        PrefetchRequest { key: placed.place, table: placed.table, store, ids: ids.to_vec() }
    }

    /// Issues a read of the table `default/<dim>`; where it is missing the ids are kept until they are asked for.
    pub(crate) fn prefetch_default(&self, dim: usize, ids: &[i64]) -> Result<PrefetchId, Failure> {
        if let Some(placed) = self.default_table(dim)? {
            return Ok(self.prefetches.issue(vec![self.request_of(placed, ids)])?);
        }
        let id = self.prefetches.issue(vec![])?;
        // As many are kept as of those that read: the older have been dropped.
        self.change_state(|state| state.handles.defer(id, ids, dim, MOST_PREFETCHES));
        Ok(id)
    }

    /// Returns the dims of the tables of a prefetch.
    pub(crate) fn issued_dims(&self, id: PrefetchId) -> Result<Vec<usize>, Failure> {
        let issued = self.prefetches.dims(id)?;
        let deferred = self.read_state(|state| state.handles.deferred_dim(id));
        Ok(deferred.map_or(issued, |dim| vec![dim]))
    }

    /// Takes the ids of a prefetch whose table did not exist when it was issued.
    pub(crate) fn take_deferred(&self, id: PrefetchId) -> Option<(Vec<i64>, usize)> {
        self.change_state(|state| state.handles.take_deferred(id))
    }
}

/// Sorts what is about tables by their stores, those chosen last first.
pub(crate) fn by_store<T>(items: Vec<(Place, T)>) -> Vec<(usize, Vec<T>)> {
    let mut groups: Vec<(usize, Vec<T>)> = Vec::new();
    for (place, item) in items {
        match groups.iter_mut().find(|(store, _)| *store == place.store) {
            Some((_, group)) => group.push(item),
            None => groups.push((place.store, vec![item])),
        }
    }
    groups.sort_by_key(|(store, _)| std::cmp::Reverse(*store));
    groups
}

fn default_name(dim: usize) -> String {
    format!("default/{dim}")
}

fn dropped(operation: &str, name: &str) -> Failure {
    Failure::Runtime(format!("{operation}: table \"{name}\" was dropped"))
}

fn lie_apart(operation: &'static str) -> Failure {
    let message = "the tables of one lookup must lie together, in this process or on the same servers";
    Error::Unsupported { operation, message: message.to_owned() }.into()
}
