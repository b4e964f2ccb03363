//! The store of the process: tables in its memory and on servers side by side.
//!
//! Whatever names tables (opening, finding, saving, loading) goes to the store that was chosen last; a table stays where
//! it was opened.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use recstore::{
    BagInput, EmbeddingStore, Error, LoadOptions, LoadReport, OptimizerState, Result, RowlessTable,
    SaveOptions, SaveReport, Serial, Shard, StoreMemory, TableConfig, TableDescription, TableId,
    TableStatistics, TableUpdate, fork,
};
use recstore_ps::RemoteStore;

/// The number of the store of the process.
const EMBEDDED: usize = 0;

/// Several stores behind one: tables get numbers of their own.
pub(crate) struct SwitchingStore {
    state: RwLock<State>,
}

struct State {
    /// The first is that of the process.
    stores: Vec<Arc<dyn EmbeddingStore>>,
    current: usize,
    /// Those on servers, in the order in which they were chosen.
    servers: Vec<Arc<RemoteStore>>,
    /// By number, from 1 on.
    places: Vec<Place>,
    numbers: HashMap<Place, TableId>,
}

impl State {
    fn place(&self, operation: &'static str, table: TableId) -> Result<Place> {
        let before = usize::try_from(table.0).ok().and_then(|number| number.checked_sub(1));
        let place = before.and_then(|before| self.places.get(before));
        place.copied().ok_or(Error::UnknownHandle { operation, handle: table.0 })
    }
}

/// The store of a table and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    store: usize,
    table: TableId,
}

impl SwitchingStore {
    pub(crate) fn new(embedded: Arc<dyn EmbeddingStore>) -> Self {
        let (places, numbers) = (Vec::new(), HashMap::new());
        let (stores, servers) = (vec![embedded], Vec::new());
        Self { state: RwLock::new(State { stores, current: EMBEDDED, servers, places, numbers }) }
    }

    /// Chooses servers for the tables opened from now on, and returns their number.
    pub(crate) fn choose_servers(&self, servers: Arc<RemoteStore>) -> usize {
        self.choose(servers.clone());
        self.with_state(|state| {
            state.servers.push(servers);
            state.servers.len() - 1
        })
    }

    /// Returns the servers on which tables are opened, if they are.
    pub(crate) fn servers(&self) -> Option<Arc<RemoteStore>> {
        self.read_state(|state| state.servers.last().filter(|_| state.current != EMBEDDED).cloned())
    }

    /// Returns the servers that were given a number.
    pub(crate) fn servers_numbered(&self, number: usize) -> Option<Arc<RemoteStore>> {
        self.read_state(|state| state.servers.get(number).cloned())
    }

    /// Chooses the store of the process.
    pub(crate) fn choose_embedded(&self) {
        self.with_state(|state| state.current = EMBEDDED);
    }

    fn choose(&self, store: Arc<dyn EmbeddingStore>) {
        self.with_state(|state| {
            state.current = state.stores.len();
            state.stores.push(store);
        });
    }

    // Both pass the gate, so that no process forks while one of its threads holds the lock: the child's would stay locked.

