//! A table on its way to a checkpoint and back.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Serialize;

use super::admission::{Admission, AdmissionCounts};
use super::changes::{CopiedRows, Cut, SaveId};
use super::engine::Engine;
use super::growth::Growth;
use super::ids::id_allocator::IdAllocator;
use super::ids::row_index::RowIndex;
use super::locks::lock_order;
use super::rows::Rows;
use super::sweep::{Sweep, SweepSteps};
use super::table::Table;
use crate::calls::MAX_STEP;
use crate::kernel::bits::Bits;
use crate::kernel::parallel::Serial;
use crate::optimizer::{DecayFactor, Slot, Slots};
use crate::rows::any_row_type::with_row_type;
use crate::rows::row_type::RowType;
use crate::{Error, Result, fork};

/// How far ahead of their use ids are searched for.
const IDS_AHEAD: usize = 16;

/// A table at the moment of a save.
pub(crate) struct TableCut {
    pub(crate) table: Arc<Table>,
    pub(crate) cut: Cut,
    pub(crate) admission: Option<AdmissionCounts>,
    /// The records of shared rows, for a table that has any; none as long as all have their initial values.
    pub(crate) shared: Option<Vec<f32>>,
    sweep: Option<Arc<Sweep>>,
    pub(crate) progress: TableProgress,
}

/// Cuts tables.
pub(crate) type CutTables<'a> = dyn Fn(&[Arc<Table>]) -> Result<Vec<TableCut>> + 'a;

/// What a table knows besides its rows.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TableProgress {
    pub(crate) step: u64,
    pub(crate) learning_rate: f64,
    pub(crate) learning_rate_was_set: bool,
    pub(crate) inserts: u64,
    pub(crate) updates: u64,
    pub(crate) deletes: u64,
    pub(crate) refusals: u64,
    pub(crate) rejections: u64,
    pub(crate) evictions: u64,
    pub(crate) sweep: Option<SweepSteps>,
    /// Of a table whose rows decay while steps leave them alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) idle_kept: Option<DecayFactor>,
}

impl TableProgress {
    /// Checks that every count is one that a float64 has, with room for those that come.
    pub(crate) fn validate(&self) -> std::result::Result<(), String> {
        let counts = [
            ("step", self.step),
            ("inserts", self.inserts),
            ("updates", self.updates),
            ("deletes", self.deletes),
            ("refusals", self.refusals),
            ("rejections", self.rejections),
            ("evictions", self.evictions),
        ];
        let began = self.sweep.map(|sweep| ("sweep.began", sweep.began));
        if let Some((name, count)) = counts.into_iter().chain(began).find(|(_, count)| *count > MAX_STEP) {
            return Err(format!("{name} must be at most 2^53, got {count}"));
        }
        match self.sweep {
            Some(SweepSteps { began, leaves }) if leaves <= began => {
                Err(format!("sweep.leaves must be beyond sweep.began, {began}, got {leaves}"))
            }
            _ => Ok(()),
        }
    }

    /// Adds the counts of another shard of the table.
    pub(crate) fn add(&mut self, other: &Self) {
        self.inserts += other.inserts;
        self.updates += other.updates;
        self.deletes += other.deletes;
        self.refusals += other.refusals;
        self.rejections += other.rejections;
        self.evictions += other.evictions;
    }

    /// Returns the same with nothing counted.
    pub(crate) fn without_counts(&self) -> Self {
        let counts = Self { inserts: 0, updates: 0, deletes: 0, refusals: 0, ..self.clone() };
        Self { rejections: 0, evictions: 0, ..counts }
    }
}

