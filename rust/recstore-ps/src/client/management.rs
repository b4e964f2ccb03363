//! Tables as a whole, on all servers.

use std::path::Path;
use std::sync::Arc;

use recstore::{
    Error, LoadOptions, LoadReport, OptimizerConfig, Result, SaveOptions, SaveReport, Shard, TableConfig,
    TableId, TableStatistics, new_snapshot_name,
};

use super::call::Call;
use super::changes::change;
use super::errors::{misfit, translated};
use super::session::Session;
use super::tables::{RemoteTable, ServerTable};
use super::{RemoteStore, table_management};
use crate::wire::codec::{LoadShard, Managed, Management, SavePart};

impl RemoteStore {
    /// Asks all servers the same and returns their answers, in the order of the shards, and which runs gave them.
    pub(super) fn ask_all(
        &self,
        session: &Session,
        operation: &'static str,
        calls: Vec<Call<'_>>,
        patience: std::time::Duration,
    ) -> Result<Vec<(Managed, u64)>> {
        let outcomes = session.call_all(operation, &calls, patience);
        let answer = |(outcome, call): (super::session::Outcome, &Call<'_>)| {
            let (reply, incarnation) = outcome.answer()?;
            let managed = reply.managed().map_err(misfit(session, operation, call.shard))?;
            Ok((managed, incarnation))
        };
        outcomes.into_iter().zip(&calls).map(answer).collect()
    }

    pub(super) fn ask_about(
        &self,
        session: &Session,
        operation: &'static str,
        table: &RemoteTable,
        request: impl Fn(i64) -> Management,
    ) -> Result<Vec<Managed>> {
        let calls = self.shards().map(|shard| table_management(table, shard, &request)).collect();
        let answers = self.ask_all(session, operation, calls, self.patience());
        let answers = answers.map_err(|error| translated(error, session, operation, table, &[]))?;
        Ok(answers.into_iter().map(|(managed, _)| managed).collect())
    }

    /// Changes a table on all servers, on each once, and returns their answers in the order of the shards.
    fn change_all(
        &self,
        session: &Session,
        operation: &'static str,
        table: &RemoteTable,
        request: impl Fn(i64) -> Management,
    ) -> Result<Vec<Managed>> {
        let calls = self.shards().map(|shard| table_management(table, shard, &request)).collect();
        let answers = change(session, operation, calls, self.patience());
        let answers = answers.map_err(|error| translated(error, session, operation, table, &[]))?;
        let managed = answers.iter().enumerate();
        managed.map(|(shard, answer)| answer.managed().map_err(misfit(session, operation, shard))).collect()
    }

    pub(super) fn open(
        &self,
        session: &Session,
        name: &str,
        config: &TableConfig,
    ) -> Result<Arc<RemoteTable>> {
        // What all servers would refuse need not be sent.
        recstore::TableValidator::new(name, config)?;
        self.agree(session)?;
        let known = session.lock_tables().find(name).cloned();
        let table = self.open_known(session, name, config, known.as_deref())?;
        self.level_steps(session, &table)?;
        Ok(table)
    }

    /// Opens a table, on the runs of the servers that have it as it was `known`: one that was restarted lost its rows.
    fn open_known(
        &self,
        session: &Session,
        name: &str,
        config: &TableConfig,
        known: Option<&RemoteTable>,
    ) -> Result<Arc<RemoteTable>> {
        let request =
            Management::OpenTable { name: name.to_owned(), dim: config.dim, config: config.clone() };
        let calls = self.shards().map(|shard| named_call(known, shard, request.clone())).collect();
        let answers = self.ask_all(session, "open_table", calls, self.patience())?;
        let place = |(shard, (answer, incarnation)): (usize, (Managed, u64))| match answer {
            Managed::Table { table: Some(number) } => {
                Ok(ServerTable { number: TableId(number), incarnation })
            }
            other => Err(unexpected(session, "open_table", shard, &other)),
        };
        let places = answers.into_iter().enumerate().map(place).collect::<Result<Vec<_>>>()?;
        let slots = self.slots_of_own_rule(session, config, &places)?;
        let mut tables = session.lock_tables();
        let config = tables.find(name).map_or_else(|| config.clone(), |table| table.config().clone());
        tables.note(name, &config, slots, places)
    }

