//! Changes of tables for those who follow them.

use std::sync::Arc;

use recstore::{ChangedRows, EmbeddingStore, Error, TableId};

use crate::registry::Registry;

impl Registry {
    /// Notes the changes of the tables of numbers for a publication, of each store; see
    /// [`recstore::Publications::begin_publication`].
    ///
    /// # Errors
    /// As [`recstore::Publications::begin_publication`]; [`Error::Unsupported`] for tables of several stores.
    pub fn begin_publication(&self, tables: &[i64]) -> recstore::Result<u64> {
        let (store, tables) = self.of_one_store(tables)?;
        store.needs_publications()?.begin_publication(&tables)
    }

    /// Returns what changed in tables, see [`recstore::Publications::take_changes`].
    ///
    /// # Errors
    /// As [`recstore::Publications::take_changes`], and as [`Registry::begin_publication`].
    pub fn take_changes(
        &self,
        tables: &[i64],
        publication: u64,
        was_told: bool,
    ) -> recstore::Result<Vec<ChangedRows>> {
        let (store, tables) = self.of_one_store(tables)?;
        store.needs_publications()?.take_changes(&tables, publication, was_told)
    }

    /// Notes nothing for a publication any more.
    ///
    /// # Errors
    /// As [`Registry::begin_publication`].
    pub fn end_publication(&self, tables: &[i64], publication: u64) -> recstore::Result<()> {
        let (store, tables) = self.of_one_store(tables)?;
        store.needs_publications()?.end_publication(&tables, publication)
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
}
