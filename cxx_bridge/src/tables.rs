//! Tables by their names and numbers: what the bindings ask for.

use std::sync::Arc;

use recstore::{
    CutRows, EmbeddingStore, EmbeddingTable, Error, InProcessStore, LoadReport, OptimizerState, TableConfig,
};

use crate::registry::{Registry, State};
use crate::stores::{EMBEDDED, Placed, TableLocation};

impl Registry {
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
    /// As [`recstore::InProcessStore::put_optimizer_states`].
    pub fn put_optimizer_states(&self, states: Vec<OptimizerState<'_>>) -> recstore::Result<()> {
        let placed = states.into_iter().map(|state| {
            let (_, place) = self.place_of("put_optimizer_states", state.table.0)?;
            Ok((place, OptimizerState { table: place.table, ..state }))
        });
        let groups = by_store(placed.collect::<recstore::Result<Vec<_>>>()?);
        let message = "servers take optimizer state from checkpoints only: load one";
        groups.iter().try_for_each(|(store, states)| {
            let store = self.store_numbered(*store);
            store.needs_process("put_optimizer_states", message)?.put_optimizer_states(states)
        })
    }

    /// Copies the table of a number, within its store, under a name that is free there.
    ///
    /// # Errors
    /// As [`recstore::InProcessStore::copy_table`].
    pub fn copy_table(&self, number: i64, name: &str) -> recstore::Result<()> {
        let (store, place) = self.place_of("copy_table", number)?;
        let message = "tables on servers cannot be copied: save a checkpoint of them";
        store.needs_process("copy_table", message)?.copy_table(place.table, name).map(drop)
    }

    /// Returns the rows of the tables of numbers as they are at one moment, and none of a table on servers.
    ///
    /// # Errors
    /// As [`recstore::InProcessStore::cut_rows`].
    pub fn cut_rows(&self, numbers: &[i64]) -> recstore::Result<Vec<Option<CutRows>>> {
        let places = numbers.iter().map(|&number| Ok(self.place_of("cut_rows", number)?.1));
        let places = places.collect::<recstore::Result<Vec<_>>>()?;
        let is_own = |place: &TableLocation| place.store == EMBEDDED;
        let own: Vec<_> = places.iter().filter(|place| is_own(place)).map(|place| place.table).collect();
        let mut cuts = self.embedded().cut_rows(&own)?.into_iter();
        Ok(places.iter().map(|place| if is_own(place) { cuts.next() } else { None }).collect())
    }

    /// Notes of how many processes the job consists that this process belongs to; 1 without a job.
    pub fn set_job_size(&self, processes: usize) {
        self.change_state(|state| state.replicas.set_job_size(processes));
    }

    /// Refuses, for a call of the name `operation`, tables of which each process of the job has a copy.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names the first one.
    pub(crate) fn check_replicas(
        &self,
        operation: &'static str,
        places: impl IntoIterator<Item = TableLocation>,
    ) -> recstore::Result<()> {
        let refused = |state: &State| places.into_iter().find(|place| !state.replicas.may_use(*place));
        let Some(refused) = self.read_state(refused) else { return Ok(()) };
        let table = self.store_numbered(refused.store).table(operation, refused.table)?;
        let message = self.read_state(|state| state.replicas.refusal(table.name()));
        Err(Error::Unsupported { operation, message })
    }

    /// Says that the rows of the table of a number are spread over so many processes, of which each has a part.
    ///
    /// # Errors
    /// As [`recstore::InProcessStore::set_shards`].
    pub fn set_shards(&self, number: i64, shards: usize) -> recstore::Result<()> {
        let (store, place) = self.place_of("set_shards", number)?;
        let message = "servers know themselves how many they are";
        store.needs_process("set_shards", message)?.set_shards(Some(place.table), shards)?;
        self.change_state(|state| state.replicas.note_sharded(place));
        Ok(())
    }

    pub(crate) fn place_of(
        &self,
        operation: &'static str,
        number: i64,
    ) -> recstore::Result<(Arc<dyn EmbeddingStore>, TableLocation)> {
        self.read_state(|state| {
            let place =
                state.stores.place(number).ok_or(Error::UnknownHandle { operation, handle: number })?;
            Ok((state.stores.store(place.store), place))
        })
    }

    pub(crate) fn find(&self, name: &str) -> recstore::Result<Option<Placed>> {
        let (number, store) = self.read_state(|state| state.stores.current());
        Ok(store.find_table(name)?.map(|table| Placed::new(number, table)))
    }

    pub(crate) fn open_placed(&self, name: &str, config: &TableConfig) -> recstore::Result<Placed> {
        let (number, store) = self.read_state(|state| state.stores.current());
        Ok(Placed::new(number, store.open_table(name, config)?))
    }
}

/// Sorts what is about tables by their stores, those chosen last first.
pub(crate) fn by_store<T>(items: Vec<(TableLocation, T)>) -> Vec<(usize, Vec<T>)> {
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
