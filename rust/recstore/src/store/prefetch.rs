//! Reads rows ahead of their use, on threads of its own.
//!
//! A prefetch is issued for the ids of one or several tables and consumed once. What was changed in the meantime comes
//! back changed: whoever changes rows says so, while prefetches are pending the ids of every change are kept, and those
//! rows are read again when the prefetch is consumed. Prefetches that nobody consumes are dropped beyond a bound, oldest first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crossbeam_channel::{Sender, unbounded};

use super::embedding_store::EmbeddingStore;
use super::embedding_table::EmbeddingTable;
use crate::calls::TableRead;
use crate::config::TableConfig;
use crate::kernel::drawn::drawn_number;
use crate::rows::distinct::IdSet;
use crate::{Error, Result, fork};

/// The number of a prefetch. It is never given to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefetchId(pub i64);

/// The ids whose rows a prefetch reads, of one table.
#[derive(Debug, Clone)]
pub struct PrefetchRequest<K> {
    /// How changes name the table.
    pub key: K,
    /// The table.
    pub table: Arc<dyn EmbeddingTable>,
    /// Its store, which reads all that a prefetch wants of it at a time.
    pub store: Arc<dyn EmbeddingStore>,
    /// The ids, duplicates allowed.
    pub ids: Vec<i64>,
}

/// Reads issued ahead, of tables that their owner tells apart by `K`: a [`TableId`](crate::TableId), if all are of one
/// store.
///
/// Changes that are [noted](Prefetches::note) are seen by prefetches issued before them. Changes that other processes make
/// to a shared store are seen only if they came before the read.
pub struct Prefetches<K> {
    most_pending: usize,
    state: Mutex<State<K>>,
    /// How many prefetches are pending or being consumed: without any a change takes no lock.
    open: AtomicUsize,
    jobs: Mutex<Option<Sender<Job<K>>>>,
    num_threads: usize,
}

struct State<K> {
    last: i64,
    dropped: u64,
    pending: BTreeMap<PrefetchId, Pending<K>>,
    /// For each prefetch that is being consumed, the number of the first change that its read may have missed.
    waiting: BTreeMap<PrefetchId, u64>,
    /// What changed since the oldest of both was issued, in order.
    changes: VecDeque<Change<K>>,
    /// The number of the first of `changes`.
    first_change: u64,
}

struct Pending<K> {
    requests: Arc<Vec<PrefetchRequest<K>>>,
    rows: Arc<Delivery>,
    /// The number of the first change that the read may have missed.
    issued_at: u64,
}

#[derive(Clone)]
struct Change<K> {
    table: K,
    /// The ids that changed; `None` for all.
    ids: Option<Arc<[i64]>>,
}

type Job<K> = (Arc<Vec<PrefetchRequest<K>>>, Arc<Delivery>);

/// The rows of a prefetch, on their way from the thread that reads them.
#[derive(Default)]
struct Delivery {
    rows: Mutex<Option<Result<Vec<Vec<f32>>>>>,
    arrived: Condvar,
}

