//! Tables and collectors by their handles: what operators ask for.

use std::sync::Arc;

use recstore::{
    EmbeddingStore, EmbeddingTable, Error, GradientCollector, InitializerConfig, LocalStore, Serial,
    TableConfig, TableId,
};

use crate::guard::Failure;
use crate::handle_words::HandleWords;
use crate::registry::Registry;
use crate::stores::{FROZEN, Placed, TableLocation};

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
        // Outside `change_state`: the store passes the fork's gate itself, which a call must pass once only.
        if let Some(place) = unused.filter(|place| place.store == FROZEN) {
            frozen.close(place.table);
        }
        Ok(())
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
        work: impl FnOnce(TableLocation, &dyn EmbeddingTable) -> recstore::Result<R>,
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
            let places = places.collect::<Result<Vec<TableLocation>, Failure>>()?;
            let number = places.first().map_or(0, |place| place.store);
            if places.iter().any(|place| place.store != number) {
                return Err(lie_apart(operation));
            }
            let tables: Vec<TableId> = places.iter().map(|place| place.table).collect();
            Ok((number, state.stores.store(number), tables))
        })?;
        // Outside `read_state`: the store passes the fork's gate itself, and the registry is free for others
        // meanwhile.
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
            Err(Failure::of(
                operation,
                format!("{operation}: table \"{name}\" has dim {expected}, got {what} of {dim}"),
            ))
        })
    }

    /// Turns an error about a table that a store does not know into one that names it.
    pub(crate) fn name_dropped(&self, operation: &'static str, store: usize, error: Error) -> Failure {
        let Error::UnknownHandle { handle: id, .. } = error else {
            return error.into();
        };
        self.read_state(|state| match state.handles.table_at(TableLocation { store, table: TableId(id) }) {
            Some(placed) => dropped(operation, placed.table.name()),
            None => error.into(),
        })
    }

    /// Returns the table `default/<dim>`, which its first write or update creates.
    pub(crate) fn default_table(&self, operation: &str, dim: usize) -> Result<Option<Placed>, Failure> {
        let name = default_name(dim);
        let placed = self.find(&name)?;
        self.read_state(|state| {
            state.replicas.check_named(operation, &name, state.stores.current_number(), placed.as_ref())
        })?;
        Ok(placed)
    }

    /// Calls `work`, which changes the rows of `ids`, with the table `default/<dim>`, whose rows start at zero, and its
    /// store. Where the table is missing `work` is tried on a scratch store first: a call that fails leaves no table
    /// behind.
    pub(crate) fn change_default_table(
        &self,
        operation: &str,
        dim: usize,
        ids: &[i64],
        work: impl Fn(&dyn EmbeddingStore, &dyn EmbeddingTable) -> recstore::Result<()>,
    ) -> Result<(), Failure> {
        let placed = match self.default_table(operation, dim)? {
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
    ) -> Result<Arc<GradientCollector<TableLocation>>, Failure> {
        self.read_state(|state| state.handles.collector(operation, handle))
    }

    /// Returns the handle of an open table, and none for one whose handle was released.
    pub(crate) fn handle_of(&self, place: TableLocation) -> Option<HandleWords> {
        self.read_state(|state| state.handles.handle_of(place))
    }
}

fn default_name(dim: usize) -> String {
    format!("default/{dim}")
}

fn dropped(operation: &str, name: &str) -> Failure {
    Failure::of(operation, format!("{operation}: table \"{name}\" was dropped"))
}

fn lie_apart(operation: &'static str) -> Failure {
    let message = "the tables of one lookup must lie together, in this process or on the same servers";
    Error::Unsupported { operation, message: message.to_owned() }.into()
}
