//! Kernels over the rows of ids, in runs: each pass over a run asks for the memory of the next pass.
//!
//! ```text
//! 1. asks for what says where each row is
//! 2. the number of each row, asks for it
//! 3. takes the rows
//! ```

use std::sync::OnceLock;

use super::source::{NO_ROW, RowSource, row_of};
use crate::kernel::elements::with_row_len;
use crate::kernel::parallel::{Executor, for_each_mut, piece_size};
use crate::kernel::simd::{Kernel, Lanes, Simd};
use crate::rows::pooling::{AddRows, Pooling};
use crate::{Error, Result};

/// The ids of a run. With fewer a pass ends before memory answers; with more, lines leave the first cache again.
const RUN: usize = 32;

/// Some ids side by side, and the numbers of their rows.
#[derive(Clone, Copy)]
struct Run<'a> {
    /// The place of the first id among all.
    first: usize,
    ids: &'a [i64],
    numbers: &'a [usize],
}

/// Takes the rows of runs in their order.
trait TakeRows {
    fn take(&mut self, lanes: impl Lanes, run: Run<'_>) -> Result<()>;
}

/// Finds the rows of ids and lets `taker` take them.
#[inline(always)]
fn walk(source: impl RowSource, lanes: impl Lanes, ids: &[i64], taker: &mut impl TakeRows) -> Result<()> {
    let (mut hashes, mut numbers) = ([[0; RUN]; 2], [[NO_ROW; RUN]; 2]);
    let ids_of = |number: usize| &ids[(number * RUN).min(ids.len())..((number + 1) * RUN).min(ids.len())];
    // A run is sought while the one before it is found and the one before that is taken: each pass's memory has the time of
    // two others to come.
    for number in 0..ids.len().div_ceil(RUN) + 2 {
        let sought = ids_of(number);
        source.seek(sought, &mut hashes[number % 2][..sought.len()]);
        if let Some(number) = number.checked_sub(1) {
            let (ids, numbers) = (ids_of(number), &mut numbers[number % 2]);
            source.find(lanes, ids, &hashes[number % 2][..ids.len()], &mut numbers[..ids.len()])?;
            for &row in numbers[..ids.len()].iter().filter(|row| **row != NO_ROW) {
                source.prefetch_row(row);
            }
        }
        if let Some(number) = number.checked_sub(2) {
            let ids = ids_of(number);
            let numbers = &numbers[number % 2][..ids.len()];
            taker.take(lanes, Run { first: number * RUN, ids, numbers })?;
        }
    }
    Ok(())
}

/// Writes the row of each id to `rows`, in pieces that threads share.
///
/// # Errors
/// [`Error::Frozen`]: a byte that was read was changed.
pub(super) fn read(
    source: impl RowSource,
    simd: Simd,
    executor: &dyn Executor,
    ids: &[i64],
    rows: &mut [f32],
) -> Result<()> {
    let (dim, failure) = (source.dim(), OnceLock::new());
    let size = piece_size(executor, ids.len(), dim);
    let pieces = ids.chunks(size).zip(rows.chunks_mut(size * dim));
    for_each_mut(executor, pieces, |(ids, rows)| {
        simd.run(ReadRows { source, ids, rows, failure: &failure });
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Writes the number of each id's row to `numbers`, -1 where it has none.
///
/// # Errors
/// As [`read`].
pub(super) fn row_numbers(source: impl RowSource, ids: &[i64], numbers: &mut [i64]) -> Result<()> {
    numbers.iter_mut().zip(ids).try_for_each(|(number, &id)| {
        *number = row_of(source, id)?.map_or(-1, |(number, _)| number as i64);
        Ok(())
    })
}

/// Writes the row of each id.
struct ReadRows<'a, S> {
    source: S,
    ids: &'a [i64],
    rows: &'a mut [f32],
    failure: &'a OnceLock<Error>,
}

impl<S: RowSource> Kernel for ReadRows<'_, S> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        if let Err(error) = walk(self.source, lanes, self.ids, &mut self) {
            // Several pieces may fail: the first error is that of the call.
            _ = self.failure.set(error);
        }
    }
}

