//! The rows of a table as they were at one moment, read by id while others go on.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::changes::{CopiedRows, Snapshot};
use super::engine::Engine;
use super::ids::id_map::IdMap;
use super::locks::exclusive_each;
use super::lookup::IdleRows;
use super::rows::Rows;
use super::saving::TableProgress;
use super::table::Table;
use crate::kernel::parallel::ReservedCores;
use crate::kernel::simd::Simd;
use crate::optimizer::Idle;
use crate::rows::any_row_type::with_row_type;
use crate::rows::row_type::RowType;
use crate::{Error, Result, fork};

const OPERATION: &str = "read_at_one_moment";

/// The rows that a table had at one moment, in which no step was half done.
///
/// As long as it is there, whatever changes one of them keeps a copy of it first. A table that is dropped meanwhile is
/// kept.
pub struct CutRows {
    table: Arc<Table>,
    snapshot: Arc<Snapshot>,
    executor: Arc<ReservedCores>,
    simd: Simd,
    /// In ascending order.
    ids: Vec<i64>,
    progress: TableProgress,
    idle: Option<Idle>,
    copies: Mutex<Copies>,
}

/// What a table knows besides its rows, at the moment of [`CutRows`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CutProgress {
    /// The steps that the table had taken.
    pub step: u64,
    /// The learning rate of the next one.
    pub learning_rate: f64,
    /// Whether it was set by hand.
    pub learning_rate_was_set: bool,
    /// What steps left of the weights that they did not change, of a table whose rows decay so.
    pub idle_kept: Option<[f64; 2]>,
}

/// Copies of rows that changed since the moment.
#[derive(Default)]
struct Copies {
    rows: CopiedRows,
    places: HashMap<i64, usize>,
}

impl Copies {
    fn take(&mut self, snapshot: &Snapshot) {
        let before = self.rows.ids.len();
        snapshot.take_kept(&mut self.rows);
        self.places.extend(self.rows.ids.iter().copied().zip(0..).skip(before));
    }

    fn record(&self, id: i64, stride: usize) -> Option<&[f32]> {
        self.places.get(&id).map(|place| &self.rows.records[place * stride..][..stride])
    }
}

/// Cuts tables at one moment.
///
/// # Errors
/// [`Error::InvalidConfig`] for a table that is given twice; [`Error::StepCutShort`] and others of a table whose rows no
/// call uses any more.
pub(crate) fn cut_rows(
    tables: &[Arc<Table>],
    executor: &Arc<ReservedCores>,
    simd: Simd,
) -> Result<Vec<CutRows>> {
    let locked = exclusive_each(OPERATION, tables)?;
    locked.iter().try_for_each(|(_, rows)| rows.check_whole())?;
    let cuts = locked.into_iter().map(|(place, mut rows)| {
        let (rows, table) = (&mut *rows, &tables[place]);
        let used = rows.row_ids.used().clone();
        let cut = CutRows {
            table: Arc::clone(table),
            snapshot: rows.changes.begin_snapshot(used),
            executor: Arc::clone(executor),
            simd,
            ids: rows.row_ids.all(),
            progress: table.progress(rows),
            idle: table.optimizer.idle(rows.kept, rows.step),
            copies: Mutex::default(),
        };
        (place, cut)
    });
    let mut cuts: Vec<_> = cuts.collect();
    cuts.sort_by_key(|(place, _)| *place);
    cuts.iter_mut().for_each(|(_, cut)| cut.ids.sort_unstable());
    Ok(cuts.into_iter().map(|(_, cut)| cut).collect())
}

impl CutRows {
    /// Returns the ids that had a row, in ascending order.
    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// Returns the elements of a row.
    pub fn dim(&self) -> usize {
        self.table.config.dim
    }

    /// Returns what the table knew besides its rows.
    pub fn progress(&self) -> CutProgress {
        let TableProgress { step, learning_rate, learning_rate_was_set, .. } = self.progress;
        let idle_kept = self.progress.idle_kept.map(|kept| kept.as_pair());
        CutProgress { step, learning_rate, learning_rate_was_set, idle_kept }
    }

