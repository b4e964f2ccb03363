//! What a server does with a request, however it came.

mod bounds;
mod clients;
mod forgetting;
mod publications;
mod saving;
mod standing;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use recstore::{
    EmbeddingStore, EmbeddingTable, Error, GradientChunk, LoadOptions, Result, SaveOptions, SaveReport,
    Shard, Step, TableId, TableRead, TableUpdate, check_checkpoint_directory,
};

use crate::durable::journal::Journal;
use crate::durable::log::{Lag, Staged};
use crate::durable::state_directory::{Durability, KeptState, StateDirectory};
use crate::metrics::Metrics;
use crate::wire::codec::{
    Answer, ClientId, Floats, Header, Kind, Managed, Management, MergedUpdate, Request, Rows, TableIds,
};
use crate::wire::replica_role::ReplicaRole;
use crate::wire::store_metadata::StoreMetadata;
use crate::workers::{Contribution, WorkerSync, Workers};
use clients::{Clients, Connected};
use publications::Publications;
use saving::commit;
pub(crate) use standing::{Progress, Stream, not_following};

/// A store and who changed it.
pub struct Handler {
    store: Arc<dyn EmbeddingStore>,
    clients: Clients,
    workers: Workers,
    shard: Shard,
    max_frame_bytes: u64,
    incarnation: AtomicU64,
    /// Where the tables are kept; none where they go with the server.
    state: Option<StateDirectory>,
    /// None where a crash loses what came since the last save.
    journal: Option<Journal>,
    /// What the clients agreed on; none before the first.
    facts: Mutex<Option<StoreMetadata>>,
    standing: Mutex<ReplicaRole>,
    /// How far a server that follows another one is.
    pub(crate) progress: Progress,
    publications: Publications,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Handler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handler").field("shard", &self.shard).finish_non_exhaustive()
    }
}

impl Handler {
    /// Serves `store` as one of several shards; no answer is larger than `max_frame_bytes`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for workers that go together and of whom nobody said how many there are.
    pub fn new(
        store: Arc<dyn EmbeddingStore>,
        shard: Shard,
        max_frame_bytes: u64,
        worker_sync: WorkerSync,
    ) -> Result<Self> {
        worker_sync.check()?;
        store.in_process().map_or(Ok(()), |own| own.set_shards(None, shard.of))?;
        let (clients, workers) = (Clients::default(), Workers::new(worker_sync, shard.number));
        let incarnation = AtomicU64::new(RandomState::new().hash_one(SystemTime::now()));
        let metrics = Arc::new(Metrics::new(shard));
        let (state, journal, facts, standing) = (None, None, Mutex::default(), Mutex::default());
        Ok(Self {
            store,
            clients,
            workers,
            shard,
            max_frame_bytes,
            incarnation,
            state,
            journal,
            facts,
            standing,
            progress: Progress::default(),
            publications: Publications::default(),
            metrics,
        })
    }

    /// The same with tables that are kept in a directory: `store`, which is empty, gets those that are there. One that
    /// was kept otherwise until now is kept as asked from here on.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be used, or another shard that the directory has; as loading a
    /// checkpoint, and as [`Handler::new`].
    pub fn kept(
        store: Arc<dyn EmbeddingStore>,
        shard: Shard,
        max_frame_bytes: u64,
        worker_sync: WorkerSync,
        kept: &KeptState,
    ) -> Result<Self> {
        let state = StateDirectory::open(&kept.directory, shard, kept.durability)?;
        let mut handler = Self::new(store, shard, max_frame_bytes, worker_sync)?;
        handler.take(&state)?;
        if state.durability() != kept.durability {
            handler.switch(&state, kept.durability)?;
        }
        handler.facts = Mutex::new(state.facts());
        handler.take_standing(&state, kept.follows.as_ref())?;
        handler.keep_saves(&state)?;
        handler.state = Some(state);
        Ok(handler)
    }

    /// Takes the tables that a directory has.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names the file that cannot be used.
    pub(crate) fn take(&mut self, state: &StateDirectory) -> Result<()> {
        match state.durability() {
            Durability::Wal => self.recover(state),
            Durability::Checkpoint if state.has_checkpoint() => {
                self.store.load(state.path(), &LoadOptions::default()).map(drop)
            }
            // Rows without a manifest are no state to begin with.
            Durability::Checkpoint => check_checkpoint_directory(state.path()),
        }
    }

