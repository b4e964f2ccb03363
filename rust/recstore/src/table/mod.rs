//! One table: ids, rows, optimizer state and the calls on them.
//!
//! A call first checks everything it was given, then takes the lock, sees whether new rows fit and brings rows from the
//! disk where some lie there, and from there on cannot fail: a refused call has changed nothing. (Only a step of more
//! rows on disk than memory holds can: then no call uses the rows any more.) Reads share the lock; a write or an update
//! holds it alone, so each is atomic.

mod admission;
mod bags;
mod bounds;
mod budget;
mod changes;
mod displacing;
mod id_allocator;
mod id_map;
mod initializer;
mod leaving;
mod lookup;
mod memory;
mod philox;
mod places;
mod records;
mod row_ids;
mod rowless;
mod saving;
mod slot_group;
mod state;
mod sweep;
mod tier;
mod transfer;
mod update;
mod usages;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::calls::{TableDescription, TableStatistics};
use crate::config::{NanPolicy, TableConfig};
use crate::kernel::hash::mix;
use crate::kernel::parallel::{Executor, Serial, for_each_mut, piece_size};
use crate::kernel::simd::Simd;
use crate::lifecycle::Usage;
use crate::optimizer::{Optimizer, PreparedRule, Slot, UpdateRules};
use crate::rows::row_type::{RowType, with_row_type};
use crate::{Error, Result, fork};
use admission::Admission;
pub(crate) use admission::AdmissionCounts;
pub(crate) use bags::pool;
use budget::Account;
pub(crate) use budget::MemoryBudget;
use changes::{Changes, RowKey};
pub(crate) use changes::{CopiedRows, SaveId};
use id_allocator::IdAllocator;
#[cfg(not(feature = "internals"))]
use id_map::IdMap;
#[cfg(feature = "internals")]
pub(crate) use id_map::IdMap;
use initializer::Initializer;
pub(crate) use lookup::FindRows;
use lookup::{ColdRows, ReadRows, RowSource};
use memory::{Growth, Indices, NewRows, distinct};
use places::Seal;
pub use places::TAG_WORDS;
use row_ids::RowIds;
pub use rowless::RowlessTable;
pub(crate) use saving::{CutTables, TableCut, TableProgress, cut};
use slot_group::SlotGroup;
pub(crate) use state::put_states;
pub(crate) use sweep::{Sweep, SweepSteps};
use tier::Tier;
pub(crate) use update::{StepRequest, apply, check};
use usages::Usages;

/// The place of a row in its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowIndex(pub(crate) u32);

/// The index of an id without a row.
const NO_INDEX: u32 = u32::MAX;

/// What [`Table::lookup`] reports for an id without a row.
const REPORTED_NO_INDEX: i64 = -1;

/// On whose threads and with which instructions a table's loops run.
#[derive(Clone, Copy)]
pub(crate) struct Engine<'a> {
    pub(crate) executor: &'a dyn Executor,
    pub(crate) simd: Simd,
}

/// A named table.
pub(crate) struct Table {
    name: String,
    config: TableConfig,
    initializer: Initializer,
    optimizer: Optimizer,
    generation: u32,
    refusals: AtomicU64,
    rows: RwLock<Rows>,
}

/// What the lock of a table guards.
struct Rows {
    ids: IdMap,
    allocator: IdAllocator,
    row_ids: RowIds,
    changes: Changes,
    /// The records of all rows; of a table with a slot file those in memory.
    storage: SlotGroup,
    /// What decides which ids get a row by training; none: all do.
    admission: Option<Admission>,
    /// None where rows never leave.
    usages: Option<Usages>,
    /// Rows that will leave.
    sweep: Option<Arc<Sweep>>,
    tier: Option<Box<Tier>>,
    /// Why rows may be of different steps: a rule of the program's own panicked.
    broken: Option<Error>,
    /// The table's memory limit, in bytes.
    limit: u64,
    account: Account,
    /// Tells this table and its deletions apart from all others: places are good for one epoch.
    epoch: u64,
    /// The memory of a step's indices, kept for the next step.
    indices: Vec<u32>,
    learning_rate: f64,
    learning_rate_was_set: bool,
    step: u64,
    inserts: u64,
    updates: u64,
    deletes: u64,
    rejections: u64,
    evictions: u64,
}

