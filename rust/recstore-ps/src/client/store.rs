//! The store's trait, over servers.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use recstore::{
    BagInput, DistinctGradients, EmbeddingStore, Error, LoadOptions, LoadReport, OptimizerState, PLACES_TAG,
    Result, RowlessTable, SaveOptions, SaveReport, Serial, Shard, Step, StoreMemory, TableConfig,
    TableDescription, TableId, TableStatistics, TableUpdate,
};

use super::changes::change;
use super::distinct::Distinct;
use super::errors::{misfit, translated};
use super::fetch::{Wanted, fetch};
use super::session::{Call, Session};
use super::tables::RemoteTable;
use super::{RemoteStore, table_call};
use crate::wire::codec::{Floats, MergedUpdate, Reply, Request};

/// A place that no row has: the tag behind such places never fits, so a step searches for its rows.
const NO_PLACE: u32 = u32::MAX;

/// The bits of a row's index below the number of its shard.
const INDEX_BITS: u32 = 48;

impl EmbeddingStore for RemoteStore {
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<TableId> {
        self.with_session(|session| self.open(session, name, config))
    }

    fn find_table(&self, name: &str) -> Result<Option<TableId>> {
        self.with_session(|session| self.find(session, name))
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        self.with_session(|session| self.drop(session, name))
    }

    fn table_names(&self) -> Result<Vec<String>> {
        self.with_session(|session| self.names(session))
    }

    fn describe(&self, table: TableId) -> Result<TableDescription> {
        self.with_table("describe", table, |_, table| Ok(table.checks.description()))
    }