    /// Asks for the slots of a rule that only the servers know.
    fn slots_of_own_rule(
        &self,
        session: &Session,
        config: &TableConfig,
        places: &[ServerTable],
    ) -> Result<Vec<(String, usize)>> {
        const OPERATION: &str = "open_table";
        let (OptimizerConfig::Rule { .. }, Some(first)) = (&config.optimizer, places.first()) else {
            return Ok(Vec::new());
        };
        let mut call = Call::manage(0, Management::Describe { table: first.number.0 });
        call.incarnations = vec![first.incarnation];
        match self.ask_all(session, OPERATION, vec![call], self.patience())?.pop() {
            Some((Managed::Description { slots, .. }, _)) => Ok(slots),
            _ => Err(session.unavailable(OPERATION, 0, "it does not describe the table".to_owned())),
        }
    }

    /// Looks for a table. One that only some servers have, since its opening was cut off, is opened on the others.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: a server was restarted since this program opened the table.
    pub(super) fn find(&self, session: &Session, name: &str) -> Result<Option<Arc<RemoteTable>>> {
        let known = session.lock_tables().find(name).cloned();
        self.find_known(session, name, known.as_deref())
    }

    /// Looks for a table whose rows servers may have lost: it is to be dropped, or was loaded.
    fn find_anew(&self, session: &Session, name: &str) -> Result<Option<Arc<RemoteTable>>> {
        self.find_known(session, name, None)
    }

    fn find_known(
        &self,
        session: &Session,
        name: &str,
        expected: Option<&RemoteTable>,
    ) -> Result<Option<Arc<RemoteTable>>> {
        const OPERATION: &str = "find_table";
        let request = Management::FindTable { name: name.to_owned() };
        let calls = self.shards().map(|shard| named_call(expected, shard, request.clone())).collect();
        let answers = self.ask_all(session, OPERATION, calls, self.patience())?;
        let places: Vec<Option<ServerTable>> = answers
            .into_iter()
            .map(|(answer, incarnation)| match answer {
                Managed::Table { table } => {
                    table.map(|number| ServerTable { number: TableId(number), incarnation })
                }
                _ => None,
            })
            .collect();
        let Some((shard, place)) =
            places.iter().enumerate().find_map(|(shard, place)| Some((shard, (*place)?)))
        else {
            session.lock_tables().forget(name);
            return Ok(None);
        };
        let known = session.lock_tables().find(name).cloned();
        // The servers have it as they had it when it was opened: nothing to describe.
        if let Some(table) = known.filter(|table| table.places.iter().copied().map(Some).eq(places.clone())) {
            return Ok(Some(table));
        }
        let request = Management::Describe { table: place.number.0 };
        let mut call = Call::manage(shard, request);
        // A server that starts again between the two requests may call another table so: it refuses instead.
        call.incarnations = vec![place.incarnation];
        let answer = self.ask_all(session, OPERATION, vec![call], self.patience())?.pop();
        let Some((Managed::Description { dim, mut config, .. }, _)) = answer else {
            return Err(session.unavailable(OPERATION, shard, "it does not describe the table".to_owned()));
        };
        config.dim = dim;
        self.agree(session)?;
        let table = self.open_known(session, name, &config, expected)?;
        self.level_steps(session, &table)?;
        Ok(Some(table))
    }

    /// Opens the tables that this program has not: so an opening, a drop or a step of theirs that reached only some servers
    /// ends, as it does for the next program that opens them. A save to `directory` waits for no step of another program.
    ///
    /// # Errors
    /// As opening them, and as [`RemoteStore::check_no_half_step`].
    fn open_others(&self, session: &Session, directory: &Path) -> Result<()> {
        for name in self.names(session)? {
            let known = session.lock_tables().find(&name).cloned();
            let table = known.map_or_else(|| self.find(session, &name), |table| Ok(Some(table)))?;
            table.map_or(Ok(()), |table| self.check_no_half_step(session, &table, directory))?;
        }
        Ok(())
    }