/// Numbers epochs: none is ever given out twice in a process.
fn next_epoch() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed)
}

/// Returns where a table stands in the order in which a call locks several, so that no two calls wait for each other.
fn lock_order(table: &Table) -> usize {
    std::ptr::from_ref(table).addr()
}

/// The shared locks of several tables.
struct Locks<'a> {
    /// In lock order, each table once.
    guards: Vec<(usize, RwLockReadGuard<'a, Rows>)>,
}

impl<'a> Locks<'a> {
    fn shared(tables: &'a [Arc<Table>]) -> Self {
        let mut order: Vec<&Table> = tables.iter().map(AsRef::as_ref).collect();
        order.sort_by_key(|table| lock_order(table));
        order.dedup_by_key(|table| lock_order(table));
        Self { guards: order.into_iter().map(|table| (lock_order(table), table.shared())).collect() }
    }

    /// Checks that the rows of each table are all of one step.
    fn check_whole(&self) -> Result<()> {
        self.guards.iter().try_for_each(|(_, rows)| rows.check_whole())
    }

    /// Returns the rows of one of the tables that were locked.
    fn of(&self, table: &Table) -> &Rows {
        let place = self.guards.partition_point(|(order, _)| *order < lock_order(table));
        &self.guards[place].1
    }
}

