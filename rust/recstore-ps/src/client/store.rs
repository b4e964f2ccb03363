//! The store's trait, over servers.

use std::borrow::Cow;
use std::mem;
use std::path::Path;
use std::sync::Arc;

use recstore::{
    BagInput, ChangedRows, DistinctGradients, EmbeddingStore, EmbeddingTable, Error, LoadOptions, LoadReport,
    PlacedRows, Publications, Result, SaveOptions, SaveReport, Step, TableConfig, TableId, TableRead,
    TableUpdate, TableValidator,
};

use super::call::Call;
use super::changes::change;
use super::distinct::Distinct;
use super::errors::{misfit, translated};
use super::fetch::{RowRequest, fetch};
use super::session::Session;
use super::table::{NO_PLACE, OpenTable};
use super::tables::RemoteTable;
use super::{RemoteStore, WireDtype};
use crate::wire::address::UNIX_PREFIX;
use crate::wire::codec::{Floats, MergedUpdate, Request};

impl EmbeddingStore for RemoteStore {
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<Arc<dyn EmbeddingTable>> {
        self.with_session(|session| Ok(self.opened(&*self.open(session, name, config)?)))
    }

    fn find_table(&self, name: &str) -> Result<Option<Arc<dyn EmbeddingTable>>> {
        self.with_session(|session| Ok(self.find(session, name)?.map(|table| self.opened(&table))))
    }

    fn table(&self, operation: &'static str, id: TableId) -> Result<Arc<dyn EmbeddingTable>> {
        self.with_session(|session| Ok(self.opened(&*session.lock_tables().get(operation, id)?)))
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        self.with_session(|session| self.drop(session, name))
    }

    fn table_names(&self) -> Result<Vec<String>> {
        self.with_session(|session| self.names(session))
    }

    fn read_tables(&self, reads: &mut [TableRead<'_>], _is_ahead: bool) -> Result<()> {
        self.with_session(|session| {
            let tables = reads.iter().map(|read| session.lock_tables().get("emb_read", read.table));
            let tables = tables.collect::<Result<Vec<_>>>()?;
            let wanted = tables.iter().zip(reads).map(|(table, read)| (&**table, read.ids, &mut *read.rows));
            self.read_each(session, wanted.collect())
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
            let checks: Vec<&TableValidator> = found.iter().map(|table| &table.checks).collect();
            TableValidator::check_bags(&checks, &input, [pooled.len(), max_positions.len(), places.len()])?;
            let bags = (input.offsets.len() - 1) / tables.len();
            let start = |table: usize| input.offsets[table * bags] as usize;
            let ids = |table: usize| &input.ids[start(table)..start(table + 1)];
            // Each row crosses the wire once, however many bags have its id.
            let distinct: Vec<Distinct<'_>> =
                (0..tables.len()).map(|number| Distinct::of(ids(number))).collect();
            let lens = distinct.iter().zip(&checks).map(|(distinct, table)| distinct.ids.len() * table.dim());
            let mut rows = Matrices::new(lens);
            let parts = found.iter().zip(&distinct).zip(rows.each_mut());
            let wanted = parts.map(|((table, distinct), rows)| RowRequest {
                table,
                ids: &distinct.ids,
                places: &[],
                rows,
            });
            self.fetch(session, OPERATION, &mut wanted.collect::<Vec<_>>())?;
            let placed = distinct.iter().zip(rows.each_mut()).map(|(distinct, rows)| distinct.placed(rows));
            let placed: Vec<PlacedRows<'_>> = placed.collect();
            TableValidator::pool(&*self.executor, &checks, input, &placed, pooled, max_positions);
            places.fill(NO_PLACE);
            Ok(())
        })
    }

    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<u64> {
        const OPERATION: &str = "emb_update";
        self.with_session(|session| {
            let tables = updates.iter().map(|update| session.lock_tables().get(OPERATION, update.table));
            let tables = tables.collect::<Result<Vec<_>>>()?;
            let checked: Vec<_> = tables.iter().map(|table| &table.checks).zip(updates).collect();
            let unmerged = match self.one_server_checks() {
                true => TableValidator::unmerged(&checked, self.is_beside_its_server())?,
                false => None,
            };
            let merged = unmerged.map_or_else(|| TableValidator::merge(&*self.executor, &checked), Ok)?;
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
            let answers = made.map_err(|error| {
                let dropped = |table: &&Arc<RemoteTable>| names_number(&error, table);
                match tables.iter().find(dropped) {
                    Some(table) => translated(error, session, OPERATION, table, &[]),
                    None => error,
                }
            })?;
            let left = answers.iter().enumerate();
            left.map(|(shard, answer)| answer.left().map_err(misfit(session, OPERATION, shard))).sum()
        })
    }

    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport> {
        self.with_session(|session| self.save_all(session, directory, options))
    }

    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport> {
        self.with_session(|session| self.load_all(session, directory, options))
    }

    fn publications(&self) -> Option<&dyn Publications> {
        Some(self)
    }
}

impl Publications for RemoteStore {
    fn begin_publication(&self, tables: &[TableId]) -> Result<u64> {
        self.with_session(|session| self.begin(session, tables))
    }

