//! Changes of a table but for optimizer steps: each holds its lock alone.

use std::sync::atomic::Ordering;

use super::access_stats::Usages;
use super::admission::Admission;
use super::engine::Engine;
use super::growth::Growth;
use super::ids::id_allocator::IdAllocator;
use super::ids::id_map::IdMap;
use super::ids::places::TAG_WORDS;
use super::ids::row_ids::RowIds;
use super::ids::row_index::{NO_INDEX, RowIndex};
use super::memory::{Indices, NewRows, distinct};
use super::rows::{Rows, next_epoch};
use super::shared_rows::SharedRows;
use super::table::{Table, new_storage, new_tier};
use crate::Result;
use crate::kernel::simd::Simd;
use crate::optimizer::PreparedRule;
use crate::rows::any_row_type::with_row_type;
use crate::rows::row_type::RowType;

/// What [`Table::lookup`] reports for an id without a row.
const REPORTED_NO_INDEX: i64 = -1;

impl Table {
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
        // All that can be refused is refused here: from the next line on rows change.
        self.make_ready(OPERATION, rows, engine, &taken_ids, true)?;
        self.refusals.fetch_add(refused.len() as u64, Ordering::Relaxed);
        let rule = self.prepare_rule(rows, 0);
        rows.writes += taken.len() as u64;
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
    pub(super) fn check_rule(&self, rows: &mut Rows, rule: &PreparedRule) -> Result<()> {
        let checked = rule.check(&self.name, &self.config.optimizer);
        if let Err(error) = &checked {
            rows.broken = Some(error.clone());
        }
        checked
    }

    /// Sees that new rows of `ids` fit, in the place of others where `displaces`, and brings those there are into memory.
    ///
    /// # Errors
    /// [`crate::Error::MemoryLimit`], [`crate::Error::Disk`]; no row has changed.
    pub(super) fn make_ready(
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
        // Rows were charged that do not come now.
        ready.inspect_err(|_| rows.settle())
    }

    /// Sees that the shared rows have records.
    pub(super) fn make_shared_rows(&self, rows: &mut Rows, rule: &PreparedRule) {
        let Some(shared) = rows.shared.as_mut().filter(|shared| shared.len() == 0) else { return };
        shared.records.reserve(shared.count as usize);
        let mut weights = vec![0.0; self.config().dim];
        for index in (0..shared.count).map(RowIndex) {
            self.initializer.fill(Simd::baseline(), &[SharedRows::first_value_of(index)], &mut weights);
            let (words, state) = shared.records.record_mut(index);
            state.fill(0.0);
            self.store(rule, &weights, words, state);
        }
    }

    /// Writes the weights that ids without rows have.
    pub(super) fn fill_rowless(&self, rows: &Rows, simd: Simd, ids: &[i64], weights: &mut [f32]) {
        match &rows.shared {
            None => self.initializer.fill(simd, ids, weights),
            Some(shared) => shared.fill(self.row_type(simd), &self.initializer, ids, weights),
        }
    }

    /// Keeps `weights` in a record, rounded to the row type, and brings its state in agreement.
    pub(super) fn store(&self, rule: &PreparedRule, weights: &[f32], words: &mut [f32], state: &mut [f32]) {
        with_row_type!(self.config.dtype, row_type => row_type.round(weights, words));
        // The rule sees weights as the row keeps them: state made from others would not stand for the row.
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
            let inserted = self.insert_missing(rows, engine.simd, ids);
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

    fn insert_missing(&self, rows: &mut Rows, simd: Simd, ids: &[i64]) -> Result<()> {
        let rule = self.prepare_rule(rows, 0);
        let mut weights = vec![0.0; self.config.dim];
        for &id in ids {
            if let (index, true) = rows.find_or_allocate(id) {
                self.fill_rowless(rows, simd, &[id], &mut weights);
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
        // Made before anything is forgotten: a slot file that cannot be made leaves the table as it was.
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
        rows.shared.iter_mut().for_each(|shared| shared.forget());
        rows.usages.iter_mut().for_each(|usages| *usages = Usages::default());
        rows.ids = IdMap::default();
        rows.row_ids = RowIds::default();
        rows.allocator = IdAllocator::default();
        rows.indices = Vec::new();
        rows.storage = storage;
        rows.tier = tier;
        rows.broken = None;
        // Places that lookups gave out are those of rows that are gone.
        rows.epoch = next_epoch();
        rows.settle();
        Ok(())
    }
}
