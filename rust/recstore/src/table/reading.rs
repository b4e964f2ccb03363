//! Reads of a table, which share its lock.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use super::engine::Engine;
use super::growth::Growth;
use super::ids::id_map::IdMap;
use super::ids::places::{self, AddTagSum, TAG_WORDS};
use super::lookup::{ColdRows, IdleRows, ReadRows, RowSource};
use super::rows::Rows;
use super::table::Table;
use crate::calls::TableRead;
use crate::kernel::parallel::{Serial, for_each_mut, parts_for, piece_size};
use crate::kernel::simd::Simd;
use crate::optimizer::Idle;
use crate::rows::any_row_type::with_row_type;
use crate::{Error, Result};

impl Table {
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
        // It takes the exclusive lock, which cannot be had within the shared one below.
        if !places.is_empty() {
            self.bring_in(engine, ids, false);
        }
        self.read_locked(&self.shared(), engine, ids, out, places)
    }

    /// Brings the rows of `ids` into memory, as many as fit, for a step that follows: after others, if they are read
    /// `ahead`, and then they stay until it comes. Whatever stays on disk, for want of room or because it cannot be read
    /// now, is read from there.
    pub(crate) fn bring_in(&self, engine: Engine<'_>, ids: &[i64], ahead: bool) {
        if self.config.disk.is_none() || self.check_writable("emb_read", 0).is_err() {
            return;
        }
        let rows = &mut *self.exclusive();
        let indices = rows.find(engine, ids);
        _ = rows.make_ready(engine.executor, &indices, Growth::NONE);
        if let (true, Some(tier)) = (ahead, &mut rows.tier) {
            tier.residence.expect_pinned();
        }
        rows.settle();
    }

    pub(super) fn read_locked(
        &self,
        rows: &Rows,
        engine: Engine<'_>,
        ids: &[i64],
        out: &mut [f32],
        places: &mut [u32],
    ) -> Result<()> {
        self.read_found(rows, &rows.ids, engine, ids, out, places)
    }

    /// Reads as [`Table::read`] does, of the rows that `found_by` has.
    pub(super) fn read_found(
        &self,
        rows: &Rows,
        found_by: &IdMap,
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
        let chunks = chunks.map(|(ids, out)| (ids, out, of_chunks.next().unwrap_or_default())).enumerate();
        let source = RowSource { ids: found_by, ..rows.source(self, engine.simd, &failure) };
        let sum = AtomicU64::new(0);
        for_each_mut(engine.executor, chunks, |(number, (ids, out, places))| {
            with_row_type!(self.config.dtype, row_type => {
                engine.simd.run(ReadRows { source, ids, out, places: &mut *places, row_type });
            });
            engine.simd.run(AddTagSum { first: number * chunk, ids, places, sum: &sum });
        });
        places::seal(places, ids.len(), places::tag(rows.epoch, sum.into_inner(), ids.len()));
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Returns the values of a slot for each id, zeros where it has no row; `None` if there is no such slot. They go with
    /// the rows that are read: steps that left rows alone count.
    pub(crate) fn read_slot(&self, name: &str, ids: &[i64]) -> Result<Option<Vec<f32>>> {
        self.check_ids("hashtable_slot", ids)?;
        let rows = self.shared();
        let Some((slot, words)) = rows.storage.slot(name) else { return Ok(None) };
        rows.check_whole()?;
        let idle = self.optimizer.idle(rows.kept, rows.step);
        let mut values = vec![0.0; slot.width * ids.len()];
        let (mut scratch, mut settled) = (Vec::new(), Vec::new());
        for (id, values) in ids.iter().zip(values.chunks_exact_mut(slot.width)) {
            let Some(index) = rows.ids.find(*id) else { continue };
            let record = self.settled(idle, rows.record(index, &mut scratch)?, &mut settled);
            slot.widen(&record[words.clone()], values);
        }
        Ok(Some(values))
    }

    /// Returns a record with its slots brought up to `idle`, in `settled` if that changes them.
    pub(super) fn settled<'a>(
        &self,
        idle: Option<Idle>,
        record: &'a [f32],
        settled: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        let Some(idle) = idle else { return record };
        record.clone_into(settled);
        // Of tables that catch up the weights lie as they are.
        self.optimizer.settle(idle, &mut settled[self.config.dim..]);
        settled
    }

    /// Returns what brings rows up to now that the last steps left alone, if steps change those.
    pub(super) fn idle_rows(&self, rows: &Rows) -> Option<IdleRows> {
        let idle = self.optimizer.idle(rows.kept, rows.step)?;
        Some(IdleRows::new(idle, &rows.storage.last_slot()))
    }
}

/// Reads rows of several tables. Small reads share the threads; a large one has them for itself.
///
/// # Errors
/// That of the first table that has one.
pub(crate) fn read_each<'a, 'r: 'a>(
    engine: Engine<'_>,
    reads: impl Iterator<Item = (&'a Arc<Table>, &'a mut TableRead<'r>)>,
) -> Result<()> {
    struct One<'a, 'r> {
        table: &'a Table,
        read: &'a mut TableRead<'r>,
        result: Result<()>,
    }
    let mut all: Vec<One<'_, '_>> = reads.map(|(table, read)| One { table, read, result: Ok(()) }).collect();
    // Loops do not nest: small reads are the items of one loop, a large one is a loop of its own.
    let (large, small): (Vec<_>, Vec<_>) =
        all.iter_mut().partition(|one| parts_for(engine.executor, one.read.rows.len()) > 1);
    let read = |engine: Engine<'_>, one: &mut One<'_, '_>| {
        one.result = one.table.read(engine, one.read.ids, one.read.rows, &mut []);
    };
    large.into_iter().for_each(|one| read(engine, one));
    let alone = Engine { executor: &Serial, ..engine };
    match parts_for(engine.executor, small.iter().map(|one| one.read.rows.len()).sum()) {
        1 => small.into_iter().for_each(|one| read(alone, one)),
        _ => for_each_mut(engine.executor, small.into_iter(), |one| read(alone, one)),
    }
    all.into_iter().try_for_each(|one| one.result)
}

impl Rows {
    /// Returns what lookups read; `failure` gets what keeps them from reading rows on disk.
    pub(super) fn source<'a>(
        &'a self,
        table: &'a Table,
        simd: Simd,
        failure: &'a OnceLock<Error>,
    ) -> RowSource<'a> {
        let cold = self.tier.as_ref().map(|tier| ColdRows { tier, failure });
        RowSource {
            ids: &self.ids,
            storage: &self.storage,
            initializer: &table.initializer,
            row_type: table.row_type(simd),
            shared: self.shared.as_deref(),
            dim: table.config.dim,
            cold,
            idle: table.idle_rows(self),
        }
    }
}
