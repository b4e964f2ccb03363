//! Publications of tables on servers: each server notes the changes of its rows under a number of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use recstore::{ChangedRows, Error, Result, TableId};

use super::RemoteStore;
use super::call::Call;
use super::errors::misfit;
use super::management::unexpected;
use super::session::Session;
use super::tables::RemoteTable;
use crate::wire::codec::{Managed, Management, Request, TakeChanges};

const OPERATION: &str = "publish";

/// The publications that a client began, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Publications(Mutex<OpenPublications>);

#[derive(Debug, Default)]
struct OpenPublications {
    last: u64,
    shards: HashMap<u64, Vec<ShardPublication>>,
}

/// A publication on one server.
#[derive(Debug, Clone, Copy)]
struct ShardPublication {
    number: u64,
    /// The last answer, and the last that was told to those who follow.
    taken: u64,
    told: u64,
}

impl Publications {
    fn lock(&self) -> MutexGuard<'_, OpenPublications> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RemoteStore {
    pub(super) fn begin(&self, session: &Session, tables: &[TableId]) -> Result<u64> {
        let tables = opened(session, tables)?;
        let request = |_, numbers| Management::BeginPublication { tables: numbers };
        let calls = self.shards().map(|shard| call(&tables, shard, request)).collect();
        let mut shards = Vec::new();
        for (shard, (answer, _)) in
            self.ask_all(session, OPERATION, calls, self.patience())?.into_iter().enumerate()
        {
            let Managed::Publication { number } = answer else {
                return Err(unexpected(session, OPERATION, shard, &answer));
            };
            shards.push(ShardPublication { number, taken: 0, told: 0 });
        }
        let mut begun = self.publications.lock();
        begun.last += 1;
        let number = begun.last;
        begun.shards.insert(number, shards);
        Ok(number)
    }

    /// Asks all servers what changed. What one of them told is told again if another one fails.
    pub(super) fn take(
        &self,
        session: &Session,
        tables: &[TableId],
        publication: u64,
        was_told: bool,
    ) -> Result<Vec<ChangedRows>> {
        let tables = opened(session, tables)?;
        let mut begun = self.publications.lock();
        let unknown = || Error::NotPublished {
            table: tables.first().map_or_else(String::new, |table| table.checks.name().to_owned()),
        };
        let shards = begun.shards.get_mut(&publication).ok_or_else(unknown)?;
        // Only if the answer before has arrived; else the servers see an older number and give that part
        // again.
        for shard in shards.iter_mut().filter(|_| was_told) {
            shard.told = shard.taken;
        }
        let request = |shard: usize, numbers| {
            let ShardPublication { number, told, .. } = shards[shard];
            Management::TakeChanges(TakeChanges { tables: numbers, publication: number, told })
        };
        let calls: Vec<_> = self.shards().map(|shard| call(&tables, shard, request)).collect();
        let dims: Vec<usize> = tables.iter().map(|table| table.checks.dim()).collect();
        let mut all = vec![ChangedRows::default(); tables.len()];
        let mut taken = Vec::new();
        for (shard, outcome) in session.call_all(OPERATION, &calls, self.patience()).into_iter().enumerate() {
            let (reply, _) = outcome.answer()?;
            let (number, changed) = reply.changed(&dims).map_err(misfit(session, OPERATION, shard))?;
            taken.push(number);
            for (all, of_shard) in all.iter_mut().zip(changed) {
                all.ids.extend(of_shard.ids);
                all.rows.extend(of_shard.rows);
                all.deleted.extend(of_shard.deleted);
            }
        }
        // After all have answered: if one fails, no number moves, and the others repeat theirs with the next
        // call.
        for (shard, number) in shards.iter_mut().zip(taken) {
            shard.taken = number;
        }
        Ok(all)
    }

    pub(super) fn end(&self, session: &Session, tables: &[TableId], publication: u64) -> Result<()> {
        let Some(shards) = self.publications.lock().shards.remove(&publication) else { return Ok(()) };
        let tables = opened(session, tables)?;
        let request = |shard: usize, numbers| Management::EndPublication {
            tables: numbers,
            publication: shards[shard].number,
        };
        let calls = self.shards().map(|shard| call(&tables, shard, request)).collect();
        self.ask_all(session, OPERATION, calls, self.patience()).map(drop)
    }
}

fn opened(session: &Session, tables: &[TableId]) -> Result<Vec<Arc<RemoteTable>>> {
    tables.iter().map(|&id| session.lock_tables().get(OPERATION, id)).collect()
}

/// A request about several tables, by the numbers that a server has for them.
fn call(
    tables: &[Arc<RemoteTable>],
    shard: usize,
    request: impl Fn(usize, Vec<i64>) -> Management,
) -> Call<'static> {
    let numbers = tables.iter().map(|table| table.on(shard).number.0).collect();
    let incarnations = tables.iter().map(|table| table.on(shard).incarnation).collect();
    Call { shard, incarnations, sequence: 0, request: Request::Manage(request(shard, numbers)) }
}
