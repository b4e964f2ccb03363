//! One table: ids, rows, optimizer state and the calls on them.
//!
//! A call first checks everything it was given, then takes the lock, and from there on cannot fail: a refused call
//! has changed nothing. Reads share the lock; a write or an update holds it alone, so each is atomic.

mod id_allocator;
mod id_map;
mod initializer;
mod philox;
mod slot_group;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::config::{NanPolicy, TableConfig};
use crate::gradient::{GradientChunk, MergedGradients, merge_in_input_order};
use crate::optimizer::{self, BlockStep, PreparedRule, Slot};
use crate::parallel::{Executor, ROWS_IN_FLIGHT, Serial, for_each_mut, touch};
use crate::pooling::{BagInput, PoolingMode};
use crate::simd::Simd;
use crate::store::{Step, TableStatistics};
use crate::{Error, Result, fork};
use id_allocator::IdAllocator;
use id_map::IdMap;
use initializer::Initializer;
use slot_group::SlotGroup;

/// The place of a row in its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowIndex(u32);

/// What [`Table::lookup`] reports for an id without a row.
const NO_INDEX: i64 = -1;

/// The floats worth waking a thread for. Less runs on the calling thread.
const FLOATS_A_THREAD: usize = 32_768;

/// The ids worth waking a thread for to look them up.
const IDS_A_THREAD: usize = 4_096;

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
    slots: Vec<Slot>,
    generation: u32,
    refusals: AtomicU64,
    rows: RwLock<Rows>,
}

/// What the lock of a table guards.
struct Rows {
    ids: IdMap,
    allocator: IdAllocator,
    storage: SlotGroup,
    learning_rate: f64,
    learning_rate_was_set: bool,
    step: u64,
    inserts: u64,
    updates: u64,
    deletes: u64,
}

/// Gradients that were checked and merged: applying them cannot fail.
pub(crate) struct CheckedUpdate {
    merged: MergedGradients,
    step: Step,
    skipped: usize,
}

