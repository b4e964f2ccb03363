//! Who is told what changed in tables. A publication that begins ends those of the same tables: a program that was killed
//! ends none of its own.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use recstore::{EmbeddingStore, Error, Result, TableId};

use crate::wire::codec::{Answer, Managed, Management, TakeChanges, changed_bytes};

/// The publications of a server's tables.
#[derive(Debug, Default)]
pub(super) struct Publications(Mutex<Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    /// The publication of each table.
    of_tables: HashMap<i64, u64>,
    /// The number of each publication's last answer.
    last: HashMap<u64, u64>,
}

impl Publications {
    /// Does what a publisher asks; None for other requests.
    pub(super) fn carry_out(
        &self,
        store: &dyn EmbeddingStore,
        request: &Management,
        limit: u64,
    ) -> Option<Result<Answer>> {
        Some(match request {
            Management::BeginPublication { tables } => self.begin(store, tables).map(Answer::Managed),
            Management::TakeChanges(take) => self.take(store, take, limit),
            Management::EndPublication { tables, publication } => {
                self.end(store, tables, *publication).map(Answer::Managed)
            }
            _ => return None,
        })
    }

    /// Begins a publication; see [`EmbeddingStore::begin_publication`].
    fn begin(&self, store: &dyn EmbeddingStore, tables: &[i64]) -> Result<Managed> {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for table in tables {
            if let Some(before) = numbers.of_tables.remove(table) {
                store.needs_publications()?.end_publication(&[TableId(*table)], before)?;
                numbers.forget_unused(before);
            }
        }
        let number = store.needs_publications()?.begin_publication(&ids(tables))?;
        numbers.of_tables.extend(tables.iter().map(|&table| (table, number)));
        numbers.last.insert(number, 0);
        Ok(Managed::Publication { number })
    }

    /// Returns what changed; see [`EmbeddingStore::take_changes`]. An answer beyond the limit ends the publication: those
    /// who follow begin again with all rows.
    fn take(&self, store: &dyn EmbeddingStore, take: &TakeChanges, limit: u64) -> Result<Answer> {
        let TakeChanges { tables, publication, told } = take;
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_others =
            |table: &&i64| numbers.of_tables.get(table).is_some_and(|number| number != publication);
        if let Some(table) = tables.iter().find(is_others) {
            return Err(Error::Published { table: name_of(store, *table)? });
        }
        let Some(last) = numbers.last.get_mut(publication) else {
            return Err(not_published(store, tables)?);
        };
        // A client that missed the last answer still names the one before.
        let was_told = told == last;
        // Also when it fails: what it took then is told with the next.
        *last += 1;
        let number = *last;
        let changed = store.needs_publications()?.take_changes(&ids(tables), *publication, was_told)?;
        let bytes: usize = changed.iter().map(changed_bytes).sum();
        if bytes as u64 > limit {
            numbers.forget(*publication);
            store.needs_publications()?.end_publication(&ids(tables), *publication)?;
            return Err(not_published(store, tables)?);
        }
        Ok(Answer::Changed { number, tables: changed })
    }

    /// Ends a publication, if it is still there.
    fn end(&self, store: &dyn EmbeddingStore, tables: &[i64], publication: u64) -> Result<Managed> {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.forget(publication);
        store.needs_publications()?.end_publication(&ids(tables), publication).map(|()| Managed::Done {})
    }
}

impl Numbers {
    fn forget(&mut self, publication: u64) {
        self.of_tables.retain(|_, number| *number != publication);
        self.last.remove(&publication);
    }

    fn forget_unused(&mut self, publication: u64) {
        if !self.of_tables.values().any(|number| *number == publication) {
            self.last.remove(&publication);
        }
    }
}

fn not_published(store: &dyn EmbeddingStore, tables: &[i64]) -> Result<Error> {
    let name = tables.first().map_or(Ok(String::new()), |table| name_of(store, *table))?;
    Ok(Error::NotPublished { table: name })
}

fn name_of(store: &dyn EmbeddingStore, table: i64) -> Result<String> {
    Ok(store.table("publish", TableId(table))?.describe()?.name)
}

fn ids(tables: &[i64]) -> Vec<TableId> {
    tables.iter().copied().map(TableId).collect()
}