    fn with_state<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let _gate = fork::enter();
        work(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn read_state<R>(&self, work: impl FnOnce(&State) -> R) -> R {
        let _gate = fork::enter();
        work(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn current(&self) -> (usize, Arc<dyn EmbeddingStore>) {
        self.read_state(|state| (state.current, Arc::clone(&state.stores[state.current])))
    }

    /// Returns the number here of a store's table.
    fn number(&self, store: usize, table: TableId) -> TableId {
        let place = Place { store, table };
        self.with_state(|state| {
            let State { places, numbers, .. } = state;
            *numbers.entry(place).or_insert_with(|| {
                places.push(place);
                TableId(places.len() as i64)
            })
        })
    }

    fn place(&self, operation: &'static str, table: TableId) -> Result<Place> {
        self.read_state(|state| state.place(operation, table))
    }

    fn store(&self, store: usize) -> Arc<dyn EmbeddingStore> {
        self.read_state(|state| Arc::clone(&state.stores[store]))
    }

    /// Calls `work` with the store of a table and its number there.
    fn with_table<R>(
        &self,
        operation: &'static str,
        table: TableId,
        work: impl FnOnce(&dyn EmbeddingStore, TableId) -> Result<R>,
    ) -> Result<R> {
        let found = |state: &State| -> Result<_> {
            let place = state.place(operation, table)?;
            Ok((place, Arc::clone(&state.stores[place.store])))
        };
        let (place, store) = self.read_state(found)?;
        let done = work(&*store, place.table);
        done.map_err(|error| self.renumbered(place.store, error))
    }

    /// Puts the number here in the place of a store's own.
    fn renumbered(&self, store: usize, error: Error) -> Error {
        match error {
            Error::UnknownHandle { operation, handle } => {
                let handle = self.number(store, TableId(handle)).0;
                Error::UnknownHandle { operation, handle }
            }
            other => other,
        }
    }

    /// Sorts what is about tables by their stores, those chosen last first, with the tables' numbers there.
    fn by_store<T: Clone>(
        &self,
        operation: &'static str,
        items: &[T],
        table_of: impl Fn(&mut T) -> &mut TableId,
    ) -> Result<Vec<(usize, Vec<T>)>> {
        let mut of_store: HashMap<usize, Vec<T>> = HashMap::new();
        for mut item in items.iter().cloned() {
            let table = table_of(&mut item);
            let place = self.place(operation, *table)?;
            *table = place.table;
            of_store.entry(place.store).or_default().push(item);
        }
        let mut groups: Vec<_> = of_store.into_iter().collect();
        groups.sort_by_key(|(store, _)| std::cmp::Reverse(*store));
        Ok(groups)
    }

    /// Makes the steps of one store.
    fn update_store(&self, store: usize, updates: &[TableUpdate<'_>]) -> Result<()> {
        self.store(store).update(updates).map_err(|error| self.renumbered(store, error))
    }
}

/// Checks updates as their store would, so that one store is not changed before another refuses.
fn check(store: &dyn EmbeddingStore, updates: &[TableUpdate<'_>]) -> Result<()> {
    let table = |update: &TableUpdate<'_>| {
        let TableDescription { name, config, .. } = store.describe(update.table)?;
        RowlessTable::new(&name, &config)
    };
    let tables = updates.iter().map(table).collect::<Result<Vec<_>>>()?;
    RowlessTable::merge(&Serial, &tables.iter().zip(updates).collect::<Vec<_>>()).map(drop)
}

impl EmbeddingStore for SwitchingStore {
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<TableId> {
        let (number, store) = self.current();
        Ok(self.number(number, store.open_table(name, config)?))
    }

    fn find_table(&self, name: &str) -> Result<Option<TableId>> {
        let (number, store) = self.current();
        Ok(store.find_table(name)?.map(|table| self.number(number, table)))
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        self.current().1.drop_table(name)
    }

    fn table_names(&self) -> Result<Vec<String>> {
        self.current().1.table_names()
    }

    fn describe(&self, table: TableId) -> Result<TableDescription> {
        self.with_table("describe", table, |store, table| store.describe(table))
    }

    fn dim(&self, table: TableId) -> Result<usize> {
        self.with_table("dim", table, |store, table| store.dim(table))
    }

    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.with_table("emb_read", table, |store, table| store.read(table, ids, rows))
    }

    fn read_with_places(
        &self,
        table: TableId,
        ids: &[i64],
        rows: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        self.with_table("emb_read", table, |store, table| store.read_with_places(table, ids, rows, places))
    }

    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()> {
        let found = tables.iter().map(|&table| self.place("emb_bag", table)).collect::<Result<Vec<_>>>()?;
        let store = found.first().map_or(0, |place| place.store);
        if found.iter().any(|place| place.store != store) {
            let message =
                "the tables of one lookup must lie together, in this process or on the same servers";
            return Err(Error::Unsupported { operation: "emb_bag", message: message.to_owned() });
        }
        let tables: Vec<TableId> = found.iter().map(|place| place.table).collect();
        let pooled = self.store(store).bag(&tables, input, pooled, max_positions, places);
        pooled.map_err(|error| self.renumbered(store, error))
    }

    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()> {
        self.with_table("emb_write", table, |store, table| store.write(table, ids, rows))
    }

    fn read_ahead(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.with_table("emb_read", table, |store, table| store.read_ahead(table, ids, rows))
    }

    /// Of several stores those on servers come first, for they may fail; all are checked before any changes.
    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<()> {
        let groups = self.by_store("emb_update", updates, |update| &mut update.table)?;
        if groups.len() > 1 {
            for (store, updates) in &groups {
                check(&*self.store(*store), updates).map_err(|error| self.renumbered(*store, error))?;
            }
        }
        groups.iter().try_for_each(|(store, updates)| self.update_store(*store, updates))
    }

    fn lookup(
        &self,
        table: TableId,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        let lookup =
            |store: &dyn EmbeddingStore, table: TableId| store.lookup(table, ids, insert, indices, rows);
        self.with_table("hashtable_lookup", table, lookup)
    }

    fn delete(&self, table: TableId, ids: &[i64]) -> Result<usize> {
        self.with_table("hashtable_delete", table, |store, table| store.delete(table, ids))
    }

    fn evict(&self, table: TableId, dry_run: bool) -> Result<Vec<i64>> {
        self.with_table("evict", table, |store, table| store.evict(table, dry_run))
    }

    fn num_evicted(&self, table: TableId) -> Result<u64> {
        self.with_table("num_evicted", table, |store, table| store.num_evicted(table))
    }

    fn clear(&self, table: TableId) -> Result<()> {
        self.with_table("hashtable_clear", table, |store, table| store.clear(table))
    }

    fn ids(&self, table: TableId) -> Result<Vec<i64>> {
        self.with_table("hashtable_ids", table, |store, table| store.ids(table))
    }

    fn num_rows(&self, table: TableId) -> Result<usize> {
        self.with_table("hashtable_size", table, |store, table| store.num_rows(table))
    }

    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        self.with_table("read_slot", table, |store, table| store.read_slot(table, slot, ids))
    }

    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()> {
        self.with_table("set_learning_rate", table, |store, table| {
            store.set_learning_rate(table, lr, explicit)
        })
    }

    /// Of several stores those on servers come first, for they may refuse.
    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()> {
        let groups = self.by_store("put_optimizer_states", states, |state| &mut state.table)?;
        groups.iter().try_for_each(|(store, states)| {
            let put = self.store(*store).put_optimizer_states(states);
            put.map_err(|error| self.renumbered(*store, error))
        })
    }

    /// Limits the tables in the memory of this process.
    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()> {
        self.store(EMBEDDED).set_memory_limit(limit)
    }

    /// Returns what the tables in the memory of this process take.
    fn memory(&self) -> StoreMemory {
        self.store(EMBEDDED).memory()
    }

    fn statistics(&self, table: TableId) -> Result<TableStatistics> {
        self.with_table("statistics", table, |store, table| store.statistics(table))
    }

    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport> {
        self.current().1.save(directory, options)
    }

    fn save_part(
        &self,
        directory: &Path,
        snapshot: &str,
        shard: Shard,
        options: &SaveOptions<'_>,
    ) -> Result<SaveReport> {
        self.current().1.save_part(directory, snapshot, shard, options)
    }

    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport> {
        self.current().1.load(directory, options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use recstore::{GradientChunk, LocalStore, PoolingMode, Step};

    /// A table in each of two stores, under one name.
    fn two_tables() -> (SwitchingStore, [TableId; 2]) {
        let store = SwitchingStore::new(Arc::new(LocalStore::new(Box::new(Serial))));
        let zeros = TableConfig::from_json(1, r#"{"initializer": {"kind": "zeros"}}"#).unwrap();
        let first = store.open_table("t", &zeros).unwrap();
        store.choose(Arc::new(LocalStore::new(Box::new(Serial))));
        assert_eq!(store.find_table("t"), Ok(None));
        let second = store.open_table("t", &zeros).unwrap();
        (store, [first, second])
    }

    fn step<'a>(table: TableId, gradient: &'a [f32; 1]) -> TableUpdate<'a> {
        TableUpdate { table, chunks: vec![GradientChunk::new(&[5], gradient, 1)], step: Step::Next }
    }

    #[test]
    fn tables_of_one_name_lie_apart_and_are_stepped_together_or_not_at_all() {
        let (store, [first, second]) = two_tables();
        let rows = || {
            [first, second].map(|table| {
                let mut row = [9.0];
                store.read(table, &[5], &mut row).unwrap();
                row[0]
            })
        };
        store.write(second, &[5], &[1.0]).unwrap();
        assert_eq!(rows(), [0.0, 1.0]);
        let refused = store.update(&[step(second, &[1.0]), step(first, &[f32::NAN])]).unwrap_err();
        assert!(refused.to_string().contains("gradient of id 5 at position 0 of table \"t\" holds NaN"));
        assert_eq!(rows(), [0.0, 1.0]);
        store.update(&[step(first, &[-100.0]), step(second, &[100.0])]).unwrap();
        assert_eq!(rows(), [1.0, 0.0]);
    }

    #[test]
    fn a_lookup_over_several_stores_and_a_dropped_table_are_refused() {
        let (store, tables) = two_tables();
        let (ids, offsets) = (&[5, 6], &[0, 1, 2]);
        let input =
            BagInput { ids, offsets, mode: PoolingMode::Sum, per_sample_weights: None, padding_idx: None };
        let refused = store.bag(&tables, input, &mut [0.0; 2], &mut [], &mut []).unwrap_err().to_string();
        assert!(refused.starts_with("emb_bag: the tables of one lookup must lie together"), "{refused}");
        store.drop_table("t").unwrap();
        let dropped = Error::UnknownHandle { operation: "emb_read", handle: tables[1].0 };
        assert_eq!(store.read(tables[1], &[5], &mut [0.0]), Err(dropped));
        store.choose_embedded();
        assert_eq!(store.find_table("t"), Ok(Some(tables[0])));
    }
}