    fn take_changes(&self, tables: &[TableId], publication: u64, was_told: bool) -> Result<Vec<ChangedRows>> {
        self.with_session(|session| self.take(session, tables, publication, was_told))
    }

    fn end_publication(&self, tables: &[TableId], publication: u64) -> Result<()> {
        self.with_session(|session| self.end(session, tables, publication))
    }
}

/// The rows of several tables, in one piece of memory.
struct Matrices {
    floats: Floats,
    lens: Vec<usize>,
}

impl Matrices {
    fn new(lens: impl Iterator<Item = usize>) -> Self {
        let lens: Vec<usize> = lens.collect();
        Self { floats: Floats::new(lens.iter().sum()), lens }
    }

    fn each_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let Self { floats, lens } = self;
        let mut rest = &mut floats[..];
        lens.iter().map(move |&len| {
            let (own, behind) = mem::take(&mut rest).split_at_mut(len);
            rest = behind;
            own
        })
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
    fn opened(&self, table: &RemoteTable) -> Arc<dyn EmbeddingTable> {
        Arc::new(OpenTable::new(self, table))
    }

    pub(super) fn fetch(
        &self,
        session: &Session,
        operation: &'static str,
        wanted: &mut [RowRequest<'_>],
    ) -> Result<()> {
        fetch(session, self.router, operation, wanted, self.patience()).map_err(|error| {
            match wanted.iter().find(|wanted| names_number(&error, wanted.table)) {
                Some(wanted) => translated(error, session, operation, wanted.table, &[]),
                None => error,
            }
        })
    }

    /// Reads rows of several tables: one request a server for all of them.
    pub(super) fn read_each(
        &self,
        session: &Session,
        mut reads: Vec<(&RemoteTable, &[i64], &mut [f32])>,
    ) -> Result<()> {
        const OPERATION: &str = "emb_read";
        // All of them before anything is sent: a read of several tables that is refused asks no server.
        reads
            .iter()
            .try_for_each(|(table, ids, rows)| table.checks.check_rows(OPERATION, ids, rows.len()))?;
        let distinct: Vec<Distinct<'_>> = reads.iter().map(|(_, ids, _)| Distinct::of(ids)).collect();
        let firsts: Vec<Vec<usize>> = distinct.iter().map(Distinct::first_positions).collect();
        let parts = reads.iter_mut().zip(&distinct).zip(&firsts);
        let wanted = parts.map(|(((table, _, rows), distinct), firsts)| RowRequest {
            table,
            ids: &distinct.ids,
            places: firsts,
            rows,
        });
        self.fetch(session, OPERATION, &mut wanted.collect::<Vec<_>>())?;
        for (((table, _, rows), distinct), firsts) in reads.iter_mut().zip(&distinct).zip(&firsts) {
            distinct.repeat_rows(firsts, table.checks.dim(), rows);
        }
        Ok(())
    }

    /// Whether nobody else is troubled by what the one server refuses: gradients need not be read once more to find out.
    fn one_server_checks(&self) -> bool {
        self.router.shards() == 1 && self.config.worker.is_none()
    }

    /// Whether bytes to the server cost less than merging gradients, which it does while it takes the step.
    fn is_beside_its_server(&self) -> bool {
        let is_local = |server: &String| server.starts_with(UNIX_PREFIX);
        self.config.servers.iter().all(is_local) && self.config.wire_dtype == WireDtype::Float32
    }

    fn part<'a>(&self, table: &RemoteTable, merged: DistinctGradients<'a>) -> Part<'a> {
        let numbers = table.places.iter().map(|place| place.number).collect();
        // Nothing to split, so nothing is copied.
        if self.router.shards() == 1 {
            return Part { shards: vec![merged], numbers };
        }
        let split = self.router.split(&merged.ids);
        let sums = split.gather(&merged.sums, table.checks.dim());
        let owned = |(ids, sums)| DistinctGradients { ids: Cow::Owned(ids), sums: Cow::Owned(sums) };
        Part { shards: split.ids.into_iter().zip(sums).map(owned).collect(), numbers }
    }
}