    /// Takes the tables that checkpoint and log have, and goes on with the log.
    fn recover(&mut self, state: &StateDirectory) -> Result<()> {
        let directory = state.directory();
        // First: what lies there tells whether the directory is a new one.
        let saves = state.known_saves()?;
        // With a log no row is lost, so the clients go on with the tables that they opened.
        self.incarnation = AtomicU64::new(Journal::incarnation(directory)?);
        // Not by `make`, which would write it to the log again.
        let make = |client, request: &Request<'_>| self.carry_out(client, request);
        let metrics = Arc::clone(&self.metrics);
        let journal = Journal::recover(directory, &*self.store, &self.workers, metrics, make)?;
        // A change that a client repeats over the restart is answered from here, and not made again.
        for (client, made) in journal.made() {
            self.clients.remember(client, made.sequence, made.outcome);
        }
        self.journal = Some(journal);
        self.store.in_process().map_or(Ok(()), |own| own.remember_saves(saves))
    }

    /// Keeps the tables, which are those of the directory, otherwise from here on.
    fn switch(&mut self, state: &StateDirectory, to: Durability) -> Result<()> {
        tracing::info!(shard = self.shard.number, directory = %state.path().display(), ?to, "switching durability");
        match to {
            Durability::Checkpoint => {
                state.switch(to, || self.store.save(state.path(), &own_directory()))?;
                self.journal = None;
            }
            Durability::Wal => state
                .switch(to, || {
                    self.recover(state)?;
                    self.checkpoint_of(state)
                })
                .map(drop)?,
        }
        Ok(())
    }