impl<S: RowSource> TakeRows for ReadRows<'_, S> {
    #[inline(always)]
    fn take(&mut self, lanes: impl Lanes, run: Run<'_>) -> Result<()> {
        let dim = self.source.dim();
        let rows = self.rows[run.first * dim..].chunks_mut(dim);
        for ((&id, &number), row) in run.ids.iter().zip(run.numbers).zip(rows) {
            decode(lanes, self.source, id, number, row)?;
        }
        Ok(())
    }
}

/// Pools the bags of one table in one piece.
pub(super) struct PoolRows<'a, S> {
    pub(super) source: S,
    pub(super) ids: &'a [i64],
    pub(super) first_position: usize,
    pub(super) pooling: Pooling<'a>,
    /// Of the table's dim.
    pub(super) row: Vec<f32>,
    pub(super) failure: &'a OnceLock<Error>,
}

impl<S: RowSource> Kernel for PoolRows<'_, S> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        if let Err(error) = walk(self.source, lanes, self.ids, &mut self) {
            _ = self.failure.set(error);
            return;
        }
        self.pooling.finish();
    }
}

impl<S: RowSource> TakeRows for PoolRows<'_, S> {
    #[inline(always)]
    fn take(&mut self, lanes: impl Lanes, run: Run<'_>) -> Result<()> {
        if !self.pooling.adds_rows_up() {
            return self.take_one_by_one(lanes, run);
        }
        with_row_len!(self.source.dim(), add_up(self, lanes, run), self.take_one_by_one(lanes, run))
    }
}

impl<S: RowSource> PoolRows<'_, S> {
    #[inline(always)]
    fn take_one_by_one(&mut self, lanes: impl Lanes, run: Run<'_>) -> Result<()> {
        for (place, (&id, &number)) in run.ids.iter().zip(run.numbers).enumerate() {
            decode(lanes, self.source, id, number, &mut self.row)?;
            self.pooling.take(self.first_position + run.first + place, &self.row);
        }
        Ok(())
    }
}

/// Adds up rows of a known length, which are decoded to registers.
#[inline(always)]
fn add_up<const LEN: usize>(
    own: &mut PoolRows<'_, impl RowSource>,
    lanes: impl Lanes,
    run: Run<'_>,
) -> Result<()> {
    let mut rows = Numbered { lanes, source: own.source, run, row: &mut own.row, failure: None };
    own.pooling.add_each::<LEN>(own.first_position + run.first, run.ids.len(), &mut rows);
    rows.failure.map_or(Ok(()), Err)
}

/// The rows of a run.
struct Numbered<'a, L, S> {
    lanes: L,
    source: S,
    run: Run<'a>,
    row: &'a mut [f32],
    failure: Option<Error>,
}

impl<L: Lanes, S: RowSource, const LEN: usize> AddRows<LEN> for Numbered<'_, L, S> {
    #[inline(always)]
    fn add(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        let row = match self.run.numbers[place] {
            NO_ROW => Ok(None),
            number => self.source.row(number, self.run.ids[place]),
        };
        match row {
            Ok(Some(bytes)) => self.source.encoding().add_to(self.lanes, sum, weight, bytes),
            Ok(None) => self.add_initial(sum, place, weight),
            // The loop goes on, as `add` gives nothing back: the call fails after it.
            Err(error) => self.failure = Some(error),
        }
    }
}

impl<L, S: RowSource> Numbered<'_, L, S> {
    #[inline(never)]
    fn add_initial<const LEN: usize>(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        self.source.fill_initial(self.run.ids[place], self.row);
        sum.iter_mut().zip(&*self.row).for_each(|(sum, value)| *sum += weight * value);
    }
}

/// Writes the row of a number, or the initial one of an id.
#[inline(always)]
fn decode(lanes: impl Lanes, source: impl RowSource, id: i64, number: usize, row: &mut [f32]) -> Result<()> {
    match if number == NO_ROW { None } else { source.row(number, id)? } {
        Some(bytes) => source.encoding().decode(lanes, bytes, row),
        None => source.fill_initial(id, row),
    }
    Ok(())
}