    fn dim(&self, table: TableId) -> Result<usize> {
        self.with_table("dim", table, |_, table| Ok(table.checks.dim()))
    }

    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.read_with_places(table, ids, rows, &mut [])
    }

    fn read_with_places(
        &self,
        table: TableId,
        ids: &[i64],
        rows: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        const OPERATION: &str = "emb_read";
        self.with_table(OPERATION, table, |session, table| {
            table.checks.check_rows(OPERATION, ids, rows.len())?;
            let expected = if places.is_empty() { 0 } else { ids.len() + PLACES_TAG };
            table.checks.check_length(OPERATION, "places", expected, places.len())?;
            let distinct = Distinct::of(ids);
            let firsts = distinct.first_positions();
            let wanted = Wanted { table, ids: &distinct.ids, places: &firsts, rows: &mut *rows };
            self.fetch(session, OPERATION, &mut [wanted])?;
            distinct.repeat_rows(&firsts, table.checks.dim(), rows);
            places.fill(NO_PLACE);
            Ok(())
        })
    }

    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()> {
        const OPERATION: &str = "emb_bag";
        self.with_session(|session| {
            let found = tables.iter().map(|&id| session.lock_tables().get(OPERATION, id));
            let found = found.collect::<Result<Vec<_>>>()?;
            let checks: Vec<&RowlessTable> = found.iter().map(|table| &table.checks).collect();
            RowlessTable::check_bags(&checks, &input, [pooled.len(), max_positions.len(), places.len()])?;
            let bags = (input.offsets.len() - 1) / tables.len();
            let start = |table: usize| input.offsets[table * bags] as usize;
            let ids = |table: usize| &input.ids[start(table)..start(table + 1)];
            let distinct: Vec<Distinct<'_>> =
                (0..tables.len()).map(|number| Distinct::of(ids(number))).collect();
            let matrix = |(distinct, checks): (&Distinct<'_>, &&RowlessTable)| {
                Floats::new(distinct.ids.len() * checks.dim())
            };
            let mut matrices: Vec<Floats> = distinct.iter().zip(&checks).map(matrix).collect();
            let parts = found.iter().zip(&distinct).zip(&mut matrices);
            let wanted = parts.map(|((table, distinct), rows)| Wanted {
                table,
                ids: &distinct.ids,
                places: &[],
                rows,
            });
            self.fetch(session, OPERATION, &mut wanted.collect::<Vec<_>>())?;
            let row = |table: usize, position| {
                let (place, dim) = (distinct[table].place(position - start(table)), checks[table].dim());
                &matrices[table][place * dim..][..dim]
            };
            RowlessTable::pool(&*self.executor, &checks, input, row, pooled, max_positions);
            places.fill(NO_PLACE);
            Ok(())
        })
    }

    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()> {
        const OPERATION: &str = "emb_write";
        self.with_table(OPERATION, table, |session, table| {
            table.checks.check_write(ids, rows)?;
            let limit = session.limits(OPERATION)?.into_iter().min().unwrap_or(u64::MAX);
            let dim = table.checks.dim();
            // What is too much for one request is several writes, each of which all servers make or none loses.
            let row_bytes = (dim * size_of::<f32>() + size_of::<i64>()) as u64;
            let most = (limit.saturating_sub(1 << 10) / row_bytes).max(1) as usize;
            for (ids, rows) in ids.chunks(most).zip(rows.chunks(most * dim)) {
                self.write_part(session, table, ids, rows)?;
            }
            Ok(())
        })
    }

    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<()> {
        const OPERATION: &str = "emb_update";
        self.with_session(|session| {
            let tables = updates.iter().map(|update| session.lock_tables().get(OPERATION, update.table));
            let tables = tables.collect::<Result<Vec<_>>>()?;
            let checked: Vec<_> = tables.iter().map(|table| &table.checks).zip(updates).collect();
            let unmerged = if self.one_server_checks() { RowlessTable::unmerged(&checked)? } else { None };
            let merged = unmerged.map_or_else(|| RowlessTable::merge(&Serial, &checked), Ok)?;
            let parts: Vec<Part<'_>> =
                tables.iter().zip(merged).map(|(table, merged)| self.part(table, merged)).collect();
            let of_shard = |shard| {
                let steps = parts.iter().zip(updates).map(|(part, update)| part.step(shard, update.step));
                let request = Request::Update(steps.collect());
                let incarnations = tables.iter().map(|table| table.on(shard).incarnation).collect();
                Call { shard, incarnations, sequence: 0, request }
            };
            // A server without any of the ids counts the step too.
            let calls = self.shards().map(of_shard).collect();
            let made = change(session, OPERATION, calls, self.patience());
            made.map(drop).map_err(|error| {
                let dropped = |table: &&Arc<RemoteTable>| names_number(&error, table);
                match tables.iter().find(dropped) {
                    Some(table) => translated(error, session, OPERATION, table, &[]),
                    None => error,
                }
            })
        })
    }

    fn lookup(
        &self,
        table: TableId,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        const OPERATION: &str = "hashtable_lookup";
        self.with_table(OPERATION, table, |session, table| {
            table.checks.check_rows(OPERATION, ids, rows.len())?;
            table.checks.check_length(OPERATION, "indices", ids.len(), indices.len())?;
            let dim = table.checks.dim();
            let limit = session.limits(OPERATION)?.into_iter().min().unwrap_or(u64::MAX);
            let row_bytes = (dim * size_of::<f32>() + size_of::<i64>()) as u64;
            let most = (limit.saturating_sub(1 << 10) / row_bytes).max(1) as usize;
            let parts = ids.chunks(most).zip(indices.chunks_mut(most)).zip(rows.chunks_mut(most * dim));
            for ((ids, indices), rows) in parts {
                self.lookup_part(session, table, ids, insert, indices, rows)?;
            }
            Ok(())
        })
    }

    fn delete(&self, table: TableId, ids: &[i64]) -> Result<usize> {
        const OPERATION: &str = "hashtable_delete";
        self.with_table(OPERATION, table, |session, table| {
            let split = self.router.split(ids);
            let request = |shard: usize| {
                let number = table.on(shard).number;
                table_call(table, shard, Request::Delete { table: number, ids: &split.ids[shard] })
            };
            let touched = self.shards().filter(|&shard| !split.ids[shard].is_empty());
            let touched: Vec<usize> = touched.collect();
            let calls = touched.iter().map(|&shard| request(shard)).collect();
            let answers = change(session, OPERATION, calls, self.patience());
            let answers = answers.map_err(|error| translated(error, session, OPERATION, table, &[]))?;
            let count = |(answer, &shard): (&Arc<Reply>, &usize)| {
                let count = answer.count().map_err(misfit(session, OPERATION, shard))?;
                Ok(count as usize)
            };
            answers.iter().zip(&touched).map(count).sum()
        })
    }

    fn evict(&self, table: TableId, dry_run: bool) -> Result<Vec<i64>> {
        self.with_table("evict", table, |session, table| self.evict_rows(session, table, dry_run))
    }

    fn num_evicted(&self, table: TableId) -> Result<u64> {
        if self.describe(table)?.config.eviction.is_none() {
            return Ok(0);
        }
        Ok(self.statistics(table)?.evictions)
    }

    fn put_optimizer_states(&self, _: &[OptimizerState<'_>]) -> Result<()> {
        let message = "servers take optimizer state from checkpoints only: load one".to_owned();
        Err(Error::Unsupported { operation: "put_optimizer_states", message })
    }

    fn read_ahead(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.read(table, ids, rows)
    }

    fn set_memory_limit(&self, _: Option<u64>) -> Result<()> {
        let message = "servers have limits of their own: set it where they are started".to_owned();
        Err(Error::Unsupported { operation: "set_memory_limit", message })
    }

    fn memory(&self) -> StoreMemory {
        StoreMemory::default()
    }

    fn clear(&self, table: TableId) -> Result<()> {
        self.with_table("hashtable_clear", table, |session, table| self.clear_rows(session, table))
    }

    fn ids(&self, table: TableId) -> Result<Vec<i64>> {
        const OPERATION: &str = "hashtable_ids";
        self.with_table(OPERATION, table, |session, table| {
            let call = |shard| table_call(table, shard, Request::Ids { table: table.on(shard).number });
            let calls: Vec<_> = self.shards().map(call).collect();
            let mut all = Vec::new();
            for (shard, outcome) in
                session.call_all(OPERATION, &calls, self.patience()).into_iter().enumerate()
            {
                let answer = outcome.answer();
                let (reply, _) = answer.map_err(|error| translated(error, session, OPERATION, table, &[]))?;
                all.extend(reply.ids().map_err(misfit(session, OPERATION, shard))?);
            }
            Ok(all)
        })
    }

    fn num_rows(&self, table: TableId) -> Result<usize> {
        self.with_table("hashtable_size", table, |session, table| self.count_rows(session, table))
    }

    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        const OPERATION: &str = "hashtable_slot";
        self.with_table("read_slot", table, |session, table| {
            table.checks.check_ids(OPERATION, ids)?;
            let slots = table.checks.description().slots;
            let Some(&(_, width)) = slots.iter().find(|(name, _)| *name == slot) else {
                return Ok(None);
            };
            let mut values = vec![0.0; width * ids.len()];
            let limit = session.limits(OPERATION)?.into_iter().min().unwrap_or(u64::MAX);
            let size = (width * size_of::<f32>()).max(size_of::<i64>()) as u64;
            let most = (limit.saturating_sub(1 << 10) / size).max(1) as usize;
            for (ids, values) in ids.chunks(most).zip(values.chunks_mut((most * width).max(1))) {
                self.slot_part(session, table, (slot, width), ids, values)?;
            }
            Ok(Some(values))
        })
    }

    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()> {
        self.with_table("set_learning_rate", table, |session, table| {
            self.set_rate(session, table, lr, explicit)
        })
    }

    fn statistics(&self, table: TableId) -> Result<TableStatistics> {
        self.with_table("statistics", table, |session, table| self.summed_statistics(session, table))
    }

    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport> {
        self.with_session(|session| self.save_all(session, directory, options))
    }

    fn save_part(&self, _: &Path, _: &str, _: Shard, _: &SaveOptions<'_>) -> Result<SaveReport> {
        let message = "the servers are the shards of a snapshot: save all of them together".to_owned();
        Err(Error::Unsupported { operation: "save", message })
    }

    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport> {
        self.with_session(|session| self.load_all(session, directory, options))
    }
}

