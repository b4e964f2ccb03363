//! A table of the store in this process, as its callers hold it.

use std::sync::{Arc, Weak};

use super::embedding_table::EmbeddingTable;
use crate::calls::{TableDescription, TableId, TableStatistics};
use crate::kernel::parallel::ReservedCores;
use crate::kernel::simd::Simd;
use crate::table::{Engine, Table};
use crate::{Error, Result, fork};

/// A table of a [`LocalStore`](super::local_store::LocalStore). It does not keep the rows of one that was dropped.
pub(super) struct LocalTable {
    id: TableId,
    name: String,
    dim: usize,
    table: Weak<Table>,
    executor: Arc<ReservedCores>,
    simd: Simd,
}

impl LocalTable {
    pub(super) fn new(id: TableId, table: &Arc<Table>, executor: Arc<ReservedCores>, simd: Simd) -> Self {
        let (name, dim) = (table.name().to_owned(), table.config().dim);
        Self { id, name, dim, table: Arc::downgrade(table), executor, simd }
    }

    fn engine(&self) -> Engine<'_> {
        Engine { executor: &*self.executor, simd: self.simd }
    }

    fn table(&self, operation: &'static str) -> Result<Arc<Table>> {
        self.table.upgrade().ok_or(Error::UnknownHandle { operation, handle: self.id.0 })
    }
}

impl EmbeddingTable for LocalTable {
    fn id(&self) -> TableId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn dim(&self) -> usize {
        self.dim
    }

    fn check_open(&self, operation: &'static str) -> Result<()> {
        self.table(operation).map(drop)
    }

    fn describe(&self) -> Result<TableDescription> {
        // Here and below: a fork waits for the call, so that no lock of a table is held in the child.
        let _gate = fork::enter();
        Ok(self.table("describe")?.description())
    }

    fn read(&self, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        let _gate = fork::enter();
        self.table("emb_read")?.read(self.engine(), ids, rows, &mut [])
    }

    fn read_with_places(&self, ids: &[i64], rows: &mut [f32], places: &mut [u32]) -> Result<()> {
        let _gate = fork::enter();
        self.table("emb_read")?.read(self.engine(), ids, rows, places)
    }

    fn read_ahead(&self, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        let _gate = fork::enter();
        let table = self.table("emb_read")?;
        table.bring_in(self.engine(), ids, true);
        table.read(self.engine(), ids, rows, &mut [])
    }

    fn write(&self, ids: &[i64], rows: &[f32]) -> Result<()> {
        let _gate = fork::enter();
        self.table("emb_write")?.write(self.engine(), ids, rows)
    }

    fn lookup(&self, ids: &[i64], insert: bool, indices: &mut [i64], rows: &mut [f32]) -> Result<()> {
        let _gate = fork::enter();
        self.table("hashtable_lookup")?.lookup(self.engine(), ids, insert, indices, rows)
    }

    fn delete(&self, ids: &[i64]) -> Result<usize> {
        let _gate = fork::enter();
        self.table("hashtable_delete")?.delete(ids)
    }

    fn evict(&self, ttl: Option<u64>, dry_run: bool) -> Result<Vec<i64>> {
        let _gate = fork::enter();
        self.table("evict")?.evict(ttl, dry_run)
    }

    fn clear(&self) -> Result<()> {
        let _gate = fork::enter();
        self.table("hashtable_clear")?.clear()
    }

    fn ids(&self) -> Result<Vec<i64>> {
        let _gate = fork::enter();
        Ok(self.table("hashtable_ids")?.ids())
    }

    fn num_rows(&self) -> Result<usize> {
        let _gate = fork::enter();
        Ok(self.table("hashtable_size")?.len())
    }

    fn read_slot(&self, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        let _gate = fork::enter();
        self.table("read_slot")?.read_slot(slot, ids)
    }

    fn set_learning_rate(&self, lr: f64, explicit: bool) -> Result<()> {
        let _gate = fork::enter();
        self.table("set_learning_rate")?.set_learning_rate(lr, explicit)
    }

    fn learning_rate(&self) -> Result<(f64, bool)> {
        let _gate = fork::enter();
        Ok(self.table("statistics")?.learning_rate())
    }

    fn statistics(&self) -> Result<TableStatistics> {
        let _gate = fork::enter();
        Ok(self.table("statistics")?.statistics())
    }
}
