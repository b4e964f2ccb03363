//! What operators name by handle: tables, collectors, prefetches. A handle is never given out twice, by no process.

use std::collections::BTreeMap;
use std::sync::Arc;

use recstore::{GradientCollector, PrefetchId, drawn_number};

use crate::guard::Failure;
use crate::handle_words::{HandleWords, NameWords};
use crate::stores::{Placed, TableLocation};

/// The handles that are open. Ordered maps: among so few numbers a search takes less time than a hash.
#[derive(Default)]
pub(crate) struct Handles {
    tables: BTreeMap<i64, OpenTable>,
    of_place: BTreeMap<TableLocation, i64>,
    /// The handles of the tables of a name, in the order in which they were opened: of several in one store, all but
    /// the last were dropped.
    of_name: BTreeMap<NameWords, Vec<i64>>,
    collectors: BTreeMap<i64, Arc<GradientCollector<TableLocation>>>,
    /// Prefetches of default tables that did not exist when they were issued: read when they are consumed.
    deferred: BTreeMap<PrefetchId, (Vec<i64>, usize)>,
}

struct OpenTable {
    placed: Placed,
    name: NameWords,
    references: usize,
}

impl Handles {
    /// Adds a reference to a table and returns its handle.
    pub(crate) fn open(&mut self, placed: Placed) -> HandleWords {
        let Self { tables, of_place, of_name, .. } = self;
        let number = *of_place.entry(placed.place).or_insert_with(next_number);
        let table = tables.entry(number).or_insert_with(|| {
            let name = NameWords::new(placed.table.name());
            of_name.entry(name).or_default().push(number);
            OpenTable { placed, name, references: 0 }
        });
        table.references += 1;
        HandleWords { number, name: table.name }
    }

    /// Takes a reference away; without any the handle's number is unknown from then on, and the table's place is returned.
    pub(crate) fn release(&mut self, handle: HandleWords) -> Result<Option<TableLocation>, Failure> {
        let not_ours = || not_ours("hashtable_release", &handle.name);
        let table = self.tables.get_mut(&handle.number).ok_or_else(not_ours)?;
        table.references -= 1;
        if table.references > 0 {
            return Ok(None);
        }
        let (place, name) = (table.placed.place, table.name);
        self.tables.remove(&handle.number);
        self.of_place.remove(&place);
        self.forget_name(&name, handle.number);
        Ok(Some(place))
    }

    fn forget_name(&mut self, name: &NameWords, number: i64) {
        let Some(numbers) = self.of_name.get_mut(name) else {
            return;
        };
        numbers.retain(|&other| other != number);
        if numbers.is_empty() {
            self.of_name.remove(name);
        }
    }

    /// Returns the number of the table that the words of a handle mean, and the table: that of the handle's number, or,
    /// where it was released here or comes from another process, the one open under its name. Of several stores' that of
    /// `current` counts.
    pub(crate) fn find(
        &self,
        operation: &str,
        words: &[i64],
        current: usize,
    ) -> Result<(i64, &Placed), Failure> {
        // The number alone: to read the name as well takes a lookup of one id some percent longer.
        let known = words.first().and_then(|number| self.tables.get_key_value(number));
        if let Some((&number, table)) = known {
            return Ok((number, &table.placed));
        }
        self.find_by_name(operation, &HandleWords::read(operation, words)?.name, current)
    }

    fn find_by_name(
        &self,
        operation: &str,
        name: &NameWords,
        current: usize,
    ) -> Result<(i64, &Placed), Failure> {
        let numbers = self.of_name.get(name).map_or(&[][..], Vec::as_slice);
        let named: Vec<_> = numbers.iter().map(|&number| (number, &self.tables[&number].placed)).collect();
        let store_of = |(_, placed): &(i64, &Placed)| placed.place.store;
        if let Some(found) = named.iter().rfind(|table| store_of(table) == current) {
            return Ok(*found);
        }
        match named.last() {
            Some(last) if named.iter().all(|table| store_of(table) == store_of(last)) => Ok(*last),
            Some(_) => Err(is_ambiguous(operation, name)),
            None => Err(is_not_open(operation, name)),
        }
    }

    /// Returns the table of a number that [`Handles::find`] gave.
    pub(crate) fn table(&self, operation: &str, number: i64) -> Result<&Placed, Failure> {
        self.tables.get(&number).map(|table| &table.placed).ok_or_else(|| was_released(operation))
    }

    /// Returns the table at a place, if it has a handle.
    pub(crate) fn table_at(&self, place: TableLocation) -> Option<&Placed> {
        self.of_place.get(&place).and_then(|handle| self.tables.get(handle)).map(|table| &table.placed)
    }

    /// Returns the handle of a table, and none for one whose handle was released.
    pub(crate) fn handle_of(&self, place: TableLocation) -> Option<HandleWords> {
        let &number = self.of_place.get(&place)?;
        Some(HandleWords { number, name: self.tables.get(&number)?.name })
    }

    pub(crate) fn add_collector(&mut self) -> i64 {
        let handle = next_number();
        self.collectors.insert(handle, Arc::default());
        handle
    }

    pub(crate) fn remove_collector(
        &mut self,
        handle: i64,
    ) -> Result<Arc<GradientCollector<TableLocation>>, Failure> {
        self.collectors.remove(&handle).ok_or_else(|| unknown_collector("collector_release", handle))
    }

    pub(crate) fn collector(
        &self,
        operation: &str,
        handle: i64,
    ) -> Result<Arc<GradientCollector<TableLocation>>, Failure> {
        self.collectors.get(&handle).cloned().ok_or_else(|| unknown_collector(operation, handle))
    }

