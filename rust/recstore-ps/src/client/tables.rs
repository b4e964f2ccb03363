//! The tables that a client has opened, and what the servers call them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use recstore::{Error, Result, TableConfig, TableId, TableValidator};

/// A table on all servers.
#[derive(Debug)]
pub(super) struct RemoteTable {
    pub(super) id: TableId,
    pub(super) checks: TableValidator,
    config: TableConfig,
    /// Its number on each server, and the run of that server.
    pub(super) places: Vec<ServerTable>,
    /// The learning rate and whether it was set by hand, as this client last set or asked for it.
    rate: Mutex<Option<(f64, bool)>>,
}

/// A table's number on a server, and the run of the server that gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerTable {
    pub(super) number: TableId,
    pub(super) incarnation: u64,
}

/// The tables that a client has opened.
#[derive(Debug, Default)]
pub(super) struct Tables {
    last: i64,
    by_name: HashMap<String, Arc<RemoteTable>>,
    by_id: HashMap<TableId, Arc<RemoteTable>>,
}

impl RemoteTable {
    fn new(id: TableId, checks: TableValidator, config: TableConfig, places: Vec<ServerTable>) -> Arc<Self> {
        Arc::new(Self { id, checks, config, places, rate: Mutex::default() })
    }

    /// Returns the learning rate and whether it was set by hand, if this client knows both.
    pub(super) fn known_rate(&self) -> Option<(f64, bool)> {
        *self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_rate(&self, rate: f64, was_set: bool) {
        *self.rate.lock().unwrap_or_else(PoisonError::into_inner) = Some((rate, was_set));
    }

    /// Notes a rate that the servers took. Whether one was set by hand before is known only if it was asked for.
    pub(super) fn note_set_rate(&self, rate: f64, by_hand: bool) {
        let mut known = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        let was_set = known.map(|(_, was_set)| was_set || by_hand).or(by_hand.then_some(true));
        *known = was_set.map(|was_set| (rate, was_set));
    }

    pub(super) fn forget_rate(&self) {
        *self.rate.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Describes the table to the servers.
    pub(super) fn config(&self) -> &TableConfig {
        &self.config
    }

    /// Returns what each server calls it.
    pub(super) fn numbers(&self) -> Vec<TableId> {
        self.places.iter().map(|place| place.number).collect()
    }

    /// Returns what the server `shard` calls it.
    pub(super) fn on(&self, shard: usize) -> ServerTable {
        self.places[shard]
    }
}

impl Tables {
    pub(super) fn get(&self, operation: &'static str, id: TableId) -> Result<Arc<RemoteTable>> {
        self.by_id.get(&id).cloned().ok_or(Error::UnknownHandle { operation, handle: id.0 })
    }

    pub(super) fn find(&self, name: &str) -> Option<&Arc<RemoteTable>> {
        self.by_name.get(name)
    }

    /// Returns what the servers call those of some tables that are open here.
    pub(super) fn numbers_of(&self, names: &BTreeSet<String>) -> Vec<Vec<TableId>> {
        names.iter().filter_map(|name| self.find(name)).map(|table| table.numbers()).collect()
    }

    /// Notes where the servers have the table `name`, whose own rule keeps `slots`. It keeps its number unless it is another table than before: where
    /// a server was not restarted but calls it otherwise, it was dropped and made anew.
    pub(super) fn note(
        &mut self,
        name: &str,
        config: &TableConfig,
        slots: Vec<(String, usize)>,
        places: Vec<ServerTable>,
    ) -> Result<Arc<RemoteTable>> {
        let known = self.by_name.get(name).cloned();
        let is_same = |table: &Arc<RemoteTable>| {
            let mut pairs = table.places.iter().zip(&places);
            // Numbers are compared within an incarnation only: a server that starts again numbers its tables
            // anew.
            pairs.all(|(old, new)| old.incarnation != new.incarnation || old.number == new.number)
        };
        let same = known.filter(is_same);
        if let Some(table) = same.as_ref().filter(|table| table.places == places) {
            return Ok(Arc::clone(table));
        }
        // Callers hold this number, so it outlives a restart of the servers.
        let id = same.map_or(TableId(self.last + 1), |table| table.id);
        self.forget(name);
        let checks = TableValidator::with_slots(name, config, slots)?;
        let table = RemoteTable::new(id, checks, config.clone(), places);
        self.last = self.last.max(id.0);
        self.by_name.insert(name.to_owned(), Arc::clone(&table));
        self.by_id.insert(id, Arc::clone(&table));
        Ok(table)
    }

    pub(super) fn forget(&mut self, name: &str) {
        if let Some(table) = self.by_name.remove(name) {
            self.by_id.remove(&table.id);
        }
    }

    pub(super) fn forget_number(&mut self, id: TableId) {
        if let Some(table) = self.by_id.remove(&id) {
            self.by_name.remove(table.checks.name());
        }
    }

    /// Returns the same tables for a forked child, which may change what servers hold as its parent may.
    pub(super) fn for_child(&self) -> Result<Self> {
        // Numbers go on from the parent's, some of which the child's callers hold.
        let mut tables = Self { last: self.last, ..Self::default() };
        for table in self.by_id.values() {
            let name = table.checks.name();
            let slots = table.checks.description().slots;
            // Made anew rather than shared: the fork may have caught a thread of the parent in the middle of
            // using it.
            let checks = TableValidator::with_slots(name, &table.config, slots)?;
            let (config, places) = (table.config.clone(), table.places.clone());
            let copy = RemoteTable::new(table.id, checks, config, places);
            tables.by_name.insert(name.to_owned(), Arc::clone(&copy));
            tables.by_id.insert(table.id, copy);
        }
        Ok(tables)
    }
}