/// A table's merged gradients, by shard.
struct Part<'a> {
    shards: Vec<DistinctGradients<'a>>,
    numbers: Vec<TableId>,
}

impl Part<'_> {
    fn step(&self, shard: usize, step: Step) -> MergedUpdate<'_> {
        let DistinctGradients { ids, sums } = &self.shards[shard];
        MergedUpdate { table: self.numbers[shard], step, ids, sums }
    }
}

/// Whether an error is about the number that some server gave a table.
fn names_number(error: &Error, table: &RemoteTable) -> bool {
    let Error::UnknownHandle { handle, .. } = error else {
        return false;
    };
    table.places.iter().any(|place| place.number.0 == *handle)
}

impl RemoteStore {
    fn fetch(&self, session: &Session, operation: &'static str, wanted: &mut [Wanted<'_>]) -> Result<()> {
        fetch(session, self.router, operation, wanted, self.patience()).map_err(|error| {
            match wanted.iter().find(|wanted| names_number(&error, wanted.table)) {
                Some(wanted) => translated(error, session, operation, wanted.table, &[]),
                None => error,
            }
        })
    }

    /// Whether nobody else is troubled by what the one server refuses: gradients need not be read once more to find out.
    fn one_server_checks(&self) -> bool {
        self.router.shards() == 1 && self.config.worker.is_none()
    }

    fn part<'a>(&self, table: &RemoteTable, merged: DistinctGradients<'a>) -> Part<'a> {
        let numbers = table.places.iter().map(|place| place.number).collect();
        if self.router.shards() == 1 {
            return Part { shards: vec![merged], numbers };
        }
        let split = self.router.split(&merged.ids);
        let sums = split.gather(&merged.sums, table.checks.dim());
        let owned = |(ids, sums)| DistinctGradients { ids: Cow::Owned(ids), sums: Cow::Owned(sums) };
        Part { shards: split.ids.into_iter().zip(sums).map(owned).collect(), numbers }
    }

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