/// Cuts all `tables` at one moment, for save `save`: what changed since `base` of those that were saved with it, and all
/// of the others.
///
/// # Errors
/// [`Error::ForkedChild`] in a forked child, whose parent goes on.
pub(crate) fn cut(tables: &[Arc<Table>], base: Option<SaveId>, save: SaveId) -> Result<Vec<TableCut>> {
    let _gate = fork::enter();
    tables.iter().try_for_each(|table| table.check_own("save"))?;
    // All locks are held before the first cut, so the tables belong to one moment; in the order that every
    // call on several tables uses, so that no two wait for each other.
    let mut order: Vec<&Arc<Table>> = tables.iter().collect();
    order.sort_by_key(|table| lock_order(table));
    let guards: Vec<_> = order.iter().map(|table| (table, table.exclusive())).collect();
    // Before any table is cut: a refused save has taken no notes away.
    guards.iter().try_for_each(|(_, rows)| rows.check_whole())?;
    let cuts = guards.into_iter().map(|(table, mut rows)| {
        let rows = &mut *rows;
        TableCut {
            table: Arc::clone(table),
            // Bits, no rows: 128 KiB for a million rows, so training stops for microseconds.
            cut: rows.changes.cut(rows.row_ids.used(), base, save),
            admission: rows.admission.as_ref().map(Admission::counts),
            shared: rows.shared.as_ref().map(|shared| shared.copied()),
            sweep: rows.sweep.clone(),
            progress: table.progress(rows),
        }
    });
    let mut cuts: Vec<_> = cuts.collect();
    // The order of locks is that of opening, which may be another in each process; files have that of the
    // names.
    cuts.sort_by(|a, b| a.table.name.cmp(&b.table.name));
    Ok(cuts)
}

impl TableCut {
    /// Copies up to `limit` rows of the snapshot that no change has made it keep, from index `start` on; returns where to
    /// go on, or `None` when there are none.
    ///
    /// # Errors
    /// [`Error::Disk`]; then the snapshot is lost.
    pub(crate) fn copy(&self, start: usize, limit: usize, copied: &mut CopiedRows) -> Result<Option<usize>> {
        let _gate = fork::enter();
        let rows = self.table.shared();
        let mut scratch = Vec::new();
        let row = |index: RowIndex, records: &mut Vec<f32>| {
            records.extend_from_slice(rows.record(index, &mut scratch)?);
            Ok(rows.key(index))
        };
        self.cut.snapshot.copy(start, limit, row, copied)
    }

    /// Returns the ids of the rows that were to leave, for a table from which rows leave.
    pub(crate) fn leaving(&self) -> Option<Vec<i64>> {
        let chosen =
            || self.sweep.as_ref().map_or_else(Vec::new, |sweep| sweep.finish_beside_training(&self.table));
        self.table.config.eviction.as_ref().map(|_| self.with_rows(chosen()))
    }

    /// Leaves out the ids whose rows were deleted since they were chosen: nobody needs them, and a file should not tell
    /// them. If rows were deleted since the cut, nobody knows any more which were there then, and all stay.
    fn with_rows(&self, mut chosen: Vec<i64>) -> Vec<i64> {
        let _gate = fork::enter();
        let rows = self.table.shared();
        if rows.deletes == self.progress.deletes {
            chosen.retain(|id| rows.ids.find(*id).is_some());
        }
        chosen
    }

    /// Whether a file would say nothing: no row of the table has changed, and it remembers nothing of ids without one.
    pub(crate) fn is_empty_delta(&self) -> bool {
        let is_unchanged = self.cut.is_delta && self.cut.rows == 0 && self.cut.deleted.is_empty();
        is_unchanged && self.admission.is_none() && self.table.config.eviction.is_none()
    }

    /// Ends the snapshot.
    pub(crate) fn end(&self, was_saved: bool) {
        let _gate = fork::enter();
        let rows = &mut *self.table.exclusive();
        rows.changes.end_save(&self.cut.snapshot, rows.row_ids.used(), was_saved);
    }
}

impl Table {
    /// Returns what the table knows besides its rows.
    pub(super) fn progress(&self, rows: &Rows) -> TableProgress {
        TableProgress {
            step: rows.step,
            learning_rate: rows.learning_rate,
            learning_rate_was_set: rows.learning_rate_was_set,
            inserts: rows.inserts,
            updates: rows.updates,
            deletes: rows.deletes,
            refusals: self.refusals.load(Ordering::Relaxed),
            rejections: rows.rejections,
            evictions: rows.evictions,
            sweep: rows.sweep.as_ref().map(|sweep| sweep.steps),
            idle_kept: self.config.optimizer.idle_decay().map(|_| rows.kept),
        }
    }

