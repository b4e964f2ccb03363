//! The stores of the process: its own, and those on servers that were chosen for tables to be opened on.
//!
//! Whatever names tables (opening, finding, saving, loading) goes to the store that was chosen last; a table stays where
//! it was opened.

use std::collections::BTreeMap;
use std::sync::Arc;

use recstore::{EmbeddingStore, EmbeddingTable, FrozenStore, TableId};
use recstore_ps::RemoteStore;

/// The number of the store of the process.
pub(crate) const EMBEDDED: usize = 0;

/// That of the frozen tables, which are opened from files whatever store was chosen.
pub(crate) const FROZEN: usize = 1;

/// The store of a table and the table's number there: no other table ever has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TableLocation {
    pub(crate) store: usize,
    pub(crate) table: TableId,
}

/// A table and where it lies.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) place: TableLocation,
    pub(crate) table: Arc<dyn EmbeddingTable>,
}

impl Placed {
    pub(crate) fn new(store: usize, table: Arc<dyn EmbeddingTable>) -> Self {
        Self { place: TableLocation { store, table: table.id() }, table }
    }
}

/// The stores, and one numbering of the tables of all.
pub(crate) struct Stores {
    /// The first is that of the process, the second that of frozen tables.
    all: Vec<Arc<dyn EmbeddingStore>>,
    frozen: Arc<FrozenStore>,
    current: usize,
    /// Those on servers, in the order in which they were chosen.
    servers: Vec<Arc<RemoteStore>>,
    /// By number, from 1 on.
    places: Vec<TableLocation>,
    numbers: BTreeMap<TableLocation, i64>,
}

impl Stores {
    pub(crate) fn new(embedded: Arc<dyn EmbeddingStore>, frozen: Arc<FrozenStore>) -> Self {
        let (places, numbers) = (Vec::new(), BTreeMap::new());
        let all = vec![embedded, frozen.clone()];
        Self { all, frozen, current: EMBEDDED, servers: Vec::new(), places, numbers }
    }

    pub(crate) fn frozen(&self) -> Arc<FrozenStore> {
        Arc::clone(&self.frozen)
    }

    /// Chooses servers for the tables opened from now on, and returns their number.
    pub(crate) fn choose_servers(&mut self, servers: Arc<RemoteStore>) -> usize {
        self.choose(servers.clone());
        self.servers.push(servers);
        self.servers.len() - 1
    }

    pub(crate) fn choose(&mut self, store: Arc<dyn EmbeddingStore>) {
        self.current = self.all.len();
        self.all.push(store);
    }

    /// Chooses the store of the process.
    pub(crate) fn choose_embedded(&mut self) {
        self.current = EMBEDDED;
    }

    /// Returns the servers on which tables are opened, if they are.
    pub(crate) fn servers(&self) -> Option<Arc<RemoteStore>> {
        self.servers.last().filter(|_| self.current != EMBEDDED).cloned()
    }

    /// Returns the servers that were given a number.
    pub(crate) fn servers_numbered(&self, number: usize) -> Option<Arc<RemoteStore>> {
        self.servers.get(number).cloned()
    }

    /// Returns the number of the store that was chosen.
    pub(crate) fn current_number(&self) -> usize {
        self.current
    }

    /// Returns the store that was chosen and its number.
    pub(crate) fn current(&self) -> (usize, Arc<dyn EmbeddingStore>) {
        (self.current, self.store(self.current))
    }

    pub(crate) fn store(&self, number: usize) -> Arc<dyn EmbeddingStore> {
        Arc::clone(&self.all[number])
    }

    /// Returns the number of a table, which it keeps.
    pub(crate) fn number(&mut self, place: TableLocation) -> i64 {
        let Self { places, numbers, .. } = self;
        *numbers.entry(place).or_insert_with(|| {
            places.push(place);
            places.len() as i64
        })
    }

    /// Returns where the table of a number lies.
    pub(crate) fn place(&self, number: i64) -> Option<TableLocation> {
        let before = usize::try_from(number).ok()?.checked_sub(1)?;
        self.places.get(before).copied()
    }
}
