//! Calls on the tables of a store by their numbers, for tests that keep numbers beside the store.
#![allow(dead_code, reason = "each test uses some of them")]

use recstore::{EmbeddingStore, Result, TableConfig, TableDescription, TableId, TableStatistics};

/// A store whose tables are named by number in each call.
pub(crate) trait Numbered: EmbeddingStore {
    fn open_numbered(&self, name: &str, config: &TableConfig) -> Result<TableId> {
        Ok(self.open_table(name, config)?.id())
    }

    fn find_numbered(&self, name: &str) -> Result<Option<TableId>> {
        Ok(self.find_table(name)?.map(|table| table.id()))
    }

    fn describe(&self, table: TableId) -> Result<TableDescription> {
        self.table("describe", table)?.describe()
    }

    fn dim(&self, table: TableId) -> Result<usize> {
        Ok(self.table("dim", table)?.dim())
    }

    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.table("emb_read", table)?.read(ids, rows)
    }

    fn read_with_places(
        &self,
        table: TableId,
        ids: &[i64],
        rows: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        self.table("emb_read", table)?.read_with_places(ids, rows, places)
    }

    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()> {
        self.table("emb_write", table)?.write(ids, rows)
    }

    fn lookup(
        &self,
        table: TableId,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        self.table("hashtable_lookup", table)?.lookup(ids, insert, indices, rows)
    }

    fn delete(&self, table: TableId, ids: &[i64]) -> Result<usize> {
        self.table("hashtable_delete", table)?.delete(ids)
    }

    fn evict(&self, table: TableId, dry_run: bool) -> Result<Vec<i64>> {
        self.table("evict", table)?.evict(None, dry_run)
    }

    fn clear(&self, table: TableId) -> Result<()> {
        self.table("hashtable_clear", table)?.clear()
    }

    fn ids(&self, table: TableId) -> Result<Vec<i64>> {
        self.table("hashtable_ids", table)?.ids()
    }

    fn num_rows(&self, table: TableId) -> Result<usize> {
        self.table("hashtable_size", table)?.num_rows()
    }

    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        self.table("read_slot", table)?.read_slot(slot, ids)
    }

    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()> {
        self.table("set_learning_rate", table)?.set_learning_rate(lr, explicit)
    }

    fn statistics(&self, table: TableId) -> Result<TableStatistics> {
        self.table("statistics", table)?.statistics()
    }
}

impl<S: EmbeddingStore + ?Sized> Numbered for S {}
