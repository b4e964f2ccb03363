//! Reads rows ahead of their use, on threads of its own, over any store.
//!
//! A prefetch is issued for the ids of one or several tables and consumed once. What this process changed in the
//! meantime comes back changed: while prefetches are pending, the ids of every change are kept, and those rows are
//! read again when the prefetch is consumed. Prefetches that nobody consumes are dropped beyond a bound, oldest first.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crossbeam_channel::{Sender, unbounded};

use super::embedding_store::EmbeddingStore;
use crate::calls::{OptimizerState, StoreMemory, TableDescription, TableId, TableStatistics, TableUpdate};
use crate::checkpoint::{LoadOptions, LoadReport, SaveOptions, SaveReport, Shard};
use crate::config::TableConfig;
use crate::rows::gradient::GradientChunk;
use crate::rows::pooling::BagInput;
use crate::{Error, Result, fork};

/// The number of a prefetch. It is never given to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefetchId(pub i64);

/// The ids whose rows a prefetch reads, of one table.
#[derive(Debug, Clone)]
pub struct PrefetchRequest {
    /// The table.
    pub table: TableId,
    /// The ids, duplicates allowed.
    pub ids: Vec<i64>,
    /// The table's dim.
    pub dim: usize,
}

/// A store whose reads can be issued ahead; every other call goes through to the store within.
///
/// Changes made through this store are seen by prefetches issued before them. Changes that other processes make to a
/// shared store are seen only if they came before the read.
pub struct PrefetchingStore {
    store: Arc<dyn EmbeddingStore>,
    most_pending: usize,
    state: Mutex<State>,
    jobs: Mutex<Option<Sender<Job>>>,
    num_threads: usize,
}

#[derive(Default)]
struct State {
    last: i64,
    dropped: u64,
    pending: BTreeMap<PrefetchId, Pending>,
    /// For each prefetch that is being consumed, the number of the first change that its read may have missed.
    waiting: BTreeMap<PrefetchId, u64>,
    /// What changed since the oldest of both was issued, in order.
    changes: VecDeque<Change>,
    /// The number of the first of `changes`.
    first_change: u64,
}

struct Pending {
    requests: Arc<Vec<PrefetchRequest>>,
    rows: Arc<Delivery>,
    /// The number of the first change that the read may have missed.
    issued_at: u64,
}

#[derive(Clone)]
struct Change {
    table: TableId,
    /// The ids that changed; `None` for all.
    ids: Option<Arc<[i64]>>,
}

type Job = (Arc<Vec<PrefetchRequest>>, Arc<Delivery>);

/// The rows of a prefetch, on their way from the thread that reads them.
#[derive(Default)]
struct Delivery {
    rows: Mutex<Option<Result<Vec<Vec<f32>>>>>,
    arrived: Condvar,
}

impl PrefetchingStore {
    /// Wraps `store`; its reads ahead run on `num_threads` threads, started with the first prefetch.
    ///
    /// At most `most_pending` prefetches wait to be consumed.
    pub fn new(store: Arc<dyn EmbeddingStore>, num_threads: usize, most_pending: usize) -> Self {
        Self {
            store,
            most_pending: most_pending.max(1),
            state: Mutex::default(),
            jobs: Mutex::default(),
            num_threads: num_threads.max(1),
        }
    }

    /// Issues a read of all of `requests` and returns its number.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a table that does not exist.
    pub fn issue(&self, requests: Vec<PrefetchRequest>) -> Result<PrefetchId> {
        for request in &requests {
            self.store.describe(request.table)?;
        }
        let _gate = fork::enter();
        let requests = Arc::new(requests);
        let rows = Arc::new(Delivery::default());
        let id = self.register(Arc::clone(&requests), Arc::clone(&rows));
        self.send((requests, rows));
        Ok(id)
    }