    /// Writes the row that each id had to `out`; an id that had none reads as its initial value.
    ///
    /// # Errors
    /// As [`EmbeddingTable::read`](crate::EmbeddingTable::read); [`Error::Unsupported`] if a checkpoint was loaded into the
    /// table since.
    pub fn read(&self, ids: &[i64], out: &mut [f32]) -> Result<()> {
        let _gate = fork::enter();
        let (table, dim) = (&self.table, self.table.config.dim);
        table.check_ids("emb_read", ids)?;
        table.check_width("emb_read", "rows", ids.len(), out.len())?;
        let rows = &*table.shared();
        let copies = self.copies(rows)?;
        table.read_locked(rows, self.engine(), ids, out, &mut [])?;
        let is_moved = self.idle.is_some() && rows.step != self.progress.step;
        if copies.places.is_empty() && !is_moved && rows.inserts == self.progress.inserts {
            return Ok(());
        }
        let (mut scratch, mut made_since) = (Vec::new(), Vec::new());
        for (place, (id, row)) in ids.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
            match self.record(rows, &copies, *id, &mut scratch)? {
                Some(record) => self.widen(rows, record, row),
                None => made_since.push(place),
            }
        }
        self.fill_initial(rows, ids, &made_since, out)
    }

    /// Returns the values that an optimizer slot had for each id, zeros for one that had no row; `None` for an unknown
    /// slot.
    ///
    /// # Errors
    /// As [`CutRows::read`].
    pub fn read_slot(&self, name: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        let _gate = fork::enter();
        self.table.check_ids("hashtable_slot", ids)?;
        let rows = &*self.table.shared();
        let Some((slot, words)) = rows.storage.slot(name) else { return Ok(None) };
        let copies = self.copies(rows)?;
        let mut values = vec![0.0; slot.width * ids.len()];
        let (mut scratch, mut settled) = (Vec::new(), Vec::new());
        for (id, values) in ids.iter().zip(values.chunks_exact_mut(slot.width)) {
            if let Some(record) = self.record(rows, &copies, *id, &mut scratch)? {
                let record = self.table.settled(self.idle, record, &mut settled);
                slot.widen(&record[words.clone()], values);
            }
        }
        Ok(Some(values))
    }

    fn engine(&self) -> Engine<'_> {
        Engine { executor: &*self.executor, simd: self.simd }
    }

    /// Returns the copies of all rows that changed; none changes while the table is locked.
    fn copies(&self, rows: &Rows) -> Result<MutexGuard<'_, Copies>> {
        rows.check_whole()?;
        if !rows.changes.has_snapshot(&self.snapshot) {
            let message = format!(
                "a checkpoint was loaded into table \"{}\" while its rows were read: read them again",
                self.table.name
            );
            return Err(Error::Unsupported { operation: OPERATION, message });
        }
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.take(&self.snapshot);
        Ok(copies)
    }

    /// Returns the record that an id had; none if it had no row.
    fn record<'a>(
        &self,
        rows: &'a Rows,
        copies: &'a Copies,
        id: i64,
        scratch: &'a mut Vec<f32>,
    ) -> Result<Option<&'a [f32]>> {
        if let Some(record) = copies.record(id, rows.storage.stride()) {
            return Ok(Some(record));
        }
        let index = rows.ids.find(id).filter(|index| self.snapshot.is_pending(*index));
        index.map(|index| rows.record(index, scratch)).transpose()
    }

    /// Writes the weights of a record as they were to `row`.
    fn widen(&self, rows: &Rows, record: &[f32], row: &mut [f32]) {
        match self.idle {
            Some(idle) => IdleRows::new(idle, &rows.storage.last_slot()).read(record, row),
            None => with_row_type!(self.table.config.dtype, row_type => {
                row_type.widen(&record[..rows.storage.weight_words()], row);
            }),
        }
    }

    /// Writes what ids without a row read as to the rows at `places`.
    fn fill_initial(&self, rows: &Rows, ids: &[i64], places: &[usize], out: &mut [f32]) -> Result<()> {
        let dim = self.table.config.dim;
        let without_row: Vec<i64> = places.iter().map(|place| ids[*place]).collect();
        let mut initial = vec![0.0; places.len() * dim];
        let none = &IdMap::default();
        self.table.read_found(rows, none, self.engine(), &without_row, &mut initial, &mut [])?;
        for (place, row) in places.iter().zip(initial.chunks_exact(dim)) {
            out[place * dim..][..dim].copy_from_slice(row);
        }
        Ok(())
    }
}

impl Drop for CutRows {
    fn drop(&mut self) {
        let _gate = fork::enter();
        self.table.exclusive().changes.end_snapshot(&self.snapshot);
    }
}

impl fmt::Debug for CutRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CutRows").field("table", &self.table.name).field("rows", &self.ids.len()).finish()
    }
}
