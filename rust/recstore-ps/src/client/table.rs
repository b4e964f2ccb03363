//! A table on servers, as its callers hold it.

use std::sync::Arc;

use recstore::{EmbeddingTable, PLACES_TAG, Result, TableDescription, TableId, TableStatistics};

use super::changes::change;
use super::errors::{misfit, translated};
use super::session::Session;
use super::tables::RemoteTable;
use super::{RemoteStore, table_call};
use crate::wire::codec::{Reply, Request};

/// A place that no row has: the tag behind such places never fits, so a step searches for its rows.
pub(super) const NO_PLACE: u32 = u32::MAX;

/// The bits of a row's index below the number of its shard.
const INDEX_BITS: u32 = 48;

/// A table of a [`RemoteStore`]. What the servers call it is looked up with each call: it changes when they start again.
pub(super) struct OpenTable {
    store: RemoteStore,
    id: TableId,
    name: String,
    dim: usize,
}

impl OpenTable {
    pub(super) fn new(store: &RemoteStore, table: &RemoteTable) -> Self {
        let (name, dim) = (table.checks.name().to_owned(), table.checks.dim());
        Self { store: store.clone(), id: table.id, name, dim }
    }

    /// Calls `work` with the session and what is known of the table.
    fn with<R>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&Session, &Arc<RemoteTable>) -> Result<R>,
    ) -> Result<R> {
        self.store.with_session(|session| {
            let table = session.lock_tables().get(operation, self.id)?;
            work(session, &table)
        })
    }
}

impl EmbeddingTable for OpenTable {
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
        self.with(operation, |_, _| Ok(()))
    }

    fn describe(&self) -> Result<TableDescription> {
        self.with("describe", |_, table| Ok(table.checks.description()))
    }

    fn read(&self, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.read_with_places(ids, rows, &mut [])
    }

    fn read_with_places(&self, ids: &[i64], rows: &mut [f32], places: &mut [u32]) -> Result<()> {
        const OPERATION: &str = "emb_read";
        self.with(OPERATION, |session, table| {
            table.checks.check_rows(OPERATION, ids, rows.len())?;
            let expected = if places.is_empty() { 0 } else { ids.len() + PLACES_TAG };
            table.checks.check_length(OPERATION, "places", expected, places.len())?;
            self.store.read_each(session, vec![(table, ids, rows)])?;
            places.fill(NO_PLACE);
            Ok(())
        })
    }

    fn write(&self, ids: &[i64], rows: &[f32]) -> Result<()> {
        const OPERATION: &str = "emb_write";
        self.with(OPERATION, |session, table| {
            table.checks.check_write(ids, rows)?;
            let dim = table.checks.dim();
            // What is too much for one request is several writes, each of which all servers make or none loses.
            let most = most_at_a_time(session, OPERATION, dim * size_of::<f32>() + size_of::<i64>())?;
            for (ids, rows) in ids.chunks(most).zip(rows.chunks(most * dim)) {
                self.store.write_part(session, table, ids, rows)?;
            }
            Ok(())
        })
    }

    fn lookup(&self, ids: &[i64], insert: bool, indices: &mut [i64], rows: &mut [f32]) -> Result<()> {
        const OPERATION: &str = "hashtable_lookup";
        self.with(OPERATION, |session, table| {
            table.checks.check_rows(OPERATION, ids, rows.len())?;
            table.checks.check_length(OPERATION, "indices", ids.len(), indices.len())?;
            let dim = table.checks.dim();
            let most = most_at_a_time(session, OPERATION, dim * size_of::<f32>() + size_of::<i64>())?;
            // Not numbered changes, though they may insert: a repetition finds the rows.
            let parts = ids.chunks(most).zip(indices.chunks_mut(most)).zip(rows.chunks_mut(most * dim));
            for ((ids, indices), rows) in parts {
                self.store.lookup_part(session, table, ids, insert, indices, rows)?;
            }
            Ok(())
        })
    }

    fn delete(&self, ids: &[i64]) -> Result<usize> {
        const OPERATION: &str = "hashtable_delete";
        self.with(OPERATION, |session, table| {
            let split = self.store.router.split(ids);
            let request = |shard: usize| {
                let number = table.on(shard).number;
                table_call(table, shard, Request::Delete { table: number, ids: &split.ids[shard] })
            };
            let touched = self.store.shards().filter(|&shard| !split.ids[shard].is_empty());
            let touched: Vec<usize> = touched.collect();
            let calls = touched.iter().map(|&shard| request(shard)).collect();
            let answers = change(session, OPERATION, calls, self.store.patience());
            let answers = answers.map_err(|error| translated(error, session, OPERATION, table, &[]))?;
            let count = |(answer, &shard): (&Arc<Reply>, &usize)| {
                let count = answer.count().map_err(misfit(session, OPERATION, shard))?;
                Ok(count as usize)
            };
            answers.iter().zip(&touched).map(count).sum()
        })
    }

    fn evict(&self, ttl: Option<u64>, dry_run: bool) -> Result<Vec<i64>> {
        self.with("evict", |session, table| self.store.evict_rows(session, table, ttl, dry_run))
    }

    fn clear(&self) -> Result<()> {
        self.with("hashtable_clear", |session, table| self.store.clear_rows(session, table))
    }

    fn ids(&self) -> Result<Vec<i64>> {
        const OPERATION: &str = "hashtable_ids";
        self.with(OPERATION, |session, table| {
            let call = |shard| table_call(table, shard, Request::Ids { table: table.on(shard).number });
            let calls: Vec<_> = self.store.shards().map(call).collect();
            let mut all = Vec::new();
            for (shard, outcome) in
                session.call_all(OPERATION, &calls, self.store.patience()).into_iter().enumerate()
            {
                let answer = outcome.answer();
                let (reply, _) = answer.map_err(|error| translated(error, session, OPERATION, table, &[]))?;
                all.extend(reply.ids().map_err(misfit(session, OPERATION, shard))?);
            }
            Ok(all)
        })
    }

    fn num_rows(&self) -> Result<usize> {
        self.with("hashtable_size", |session, table| self.store.count_rows(session, table))
    }

    fn read_slot(&self, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        const OPERATION: &str = "hashtable_slot";
        self.with("read_slot", |session, table| {
            table.checks.check_ids(OPERATION, ids)?;
            let slots = table.checks.description().slots;
            let Some(&(_, width)) = slots.iter().find(|(name, _)| *name == slot) else {
                return Ok(None);
            };
            let mut values = vec![0.0; width * ids.len()];
            // Ids go out and values come back: the wider of the two is the limit of both.
            let bytes = (width * size_of::<f32>()).max(size_of::<i64>());
            let most = most_at_a_time(session, OPERATION, bytes)?;
            for (ids, values) in ids.chunks(most).zip(values.chunks_mut((most * width).max(1))) {
                self.store.slot_part(session, table, (slot, width), ids, values)?;
            }
            Ok(Some(values))
        })
    }

    fn set_learning_rate(&self, lr: f64, explicit: bool) -> Result<()> {
        self.with("set_learning_rate", |session, table| self.store.set_rate(session, table, lr, explicit))
    }

    fn learning_rate(&self) -> Result<(f64, bool)> {
        let known = self.with("statistics", |_, table| Ok(table.known_rate()))?;
        known.map_or_else(|| self.statistics().map(|now| (now.learning_rate, now.learning_rate_was_set)), Ok)
    }

    fn statistics(&self) -> Result<TableStatistics> {
        self.with("statistics", |session, table| self.store.summed_statistics(session, table))
    }
}