    /// Keeps the ids and the dim of a prefetch whose table does not exist yet; of more than `most` the newest.
    pub(crate) fn defer(&mut self, id: PrefetchId, ids: &[i64], dim: usize, most: usize) {
        self.deferred.insert(id, (ids.to_vec(), dim));
        if self.deferred.len() > most {
            // Prefetches are numbered as they are issued, so the first is the oldest.
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

/// Draws the number of a handle. Files and other processes have handles too: counted numbers would meet there.
fn next_number() -> i64 {
    (drawn_number() >> 1) as i64
}

fn is_not_open(operation: &str, name: &NameWords) -> Failure {
    Failure::of(
        operation,
        format!(
            "{operation}: table \"{}\" is not open in this process; open it first, by a module or make_hashtable of that name",
            name.text()
        ),
    )
}

fn is_ambiguous(operation: &str, name: &NameWords) -> Failure {
    Failure::of(
        operation,
        format!(
            "{operation}: several stores have a table \"{}\" that is open here; choose the store that is meant",
            name.text()
        ),
    )
}

fn not_ours(operation: &str, name: &NameWords) -> Failure {
    Failure::of(
        operation,
        format!(
            "{operation}: this handle of table \"{}\" was released, or comes from another process; only who opened a table \
         here releases it",
            name.text()
        ),
    )
}

fn was_released(operation: &str) -> Failure {
    Failure::of(operation, format!("{operation}: the table was released during the call"))
}

fn unknown_collector(operation: &str, handle: i64) -> Failure {
    Failure::of(
        operation,
        format!("{operation}: collector handle {handle} is unknown, released or of another process"),
    )
}

#[cfg(test)]
mod tests {
    use recstore::{EmbeddingStore, LocalStore, TableConfig};

    use super::*;

    const OP: &str = "emb_read";

    fn store() -> LocalStore {
        LocalStore::default()
    }

    fn placed(number: usize, store: &LocalStore, name: &str) -> Placed {
        Placed::new(number, store.open_table(name, &TableConfig::new(1)).unwrap())
    }

    /// A handle as another process would have given it.
    fn foreign(name: &str) -> HandleWords {
        HandleWords { number: next_number(), name: NameWords::new(name) }
    }

    fn found(handles: &Handles, handle: HandleWords, current: usize) -> Result<TableLocation, String> {
        let found = handles.find(OP, &handle.to_words(), current).map_err(|error| error.to_string())?;
        Ok(found.1.place)
    }

    fn not_open(name: &str) -> String {
        format!(
            "emb_read: table \"{name}\" is not open in this process; open it first, by a module or make_hashtable of \
             that name"
        )
    }

    #[test]
    fn a_foreign_handle_means_the_table_that_is_open_under_its_name() {
        let (mut handles, store) = (Handles::default(), store());
        let (user, other) = (placed(0, &store, "user"), placed(0, &store, "country"));
        let user_place = user.place;
        handles.open(other);
        assert_eq!(found(&handles, foreign("user"), 0), Err(not_open("user")));
        let own = handles.open(user.clone());
        assert_eq!(handles.open(user), own);
        assert_eq!(found(&handles, foreign("user"), 0), Ok(user_place));
        handles.release(own).unwrap();
        assert_eq!(found(&handles, foreign("user"), 0), Ok(user_place));
        handles.release(own).unwrap();
        for handle in [own, foreign("user")] {
            assert_eq!(found(&handles, handle, 0), Err(not_open("user")));
        }
    }

    #[test]
    fn a_handle_that_was_released_means_the_table_opened_since() {
        let (mut handles, store) = (Handles::default(), store());
        let dropped = handles.open(placed(0, &store, "user"));
        let dropped_place = handles.find(OP, &dropped.to_words(), 0).unwrap().1.place;
        store.drop_table("user").unwrap();
        let again = placed(0, &store, "user");
        let place = again.place;
        let own = handles.open(again);
        assert_ne!(own.number, dropped.number);
        assert_eq!(found(&handles, dropped, 0), Ok(dropped_place));
        assert_eq!(found(&handles, foreign("user"), 0), Ok(place));
        handles.release(dropped).unwrap();
        assert_eq!(found(&handles, dropped, 0), Ok(place));
    }

    #[test]
    fn of_several_stores_the_current_one_counts_and_no_other_is_guessed() {
        let (mut handles, stores) = (Handles::default(), [store(), store(), store()]);
        let places = [1, 2].map(|number| {
            let table = placed(number, &stores[number], "user");
            handles.open(table.clone());
            table.place
        });
        assert_eq!(found(&handles, foreign("user"), 1), Ok(places[0]));
        assert_eq!(found(&handles, foreign("user"), 2), Ok(places[1]));
        let refused = found(&handles, foreign("user"), 0).unwrap_err();
        assert!(refused.starts_with("emb_read: several stores have a table \"user\""), "{refused}");
    }

    #[test]
    fn a_handle_releases_only_what_was_opened_under_its_number() {
        let (mut handles, store) = (Handles::default(), store());
        let own = handles.open(placed(0, &store, "user"));
        let refused = handles.release(foreign("user")).unwrap_err().to_string();
        assert!(
            refused.starts_with("hashtable_release: this handle of table \"user\" was released"),
            "{refused}"
        );
        assert!(handles.find(OP, &foreign("user").to_words(), 0).is_ok());
        handles.release(own).unwrap();
        assert!(handles.release(own).is_err());
        let missing = handles.table(OP, own.number).unwrap_err().to_string();
        assert_eq!(missing, "emb_read: the table was released during the call");
    }
}