impl<K: Clone + PartialEq + Send + Sync + 'static> Prefetches<K> {
    /// Reads on `num_threads` threads, started with the first prefetch.
    ///
    /// At most `most_pending` prefetches wait to be consumed.
    pub fn new(num_threads: usize, most_pending: usize) -> Self {
        Self {
            most_pending: most_pending.max(1),
            state: Mutex::default(),
            open: AtomicUsize::new(0),
            jobs: Mutex::default(),
            num_threads: num_threads.max(1),
        }
    }

    /// Issues a read of all of `requests` and returns its number.
    ///
    /// # Errors
    /// [`Error::UnknownHandle`] for a table that does not exist.
    pub fn issue(&self, requests: Vec<PrefetchRequest<K>>) -> Result<PrefetchId> {
        requests.iter().try_for_each(|request| request.table.check_open("emb_prefetch"))?;
        let _gate = fork::enter();
        let requests = Arc::new(requests);
        let rows = Arc::new(Delivery::default());
        let id = self.register(Arc::clone(&requests), Arc::clone(&rows));
        self.send((requests, rows));
        Ok(id)
    }

    fn register(&self, requests: Arc<Vec<PrefetchRequest<K>>>, rows: Arc<Delivery>) -> PrefetchId {
        let mut state = self.lock();
        while state.pending.len() >= self.most_pending {
            state.pending.pop_first();
            state.dropped += 1;
        }
        let id = state.next_id();
        // Under the lock, and before the read is sent: a change from here on is noted, as the read may miss
        // it.
        let issued_at = state.first_change + state.changes.len() as u64;
        state.pending.insert(id, Pending { requests, rows, issued_at });
        self.forget_old_changes(&mut state);
        id
    }

    /// Hands a job to the threads. A forked child has none, and reads when the prefetch is consumed.
    fn send(&self, job: Job<K>) {
        if fork::is_child() {
            return;
        }
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = jobs.get_or_insert_with(|| self.start_threads());
        // Sending fails only once all threads are gone; then the rows are read when they are asked for.
        if let Err(unsent) = sender.send(job) {
            let (requests, rows) = unsent.into_inner();
            rows.deliver(read_all(&requests));
        }
    }

    fn start_threads(&self) -> Sender<Job<K>> {
        let (sender, receiver) = unbounded::<Job<K>>();
        for number in 0..self.num_threads {
            let receiver = receiver.clone();
            let name = format!("recstore-prefetch-{number}");
            let work = move || {
                for (requests, rows) in receiver {
                    rows.deliver(read_all(&requests));
                }
            };
            // A machine that gives no further thread is no error: without any receiver `send` reads by
            // itself.
            if thread::Builder::new().name(name).spawn(work).is_err() {
                break;
            }
        }
        sender
    }

    /// Returns the tables of the requests of a prefetch that was not consumed yet, and their dims.
    ///
    /// # Errors
    /// [`Error::UnknownPrefetch`].
    pub fn tables(&self, id: PrefetchId) -> Result<Vec<(K, usize)>> {
        let _gate = fork::enter();
        let state = self.lock();
        let pending = state.pending.get(&id).ok_or(Error::UnknownPrefetch { prefetch: id.0 })?;
        Ok(pending.requests.iter().map(|request| (request.key.clone(), request.table.dim())).collect())
    }

    /// Waits for the rows of a prefetch and consumes it: one `[ids, dim]` matrix for each of its requests.
    ///
    /// # Errors
    /// [`Error::UnknownPrefetch`] for a number that was never issued, was consumed, or was dropped; the errors of
    /// [`EmbeddingTable::read`].
    pub fn wait(&self, id: PrefetchId) -> Result<Vec<Vec<f32>>> {
        let pending = self.begin_waiting(id)?;
        // The threads that deliver the rows are the parent's: the child would wait for ever.
        if fork::is_child() {
            self.finish_waiting(id);
            return read_all(&pending.requests);
        }
        let rows = pending.rows.take();
        // Only when the rows have arrived: changes until then are noted for this prefetch, and are read again
        // below.
        let changes = self.finish_waiting(id);
        let mut rows = rows?;
        read_changed(&pending.requests, &changes, &mut rows)?;
        Ok(rows)
    }

    fn begin_waiting(&self, id: PrefetchId) -> Result<Pending<K>> {
        let _gate = fork::enter();
        let mut state = self.lock();
        let pending = state.pending.remove(&id).ok_or(Error::UnknownPrefetch { prefetch: id.0 })?;
        state.waiting.insert(id, pending.issued_at);
        Ok(pending)
    }

    /// Returns what changed since the prefetch was issued.
    fn finish_waiting(&self, id: PrefetchId) -> Vec<Change<K>> {
        let _gate = fork::enter();
        let mut state = self.lock();
        let issued_at = state.waiting.remove(&id).unwrap_or(u64::MAX);
        let skipped = issued_at.saturating_sub(state.first_change) as usize;
        let changes = state.changes.iter().skip(skipped).cloned().collect();
        self.forget_old_changes(&mut state);
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

    /// Notes a change that was just made to the rows of `ids`, or to all rows, if a pending prefetch may have missed it.
    pub fn note(&self, table: &K, ids: Option<&mut dyn Iterator<Item = i64>>) {
        // A prefetch that is issued after this look reads what was changed before it: the fence keeps the look behind the
        // change.
        fence(Ordering::SeqCst);
        if self.open.load(Ordering::SeqCst) == 0 {
            return;
        }
        let _gate = fork::enter();
        let mut state = self.lock();
        if state.num_open() > 0 {
            let ids = ids.map(Iterator::collect);
            state.changes.push_back(Change { table: table.clone(), ids });
        }
    }

    /// Forgets what changed before the oldest prefetch was issued that is not consumed.
    fn forget_old_changes(&self, state: &mut State<K>) {
        // The counterpart of the fence in `note`: a change either sees this prefetch, or was made before its
        // read.
        self.open.store(state.num_open(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let end = state.first_change + state.changes.len() as u64;
        let pending = state.pending.values().map(|pending| pending.issued_at);
        let oldest = pending.chain(state.waiting.values().copied()).min().unwrap_or(end);
        while state.first_change < oldest && state.changes.pop_front().is_some() {
            state.first_change += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Default for State<K> {
    fn default() -> Self {
        Self {
            last: 0,
            dropped: 0,
            pending: BTreeMap::new(),
            waiting: BTreeMap::new(),
            changes: VecDeque::new(),
            first_change: 0,
        }
    }
}

impl<K> State<K> {
    /// Returns a number above all before, so that the oldest comes first. It ends in drawn bits: a number that came from
    /// another process is none of a prefetch here.
    fn next_id(&mut self) -> PrefetchId {
        // Beside the sign 40 bits are left to count, more than any process issues.
        const DRAWN_BITS: u32 = 23;
        self.last += 1;
        PrefetchId(self.last << DRAWN_BITS | (drawn_number() >> (u64::BITS - DRAWN_BITS)) as i64)
    }

    fn num_open(&self) -> usize {
        self.pending.len() + self.waiting.len()
    }
}

/// Reads those rows again that changed since they were asked for.
fn read_changed<K: PartialEq>(
    requests: &[PrefetchRequest<K>],
    changes: &[Change<K>],
    rows: &mut [Vec<f32>],
) -> Result<()> {
    let positions: Vec<Vec<usize>> = requests.iter().map(|request| changed(request, changes)).collect();
    if positions.iter().all(Vec::is_empty) {
        return Ok(());
    }
    let of = |(request, positions): (&PrefetchRequest<K>, &Vec<usize>)| {
        positions.iter().map(|&position| request.ids[position]).collect()
    };
    let ids: Vec<Vec<i64>> = requests.iter().zip(&positions).map(of).collect();
    let fresh = read(requests, ids.iter().map(|ids| &ids[..]), false)?;
    for (((request, positions), fresh), rows) in requests.iter().zip(positions).zip(fresh).zip(rows) {
        let dim = request.table.dim();
        for (position, row) in positions.into_iter().zip(fresh.chunks_exact(dim)) {
            rows[position * dim..][..dim].copy_from_slice(row);
        }
    }
    Ok(())
}

/// Returns the positions of those ids of a request whose rows changed.
fn changed<K: PartialEq>(request: &PrefetchRequest<K>, changes: &[Change<K>]) -> Vec<usize> {
    let of_table = || changes.iter().filter(|change| change.table == request.key).map(|change| &change.ids);
    if of_table().any(Option::is_none) {
        return (0..request.ids.len()).collect();
    }
    // Any id without a row may have trained the row that another one reads, and a step changes all rows of some rules.
    let changes_others =
        |config: &TableConfig| config.shared_rows().is_some() || config.optimizer.catches_up();
    let changes_others = || request.table.describe().map_or(true, |table| changes_others(&table.config));
    if of_table().next().is_some() && changes_others() {
        return (0..request.ids.len()).collect();
    }
    let ids: Vec<i64> = of_table().flatten().flat_map(|ids| ids.iter().copied()).collect();
    let changed = IdSet::of(&ids);
    (0..request.ids.len()).filter(|&position| changed.has(request.ids[position])).collect()
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

fn read_all<K>(requests: &[PrefetchRequest<K>]) -> Result<Vec<Vec<f32>>> {
    read(requests, requests.iter().map(|request| &request.ids[..]), true)
}

/// Reads rows of the tables of requests: those of one store that stand together at a time.
fn read<'a, K>(
    requests: &[PrefetchRequest<K>],
    mut ids: impl Iterator<Item = &'a [i64]>,
    is_ahead: bool,
) -> Result<Vec<Vec<f32>>> {
    let mut matrices = Vec::with_capacity(requests.len());
    for of_store in requests.chunk_by(|one, next| Arc::ptr_eq(&one.store, &next.store)) {
        let ids: Vec<&[i64]> = ids.by_ref().take(of_store.len()).collect();
        let room = of_store.iter().zip(&ids).map(|(request, ids)| vec![0.0; ids.len() * request.table.dim()]);
        let mut rows: Vec<Vec<f32>> = room.collect();
        let reads = of_store.iter().zip(ids).zip(&mut rows);
        let reads = reads.map(|((request, ids), rows)| TableRead { table: request.table.id(), ids, rows });
        of_store[0].store.read_tables(&mut reads.collect::<Vec<_>>(), is_ahead)?;
        matrices.append(&mut rows);
    }
    Ok(matrices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::{TableId, TableUpdate};
    use crate::config::TableConfig;
    use crate::rows::gradient::GradientChunk;
    use crate::{EmbeddingStore, LocalStore, Serial, Step};
    use proptest::prelude::*;

    /// A table whose changes are noted.
    struct Noted {
        store: Arc<LocalStore>,
        table: Arc<dyn EmbeddingTable>,
        prefetches: Prefetches<TableId>,
    }

    impl Noted {
        fn new(most_pending: usize) -> Self {
            let store = Arc::new(LocalStore::new(Box::new(Serial)));
            let table = store.open_table("t", &TableConfig::new(2)).unwrap();
            Self { store, table, prefetches: Prefetches::new(2, most_pending) }
        }

        fn request(&self, ids: &[i64]) -> PrefetchRequest<TableId> {
            let table = Arc::clone(&self.table);
            PrefetchRequest { key: table.id(), table, store: self.store.clone(), ids: ids.to_vec() }
        }

        fn issue(&self, ids: &[i64]) -> PrefetchId {
            self.prefetches.issue(vec![self.request(ids)]).unwrap()
        }

        fn note(&self, ids: &[i64]) {
            self.prefetches.note(&self.table.id(), Some(&mut ids.iter().copied()));
        }

        fn update(&self, ids: &[i64]) {
            let gradients = vec![1.0; ids.len() * 2];
            let chunk = GradientChunk::new(ids, &gradients, 2);
            let update = TableUpdate { table: self.table.id(), chunks: vec![chunk], step: Step::Next };
            self.store.update(&[update]).unwrap();
            self.note(ids);
        }

        fn write(&self, id: i64) {
            self.table.write(&[id], &[id as f32, 1.0]).unwrap();
            self.note(&[id]);
        }

        fn delete(&self, id: i64) {
            self.table.delete(&[id]).unwrap();
            self.note(&[id]);
        }

        fn clear(&self) {
            self.table.clear().unwrap();
            self.prefetches.note(&self.table.id(), None);
        }

        fn read(&self, ids: &[i64]) -> Vec<f32> {
            let mut rows = vec![0.0; ids.len() * 2];
            self.table.read(ids, &mut rows).unwrap();
            rows
        }

        fn num_changes(&self) -> usize {
            self.prefetches.lock().changes.len()
        }
    }

    #[test]
    fn a_prefetch_is_consumed_once() {
        let noted = Noted::new(8);
        let prefetches = &noted.prefetches;
        let id = prefetches.issue(vec![noted.request(&[1, 2]), noted.request(&[])]).unwrap();
        assert_eq!(prefetches.wait(id).unwrap(), [noted.read(&[1, 2]), vec![]]);
        assert_eq!(prefetches.wait(id), Err(Error::UnknownPrefetch { prefetch: id.0 }));
        assert_eq!(prefetches.wait(PrefetchId(99)), Err(Error::UnknownPrefetch { prefetch: 99 }));
    }

    #[test]
    fn prefetches_of_others_have_other_numbers() {
        let [one, other] = [Noted::new(8), Noted::new(8)];
        let foreign = one.issue(&[1]);
        let ids = [other.issue(&[1]), other.issue(&[1])];
        assert!(ids[0] < ids[1]);
        assert_eq!(other.prefetches.wait(foreign), Err(Error::UnknownPrefetch { prefetch: foreign.0 }));
    }

    #[test]
    fn abandoned_prefetches_are_dropped_oldest_first() {
        let noted = Noted::new(2);
        let ids: Vec<_> = (0..3).map(|id| noted.issue(&[id])).collect();
        let prefetches = &noted.prefetches;
        assert_eq!((prefetches.num_dropped(), prefetches.num_pending()), (1, 2));
        assert!(prefetches.wait(ids[0]).is_err());
        assert!(prefetches.wait(ids[1]).is_ok() && prefetches.wait(ids[2]).is_ok());
    }

    #[test]
    fn changes_are_kept_only_for_the_prefetches_that_need_them() {
        let noted = Noted::new(2);
        noted.update(&[1]);
        assert_eq!(noted.num_changes(), 0);
        let id = noted.issue(&[1]);
        noted.update(&[1]);
        assert_eq!(noted.num_changes(), 1);
        noted.prefetches.wait(id).unwrap();
        assert_eq!(noted.num_changes(), 0);
        noted.update(&[1]);
        assert_eq!(noted.num_changes(), 0);
    }

    #[test]
    fn a_dropped_table_is_an_error() {
        let noted = Noted::new(2);
        let pending = noted.issue(&[1]);
        noted.prefetches.wait(pending).unwrap();
        noted.store.drop_table("t").unwrap();
        let dropped = Error::UnknownHandle { operation: "emb_prefetch", handle: noted.table.id().0 };
        assert_eq!(noted.prefetches.issue(vec![noted.request(&[1])]), Err(dropped));
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
            let noted = Noted::new(4);
            let mut pending: Vec<(PrefetchId, Vec<i64>)> = Vec::new();
            for act in acts {
                match act {
                    Act::Issue(ids) => {
                        pending.push((noted.issue(&ids), ids));
                        if pending.len() > 4 {
                            prop_assert!(noted.prefetches.wait(pending.remove(0).0).is_err());
                        }
                    }
                    Act::Update(ids) => noted.update(&ids),
                    Act::Write(id) => noted.write(id),
                    Act::Delete(id) => noted.delete(id),
                    Act::Clear => noted.clear(),
                    Act::Wait(place) if place < pending.len() => {
                        let (id, ids) = pending.remove(place);
                        prop_assert_eq!(noted.prefetches.wait(id).unwrap(), [noted.read(&ids)]);
                    }
                    Act::Wait(_) => {}
                }
            }
        }
    }
}