    /// Counts a connection of a client until what is returned is dropped.
    pub(crate) fn connect(&self, client: ClientId) -> Connected<'_> {
        self.clients.connect(client)
    }

    /// Returns what tells this server from one that has other rows.
    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation.load(Ordering::Relaxed)
    }

    pub(crate) fn store(&self) -> &dyn EmbeddingStore {
        &*self.store
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns how much log there is behind the last checkpoint, where there is a log that can be read.
    pub(crate) fn log_lag(&self) -> Option<Lag> {
        self.journal.as_ref().and_then(|journal| journal.lag().ok())
    }

    /// Saves the tables to the server's directory; with a log, drops what was logged before.
    ///
    /// # Errors
    /// As a save; [`Error::Unsupported`] without a directory.
    pub fn checkpoint(&self) -> Result<SaveReport> {
        let none = || Error::Unsupported {
            operation: "save",
            message: "the server has no directory to keep its tables in".to_owned(),
        };
        self.checkpoint_of(self.state.as_ref().ok_or_else(none)?)
    }

    fn checkpoint_of(&self, state: &StateDirectory) -> Result<SaveReport> {
        match &self.journal {
            Some(journal) => journal.checkpoint(&*self.store, &self.workers),
            None => self.metrics.checkpoints.make(|| self.store.save(state.path(), &own_directory())),
        }
    }

    /// Returns what the clients agreed on.
    pub(crate) fn facts(&self) -> Option<StoreMetadata> {
        self.lock_facts().clone()
    }

    /// Takes what a client says of the store, if none has said it before or `replaces` what was said, and returns what
    /// counts.
    fn agree(&self, facts: &StoreMetadata, replaces: bool) -> Result<StoreMetadata> {
        let mut known = self.lock_facts();
        match &*known {
            Some(own) if !replaces => Ok(own.clone()),
            // On the disk before it counts.
            _ => {
                self.state.as_ref().map_or(Ok(()), |state| state.set_facts(facts))?;
                *known = Some(facts.clone());
                Ok(facts.clone())
            }
        }
    }

    fn lock_facts(&self) -> MutexGuard<'_, Option<StoreMetadata>> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what a client asks. A change with a sequence number is made once, however often it comes; one with the
    /// number 0 each time.
    ///
    /// # Errors
    /// As the store's; [`Error::RequestTooLarge`] for an answer beyond the limit; [`Error::Workers`] where the client
    /// waited in vain for others.
    pub fn handle(&self, client: ClientId, sequence: u64, request: &Request<'_>) -> Result<Answer> {
        self.handle_staged(client, sequence, request, None)
    }

    /// Leaves room in the log for the frame of so many bytes that comes, if it is a change that will be logged as it is.
    pub(crate) fn stage(&self, header: &Header, bytes: u64) -> Option<Staged> {
        let is_logged = match header.kind {
            // Logged with those of the other workers.
            Kind::Update => !self.workers.are_synchronous(),
            Kind::Write => true,
            _ => false,
        };
        self.journal.as_ref().filter(|_| is_logged)?.stage(bytes)
    }

    /// As [`Handler::handle`], of a request whose frame [`Handler::stage`] put into the log.
    pub(crate) fn handle_staged(
        &self,
        client: ClientId,
        sequence: u64,
        request: &Request<'_>,
        staged: Option<Staged>,
    ) -> Result<Answer> {
        if let Request::Round { .. } = request {
            let message = "a step of several clients comes from each of them".to_owned();
            return Err(Error::Unsupported { operation: "emb_update", message });
        }
        bounds::check(request, sequence)?;
        self.check_leads(request)?;
        self.metrics.requests.observe(request, || {
            if request.is_change() && sequence > 0 {
                let make = || self.go_together(client, sequence, request, staged);
                self.clients.once(client, sequence, request.stepped(), make)
            } else {
                self.go_together(client, 0, request, staged)
            }
        })
    }

    /// Makes a request when the other workers are ready for it.
    fn go_together(
        &self,
        client: ClientId,
        sequence: u64,
        request: &Request<'_>,
        staged: Option<Staged>,
    ) -> Result<Answer> {
        let workers = &self.workers;
        match request {
            Request::Manage(Management::Barrier { name, patience_ms }) => {
                workers.barrier(client, sequence, name, Duration::from_millis(*patience_ms))
            }
            Request::Update(updates) if workers.are_synchronous() => {
                let part = Contribution::new(client, sequence, updates);
                // Without `staged`: the log gets the parts of all workers as one change.
                workers.step_together(part, |round| self.make(client, sequence, round, None))
            }
            Request::Update(_) => {
                workers.admit("emb_update", client, true)?;
                self.make(client, sequence, request, staged)
            }
            Request::Read(_) => {
                workers.admit("emb_read", client, false)?;
                self.make(client, sequence, request, staged)
            }
            _ => self.make(client, sequence, request, staged),
        }
    }

    /// Carries a request out, so that a crash does not undo it.
    fn make(
        &self,
        client: ClientId,
        sequence: u64,
        request: &Request<'_>,
        staged: Option<Staged>,
    ) -> Result<Answer> {
        let carry_out = || self.carry_out(client, request);
        match &self.journal {
            Some(journal) if request.is_load() => {
                // A run of its own: the log cannot tell of rows that are loaded, so those who follow copy
                // them.
                let begin = |first| self.state.as_ref().map_or(Ok(()), |state| state.begin_run(first, true));
                let (answer, _) = journal.replace(&*self.store, &self.workers, begin, carry_out)?;
                self.state.as_ref().map_or(Ok(()), |state| self.keep_saves(state)).map(|()| answer)
            }
            Some(journal) if request.alters() => journal.change(client, sequence, request, staged, carry_out),
            _ => carry_out(),
        }
    }

    fn carry_out(&self, client: ClientId, request: &Request<'_>) -> Result<Answer> {
        let store = &*self.store;
        match *request {
            // Only a Unix socket hands descriptors over.
            Request::Manage(Management::AttachSegment {}) => Err(no_segment("no descriptor came with it")),
            Request::Manage(ref management) => {
                let publishing = self.publications.carry_out(store, management, self.max_frame_bytes);
                publishing.unwrap_or_else(|| self.manage(client, management).map(Answer::Managed))
            }
            Request::Read(ref reads) => self.read(reads).map(Answer::Rows),
            Request::Write { table, ids, rows } => {
                store.table("emb_write", table)?.write(ids, rows).map(|()| Answer::Done)
            }
            Request::Update(ref updates) => {
                let answer = self.update(updates, 1)?;
                self.workers.count_step(client);
                Ok(answer)
            }
            Request::Round { ref members, ref updates } => self.update(updates, members.len()),
            Request::Lookup { table, ids, insert } => self.lookup(table, ids, insert),
            Request::Delete { table, ids } => {
                let deleted = store.table("hashtable_delete", table)?.delete(ids)?;
                Ok(Answer::Count(deleted as u64))
            }
            Request::Ids { table } => {
                let rows = store.table("hashtable_size", table)?.num_rows()?;
                self.check_answer("hashtable_ids", rows, size_of::<i64>())?;
                store.table("hashtable_ids", table)?.ids().map(Answer::Ids)
            }
            Request::Slot { table, ref slot, ids } => self.slot(table, slot, ids),
        }
    }

    /// Checks the size of an answer before anything is made for it.
    fn check_answer(&self, operation: &'static str, count: usize, size: usize) -> Result<()> {
        let (bytes, limit) = ((count as u64).saturating_mul(size as u64), self.max_frame_bytes);
        if bytes <= limit {
            return Ok(());
        }
        Err(Error::RequestTooLarge { operation, shard: self.shard.number, bytes, limit })
    }

    fn read(&self, reads: &[TableIds<'_>]) -> Result<Vec<Rows>> {
        let tables = reads.iter().map(|read| self.store.table("dim", read.table));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        let floats =
            reads.iter().zip(&tables).map(|(read, table)| read.ids.len().saturating_mul(table.dim()));
        let total = floats.fold(0, |sum: usize, count| sum.saturating_add(count));
        self.check_answer("emb_read", total, size_of::<f32>())?;
        let room = reads.iter().zip(&tables).map(|(read, table)| {
            let dim = table.dim();
            Rows { dim, values: Floats::new(read.ids.len() * dim) }
        });
        let mut found: Vec<Rows> = room.collect();
        let wanted = reads.iter().zip(&mut found).map(|(read, Rows { values, .. })| TableRead {
            table: read.table,
            ids: read.ids,
            rows: values,
        });
        self.store.read_tables(&mut wanted.collect::<Vec<_>>(), false).map(|()| found)
    }

    /// Makes steps, each of which has the parts of so many workers, and says how many rows left with them.
    fn update(&self, updates: &[MergedUpdate<'_>], workers: usize) -> Result<Answer> {
        let steps = updates.chunks(workers.max(1)).map(|parts| self.step(parts));
        match self.store.update(&steps.collect::<Result<Vec<_>>>()?)? {
            0 => Ok(Answer::Done),
            left => Ok(Answer::Count(left)),
        }
    }

    fn step<'a>(&self, parts: &[MergedUpdate<'a>]) -> Result<TableUpdate<'a>> {
        let MergedUpdate { table, step, .. } = parts[0];
        let dim = self.store.table("dim", table)?.dim();
        let chunk = |part: &MergedUpdate<'a>| GradientChunk::new(part.ids, part.sums, dim);
        Ok(TableUpdate { table, chunks: parts.iter().map(chunk).collect(), step })
    }

    fn lookup(&self, table: TableId, ids: &[i64], insert: bool) -> Result<Answer> {
        let opened = self.store.table("dim", table)?;
        let dim = opened.dim();
        let row_bytes = dim.saturating_mul(size_of::<f32>()).saturating_add(size_of::<i64>());
        self.check_answer("hashtable_lookup", ids.len(), row_bytes)?;
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * dim]);
        opened.lookup(ids, insert, &mut indices, &mut rows)?;
        Ok(Answer::Found { indices, rows })
    }

    fn slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Answer> {
        let table = self.store.table("describe", table)?;
        let slots = table.describe()?.slots;
        let width = slots.iter().find(|(name, _)| *name == slot).map_or(0, |&(_, width)| width);
        self.check_answer("hashtable_slot", ids.len(), width.saturating_mul(size_of::<f32>()))?;
        Ok(table.read_slot(slot, ids)?.map_or(Answer::NoSlot, Answer::Slot))
    }

    fn manage(&self, client: ClientId, request: &Management) -> Result<Managed> {
        let (store, workers) = (&*self.store, &self.workers);
        let opened = |operation, table: &i64| store.table(operation, TableId(*table));
        Ok(match request {
            Management::OpenTable { name, dim, config } => {
                let mut config = config.clone();
                config.dim = *dim;
                Managed::Table { table: Some(store.open_table(name, &config)?.id().0) }
            }
            Management::FindTable { name } => {
                Managed::Table { table: store.find_table(name)?.map(|table| table.id().0) }
            }
            Management::DropTable { name } => done(store.drop_table(name))?,
            Management::TableNames {} => Managed::Names { names: store.table_names()? },
            Management::Describe { table } => described(&*opened("describe", table)?)?,
            Management::Clear { table } => done(opened("hashtable_clear", table)?.clear())?,
            Management::Evict { table, ttl, dry_run } => {
                Managed::Ids { ids: opened("evict", table)?.evict(*ttl, *dry_run)? }
            }
            Management::NumRows { table } => {
                Managed::Count { count: opened("hashtable_size", table)?.num_rows()? }
            }
            Management::SetLearningRate { table, learning_rate, explicit } => {
                done(opened("set_learning_rate", table)?.set_learning_rate(*learning_rate, *explicit))?
            }
            Management::Steps { table } => self.steps(client, TableId(*table))?,
            Management::CountSteps { table, from, to } => done(self.count_steps(*table, *from..*to))?,
            Management::Statistics { table } => {
                Managed::Statistics { statistics: Box::new(opened("statistics", table)?.statistics()?) }
            }
            Management::SavePart(part) => Managed::Saved { report: self.save_part(part)? },
            Management::Commit(part) => done(commit(part))?,
            Management::Checkpoint {} if self.state.is_none() => Managed::Done {},
            Management::Checkpoint {} => Managed::Saved { report: self.checkpoint()? },
            Management::Agree { facts, replaces } => Managed::Agreed { facts: self.agree(facts, *replaces)? },
            Management::Confirm { number } => done(self.confirm(client, *number))?,
            Management::StandDown { epoch } => Managed::StoodDown { last: self.stand_down(*epoch)? },
            Management::Promote {} => return Err(not_following(&self.standing())),
            Management::Follow(_) => return Err(standing::not_streamed()),
            Management::Load(load) => Managed::Loaded { report: self.load(load)? },
            Management::Join { worker } => {
                workers.join(client, *worker)?;
                Managed::Joined { patience_ms: workers.worker_sync().patience.as_millis() as u64 }
            }
            Management::Beat { worker } => done(workers.beat(client, *worker))?,
            Management::Leave {} => {
                workers.leave(client);
                Managed::Done {}
            }
            // Done before the request came here: barriers, what publishers ask, and how a connection's rows go.
            Management::Barrier { .. }
            | Management::Narrow {}
            | Management::AttachSegment {}
            | Management::BeginPublication { .. }
            | Management::TakeChanges(_)
            | Management::EndPublication { .. } => Managed::Done {},
            Management::Workers {} => states(workers),
        })
    }

    fn steps(&self, client: ClientId, table: TableId) -> Result<Managed> {
        let step = self.store.table("open_table", table)?.statistics()?.step;
        Ok(Managed::Steps { step, last: self.clients.last_steps(client, table) })
    }

    /// Counts steps that no row takes, one by one: what a step does besides is done as on the shards that took them.
    fn count_steps(&self, table: i64, steps: std::ops::Range<u64>) -> Result<()> {
        let table = TableId(table);
        if self.store.table("open_table", table)?.statistics()?.step != steps.start {
            return Ok(());
        }
        let step = Step::Next;
        steps
            .into_iter()
            .try_for_each(|_| self.update(&[MergedUpdate { table, step, ids: &[], sums: &[] }], 1).map(drop))
    }
}

/// Returns how a server saves to the directory of its own.
fn own_directory() -> SaveOptions<'static> {
    let mut options = SaveOptions::default();
    options.by_its_server = true;
    options
}

/// Says why memory cannot be shared with a client.
pub(crate) fn no_segment(why: impl std::fmt::Display) -> Error {
    Error::Unsupported { operation: "connect", message: why.to_string() }
}

fn done(result: Result<()>) -> Result<Managed> {
    result.map(|()| Managed::Done {})
}

fn states(workers: &Workers) -> Managed {
    let (workers, most_ahead) = workers.states();
    Managed::Workers { workers, most_ahead }
}

fn described(table: &dyn EmbeddingTable) -> Result<Managed> {
    let found = table.describe()?;
    let (name, slots) = (found.name, found.slots);
    Ok(Managed::Description { name, dim: found.config.dim, config: Box::new(found.config), slots })
}