    /// Returns the mean of each row over records of several stores, slots included.
    pub(crate) fn mean_of_records(&self, all: &[Vec<f32>]) -> Vec<f32> {
        let ((weight_words, stride), slots) = (self.record_words(), Slots(self.record_slots()));
        let mut values = vec![0.0; self.config.dim + slots.width()];
        let mut sum = vec![0.0; values.len()];
        let mut mean = vec![0.0; all.first().map_or(0, Vec::len)];
        for (place, record) in mean.chunks_exact_mut(stride).enumerate() {
            sum.fill(0.0);
            for records in all {
                let (words, state) = records[place * stride..][..stride].split_at(weight_words);
                let (row, kept) = values.split_at_mut(self.config.dim);
                // Widened first: codes have a scale a row and cannot be added as they lie.
                with_row_type!(self.config.dtype, row_type => row_type.widen(words, row));
                slots.widen(state, kept);
                sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            for (value, sum) in values.iter_mut().zip(&sum) {
                *value = (sum / all.len() as f64) as f32;
            }
            let ((row, kept), (words, state)) =
                (values.split_at(self.config.dim), record.split_at_mut(weight_words));
            with_row_type!(self.config.dtype, row_type => row_type.round(row, words));
            slots.round(kept, state);
        }
        mean
    }

    /// Returns the words of a record that hold a row's weights, and of a whole record.
    pub(crate) fn record_words(&self) -> (usize, usize) {
        let rows = self.shared();
        (rows.storage.weight_words(), rows.storage.stride())
    }

    /// Returns the optimizer's slots, in the order in which they lie in a record.
    pub(crate) fn record_slots(&self) -> &[Slot] {
        self.optimizer.slots()
    }

    /// Makes room for `rows` rows of a table that has none.
    pub(crate) fn reserve(&mut self, rows: usize) {
        let own = self.own_rows();
        own.ids.reserve(rows);
    }

    /// Gives the rows of `ids` these records. `seen` notes their indices: an id seen before is returned, and the rest left
    /// out.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`], [`Error::Disk`].
    pub(crate) fn put_records(
        &mut self,
        engine: Engine<'_>,
        copied: &CopiedRows,
        seen: &mut Bits,
    ) -> Result<Option<i64>> {
        let CopiedRows { ids, usages, records } = copied;
        let stride = self.record_words().1;
        // A checkpoint is loaded as a whole or not at all.
        self.make_ready("load", &mut self.exclusive(), engine, ids, false)?;
        let rows = self.own_rows();
        for (position, (id, record)) in ids.iter().zip(records.chunks_exact(stride)).enumerate() {
            if let Some(ahead) = ids.get(position + IDS_AHEAD) {
                rows.ids.prefetch(*ahead);
            }
            let (index, is_new) = rows.find_or_allocate(*id);
            seen.grow(rows.allocator.high_water());
            if seen.take(index.0 as usize) {
                return Ok(Some(*id));
            }
            seen.set(index.0 as usize);
            if let (Some(own), Some(usage)) = (&rows.usages, usages.get(position)) {
                own.set(index, *usage);
            }
            rows.change(index, is_new, |weights, state| {
                let (own_weights, own_state) = record.split_at(weights.len());
                weights.copy_from_slice(own_weights);
                state.copy_from_slice(own_state);
            })?;
        }
        rows.settle();
        Ok(None)
    }

    /// Deletes the rows of `ids`, before anybody has seen the table.
    pub(crate) fn remove_records(&mut self, ids: &[i64]) {
        let rows = self.own_rows();
        for id in ids {
            _ = rows.remove(*id);
        }
    }

    /// Sets what the table knows besides its rows. `save` holds just what the table now does.
    ///
    /// # Errors
    /// [`Error::InvalidLearningRate`].
    pub(crate) fn restore(&mut self, progress: &TableProgress, save: SaveId) -> Result<()> {
        self.take_progress(progress)?;
        self.own_rows().changes.is_as_saved(save);
        Ok(())
    }

    /// Sets what the table knows besides its rows.
    ///
    /// # Errors
    /// [`Error::InvalidLearningRate`]; [`Error::StateMismatch`].
    pub(super) fn take_progress(&mut self, progress: &TableProgress) -> Result<()> {
        let given = progress.idle_kept;
        // What can be refused comes first: from the counts on nothing fails.
        let kept = self.kept_of(given, given.filter(|kept| kept.is_possible()))?;
        self.set_learning_rate(progress.learning_rate, progress.learning_rate_was_set)?;
        *self.refusals.get_mut() = progress.refusals;
        let rows = self.own_rows();
        rows.kept = kept;
        rows.step = progress.step;
        rows.inserts = progress.inserts;
        rows.updates = progress.updates;
        rows.deletes = progress.deletes;
        rows.rejections = progress.rejections;
        rows.evictions = progress.evictions;
        Ok(())
    }

    /// Returns what the steps before left of weights that they did not change: the product that was `given`, if it is one.
    ///
    /// # Errors
    /// [`Error::StateMismatch`]: none was given to a table that needs one, or one to another, or it is none.
    pub(super) fn kept_of(
        &self,
        given: Option<impl Serialize>,
        product: Option<DecayFactor>,
    ) -> Result<DecayFactor> {
        match (self.config.optimizer.idle_decay(), &given, product) {
            (None, None, _) => Ok(DecayFactor::default()),
            (Some(_), _, Some(kept)) => Ok(kept),
            (decay, ..) => {
                let expected = if decay.is_some() { "a fraction and an exponent" } else { "none" };
                let message = format!("expected {expected} as idle_kept, got {}", serde_json::json!(given));
                Err(Error::StateMismatch { table: self.name.clone(), message })
            }
        }
    }

    /// Adds what was counted of ids without a row, of those that `keeps` is true of.
    ///
    /// # Errors
    /// Says what does not fit the table's configuration.
    pub(crate) fn add_admission_counts(
        &mut self,
        counts: &AdmissionCounts,
        keeps: impl Fn(i64) -> bool,
    ) -> std::result::Result<(), String> {
        let rows = self.own_rows();
        if let Some(admission) = &mut rows.admission {
            admission.add(counts, keeps)?;
            // Rows in memory took what room there was. What cannot go now goes with the next step.
            _ = rows.shrink_frames(&Serial, Growth::NONE);
            rows.settle();
        }
        Ok(())
    }

    /// Sets the records of shared rows.
    ///
    /// # Errors
    /// Says what does not fit the table's configuration.
    pub(crate) fn put_shared_rows(&mut self, records: &[f32]) -> std::result::Result<(), String> {
        let rows = self.own_rows();
        if let Some(shared) = &mut rows.shared {
            shared.put(records)?;
            // As for counts.
            _ = rows.shrink_frames(&Serial, Growth::NONE);
            rows.settle();
        }
        Ok(())
    }

    /// Sets which rows will leave, and when.
    pub(crate) fn set_leaving(&mut self, steps: SweepSteps, ids: Vec<i64>) {
        let Some(config) = self.config.eviction.clone() else { return };
        self.own_rows().sweep = Some(Arc::new(Sweep::done(&config, steps, ids)));
    }

    /// Checks that the table may have rows of these ids.
    pub(crate) fn check_loaded(&self, ids: &[i64]) -> Result<()> {
        self.check_ids("load", ids)
    }

    /// Checks that so many rows fit a table.
    pub(crate) fn check_room(name: &str, rows: usize) -> Result<()> {
        let limit = IdAllocator::LIMIT;
        if rows > limit {
            let table = name.to_owned();
            return Err(Error::TableFull { operation: "load", table, rows: 0, requested: rows, limit });
        }
        Ok(())
    }
}