/// Returns how many ids, with so many bytes each that go or come along, every server takes at a time.
fn most_at_a_time(session: &Session, operation: &'static str, bytes: usize) -> Result<usize> {
    let limit = session.limits(operation)?.into_iter().min().unwrap_or(u64::MAX);
    // 1 KiB is left for the headers of the frame and its sections.
    Ok((limit.saturating_sub(1 << 10) / bytes as u64).max(1) as usize)
}

impl RemoteStore {
    fn write_part(&self, session: &Session, table: &RemoteTable, ids: &[i64], rows: &[f32]) -> Result<()> {
        const OPERATION: &str = "emb_write";
        let split = self.router.split(ids);
        let rows = split.gather(rows, table.checks.dim());
        let request = |shard: usize| {
            let (ids, rows) = (&split.ids[shard][..], &rows[shard][..]);
            table_call(table, shard, Request::Write { table: table.on(shard).number, ids, rows })
        };
        let touched = self.shards().filter(|&shard| !split.ids[shard].is_empty());
        let made = change(session, OPERATION, touched.map(request).collect(), self.patience());
        made.map(drop).map_err(|error| translated(error, session, OPERATION, table, &[]))
    }

    fn lookup_part(
        &self,
        session: &Session,
        table: &RemoteTable,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        const OPERATION: &str = "hashtable_lookup";
        let (split, dim) = (self.router.split(ids), table.checks.dim());
        let call = |shard: usize| {
            let (number, ids) = (table.on(shard).number, &split.ids[shard][..]);
            table_call(table, shard, Request::Lookup { table: number, ids, insert })
        };
        let calls: Vec<_> = self.shards().filter(|&shard| !split.ids[shard].is_empty()).map(call).collect();
        let outcomes = session.call_all(OPERATION, &calls, self.patience());
        for (shard, outcome) in calls.iter().map(|call| call.shard).zip(outcomes) {
            let positions = &split.positions[shard];
            let answer = outcome.answer();
            let (reply, _) =
                answer.map_err(|error| translated(error, session, OPERATION, table, positions))?;
            let (found, found_rows) =
                reply.found(positions.len(), dim).map_err(misfit(session, OPERATION, shard))?;
            let global = |&index: &i64| if index < 0 { index } else { (shard as i64) << INDEX_BITS | index };
            let found: Vec<i64> = found.iter().map(global).collect();
            split.scatter(shard, 1, &found, indices);
            split.scatter(shard, dim, found_rows, rows);
        }
        Ok(())
    }

    fn slot_part(
        &self,
        session: &Session,
        table: &RemoteTable,
        (slot, width): (&str, usize),
        ids: &[i64],
        values: &mut [f32],
    ) -> Result<()> {
        const OPERATION: &str = "hashtable_slot";
        let split = self.router.split(ids);
        let call = |shard: usize| {
            let (number, ids) = (table.on(shard).number, &split.ids[shard][..]);
            table_call(table, shard, Request::Slot { table: number, slot: slot.to_owned(), ids })
        };
        let calls: Vec<_> = self.shards().filter(|&shard| !split.ids[shard].is_empty()).map(call).collect();
        let outcomes = session.call_all(OPERATION, &calls, self.patience());
        for (shard, outcome) in calls.iter().map(|call| call.shard).zip(outcomes) {
            let positions = &split.positions[shard];
            let answer = outcome.answer();
            let (reply, _) =
                answer.map_err(|error| translated(error, session, OPERATION, table, positions))?;
            let found = reply.slot(positions.len() * width).map_err(misfit(session, OPERATION, shard))?;
            split.scatter(shard, width, found.unwrap_or_default(), values);
        }
        Ok(())
    }
}