impl Table {
    /// Returns a table without rows, whose memory counts in `budget`.
    ///
    /// # Errors
    /// [`Error::Disk`] if its slot file cannot be made; [`Error::UnknownRule`] for a rule that is not among `rules`;
    /// [`Error::InvalidConfig`] and [`Error::RuleFailed`] for one whose slots cannot be kept.
    pub(crate) fn new(
        name: &str,
        config: &TableConfig,
        rules: &UpdateRules,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Self> {
        let optimizer = Optimizer::new(name, config, rules)?;
        let storage = new_storage(config, optimizer.slots().to_vec());
        let tier = new_tier(name, config, &storage)?;
        Ok(Self {
            name: name.to_owned(),
            config: config.clone(),
            initializer: Initializer::new(name, config),
            optimizer,
            generation: fork::generation(),
            refusals: AtomicU64::new(0),
            rows: RwLock::new(Rows {
                ids: IdMap::default(),
                allocator: IdAllocator::default(),
                row_ids: RowIds::default(),
                changes: Changes::default(),
                storage,
                tier,
                broken: None,
                limit: config.memory_limit.unwrap_or(u64::MAX),
                account: Account::new(Arc::clone(budget)),
                admission: config.admission.as_ref().map(Admission::new),
                usages: config.eviction.as_ref().map(|_| Usages::default()),
                sweep: None,
                epoch: next_epoch(),
                indices: Vec::new(),
                learning_rate: config.optimizer.learning_rate(),
                learning_rate_was_set: false,
                step: 0,
                inserts: 0,
                updates: 0,
                deletes: 0,
                rejections: 0,
                evictions: 0,
            }),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn config(&self) -> &TableConfig {
        &self.config
    }

    /// Writes the row of each id to `out`; an id without a row reads as its initial value. `places` is empty, or gets
    /// the ids' places and their tag.
    pub(crate) fn read(
        &self,
        engine: Engine<'_>,
        ids: &[i64],
        out: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        self.check_ids("emb_read", ids)?;
        self.check_width("emb_read", "rows", ids.len(), out.len())?;
        let expected = if places.is_empty() { 0 } else { ids.len() + TAG_WORDS };
        self.check_length("emb_read", "places", expected, places.len())?;
        if !places.is_empty() {
            self.bring_in(engine, ids);
        }
        self.read_locked(&self.shared(), engine, ids, out, places)
    }

    /// Brings the rows of `ids` into memory, as many as fit, for a step that follows. Whatever stays on disk, for want of
    /// room or because it cannot be read now, is read from there.
    pub(crate) fn bring_in(&self, engine: Engine<'_>, ids: &[i64]) {
        if self.config.disk.is_none() || self.check_writable("emb_read", 0).is_err() {
            return;
        }
        let rows = &mut *self.exclusive();
        let indices = rows.find(engine, ids);
        _ = rows.make_ready(engine.executor, &indices, Growth::NONE);
        rows.settle();
    }

    fn read_locked(
        &self,
        rows: &Rows,
        engine: Engine<'_>,
        ids: &[i64],
        out: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        rows.check_whole()?;
        let failure = OnceLock::new();
        let dim = self.config.dim;
        let chunk = piece_size(engine.executor, ids.len(), dim);
        let mut of_chunks = places.chunks_mut(chunk);
        let chunks = ids.chunks(chunk).zip(out.chunks_mut(chunk * dim));
        let chunks = chunks.map(|(ids, out)| (ids, out, of_chunks.next().unwrap_or_default()));
        let source = rows.source(self, &failure);
        for_each_mut(engine.executor, chunks, |(ids, out, places)| {
            with_row_type!(self.config.dtype, row_type => {
                engine.simd.run(ReadRows { source, ids, out, places, row_type });
            });
        });
        engine.simd.run(Seal { places, epoch: rows.epoch, ids });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Overwrites the rows of `ids`; of duplicates the last one wins.
    pub(crate) fn write(&self, engine: Engine<'_>, ids: &[i64], values: &[f32]) -> Result<()> {
        const OPERATION: &str = "emb_write";
        self.check_ids(OPERATION, ids)?;
        self.check_width(OPERATION, "rows", ids.len(), values.len())?;
        let refused = self.check_finite(OPERATION, "row", ids, values)?;
        self.check_writable(OPERATION, ids.len())?;
        let mut left_out = refused.iter().peekable();
        let is_taken = |position: &usize| left_out.next_if_eq(&position).is_none();
        let taken: Vec<usize> = (0..ids.len()).filter(is_taken).collect();
        let taken_ids: Vec<i64> = taken.iter().map(|&position| ids[position]).collect();
        let rows = &mut *self.exclusive();
        self.make_ready(OPERATION, rows, engine, &taken_ids, true)?;
        self.refusals.fetch_add(refused.len() as u64, Ordering::Relaxed);
        let rule = self.prepare_rule(rows);
        let written = taken.into_iter().zip(taken_ids).try_for_each(|(position, id)| {
            let value = &values[position * self.config.dim..][..self.config.dim];
            let (index, is_new) = rows.find_or_allocate(id);
            let changed = rows.change(index, is_new, |words, state| {
                if is_new {
                    state.fill(0.0);
                }
                self.store(&rule, value, words, state);
            });
            rows.renew(index);
            changed
        });
        rows.settle();
        written.and(self.check_rule(rows, &rule))
    }

    /// Notes it if a rule of the program's own has panicked: then no call uses the rows any more.
    fn check_rule(&self, rows: &mut Rows, rule: &PreparedRule) -> Result<()> {
        let checked = rule.check(&self.name, &self.config.optimizer);
        if let Err(error) = &checked {
            rows.broken = Some(error.clone());
        }
        checked
    }

    /// Sees that new rows of `ids` fit, in the place of others where `displaces`, and brings those there are into memory.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`], [`Error::Disk`]; no row has changed.
    fn make_ready(
        &self,
        operation: &'static str,
        rows: &mut Rows,
        engine: Engine<'_>,
        ids: &[i64],
        displaces: bool,
    ) -> Result<()> {
        rows.check_whole()?;
        if !rows.is_limited() {
            return Ok(());
        }
        let missing = |rows: &Rows| ids.iter().copied().filter(|id| rows.ids.find(*id).is_none()).collect();
        let count = |rows: &Rows| Growth::of_rows(distinct(missing(rows)).len());
        let found = |rows: &Rows| rows.find(engine, ids);
        let needed = displaces.then_some(&found as &Indices<'_>);
        let new = self.admit(
            operation,
            rows,
            &NewRows { at_most: Growth::of_rows(ids.len()), count: &count, needed },
        )?;
        let ready = match rows.tier {
            None => Ok(()),
            Some(_) => {
                let indices = rows.find(engine, ids);
                rows.make_ready(engine.executor, &indices, new)
            }
        };
        ready.inspect_err(|_| rows.settle())
    }

    /// Keeps `weights` in a record, rounded to the row type, and brings its state in agreement.
    fn store(&self, rule: &PreparedRule, weights: &[f32], words: &mut [f32], state: &mut [f32]) {
        with_row_type!(self.config.dtype, row_type => row_type.round(weights, words));
        let mut kept = weights.to_vec();
        with_row_type!(self.config.dtype, row_type => row_type.widen(words, &mut kept));
        rule.adopt_weights(&kept, state);
    }

    /// Writes each id's index (-1 where it has no row) and row; with `insert`, ids without a row get one first.
    pub(crate) fn lookup(
        &self,
        engine: Engine<'_>,
        ids: &[i64],
        insert: bool,
        indices: &mut [i64],
        out: &mut [f32],
    ) -> Result<()> {
        const OPERATION: &str = "hashtable_lookup";
        self.check_ids(OPERATION, ids)?;
        self.check_width(OPERATION, "rows", ids.len(), out.len())?;
        self.check_length(OPERATION, "indices", ids.len(), indices.len())?;
        if insert {
            self.check_writable(OPERATION, ids.len())?;
            let rows = &mut *self.exclusive();
            self.make_ready(OPERATION, rows, engine, ids, true)?;
            let inserted = self.insert_missing(rows, ids);
            rows.settle();
            inserted.and_then(|()| self.lookup_locked(rows, engine, ids, indices, out))
        } else {
            self.lookup_locked(&self.shared(), engine, ids, indices, out)
        }
    }

    fn lookup_locked(
        &self,
        rows: &Rows,
        engine: Engine<'_>,
        ids: &[i64],
        indices: &mut [i64],
        out: &mut [f32],
    ) -> Result<()> {
        let mut places = vec![NO_INDEX; ids.len() + TAG_WORDS];
        self.read_locked(rows, engine, ids, out, &mut places)?;
        for (index, &place) in indices.iter_mut().zip(&places) {
            *index = if place == NO_INDEX { REPORTED_NO_INDEX } else { i64::from(place) };
        }
        Ok(())
    }

    fn insert_missing(&self, rows: &mut Rows, ids: &[i64]) -> Result<()> {
        let rule = self.prepare_rule(rows);
        let mut weights = vec![0.0; self.config.dim];
        for &id in ids {
            if let (index, true) = rows.find_or_allocate(id) {
                self.initializer.fill(&[id], &mut weights);
                rows.change(index, true, |words, state| {
                    state.fill(0.0);
                    self.store(&rule, &weights, words, state);
                })?;
            }
        }
        self.check_rule(rows, &rule)
    }

    /// Deletes the rows of `ids` and returns how many there were; an id without a row is no error.
    pub(crate) fn delete(&self, ids: &[i64]) -> Result<usize> {
        self.check_writable("hashtable_delete", 0)?;
        let rows = &mut *self.exclusive();
        let deleted = rows.delete(ids)?;
        ids.iter().for_each(|id| rows.forget(*id));
        Ok(deleted)
    }

    /// Deletes every row and gives its memory back; configuration, learning rate and step stay.
    pub(crate) fn clear(&self) -> Result<()> {
        self.check_writable("hashtable_clear", 0)?;
        let rows = &mut *self.exclusive();
        let storage = new_storage(&self.config, self.optimizer.slots().to_vec());
        let tier = new_tier(&self.name, &self.config, &storage)?;
        let used = || rows.row_ids.used().ones_from(0).map(|index| RowIndex(index as u32));
        rows.copy_before_delete(used())?;
        used().for_each(|index| rows.changes.deleted(index, rows.row_ids.of(index)));
        rows.deletes += rows.ids.len() as u64;
        // A save under way may want to know what the sweep chose.
        if let Some(sweep) = rows.sweep.take() {
            sweep.finish(self, rows);
        }
        rows.admission.iter_mut().for_each(Admission::clear);
        rows.usages.iter_mut().for_each(|usages| *usages = Usages::default());
        rows.ids = IdMap::default();
        rows.row_ids = RowIds::default();
        rows.allocator = IdAllocator::default();
        rows.indices = Vec::new();
        rows.storage = storage;
        rows.tier = tier;
        rows.broken = None;
        rows.epoch = next_epoch();
        rows.settle();
        Ok(())
    }

    /// Checks that this process may drop or replace the table.
    pub(crate) fn check_droppable(&self, operation: &'static str) -> Result<()> {
        self.check_writable(operation, 0)
    }

    /// Returns the ids that have a row, in the order of their indices.
    pub(crate) fn ids(&self) -> Vec<i64> {
        self.shared().row_ids.all()
    }

    pub(crate) fn len(&self) -> usize {
        self.shared().ids.len()
    }

    /// Returns name, configuration, and the names and widths of the optimizer's slots.
    pub(crate) fn description(&self) -> TableDescription {
        TableDescription {
            name: self.name.clone(),
            config: self.config.clone(),
            slots: self.optimizer.slots().iter().map(|slot| (slot.name.to_string(), slot.width)).collect(),
        }
    }

    /// Returns the values of a slot for each id, zeros where it has no row; `None` if there is no such slot.
    pub(crate) fn read_slot(&self, name: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        self.check_ids("hashtable_slot", ids)?;
        let Some(&Slot { width, .. }) = self.optimizer.slots().iter().find(|slot| slot.name == name) else {
            return Ok(None);
        };
        let rows = self.shared();
        rows.check_whole()?;
        let mut values = vec![0.0; width * ids.len()];
        let mut scratch = Vec::new();
        for (id, value) in ids.iter().zip(values.chunks_exact_mut(width)) {
            let Some(index) = rows.ids.find(*id) else { continue };
            if let Some(found) = rows.storage.slot(rows.record(index, &mut scratch)?, name) {
                value.copy_from_slice(found);
            }
        }
        Ok(Some(values))
    }

    /// Sets the learning rate from the next step on. `explicit` marks it as set by hand, which
    /// [`TableStatistics::learning_rate_was_set`] reports.
    pub(crate) fn set_learning_rate(&self, lr: f64, explicit: bool) -> Result<()> {
        self.check_learning_rate(lr)?;
        self.check_writable("set_learning_rate", 0)?;
        let rows = &mut *self.exclusive();
        rows.learning_rate = lr;
        rows.learning_rate_was_set |= explicit;
        Ok(())
    }

    pub(crate) fn statistics(&self) -> TableStatistics {
        let rows = self.shared();
        let mut memory = rows.memory();
        if let Some(tier) = &rows.tier {
            tier.add_to(&mut memory);
        }
        TableStatistics {
            rows: rows.ids.len(),
            bytes: memory.bytes() as usize,
            memory,
            inserts: rows.inserts,
            updates: rows.updates,
            deletes: rows.deletes,
            rejections: rows.rejections,
            evictions: rows.evictions,
            candidates: rows.admission.as_ref().map_or(0, Admission::num_candidates),
            refusals: self.refusals.load(Ordering::Relaxed),
            step: rows.step,
            learning_rate: rows.learning_rate,
            learning_rate_was_set: rows.learning_rate_was_set,
        }
    }

    fn shared(&self) -> RwLockReadGuard<'_, Rows> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn exclusive(&self) -> RwLockWriteGuard<'_, Rows> {
        self.rows.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rows of a table that nobody else has.
    fn own_rows(&mut self) -> &mut Rows {
        self.rows.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn prepare_rule(&self, rows: &Rows) -> PreparedRule {
        self.optimizer.prepare(rows.learning_rate, rows.step.max(1))
    }

    /// Returns what seeds the noise of rounding at a step.
    fn noise(&self, step: u64) -> u64 {
        mix((self.initializer.seed() ^ mix(step as i64)) as i64)
    }

    fn check_learning_rate(&self, lr: f64) -> Result<()> {
        let is_ftrl_zero = lr as f32 == 0.0 && self.config.optimizer.needs_positive_learning_rate();
        if !(lr as f32).is_finite() || lr < 0.0 || is_ftrl_zero {
            return Err(Error::InvalidLearningRate { table: self.name.clone(), value: lr });
        }
        Ok(())
    }

    fn check_ids(&self, operation: &'static str, ids: &[i64]) -> Result<()> {
        let Some(num_embeddings) = self.config.num_embeddings else {
            return Ok(());
        };
        match ids.iter().position(|&id| id < 0 || id as u64 >= num_embeddings) {
            None => Ok(()),
            Some(position) => Err(Error::IdOutOfRange {
                operation,
                table: self.name.clone(),
                id: ids[position],
                position,
                num_embeddings,
            }),
        }
    }

    fn check_width(&self, operation: &'static str, what: &str, count: usize, len: usize) -> Result<()> {
        let dim = self.config.dim;
        if len == count * dim {
            return Ok(());
        }
        let actual = match count > 0 && len.is_multiple_of(count) {
            true => format!("{what} of {}", len / count),
            false => format!("{len} values for {count} {what}"),
        };
        Err(Error::DimMismatch { operation, table: self.name.clone(), expected: dim, actual })
    }

    fn check_length(
        &self,
        operation: &'static str,
        what: &str,
        expected: usize,
        actual: usize,
    ) -> Result<()> {
        if actual == expected {
            return Ok(());
        }
        let what = format!("{what} for the ids of table \"{}\"", self.name);
        Err(Error::LengthMismatch { operation, what, expected, actual })
    }

    /// Returns the positions of rows that the policy leaves out, in rising order.
    fn check_finite(
        &self,
        operation: &'static str,
        what: &'static str,
        ids: &[i64],
        values: &[f32],
    ) -> Result<Vec<usize>> {
        if self.config.nan_policy == NanPolicy::Allow || values.iter().all(|value| value.is_finite()) {
            return Ok(Vec::new());
        }
        let bad = |row: &[f32]| row.iter().copied().find(|value| !value.is_finite());
        let rows = values.chunks_exact(self.config.dim).enumerate();
        let mut refused = rows.filter_map(|(position, row)| bad(row).map(|value| (position, value)));
        if self.config.nan_policy == NanPolicy::Skip {
            return Ok(refused.map(|(position, _)| position).collect());
        }
        let Some((position, value)) = refused.next() else {
            return Ok(Vec::new());
        };
        self.refusals.fetch_add(1, Ordering::Relaxed);
        Err(Error::NonFinite {
            operation,
            what,
            table: self.name.clone(),
            id: ids[position],
            position,
            value,
        })
    }

    /// Checks that this process may change the table and that `more` rows would fit.
    fn check_writable(&self, operation: &'static str, more: usize) -> Result<()> {
        if self.generation != fork::generation() {
            return Err(Error::ForkedChild { operation, table: self.name.clone() });
        }
        let limit = IdAllocator::LIMIT;
        let rows = self.len();
        if rows + more > limit {
            return Err(Error::TableFull {
                operation,
                table: self.name.clone(),
                rows,
                requested: more,
                limit,
            });
        }
        Ok(())
    }
}

impl Rows {
    /// Returns the index of `id`'s row, and whether it is new: then its record still holds what was there before.
    fn find_or_allocate(&mut self, id: i64) -> (RowIndex, bool) {
        if let Some(index) = self.ids.find(id) {
            return (index, false);
        }
        let index = self.allocator.allocate();
        self.make_room();
        self.place_new(&[index]);
        self.ids.insert(id, index);
        self.forget(id);
        self.note_created(index, id, self.stamp(self.step.saturating_add(1)));
        self.inserts += 1;
        (index, true)
    }

    /// Notes a row that has been given its index. What is no step counts as of the next one.
    fn note_created(&mut self, index: RowIndex, id: i64, step: u64) {
        self.row_ids.set(index, id);
        self.changes.created(index);
        if let Some(usages) = &self.usages {
            usages.set(index, Usage::new(step, 0));
        }
    }

    /// Whether an id without a row is counted already.
    fn is_candidate(&self, id: i64) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.is_candidate(id))
    }

    /// Whether an id without a row gets one by the next step that updates it.
    fn would_admit(&self, id: i64, noise: impl FnOnce() -> u64) -> bool {
        self.admission.as_ref().is_none_or(|admission| admission.would_admit(id, noise))
    }

    /// Forgets how often an id without a row was updated.
    fn forget(&mut self, id: i64) {
        if let Some(admission) = &mut self.admission {
            admission.forget(id);
        }
    }

    /// Returns what belongs to a row besides its record.
    fn key(&self, index: RowIndex) -> RowKey {
        RowKey { id: self.row_ids.of(index), usage: self.usages.as_ref().map(|usages| usages.of(index)) }
    }

    /// Notes that a row was written.
    fn renew(&self, index: RowIndex) {
        if let Some(usages) = &self.usages {
            let usage = usages.of(index);
            if let Some(sweep) = &self.sweep {
                sweep.keep(index, self.row_ids.of(index), usage);
            }
            usages.set(index, Usage::new(self.stamp(self.step.saturating_add(1)), usage.count()));
        }
    }

    /// Deletes the rows of `ids` and returns how many there were.
    ///
    /// # Errors
    /// [`Error::Disk`]; [`Error::RuleFailed`]; then all are there.
    fn delete(&mut self, ids: &[i64]) -> Result<usize> {
        self.check_whole()?;
        let before = self.ids.len();
        self.copy_before_delete(ids.iter().filter_map(|id| self.ids.find(*id)))?;
        for &id in ids {
            if let Some(index) = self.remove(id) {
                self.changes.deleted(index, id);
            }
        }
        let deleted = before - self.ids.len();
        // The ids deleted are noted for the next delta: that may cost frames. What cannot go now goes with the next step.
        _ = self.shrink_frames(&Serial, Growth::NONE);
        self.settle();
        self.deletes += deleted as u64;
        if deleted > 0 {
            self.epoch = next_epoch();
        }
        Ok(deleted)
    }

    /// Gives each of `ids`, which have none and are distinct, a record; it still holds what was there before.
    fn allocate_each(&mut self, ids: &[i64]) {
        let indices: Vec<RowIndex> = ids.iter().map(|_| self.allocator.allocate()).collect();
        self.make_room();
        self.place_new(&indices);
        for (index, id) in indices.iter().zip(ids) {
            self.note_created(*index, *id, self.stamp(self.step));
        }
        self.ids.insert_each(ids, indices);
        self.inserts += ids.len() as u64;
    }

    /// Makes room for every index that was ever handed out.
    fn make_room(&mut self) {
        let len = self.allocator.high_water();
        match &mut self.tier {
            None => self.storage.reserve(len),
            Some(tier) => tier.grow(len),
        }
        self.row_ids.grow(len);
        self.changes.grow(len);
        self.usages.iter_mut().for_each(|usages| usages.grow(len));
    }

    /// Gives rows that were just made what frames are free, if this table has frames.
    fn place_new(&mut self, indices: &[RowIndex]) {
        if let Some(tier) = &mut self.tier {
            indices.iter().for_each(|index| tier.place_new(*index));
        }
    }

    /// Keeps the memory of a step's indices for the next one, unless the table has a limit, which is for rows.
    fn keep(&mut self, indices: Vec<u32>) {
        if !self.is_limited() {
            self.indices = indices;
        }
    }

    /// Frees the row of `id` and returns the index that it had.
    fn remove(&mut self, id: i64) -> Option<RowIndex> {
        let index = self.ids.remove(id)?;
        if let (Some(sweep), Some(usages)) = (&self.sweep, &self.usages) {
            sweep.keep(index, id, usages.of(index));
        }
        self.row_ids.clear(index);
        self.allocator.free(index);
        if let Some(tier) = &mut self.tier {
            tier.release(index);
        }
        Some(index)
    }

    /// Returns the index of each id, [`NO_INDEX`] for one without a row.
    fn find(&self, engine: Engine<'_>, ids: &[i64]) -> Vec<u32> {
        let mut indices = vec![NO_INDEX; ids.len()];
        engine.simd.run(FindRows { ids: &self.ids, of: ids, indices: &mut indices });
        indices
    }

    /// Returns what lookups read; `failure` gets what keeps them from reading rows on disk.
    fn source<'a>(&'a self, table: &'a Table, failure: &'a OnceLock<Error>) -> RowSource<'a> {
        let cold = self.tier.as_ref().map(|tier| ColdRows { tier, failure });
        RowSource {
            ids: &self.ids,
            storage: &self.storage,
            initializer: &table.initializer,
            dim: table.config.dim,
            cold,
        }
    }
}

fn new_storage(config: &TableConfig, slots: Vec<Slot>) -> SlotGroup {
    let words = with_row_type!(config.dtype, row_type => row_type.words(config.dim));
    match (&config.disk, config.memory_limit) {
        (Some(_), Some(limit)) => SlotGroup::within(words, limit, slots),
        _ => SlotGroup::new(words, config.block_size, slots),
    }
}

fn new_tier(name: &str, config: &TableConfig, storage: &SlotGroup) -> Result<Option<Box<Tier>>> {
    let tier =
        config.disk.as_ref().map(|directory| Tier::new(name, directory, storage.stride()).map(Box::new));
    tier.transpose()
}