    pub(super) fn names(&self, session: &Session) -> Result<Vec<String>> {
        const OPERATION: &str = "table_names";
        let calls = self.shards().map(|shard| Call::manage(shard, Management::TableNames {})).collect();
        let mut all = Vec::new();
        for (answer, _) in self.ask_all(session, OPERATION, calls, self.patience())? {
            if let Managed::Names { names } = answer {
                all.extend(names);
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Drops a table where it is there; a server that lacks it has dropped it before.
    pub(super) fn drop(&self, session: &Session, name: &str) -> Result<()> {
        const OPERATION: &str = "drop_table";
        let unknown = || Error::UnknownTable { operation: OPERATION, table: name.to_owned() };
        let table = self.find_anew(session, name)?.ok_or_else(unknown)?;
        let request = |_| Management::DropTable { name: name.to_owned() };
        let calls = self.shards().map(|shard| table_management(&table, shard, request)).collect();
        change(session, OPERATION, calls, self.patience())?;
        // After all servers have dropped it: a drop that failed can be repeated by name.
        session.lock_tables().forget(name);
        Ok(())
    }

    pub(super) fn clear_rows(&self, session: &Session, table: &RemoteTable) -> Result<()> {
        let request = |number| Management::Clear { table: number };
        self.change_all(session, "hashtable_clear", table, request).map(drop)
    }

    pub(super) fn count_rows(&self, session: &Session, table: &RemoteTable) -> Result<usize> {
        let request = |number| Management::NumRows { table: number };
        let answers = self.ask_about(session, "hashtable_size", table, request)?;
        let count = |(shard, answer): (usize, Managed)| match answer {
            Managed::Count { count } => Ok(count),
            other => Err(unexpected(session, "hashtable_size", shard, &other)),
        };
        answers.into_iter().enumerate().map(count).sum()
    }

    pub(super) fn set_rate(
        &self,
        session: &Session,
        table: &RemoteTable,
        learning_rate: f64,
        explicit: bool,
    ) -> Result<()> {
        table.checks.check_learning_rate(learning_rate)?;
        let request = |number| Management::SetLearningRate { table: number, learning_rate, explicit };
        // Not a numbered change: setting it twice comes to the same.
        self.ask_about(session, "set_learning_rate", table, request)?;
        table.note_set_rate(learning_rate, explicit);
        Ok(())
    }

    /// Takes away the rows that eviction chooses on each server, and returns their ids in ascending order.
    pub(super) fn evict_rows(
        &self,
        session: &Session,
        table: &RemoteTable,
        ttl: Option<u64>,
        dry_run: bool,
    ) -> Result<Vec<i64>> {
        const OPERATION: &str = "evict";
        let request = |number| Management::Evict { table: number, ttl, dry_run };
        let answers = match dry_run {
            true => self.ask_about(session, OPERATION, table, request)?,
            false => self.change_all(session, OPERATION, table, request)?,
        };
        let mut all = Vec::new();
        for (shard, answer) in answers.into_iter().enumerate() {
            let Managed::Ids { ids } = answer else {
                return Err(unexpected(session, OPERATION, shard, &answer));
            };
            all.extend(ids);
        }
        all.sort_unstable();
        Ok(all)
    }

    /// Counts are summed over servers; the step is the greatest, the rate that of the first.
    pub(super) fn summed_statistics(
        &self,
        session: &Session,
        table: &RemoteTable,
    ) -> Result<TableStatistics> {
        let request = |number| Management::Statistics { table: number };
        let answers = self.ask_about(session, "statistics", table, request)?;
        let mut sum = TableStatistics::default();
        // The calls that the client refused by itself never came to a server.
        sum.refusals = table.checks.refusals();
        for (shard, answer) in answers.into_iter().enumerate() {
            let Managed::Statistics { statistics: of_shard } = answer else {
                return Err(unexpected(session, "statistics", shard, &answer));
            };
            sum.rows += of_shard.rows;
            sum.bytes += of_shard.bytes;
            sum.inserts += of_shard.inserts;
            sum.updates += of_shard.updates;
            sum.deletes += of_shard.deletes;
            sum.rejections += of_shard.rejections;
            sum.writes += of_shard.writes;
            sum.evictions += of_shard.evictions;
            sum.candidates += of_shard.candidates;
            sum.shared_rows += of_shard.shared_rows;
            sum.memory.add(&of_shard.memory);
            sum.refusals += of_shard.refusals;
            // Not a sum: every step is counted by all servers.
            sum.step = sum.step.max(of_shard.step);
            sum.capacity_share = sum.capacity_share.max(of_shard.capacity_share);
            sum.learning_rate_was_set |= of_shard.learning_rate_was_set;
            if shard == 0 {
                sum.learning_rate = of_shard.learning_rate;
            }
        }
        table.note_rate(sum.learning_rate, sum.learning_rate_was_set);
        Ok(sum)
    }

    /// Every server saves its part to `directory`, which all see under this path, and the first one puts them together.
    /// Changes of this client wait until all are done, so that the parts are of one moment; other clients must not
    /// train meanwhile, or the parts are refused for they do not fit together.
    pub(super) fn save_all(
        &self,
        session: &Session,
        directory: &Path,
        options: &SaveOptions<'_>,
    ) -> Result<SaveReport> {
        const OPERATION: &str = "save";
        self.agree(session)?;
        // A save is not repeated: whether a server has lost its rows is to be known before.
        session.ask_for_facts(OPERATION, true)?;
        self.open_others(session, directory)?;
        let _changes = session.changes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(progress) = options.progress {
            progress.begin();
        }
        let of = self.router.shards();
        let part = SavePart {
            directory: directory.to_owned(),
            snapshot: new_snapshot_name(),
            shard: Shard { number: 0, of },
            kind: options.kind,
            keep: options.keep,
            metadata: options.metadata.clone(),
            compression: options.compression.level(),
            replace: options.replace,
        };
        let of_shard = |number| SavePart { shard: Shard { number, of }, ..part.clone() };
        let calls =
            self.shards().map(|shard| Call::manage(shard, Management::SavePart(of_shard(shard)))).collect();
        let answers = self.ask_all(session, OPERATION, calls, self.config().save_timeout)?;
        let mut sum = SaveReport::default();
        sum.snapshot.clone_from(&part.snapshot);
        for (shard, (answer, _)) in answers.into_iter().enumerate() {
            let Managed::Saved { report } = answer else {
                return Err(unexpected(session, OPERATION, shard, &answer));
            };
            sum.is_delta |= report.is_delta;
            sum.rows += report.rows;
            sum.deleted += report.deleted;
            sum.bytes += report.bytes;
            sum.kept = sum.kept.or(report.kept);
            if let Some(progress) = options.progress {
                progress.add_done(report.bytes);
            }
        }
        // Only once all parts are there: until the commit, the newest snapshot is the one before.
        let commit = Call::manage(0, Management::Commit(part));
        self.ask_all(session, OPERATION, vec![commit], self.config().save_timeout)?;
        Ok(sum)
    }

    /// Every server loads the rows that are its own; any number of servers may have saved them.
    pub(super) fn load_all(
        &self,
        session: &Session,
        directory: &Path,
        options: &LoadOptions<'_>,
    ) -> Result<LoadReport> {
        const OPERATION: &str = "load";
        if options.keeps.is_some() || options.without_counts || options.without_rules {
            let message = "servers load the rows that are routed to them, with their own rules, and share the counts, by themselves";
            return Err(Error::Unsupported { operation: OPERATION, message: message.to_owned() });
        }
        // A repetition of a step would change the loaded rows, for which it was not computed.
        let numbers = options.tables.map(|names| session.lock_tables().numbers_of(names));
        let changes = session.changes.lock();
        changes.unwrap_or_else(std::sync::PoisonError::into_inner).give_up(numbers.as_deref());
        // A server that lost its rows gets them now.
        session.set_agreed(None);
        let (of, hash_method) = (self.router.shards(), self.router.method());
        let load = |number| {
            let shard = Shard { number, of };
            let (directory, tables) = (directory.to_owned(), options.tables.cloned());
            let snapshot = options.snapshot.map(str::to_owned);
            Management::Load(LoadShard { directory, shard, hash_method, tables, snapshot })
        };
        let calls = self.shards().map(|shard| Call::manage(shard, load(shard))).collect();
        let answers = self.ask_all(session, OPERATION, calls, self.config().save_timeout)?;
        let mut sum = LoadReport::default();
        for (shard, (answer, _)) in answers.into_iter().enumerate() {
            let Managed::Loaded { report } = answer else {
                return Err(unexpected(session, OPERATION, shard, &answer));
            };
            if let Some(progress) = options.progress {
                progress.add_done(report.bytes);
            }
            add_report(&mut sum, report);
        }
        self.agree_anew(session)?;
        // After a restart the servers call the tables otherwise.
        for (name, _) in &sum.tables {
            if let Some(table) = self.find_anew(session, name)? {
                table.forget_rate();
            }
        }
        Ok(sum)
    }
}

/// Asks one server about a table by name; the run of the server that had it, if it is known, must be the same.
fn named_call<'a>(known: Option<&RemoteTable>, shard: usize, request: Management) -> Call<'a> {
    let mut call = Call::manage(shard, request);
    call.incarnations = known.map(|table| table.on(shard).incarnation).into_iter().collect();
    call
}

fn add_report(sum: &mut LoadReport, report: LoadReport) {
    sum.bytes += report.bytes;
    for (name, rows) in report.tables {
        match sum.tables.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => *sum += rows,
            None => sum.tables.push((name, rows)),
        }
    }
    (sum.snapshot, sum.metadata) = (report.snapshot, report.metadata);
}

pub(super) fn unexpected(
    session: &Session,
    operation: &'static str,
    shard: usize,
    answer: &Managed,
) -> Error {
    session.unavailable(operation, shard, format!("an answer that does not fit, {}", answer.form()))
}
