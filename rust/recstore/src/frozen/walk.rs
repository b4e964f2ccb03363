//! Kernels over the rows of ids: each step of a lookup asks for the memory of the next one, a group of ids ahead.
//!
//! ```text
//! group 2: the home of each id, asks for its line
//! group 1: which id of the line it is, asks for its row
//! group 0: takes the rows
//! ```

use std::sync::OnceLock;

use super::table::{FrozenTable, NO_ROW};
use crate::kernel::elements::with_row_len;
use crate::kernel::simd::{Kernel, Lanes};
use crate::rows::pooling::{AddRows, Pooling};
use crate::{Error, Result};

/// The ids whose memory is asked for together.
const GROUP: usize = 32;

/// Takes the rows of ids in their order.
trait TakeRows {
    /// Takes the rows of a group; `first` is the place of its first id among all.
    fn take(&mut self, table: &FrozenTable, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()>;
}

/// Finds the rows of ids and lets `taker` take them.
#[inline(always)]
fn walk(table: &FrozenTable, lanes: impl Lanes, ids: &[i64], taker: &mut impl TakeRows) -> Result<()> {
    let (mut homes, mut numbers) = ([[0; GROUP]; 2], [[NO_ROW; GROUP]; 2]);
    for step in 0..ids.len().div_ceil(GROUP) + 2 {
        let group = |behind: usize| {
            let group = step.checked_sub(behind)?;
            ids.chunks(GROUP).nth(group).map(|ids| (group % 2, ids))
        };
        if let Some((side, ids)) = group(0) {
            for (home, &id) in homes[side].iter_mut().zip(ids) {
                *home = table.seek(id);
            }
        }
        if let Some((side, ids)) = group(1) {
            for ((number, &home), &id) in numbers[side].iter_mut().zip(&homes[side]).zip(ids) {
                *number = table.number(lanes, home, id)?;
                if *number != NO_ROW {
                    table.prefetch_row(*number);
                }
            }
        }
        if let Some((side, ids)) = group(2) {
            taker.take(table, (step - 2) * GROUP, ids, &numbers[side][..ids.len()])?;
        }
    }
    Ok(())
}

/// Writes the row of each id.
pub(super) struct ReadRows<'a> {
    pub(super) table: &'a FrozenTable,
    pub(super) ids: &'a [i64],
    pub(super) rows: &'a mut [f32],
    pub(super) failure: &'a OnceLock<Error>,
}

impl Kernel for ReadRows<'_> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        if let Err(error) = walk(self.table, lanes, self.ids, &mut self) {
            _ = self.failure.set(error);
        }
    }
}

impl TakeRows for ReadRows<'_> {
    #[inline(always)]
    fn take(&mut self, table: &FrozenTable, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()> {
        let dim = table.dim();
        let rows = self.rows[first * dim..].chunks_mut(dim);
        for ((id, &number), row) in ids.iter().zip(numbers).zip(rows) {
            decode(table, *id, number, row)?;
        }
        Ok(())
    }
}

/// Pools the bags of one table in one piece.
pub(super) struct PoolRows<'a> {
    pub(super) table: &'a FrozenTable,
    pub(super) ids: &'a [i64],
    pub(super) first_position: usize,
    pub(super) pooling: Pooling<'a>,
    /// Of the table's dim.
    pub(super) row: Vec<f32>,
    pub(super) failure: &'a OnceLock<Error>,
}

impl Kernel for PoolRows<'_> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        if let Err(error) = walk(self.table, lanes, self.ids, &mut self) {
            _ = self.failure.set(error);
            return;
        }
        self.pooling.finish();
    }
}

impl TakeRows for PoolRows<'_> {
    #[inline(always)]
    fn take(&mut self, table: &FrozenTable, first: usize, ids: &[i64], numbers: &[usize]) -> Result<()> {
        if !self.pooling.adds_rows_up() {
            return self.take_one_by_one(table, first, ids, numbers);
        }
        with_row_len!(
            table.dim(),
            add_up(self, table, first, ids, numbers),
            self.take_one_by_one(table, first, ids, numbers)
        )
    }
}

impl PoolRows<'_> {
    #[inline(always)]
    fn take_one_by_one(
        &mut self,
        table: &FrozenTable,
        first: usize,
        ids: &[i64],
        numbers: &[usize],
    ) -> Result<()> {
        for (place, (&id, &number)) in ids.iter().zip(numbers).enumerate() {
            decode(table, id, number, &mut self.row)?;
            self.pooling.take(self.first_position + first + place, &self.row);
        }
        Ok(())
    }
}

/// Adds up rows of a known length, which are decoded to registers.
#[inline(always)]
fn add_up<const LEN: usize>(
    own: &mut PoolRows<'_>,
    table: &FrozenTable,
    first: usize,
    ids: &[i64],
    numbers: &[usize],
) -> Result<()> {
    let mut rows = Numbered { table, ids, numbers, row: &mut own.row, failure: None };
    own.pooling.add_each::<LEN>(own.first_position + first, ids.len(), &mut rows);
    rows.failure.map_or(Ok(()), Err)
}

/// The rows of numbers.
struct Numbered<'a> {
    table: &'a FrozenTable,
    ids: &'a [i64],
    numbers: &'a [usize],
    row: &'a mut [f32],
    failure: Option<Error>,
}

impl<const LEN: usize> AddRows<LEN> for Numbered<'_> {
    #[inline(always)]
    fn add(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        match self.numbers[place] {
            NO_ROW => self.add_initial(sum, place, weight),
            number => match self.table.row(number) {
                Ok(bytes) => self.table.encoding().add_to(sum, weight, bytes),
                Err(error) => self.failure = Some(error),
            },
        }
    }
}

impl Numbered<'_> {
    #[inline(never)]
    fn add_initial<const LEN: usize>(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        self.table.initializer().fill(&self.ids[place..=place], self.row);
        sum.iter_mut().zip(&*self.row).for_each(|(sum, value)| *sum += weight * value);
    }
}

/// Writes the row of a number, or the initial one of an id.
#[inline(always)]
fn decode(table: &FrozenTable, id: i64, number: usize, row: &mut [f32]) -> Result<()> {
    if number == NO_ROW {
        table.initializer().fill(&[id], row);
    } else {
        table.encoding().decode(table.row(number)?, row);
    }
    Ok(())
}