    fn register(&self, requests: Arc<Vec<PrefetchRequest>>, rows: Arc<Delivery>) -> PrefetchId {
        let mut state = self.lock();
        while state.pending.len() >= self.most_pending {
            state.pending.pop_first();
            state.dropped += 1;
        }
        state.last += 1;
        let id = PrefetchId(state.last);
        let issued_at = state.first_change + state.changes.len() as u64;
        state.pending.insert(id, Pending { requests, rows, issued_at });
        state.forget_old_changes();
        id
    }

    /// Hands a job to the threads. A forked child has none, and reads when the prefetch is consumed.
    fn send(&self, job: Job) {
        if fork::is_child() {
            return;
        }
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = jobs.get_or_insert_with(|| self.start_threads());
        // Sending fails only once all threads are gone; then the rows are read when they are asked for.
        if let Err(unsent) = sender.send(job) {
            let (requests, rows) = unsent.into_inner();
            rows.deliver(read_all(&*self.store, &requests));
        }
    }

    fn start_threads(&self) -> Sender<Job> {
        let (sender, receiver) = unbounded::<Job>();
        for number in 0..self.num_threads {
            let (receiver, store) = (receiver.clone(), Arc::clone(&self.store));
            let name = format!("recstore-prefetch-{number}");
            let work = move || {
                for (requests, rows) in receiver {
                    rows.deliver(read_all(&*store, &requests));
                }
            };
            if thread::Builder::new().name(name).spawn(work).is_err() {
                break;
            }
        }
        sender
    }

    /// Returns the dims of the requests of a prefetch that was not consumed yet.
    ///
    /// # Errors
    /// [`Error::UnknownPrefetch`].
    pub fn dims(&self, id: PrefetchId) -> Result<Vec<usize>> {
        let _gate = fork::enter();
        let state = self.lock();
        let pending = state.pending.get(&id).ok_or(Error::UnknownPrefetch { prefetch: id.0 })?;
        Ok(pending.requests.iter().map(|request| request.dim).collect())
    }

    /// Waits for the rows of a prefetch and consumes it: one `[ids, dim]` matrix for each of its requests.
    ///
    /// # Errors
    /// [`Error::UnknownPrefetch`] for a number that was never issued, was consumed, or was dropped; the errors of
    /// [`EmbeddingStore::read`].
    pub fn wait(&self, id: PrefetchId) -> Result<Vec<Vec<f32>>> {
        let pending = self.begin_waiting(id)?;
        if fork::is_child() {
            self.finish_waiting(id);
            return read_all(&*self.store, &pending.requests);
        }
        let rows = pending.rows.take();
        let changes = self.finish_waiting(id);
        let mut rows = rows?;
        for (request, rows) in pending.requests.iter().zip(&mut rows) {
            self.read_changed(request, &changes, rows)?;
        }
        Ok(rows)
    }

    fn begin_waiting(&self, id: PrefetchId) -> Result<Pending> {
        let _gate = fork::enter();
        let mut state = self.lock();
        let pending = state.pending.remove(&id).ok_or(Error::UnknownPrefetch { prefetch: id.0 })?;
        state.waiting.insert(id, pending.issued_at);
        Ok(pending)
    }

    /// Returns what changed since the prefetch was issued.
    fn finish_waiting(&self, id: PrefetchId) -> Vec<Change> {
        let _gate = fork::enter();
        let mut state = self.lock();
        let issued_at = state.waiting.remove(&id).unwrap_or(u64::MAX);
        let skipped = issued_at.saturating_sub(state.first_change) as usize;
        let changes = state.changes.iter().skip(skipped).cloned().collect();
        state.forget_old_changes();
        changes
    }

    /// Returns how many prefetches were dropped because nobody consumed them.
    pub fn num_dropped(&self) -> u64 {
        let _gate = fork::enter();
        self.lock().dropped
    }

    /// Returns how many prefetches wait to be consumed.
    pub fn num_pending(&self) -> usize {
        let _gate = fork::enter();
        self.lock().pending.len()
    }

