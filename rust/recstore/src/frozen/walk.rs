//! Kernels over the rows of ids, in runs: each pass over a run asks for the memory of the next pass.
//!
//! ```text
//! 1. the bucket of each id, asks for its line
//! 2. which id of the line it is, asks for its row
//! 3. takes the rows
//! ```

use std::sync::OnceLock;

use super::source::{NO_ROW, RowSource};
use crate::kernel::elements::with_row_len;
use crate::kernel::parallel::{Executor, for_each_mut, piece_size};
use crate::kernel::simd::{Kernel, Lanes, ScalarLanes, Simd};
use crate::rows::pooling::{AddRows, Pooling};
use crate::{Error, Result};

/// The ids of a run. With fewer a pass ends before memory answers; with more, lines leave the first cache again.
const RUN: usize = 32;

/// Takes the rows of ids in their order.
trait TakeRows<S> {
    /// Takes the rows of a group; `first` is the place of its first id among all.
    fn take(&mut self, source: S, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()>;
}

/// Finds the rows of ids and lets `taker` take them.
#[inline(always)]
fn walk<S: RowSource>(source: S, lanes: impl Lanes, ids: &[i64], taker: &mut impl TakeRows<S>) -> Result<()> {
    let (mut buckets, mut numbers) = ([S::Bucket::default(); RUN], [NO_ROW; RUN]);
    for (run, ids) in ids.chunks(RUN).enumerate() {
        let (buckets, numbers) = (&mut buckets[..ids.len()], &mut numbers[..ids.len()]);
        // Pass after pass over a run. Groups that overlap were as quick and harder to follow.
        for (bucket, &id) in buckets.iter_mut().zip(ids) {
            *bucket = source.seek(id);
        }
        for ((number, &bucket), &id) in numbers.iter_mut().zip(&*buckets).zip(ids) {
            *number = source.number(lanes, bucket, id)?;
            if *number != NO_ROW {
                source.prefetch_row(*number);
            }
        }
        taker.take(source, run * RUN, ids, numbers)?;
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
        let found = source.number(ScalarLanes, source.seek(id), id)?;
        *number = if found == NO_ROW { -1 } else { found as i64 };
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

impl<S: RowSource> TakeRows<S> for ReadRows<'_, S> {
    #[inline(always)]
    fn take(&mut self, source: S, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()> {
        let dim = source.dim();
        let rows = self.rows[first * dim..].chunks_mut(dim);
        for ((id, &number), row) in ids.iter().zip(numbers).zip(rows) {
            decode(source, *id, number, row)?;
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

impl<S: RowSource> TakeRows<S> for PoolRows<'_, S> {
    #[inline(always)]
    fn take(&mut self, source: S, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()> {
        if !self.pooling.adds_rows_up() {
            return self.take_one_by_one(first, ids, numbers);
        }
        with_row_len!(
            source.dim(),
            add_up(self, first, ids, numbers),
            self.take_one_by_one(first, ids, numbers)
        )
    }
}

impl<S: RowSource> PoolRows<'_, S> {
    #[inline(always)]
    fn take_one_by_one(&mut self, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()> {
        for (place, (&id, &number)) in ids.iter().zip(numbers).enumerate() {
            decode(self.source, id, number, &mut self.row)?;
            self.pooling.take(self.first_position + first + place, &self.row);
        }
        Ok(())
    }
}

/// Adds up rows of a known length, which are decoded to registers.
#[inline(always)]
fn add_up<const LEN: usize>(
    own: &mut PoolRows<'_, impl RowSource>,
    first: usize,
    ids: &[i64],
    numbers: &[usize],
) -> Result<()> {
    let mut rows = Numbered { source: own.source, ids, numbers, row: &mut own.row, failure: None };
    own.pooling.add_each::<LEN>(own.first_position + first, ids.len(), &mut rows);
    rows.failure.map_or(Ok(()), Err)
}

/// The rows of numbers.
struct Numbered<'a, S> {
    source: S,
    ids: &'a [i64],
    numbers: &'a [usize],
    row: &'a mut [f32],
    failure: Option<Error>,
}

impl<S: RowSource, const LEN: usize> AddRows<LEN> for Numbered<'_, S> {
    #[inline(always)]
    fn add(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        match self.numbers[place] {
            NO_ROW => self.add_initial(sum, place, weight),
            number => match self.source.row(number) {
                Ok(bytes) => self.source.encoding().add_to(sum, weight, bytes),
                // The loop goes on, as `add` gives nothing back: the call fails after it.
                Err(error) => self.failure = Some(error),
            },
        }
    }
}

impl<S: RowSource> Numbered<'_, S> {
    #[inline(never)]
    fn add_initial<const LEN: usize>(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        self.source.fill_initial(self.ids[place], self.row);
        sum.iter_mut().zip(&*self.row).for_each(|(sum, value)| *sum += weight * value);
    }
}

/// Writes the row of a number, or the initial one of an id.
#[inline(always)]
fn decode(source: impl RowSource, id: i64, number: usize, row: &mut [f32]) -> Result<()> {
    if number == NO_ROW {
        source.fill_initial(id, row);
    } else {
        source.encoding().decode(source.row(number)?, row);
    }
    Ok(())
}
