//! What operators name by handle: tables, collectors, prefetches. A handle is never given out twice.

use std::collections::BTreeMap;
use std::sync::Arc;

use recstore::{GradientCollector, PrefetchId};

use crate::guard::Failure;
use crate::stores::{Place, Placed};

/// The handles that are open. Ordered maps: among so few numbers a search takes less time than a hash.
#[derive(Default)]
pub(crate) struct Handles {
    last: i64,
    tables: BTreeMap<i64, OpenTable>,
    of_place: BTreeMap<Place, i64>,
    collectors: BTreeMap<i64, Arc<GradientCollector<Place>>>,
    /// Prefetches of default tables that did not exist when they were issued: read when they are consumed.
    deferred: BTreeMap<PrefetchId, (Vec<i64>, usize)>,
}

struct OpenTable {
    placed: Placed,
    references: usize,
}

impl Handles {
    fn next(&mut self) -> i64 {
        self.last += 1;
        self.last
    }

    /// Adds a reference to a table and returns its handle.
    pub(crate) fn open(&mut self, placed: Placed) -> i64 {
        let handle = match self.of_place.get(&placed.place) {
            Some(&handle) => handle,
            None => self.next(),
        };
        self.of_place.insert(placed.place, handle);
        self.tables.entry(handle).or_insert(OpenTable { placed, references: 0 }).references += 1;
        handle
    }

    /// Takes a reference away; without any the handle is unknown from then on.
    pub(crate) fn release(&mut self, handle: i64) -> Result<(), Failure> {
        let unknown = || unknown("hashtable_release", handle);
        let table = self.tables.get_mut(&handle).ok_or_else(unknown)?;
        table.references -= 1;
        if table.references == 0 {
            let place = table.placed.place;
            self.tables.remove(&handle);
            self.of_place.remove(&place);
        }
        Ok(())
    }

    /// Returns the table behind a handle.
    pub(crate) fn table(&self, operation: &str, handle: i64) -> Result<&Placed, Failure> {
        self.tables.get(&handle).map(|table| &table.placed).ok_or_else(|| unknown(operation, handle))
    }

    /// Returns the table at a place, if it has a handle.
    pub(crate) fn table_at(&self, place: Place) -> Option<&Placed> {
        self.of_place.get(&place).and_then(|handle| self.tables.get(handle)).map(|table| &table.placed)
    }

    /// Returns the handle of a table, and 0 for one whose handle was released.
    pub(crate) fn handle_of(&self, place: Place) -> i64 {
        self.of_place.get(&place).copied().unwrap_or_default()
    }

    pub(crate) fn add_collector(&mut self) -> i64 {
        let handle = self.next();
        self.collectors.insert(handle, Arc::default());
        handle
    }

    pub(crate) fn remove_collector(&mut self, handle: i64) -> Result<Arc<GradientCollector<Place>>, Failure> {
        self.collectors.remove(&handle).ok_or_else(|| unknown_collector("collector_release", handle))
    }

    pub(crate) fn collector(
        &self,
        operation: &str,
        handle: i64,
    ) -> Result<Arc<GradientCollector<Place>>, Failure> {
        self.collectors.get(&handle).cloned().ok_or_else(|| unknown_collector(operation, handle))
    }

    /// Keeps the ids and the dim of a prefetch whose table does not exist yet; of more than `most` the newest.
    pub(crate) fn defer(&mut self, id: PrefetchId, ids: &[i64], dim: usize, most: usize) {
        self.deferred.insert(id, (ids.to_vec(), dim));
        if self.deferred.len() > most {
            self.deferred.pop_first();
        }
    }

    pub(crate) fn deferred_dim(&self, id: PrefetchId) -> Option<usize> {
        self.deferred.get(&id).map(|(_, dim)| *dim)
    }

    pub(crate) fn take_deferred(&mut self, id: PrefetchId) -> Option<(Vec<i64>, usize)> {
        self.deferred.remove(&id)
    }
}

fn unknown(operation: &str, handle: i64) -> Failure {
    Failure::Runtime(format!("{operation}: table handle {handle} is unknown, released or dropped"))
}

fn unknown_collector(operation: &str, handle: i64) -> Failure {
    Failure::Runtime(format!("{operation}: collector handle {handle} is unknown or released"))
}