impl Table {
    pub(crate) fn new(name: &str, config: &TableConfig) -> Self {
        let slots = optimizer::slots(&config.optimizer, config.dim);
        Self {
            name: name.to_owned(),
            config: config.clone(),
            initializer: Initializer::new(name, config),
            slots: slots.clone(),
            generation: fork::generation(),
            refusals: AtomicU64::new(0),
            rows: RwLock::new(Rows {
                ids: IdMap::default(),
                allocator: IdAllocator::default(),
                storage: SlotGroup::new(config.dim, config.block_size, slots),
                learning_rate: config.optimizer.learning_rate(),
                learning_rate_was_set: false,
                step: 0,
                inserts: 0,
                updates: 0,
                deletes: 0,
            }),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn config(&self) -> &TableConfig {
        &self.config
    }

    /// Writes the row of each id to `out`; an id without a row reads as its initial value.
    pub(crate) fn read(&self, engine: Engine<'_>, ids: &[i64], out: &mut [f32]) -> Result<()> {
        self.check_ids("emb_read", ids)?;
        self.check_width("emb_read", "rows", ids.len(), out.len())?;
        self.read_locked(&self.shared(), engine, ids, out);
        Ok(())
    }

    fn read_locked(&self, rows: &Rows, engine: Engine<'_>, ids: &[i64], out: &mut [f32]) {
        let (dim, chunk) = (self.config.dim, self.rows_a_thread());
        let chunks = ids.chunks(chunk).zip(out.chunks_mut(chunk * dim));
        for_each_mut(engine.executor, chunks, |(ids, out)| {
            for (ids, out) in ids.chunks(ROWS_IN_FLIGHT).zip(out.chunks_mut(ROWS_IN_FLIGHT * dim)) {
                self.read_together(rows, ids, out);
            }
        });
    }

    /// Reads at most [`ROWS_IN_FLIGHT`] rows in three passes, so that their cache misses overlap: no load of a pass
    /// waits for another one of it.
    fn read_together(&self, rows: &Rows, ids: &[i64], out: &mut [f32]) {
        let mut found = [None; ROWS_IN_FLIGHT];
        for (weights, id) in found.iter_mut().zip(ids) {
            *weights = rows.ids.get(*id).map(|index| rows.storage.weights(index));
        }
        found.iter().flatten().for_each(|weights| touch(weights));
        for ((weights, id), row) in found.iter().zip(ids).zip(out.chunks_exact_mut(self.config.dim)) {
            match weights {
                Some(weights) => row.copy_from_slice(weights),
                None => self.initializer.fill(*id, row),
            }
        }
    }

    /// Pools the rows of each bag; see [`BagInput`].
    pub(crate) fn bag(
        &self,
        engine: Engine<'_>,
        input: BagInput<'_>,
        pooled: &mut [f32],
        max_positions: &mut [i64],
    ) -> Result<()> {
        input.validate()?;
        self.check_ids("emb_bag", input.ids)?;
        self.check_width("emb_bag", "pooled rows", input.num_bags(), pooled.len())?;
        let positions = if input.mode == PoolingMode::Max { pooled.len() } else { 0 };
        self.check_length("emb_bag", "positions of maxima", positions, max_positions.len())?;
        let dim = self.config.dim;
        let chunk = self.bags_a_thread(&input);
        let rows = &*self.shared();
        let mut max_rows = max_positions.chunks_mut(chunk * dim);
        let chunks = pooled
            .chunks_mut(chunk * dim)
            .enumerate()
            .map(|(number, pooled)| (number * chunk, pooled, max_rows.next().unwrap_or_default()));
        for_each_mut(engine.executor, chunks, |(first_bag, pooled, max_rows)| {
            let mut max_rows = max_rows.chunks_mut(dim);
            for (bag, pooled) in pooled.chunks_exact_mut(dim).enumerate() {
                let row_of = |id: i64, visit: &mut dyn FnMut(&[f32])| self.with_row(rows, id, visit);
                input.pool(first_bag + bag, row_of, pooled, max_rows.next().unwrap_or_default());
            }
        });
        Ok(())
    }

    fn with_row(&self, rows: &Rows, id: i64, visit: &mut dyn FnMut(&[f32])) {
        if let Some(index) = rows.ids.get(id) {
            return visit(rows.storage.weights(index));
        }
        let mut initial = vec![0.0; self.config.dim];
        self.initializer.fill(id, &mut initial);
        visit(&initial);
    }

    /// Overwrites the rows of `ids`; of duplicates the last one wins.
    pub(crate) fn write(&self, ids: &[i64], values: &[f32]) -> Result<()> {
        const OPERATION: &str = "emb_write";
        self.check_ids(OPERATION, ids)?;
        self.check_width(OPERATION, "rows", ids.len(), values.len())?;
        let refused = self.check_finite(OPERATION, "row", ids, values)?;
        self.check_writable(OPERATION, ids.len())?;
        let rows = &mut *self.exclusive();
        self.refusals.fetch_add(refused.len() as u64, Ordering::Relaxed);
        let rule = self.prepare_rule(rows);
        let mut refused = refused.into_iter().peekable();
        for (position, (id, value)) in ids.iter().zip(values.chunks_exact(self.config.dim)).enumerate() {
            if refused.next_if_eq(&position).is_some() {
                continue;
            }
            let (index, is_new) = rows.find_or_allocate(*id);
            let (weights, state) = rows.storage.record_mut(index);
            weights.copy_from_slice(value);
            if is_new {
                state.fill(0.0);
            }
            rule.adopt_weights(weights, state);
        }
        Ok(())
    }

    /// Checks gradients and merges the duplicates; nothing is changed before [`Table::apply`].
    pub(crate) fn check_update(&self, chunks: &[GradientChunk<'_>], step: Step) -> Result<CheckedUpdate> {
        const OPERATION: &str = "emb_update";
        if step == Step::At(0) {
            return Err(Error::InvalidStep { table: self.name.clone() });
        }
        let mut count = 0;
        for chunk in chunks {
            self.check_ids(OPERATION, chunk.ids).map_err(|error| error.shifted(count))?;
            self.check_width(OPERATION, "gradient rows", chunk.ids.len(), chunk.gradients.len())?;
            count += chunk.ids.len();
        }
        self.check_writable(OPERATION, count)?;
        if self.config.nan_policy == NanPolicy::Error {
            self.check_each_gradient(OPERATION, chunks)?;
        }
        // A gradient that is not finite leaves its id without a finite sum: under `skip` the id takes no step, whether
        // its gradients come one by one or merged.
        let merged = merge_in_input_order(self.config.dim, chunks);
        let refused = self.check_finite(OPERATION, "summed gradient", &merged.ids, &merged.sums);
        let refused = refused.map_err(|error| error.at_first_of_its_id(chunks))?;
        let merged = self.without(merged, &refused);
        Ok(CheckedUpdate { merged, step, skipped: refused.len() })
    }

    fn check_each_gradient(&self, operation: &'static str, chunks: &[GradientChunk<'_>]) -> Result<()> {
        let mut start = 0;
        for chunk in chunks {
            let checked = self.check_finite(operation, "gradient", chunk.ids, chunk.gradients);
            checked.map_err(|error| error.shifted(start))?;
            start += chunk.ids.len();
        }
        Ok(())
    }

    /// Takes one optimizer step for every id of `update`, and counts it for an empty one too.
    pub(crate) fn apply(&self, engine: Engine<'_>, update: CheckedUpdate) {
        let CheckedUpdate { merged, step, skipped } = update;
        let rows = &mut *self.exclusive();
        self.refusals.fetch_add(skipped as u64, Ordering::Relaxed);
        rows.step = match step {
            Step::Next => rows.step.saturating_add(1),
            Step::At(step) => step,
        };
        rows.updates += merged.ids.len() as u64;
        let rule = self.prepare_rule(rows);
        let found = self.find_or_allocate(rows, engine, &merged.ids);
        let work = rows.group_by_block(&found);
        let (dim, stride) = (self.config.dim, rows.storage.stride());
        let blocks = rows.storage.blocks_mut().zip(work).filter(|(_, work)| !work.is_empty());
        let executor: &dyn Executor =
            if merged.sums.len() < FLOATS_A_THREAD { &Serial } else { engine.executor };
        for_each_mut(executor, blocks, |(records, work)| {
            for &(row, gradient) in work.iter().filter(|(_, gradient)| found[*gradient].1) {
                let (weights, state) = records[row * stride..][..stride].split_at_mut(dim);
                self.initialize(&rule, merged.ids[gradient], weights, state);
            }
            let block = BlockStep { records, stride, dim, rows: &work, gradients: &merged.sums };
            rule.apply(engine.simd, block);
        });
    }

    /// Returns the index of each of the distinct `ids`, and whether it is new; new ones are handed out in ascending
    /// order of the ids.
    fn find_or_allocate(&self, rows: &mut Rows, engine: Engine<'_>, ids: &[i64]) -> Vec<(RowIndex, bool)> {
        let mut found = vec![None; ids.len()];
        let chunks = ids.chunks(IDS_A_THREAD).zip(found.chunks_mut(IDS_A_THREAD));
        for_each_mut(engine.executor, chunks, |(ids, found)| {
            for (index, id) in found.iter_mut().zip(ids) {
                *index = rows.ids.get(*id);
            }
        });
        let mut missing: Vec<usize> = (0..ids.len()).filter(|&place| found[place].is_none()).collect();
        missing.sort_unstable_by_key(|&place| ids[place]);
        let mut found: Vec<_> =
            found.into_iter().map(|index| (index.unwrap_or(RowIndex(0)), false)).collect();
        for place in missing {
            found[place] = rows.find_or_allocate(ids[place]);
        }
        found
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
            self.insert_missing(rows, ids);
            self.lookup_locked(rows, engine, ids, indices, out);
        } else {
            self.lookup_locked(&self.shared(), engine, ids, indices, out);
        }
        Ok(())
    }

    fn lookup_locked(
        &self,
        rows: &Rows,
        engine: Engine<'_>,
        ids: &[i64],
        indices: &mut [i64],
        out: &mut [f32],
    ) {
        for (index, id) in indices.iter_mut().zip(ids) {
            *index = rows.ids.get(*id).map_or(NO_INDEX, |index| i64::from(index.0));
        }
        self.read_locked(rows, engine, ids, out);
    }

    fn insert_missing(&self, rows: &mut Rows, ids: &[i64]) {
        let rule = self.prepare_rule(rows);
        for &id in ids {
            if let (index, true) = rows.find_or_allocate(id) {
                let (weights, state) = rows.storage.record_mut(index);
                self.initialize(&rule, id, weights, state);
            }
        }
    }

    /// Deletes the rows of `ids` and returns how many there were; an id without a row is no error.
    pub(crate) fn delete(&self, ids: &[i64]) -> Result<usize> {
        self.check_writable("hashtable_delete", 0)?;
        let rows = &mut *self.exclusive();
        let before = rows.ids.len();
        for &id in ids {
            if let Some(index) = rows.ids.remove(id) {
                rows.allocator.free(index);
            }
        }
        let deleted = before - rows.ids.len();
        rows.deletes += deleted as u64;
        Ok(deleted)
    }

    /// Deletes every row and gives its memory back; configuration, learning rate and step stay.
    pub(crate) fn clear(&self) -> Result<()> {
        self.check_writable("hashtable_clear", 0)?;
        let rows = &mut *self.exclusive();
        rows.deletes += rows.ids.len() as u64;
        rows.ids = IdMap::default();
        rows.allocator = IdAllocator::default();
        rows.storage = SlotGroup::new(self.config.dim, self.config.block_size, self.slots.clone());
        Ok(())
    }

    /// Checks that this process may drop the table.
    pub(crate) fn check_droppable(&self) -> Result<()> {
        self.check_writable("drop_table", 0)
    }

    /// Returns the ids that have a row, in the order of their indices.
    pub(crate) fn ids(&self) -> Vec<i64> {
        self.shared().ids.ids()
    }

    pub(crate) fn len(&self) -> usize {
        self.shared().ids.len()
    }

    /// Returns the names and widths of the optimizer's slots.
    pub(crate) fn slots(&self) -> Vec<(&'static str, usize)> {
        self.slots.iter().map(|slot| (slot.name, slot.width)).collect()
    }

    /// Returns the values of a slot for each id, zeros where it has no row; `None` if there is no such slot.
    pub(crate) fn read_slot(&self, name: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        self.check_ids("hashtable_slot", ids)?;
        let Some(&Slot { width, .. }) = self.slots.iter().find(|slot| slot.name == name) else {
            return Ok(None);
        };
        let rows = self.shared();
        let mut values = vec![0.0; width * ids.len()];
        for (id, value) in ids.iter().zip(values.chunks_exact_mut(width)) {
            let found = rows.ids.get(*id).and_then(|index| rows.storage.slot(index, name));
            if let Some(found) = found {
                value.copy_from_slice(found);
            }
        }
        Ok(Some(values))
    }

    /// Sets the learning rate from the next step on. `explicit` marks it as set by hand, which
    /// [`TableStatistics::learning_rate_was_set`] reports.
    pub(crate) fn set_learning_rate(&self, lr: f64, explicit: bool) -> Result<()> {
        let is_ftrl_zero = lr as f32 == 0.0 && self.config.optimizer.needs_positive_learning_rate();
        if !(lr as f32).is_finite() || lr < 0.0 || is_ftrl_zero {
            return Err(Error::InvalidLearningRate { table: self.name.clone(), value: lr });
        }
        self.check_writable("set_learning_rate", 0)?;
        let rows = &mut *self.exclusive();
        rows.learning_rate = lr;
        rows.learning_rate_was_set |= explicit;
        Ok(())
    }

    pub(crate) fn statistics(&self) -> TableStatistics {
        let rows = self.shared();
        TableStatistics {
            rows: rows.ids.len(),
            bytes: rows.storage.bytes() + rows.ids.bytes(),
            inserts: rows.inserts,
            updates: rows.updates,
            deletes: rows.deletes,
            refusals: self.refusals.load(Ordering::Relaxed),
            step: rows.step,
            learning_rate: rows.learning_rate,
            learning_rate_was_set: rows.learning_rate_was_set,
        }
    }

    fn rows_a_thread(&self) -> usize {
        FLOATS_A_THREAD.div_ceil(self.config.dim)
    }

    /// As many bags as hold the ids that one thread reads.
    fn bags_a_thread(&self, input: &BagInput<'_>) -> usize {
        let bags = input.num_bags().max(1);
        (self.rows_a_thread() * bags / input.ids.len().max(bags)).max(1)
    }

    fn shared(&self) -> RwLockReadGuard<'_, Rows> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn exclusive(&self) -> RwLockWriteGuard<'_, Rows> {
        self.rows.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn prepare_rule(&self, rows: &Rows) -> PreparedRule {
        optimizer::prepare(&self.config.optimizer, rows.learning_rate, rows.step.max(1))
    }

    fn initialize(&self, rule: &PreparedRule, id: i64, weights: &mut [f32], state: &mut [f32]) {
        self.initializer.fill(id, weights);
        state.fill(0.0);
        rule.adopt_weights(weights, state);
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

    /// Returns merged gradients without those at the `refused` positions.
    fn without(&self, merged: MergedGradients, refused: &[usize]) -> MergedGradients {
        if refused.is_empty() {
            return merged;
        }
        let rows = merged.ids.iter().zip(merged.sums.chunks_exact(self.config.dim)).enumerate();
        let kept = rows.filter(|(position, _)| refused.binary_search(position).is_err());
        let (ids, sums): (Vec<i64>, Vec<&[f32]>) = kept.map(|(_, row)| row).unzip();
        MergedGradients { ids, sums: sums.concat() }
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
        if let Some(index) = self.ids.get(id) {
            return (index, false);
        }
        let index = self.allocator.allocate();
        self.storage.reserve(self.allocator.high_water());
        self.ids.insert(id, index);
        self.inserts += 1;
        (index, true)
    }

    /// Returns, for each block, the rows of it that are in `found` and their places there.
    fn group_by_block(&self, found: &[(RowIndex, bool)]) -> Vec<Vec<(usize, usize)>> {
        let mut work = Vec::new();
        for (place, (index, _)) in found.iter().enumerate() {
            let (block, row) = self.storage.locate(*index);
            if work.len() <= block {
                work.resize_with(block + 1, Vec::new);
            }
            work[block].push((row, place));
        }
        work
    }
}