    /// Reads those rows of a request again that changed since it was issued.
    fn read_changed(&self, request: &PrefetchRequest, changes: &[Change], rows: &mut [f32]) -> Result<()> {
        let of_table =
            || changes.iter().filter(|change| change.table == request.table).map(|change| &change.ids);
        if of_table().any(Option::is_none) {
            return self.store.read(request.table, &request.ids, rows);
        }
        let changed: HashSet<i64> = of_table().flatten().flat_map(|ids| ids.iter().copied()).collect();
        let positions: Vec<usize> =
            (0..request.ids.len()).filter(|&position| changed.contains(&request.ids[position])).collect();
        let ids: Vec<i64> = positions.iter().map(|&position| request.ids[position]).collect();
        let mut fresh = vec![0.0; ids.len() * request.dim];
        self.store.read(request.table, &ids, &mut fresh)?;
        for (position, row) in positions.into_iter().zip(fresh.chunks_exact(request.dim)) {
            rows[position * request.dim..][..request.dim].copy_from_slice(row);
        }
        Ok(())
    }

    /// Notes a change that just happened, if a pending prefetch may have missed it.
    fn note(&self, table: TableId, ids: Option<impl Iterator<Item = i64>>) {
        let _gate = fork::enter();
        let mut state = self.lock();
        if !(state.pending.is_empty() && state.waiting.is_empty()) {
            let ids = ids.map(Iterator::collect);
            state.changes.push_back(Change { table, ids });
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Forgets what changed before the oldest prefetch was issued that is not consumed.
    fn forget_old_changes(&mut self) {
        let end = self.first_change + self.changes.len() as u64;
        let pending = self.pending.values().map(|pending| pending.issued_at);
        let oldest = pending.chain(self.waiting.values().copied()).min().unwrap_or(end);
        while self.first_change < oldest && self.changes.pop_front().is_some() {
            self.first_change += 1;
        }
    }
}

impl Delivery {
    fn deliver(&self, rows: Result<Vec<Vec<f32>>>) {
        *self.rows.lock().unwrap_or_else(PoisonError::into_inner) = Some(rows);
        self.arrived.notify_all();
    }

    fn take(&self) -> Result<Vec<Vec<f32>>> {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows =
            self.arrived.wait_while(rows, |rows| rows.is_none()).unwrap_or_else(PoisonError::into_inner);
        rows.take().unwrap_or_else(|| Ok(Vec::new()))
    }
}

impl EmbeddingStore for PrefetchingStore {
    fn open_table(&self, name: &str, config: &TableConfig) -> Result<TableId> {
        self.store.open_table(name, config)
    }

    fn find_table(&self, name: &str) -> Result<Option<TableId>> {
        self.store.find_table(name)
    }

    fn drop_table(&self, name: &str) -> Result<()> {
        self.store.drop_table(name)
    }

    fn table_names(&self) -> Result<Vec<String>> {
        self.store.table_names()
    }

    fn describe(&self, table: TableId) -> Result<TableDescription> {
        self.store.describe(table)
    }

    fn dim(&self, table: TableId) -> Result<usize> {
        self.store.dim(table)
    }

    fn read(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.store.read(table, ids, rows)
    }

    fn read_ahead(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.store.read_ahead(table, ids, rows)
    }

    fn read_with_places(
        &self,
        table: TableId,
        ids: &[i64],
        rows: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        self.store.read_with_places(table, ids, rows, places)
    }

    fn bag(
        &self,
        tables: &[TableId],
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
        places: &mut [u32],
    ) -> Result<()> {
        self.store.bag(tables, input, pooled, max_positions, places)
    }

    fn write(&self, table: TableId, ids: &[i64], rows: &[f32]) -> Result<()> {
        self.store.write(table, ids, rows)?;
        self.note(table, Some(ids.iter().copied()));
        Ok(())
    }

    fn update(&self, updates: &[TableUpdate<'_>]) -> Result<()> {
        // The update itself says what is wrong with a table; one that is dropped meanwhile has changed.
        let evicted = || updates.iter().map(|update| self.store.num_evicted(update.table).ok());
        let before: Vec<_> = evicted().collect();
        self.store.update(updates)?;
        for ((update, before), after) in updates.iter().zip(before).zip(evicted()) {
            self.note(update.table, Some(update.chunks.iter().flat_map(GradientChunk::ids)));
            if after != before {
                self.note(update.table, None::<std::iter::Empty<i64>>);
            }
        }
        Ok(())
    }

    fn lookup(
        &self,
        table: TableId,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        rows: &mut [f32],
    ) -> Result<()> {
        // A row that is inserted holds what was read before it was.
        self.store.lookup(table, ids, insert, indices, rows)
    }

    fn delete(&self, table: TableId, ids: &[i64]) -> Result<usize> {
        let deleted = self.store.delete(table, ids)?;
        self.note(table, Some(ids.iter().copied()));
        Ok(deleted)
    }

    fn evict(&self, table: TableId, dry_run: bool) -> Result<Vec<i64>> {
        let evicted = self.store.evict(table, dry_run)?;
        self.note(table, Some(evicted.iter().copied()));
        Ok(evicted)
    }

    fn num_evicted(&self, table: TableId) -> Result<u64> {
        self.store.num_evicted(table)
    }

    fn clear(&self, table: TableId) -> Result<()> {
        self.store.clear(table)?;
        self.note(table, None::<std::iter::Empty<i64>>);
        Ok(())
    }

    fn ids(&self, table: TableId) -> Result<Vec<i64>> {
        self.store.ids(table)
    }

    fn num_rows(&self, table: TableId) -> Result<usize> {
        self.store.num_rows(table)
    }

    fn read_slot(&self, table: TableId, slot: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        self.store.read_slot(table, slot, ids)
    }

    fn set_learning_rate(&self, table: TableId, lr: f64, explicit: bool) -> Result<()> {
        self.store.set_learning_rate(table, lr, explicit)
    }

    fn put_optimizer_states(&self, states: &[OptimizerState<'_>]) -> Result<()> {
        self.store.put_optimizer_states(states)
    }

    fn statistics(&self, table: TableId) -> Result<TableStatistics> {
        self.store.statistics(table)
    }

    fn set_memory_limit(&self, limit: Option<u64>) -> Result<()> {
        self.store.set_memory_limit(limit)
    }

    fn memory(&self) -> StoreMemory {
        self.store.memory()
    }

    fn save(&self, directory: &Path, options: &SaveOptions<'_>) -> Result<SaveReport> {
        self.store.save(directory, options)
    }

    fn save_part(
        &self,
        directory: &Path,
        snapshot: &str,
        shard: Shard,
        options: &SaveOptions<'_>,
    ) -> Result<SaveReport> {
        self.store.save_part(directory, snapshot, shard, options)
    }

    fn load(&self, directory: &Path, options: &LoadOptions<'_>) -> Result<LoadReport> {
        let report = self.store.load(directory, options)?;
        for (name, _) in &report.tables {
            if let Some(table) = self.store.find_table(name)? {
                self.note(table, None::<std::iter::Empty<i64>>);
            }
        }
        Ok(report)
    }
}

fn read_all(store: &dyn EmbeddingStore, requests: &[PrefetchRequest]) -> Result<Vec<Vec<f32>>> {
    let read = |request: &PrefetchRequest| {
        let mut rows = vec![0.0; request.ids.len() * request.dim];
        store.read_ahead(request.table, &request.ids, &mut rows).map(|()| rows)
    };
    requests.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::gradient::GradientChunk;
    use crate::{LocalStore, Serial, Step};
    use proptest::prelude::*;

    fn store(most_pending: usize) -> (PrefetchingStore, TableId) {
        let store = PrefetchingStore::new(Arc::new(LocalStore::new(Box::new(Serial))), 2, most_pending);
        let table = store.open_table("t", &TableConfig::new(2)).unwrap();
        (store, table)
    }

    fn request(table: TableId, ids: &[i64]) -> PrefetchRequest {
        PrefetchRequest { table, ids: ids.to_vec(), dim: 2 }
    }

    fn update(store: &PrefetchingStore, table: TableId, ids: &[i64]) {
        let gradients = vec![1.0; ids.len() * 2];
        let chunk = GradientChunk::new(ids, &gradients, 2);
        store.update(&[TableUpdate { table, chunks: vec![chunk], step: Step::Next }]).unwrap();
    }

    fn read(store: &PrefetchingStore, table: TableId, ids: &[i64]) -> Vec<f32> {
        let mut rows = vec![0.0; ids.len() * 2];
        store.read(table, ids, &mut rows).unwrap();
        rows
    }

    #[test]
    fn a_prefetch_is_consumed_once() {
        let (store, table) = store(8);
        let id = store.issue(vec![request(table, &[1, 2]), request(table, &[])]).unwrap();
        assert_eq!(store.wait(id).unwrap(), [read(&store, table, &[1, 2]), vec![]]);
        assert_eq!(store.wait(id), Err(Error::UnknownPrefetch { prefetch: id.0 }));
        assert_eq!(store.wait(PrefetchId(99)), Err(Error::UnknownPrefetch { prefetch: 99 }));
    }

    #[test]
    fn abandoned_prefetches_are_dropped_oldest_first() {
        let (store, table) = store(2);
        let ids: Vec<_> = (0..3).map(|id| store.issue(vec![request(table, &[id])]).unwrap()).collect();
        assert_eq!((store.num_dropped(), store.num_pending()), (1, 2));
        assert!(store.wait(ids[0]).is_err());
        assert!(store.wait(ids[1]).is_ok() && store.wait(ids[2]).is_ok());
    }

    #[test]
    fn changes_are_forgotten_with_the_prefetches_that_need_them() {
        let (store, table) = store(2);
        update(&store, table, &[1]);
        assert_eq!(store.lock().changes.len(), 0);
        let id = store.issue(vec![request(table, &[1])]).unwrap();
        update(&store, table, &[1]);
        assert_eq!(store.lock().changes.len(), 1);
        store.wait(id).unwrap();
        assert_eq!(store.lock().changes.len(), 0);
    }

    #[test]
    fn a_dropped_table_and_a_wrong_dim_are_errors() {
        let (store, table) = store(2);
        assert!(store.issue(vec![request(TableId(99), &[1])]).is_err());
        let wrong = store.issue(vec![PrefetchRequest { table, ids: vec![1], dim: 3 }]).unwrap();
        assert!(matches!(store.wait(wrong), Err(Error::DimMismatch { .. })));
    }

    #[derive(Debug, Clone)]
    enum Act {
        Issue(Vec<i64>),
        Update(Vec<i64>),
        Write(i64),
        Delete(i64),
        Clear,
        Wait(usize),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let ids = || prop::collection::vec(0..6i64, 0..6);
        let act = prop_oneof![
            4 => ids().prop_map(Act::Issue),
            4 => ids().prop_map(Act::Update),
            2 => (0..6i64).prop_map(Act::Write),
            1 => (0..6i64).prop_map(Act::Delete),
            1 => Just(Act::Clear),
            4 => (0..8usize).prop_map(Act::Wait),
        ];
        prop::collection::vec(act, 0..40)
    }

    proptest! {
        #[test]
        fn a_prefetch_gives_what_a_read_would(acts in acts()) {
            let (store, table) = store(4);
            let mut pending: Vec<(PrefetchId, Vec<i64>)> = Vec::new();
            for act in acts {
                match act {
                    Act::Issue(ids) => {
                        pending.push((store.issue(vec![request(table, &ids)]).unwrap(), ids));
                        if pending.len() > 4 {
                            prop_assert!(store.wait(pending.remove(0).0).is_err());
                        }
                    }
                    Act::Update(ids) => update(&store, table, &ids),
                    Act::Write(id) => store.write(table, &[id], &[id as f32, 1.0]).unwrap(),
                    Act::Delete(id) => drop(store.delete(table, &[id]).unwrap()),
                    Act::Clear => store.clear(table).unwrap(),
                    Act::Wait(place) if place < pending.len() => {
                        let (id, ids) = pending.remove(place);
                        prop_assert_eq!(store.wait(id).unwrap(), [read(&store, table, &ids)]);
                    }
                    Act::Wait(_) => {}
                }
            }
        }
    }
}
