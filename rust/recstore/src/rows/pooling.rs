//! Pools the rows of bags of ids: sum, mean or maximum, in one pass over the rows.

use std::ops::Range;
use std::str::FromStr;

use crate::kernel::cache::{Cache, prefetch, prefetch_later_known, prefetch_near, prefetch_near_known};
use crate::kernel::elements::{AddScaled, ElementRule, for_each_element, with_row_len};
use crate::kernel::parallel::{Executor, for_each_mut, piece_size};
use crate::{Error, Result};

/// How many bags ahead the row that a bag is pooled into is loaded.
const ROWS_AHEAD: usize = 32;

/// How the rows of a bag become one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingMode {
    /// Their sum, each row times its weight where weights are given.
    Sum,
    /// That sum divided by the number of rows; an empty bag gives zeros.
    Mean,
    /// The maximum of every column; an empty bag gives zeros. Takes no weights.
    Max,
}

impl FromStr for PoolingMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "sum" => Ok(Self::Sum),
            "mean" => Ok(Self::Mean),
            "max" => Ok(Self::Max),
            _ => Err(bag_error(format!("the pooling mode must be sum, mean or max, got \"{name}\""))),
        }
    }
}

/// Bags of ids of one or several tables: bag b holds the ids from `offsets[b]` up to `offsets[b + 1]`.
///
/// With F tables and B bags each, the bags of the first table come first, then those of the second.
#[derive(Debug, Clone, Copy)]
pub struct BagInput<'a> {
    /// The ids of all bags, one after another.
    pub ids: &'a [i64],
    /// One more than there are bags, rising from 0 to the number of ids.
    pub offsets: &'a [i64],
    /// How rows are pooled.
    pub mode: PoolingMode,
    /// One factor an id, for sum and mean.
    pub per_sample_weights: Option<&'a [f32]>,
    /// An id that no bag counts.
    pub padding_idx: Option<i64>,
}

impl<'a> BagInput<'a> {
    /// Checks offsets and weights, and that every one of `tables` tables has as many bags.
    ///
    /// # Errors
    /// [`Error::InvalidBag`] or [`Error::LengthMismatch`].
    pub(crate) fn validate(&self, tables: usize) -> Result<()> {
        check_offsets(self.offsets, self.ids.len())?;
        let bags = self.offsets.len() - 1;
        if tables == 0 || !bags.is_multiple_of(tables) {
            return Err(bag_error(format!("{tables} tables need as many bags each, got {bags} bags")));
        }
        self.validate_weights()
    }

    fn validate_weights(&self) -> Result<()> {
        let Some(weights) = self.per_sample_weights else {
            return Ok(());
        };
        if self.mode == PoolingMode::Max {
            return Err(bag_error("per_sample_weights go with sum and mean, not with max".to_owned()));
        }
        if weights.len() != self.ids.len() {
            return Err(Error::LengthMismatch {
                operation: "emb_bag",
                what: "per_sample_weights, one an id".to_owned(),
                expected: self.ids.len(),
                actual: weights.len(),
            });
        }
        Ok(())
    }

    /// The number of bags of each of `tables` tables.
    pub(crate) fn bags_a_table(&self, tables: usize) -> usize {
        self.offsets.len().saturating_sub(1) / tables.max(1)
    }

    /// Returns the ids of some bags.
    pub(crate) fn ids_of(&self, bags: Range<usize>) -> &'a [i64] {
        &self.ids[self.offsets[bags.start] as usize..self.offsets[bags.end] as usize]
    }
}

/// Where the pooled rows of a table go: some columns of a matrix.
#[derive(Debug)]
pub(crate) struct PooledColumns<'a> {
    /// The matrix, a row a bag.
    pub(crate) pooled: &'a mut [f32],
    /// For the maximum the positions of those who hold it, of the same shape; else empty.
    pub(crate) max_positions: &'a mut [i64],
    /// The elements of a row of the matrix.
    pub(crate) stride: usize,
    /// The first column.
    pub(crate) first: usize,
    /// The number of columns.
    pub(crate) dim: usize,
}

impl PooledColumns<'_> {
    #[inline(always)]
    fn row(&mut self, bag: usize) -> &mut [f32] {
        &mut self.pooled[bag * self.stride + self.first..][..self.dim]
    }

    /// Asks for a row that is to be written.
    #[inline(always)]
    fn prefetch(&self, bag: usize) {
        let start = bag * self.stride + self.first;
        if let Some(row) = self.pooled.get(start..start + self.dim) {
            prefetch(row, Cache::First);
        }
    }

    #[inline(always)]
    fn rows(&mut self, bag: usize) -> (&mut [f32], &mut [i64]) {
        let start = bag * self.stride + self.first;
        let positions = match self.max_positions.is_empty() {
            true => &mut [][..],
            false => &mut self.max_positions[start..][..self.dim],
        };
        (&mut self.pooled[start..][..self.dim], positions)
    }
}

/// Some bags of every table, and where they go.
pub(crate) struct Piece<'a> {
    bags: Range<usize>,
    bags_a_table: usize,
    stride: usize,
    pooled: &'a mut [f32],
    max_positions: &'a mut [i64],
}

impl Piece<'_> {
    /// Returns the bags of a table among all, and the columns that they are pooled into.
    pub(crate) fn of_table(
        &mut self,
        number: usize,
        first: usize,
        dim: usize,
    ) -> (Range<usize>, PooledColumns<'_>) {
        let before = number * self.bags_a_table;
        let columns = PooledColumns {
            pooled: &mut *self.pooled,
            max_positions: &mut *self.max_positions,
            stride: self.stride,
            first,
            dim,
        };
        (before + self.bags.start..before + self.bags.end, columns)
    }
}

/// Cuts the bags of tables of some dims into pieces, which threads share.
pub(crate) fn for_each_piece(
    executor: &dyn Executor,
    dims: &[usize],
    input: &BagInput<'_>,
    pooled: &mut [f32],
    max_positions: &mut [i64],
    pool: impl Fn(Piece<'_>) + Sync,
) {
    let (bags, stride) = (input.bags_a_table(dims.len()), dims.iter().sum::<usize>());
    let floats_read = input.ids.len() * stride / dims.len();
    // The work of a bag is its reads and its writes: bags of many ids make pieces of fewer bags.
    let size = piece_size(executor, bags, stride + floats_read / bags.max(1));
    let mut positions = max_positions.chunks_mut(size * stride);
    let pieces = pooled.chunks_mut(size * stride).enumerate().map(|(piece, pooled)| Piece {
        bags: piece * size..bags.min((piece + 1) * size),
        bags_a_table: bags,
        stride,
        pooled,
        max_positions: positions.next().unwrap_or_default(),
    });
    for_each_mut(executor, pieces, pool);
}

/// Begins a sum with a row times a weight.
struct StartScaled(f32);

impl ElementRule<0> for StartScaled {
    #[inline(always)]
    fn step(&self, _: f32, _: [f32; 0], input: f32) -> (f32, [f32; 0]) {
        // The sum begins at zero, as in `add_each`: both ways give 0.0 for -0.0.
        (0.0 + self.0 * input, [])
    }
}

/// Takes the rows of consecutive bags in the order of their ids and pools them.
pub(crate) struct Pooling<'a> {
    input: BagInput<'a>,
    columns: PooledColumns<'a>,
    /// The bags among those of the input.
    bags: Range<usize>,
    /// The bag that rows go to, counted from the first.
    bag: usize,
    /// Where its ids end.
    end: usize,
    /// The rows it has taken.
    taken: usize,
}

impl<'a> Pooling<'a> {
    /// Pools `bags` of `input` into the rows of `columns`, the first bag into the first row.
    pub(crate) fn new(input: BagInput<'a>, bags: Range<usize>, columns: PooledColumns<'a>) -> Self {
        let end = bags.clone().next().map_or(0, |bag| input.offsets[bag + 1] as usize);
        Self { input, columns, bags, bag: 0, end, taken: 0 }
    }

    /// Takes the row of the id at `position` among all ids.
    #[inline(always)]
    pub(crate) fn take(&mut self, position: usize, row: &[f32]) {
        while position >= self.end {
            self.close();
        }
        if self.input.padding_idx.is_some() && self.input.padding_idx == Some(self.input.ids[position]) {
            return;
        }
        let is_first = self.taken == 0;
        self.taken += 1;
        if self.input.mode == PoolingMode::Max {
            let (maximum, positions) = self.columns.rows(self.bag);
            return take_maximum(maximum, positions, row, position, is_first);
        }
        let weight = self.input.per_sample_weights.map_or(1.0, |weights| weights[position]);
        let sum = self.columns.row(self.bag);
        if is_first {
            for_each_element(&StartScaled(weight), sum, [], row);
        } else {
            for_each_element(&AddScaled(weight), sum, [], row);
        }
    }

    /// Takes the rows of the ids from `position` on. `upcoming` are the same rows and those taken after them, to ask for.
    #[inline(always)]
    pub(crate) fn take_each(&mut self, position: usize, rows: &[&[f32]], upcoming: &[&[f32]]) {
        if !self.adds_rows_up() {
            return self.take_one_by_one(position, rows, upcoming);
        }
        with_row_len!(
            self.columns.dim,
            add_up(self, position, rows, upcoming),
            self.take_one_by_one(position, rows, upcoming)
        );
    }

    /// Whether [`Pooling::take_each`] asks for a row that is taken later with each that it adds.
    #[inline(always)]
    pub(crate) fn asks_with_each(&self) -> bool {
        self.adds_rows_up() && with_row_len!(self.columns.dim, asks_with_each(), false)
    }

    /// Whether every row adds to its bag's sum.
    #[inline(always)]
    pub(crate) fn adds_rows_up(&self) -> bool {
        self.input.mode != PoolingMode::Max && self.input.padding_idx.is_none()
    }

    /// Takes `count` rows of a known length from `position` on, where [`Pooling::adds_rows_up`]; a bag's sum is kept in
    /// registers.
    #[inline(always)]
    pub(crate) fn add_each<const LEN: usize>(
        &mut self,
        position: usize,
        count: usize,
        rows: &mut impl AddRows<LEN>,
    ) {
        let (input, mut place) = (self.input, 0);
        while place < count {
            while position + place >= self.end {
                self.close();
            }
            let own = place..count.min(self.end - position);
            let row = self.columns.row(self.bag);
            let mut sum = [0.0; LEN];
            // Rows come in groups, and a group may end within a bag: its sum goes on from memory.
            if self.taken > 0 {
                sum.copy_from_slice(row);
            }
            for place in own.clone() {
                match input.per_sample_weights {
                    // A product with 1 is exact, so bags without weights share this loop.
                    None => rows.add(&mut sum, place, 1.0),
                    Some(weights) => rows.add(&mut sum, place, weights[position + place]),
                }
            }
            row.copy_from_slice(&sum);
            self.taken += own.len();
            place = own.end;
        }
    }

    #[inline(always)]
    fn take_one_by_one(&mut self, position: usize, rows: &[&[f32]], upcoming: &[&[f32]]) {
        for (place, row) in rows.iter().enumerate() {
            prefetch_near(upcoming, place, row.len());
            self.take(position + place, row);
        }
    }

    /// Ends the current bag.
    #[inline(always)]
    fn close(&mut self) {
        let taken = std::mem::take(&mut self.taken);
        let (row, positions) = self.columns.rows(self.bag);
        if taken == 0 {
            row.fill(0.0);
            positions.fill(-1);
        } else if self.input.mode == PoolingMode::Mean {
            for value in row {
                *value /= taken as f32;
            }
        }
        self.bag += 1;
        // A table's output rows lie one row of all tables apart, which no hardware prefetcher follows far:
        // without this a forward of 26 tables took 4.1 ms, with it 3.8.
        self.columns.prefetch(self.bag + ROWS_AHEAD);
        let next = self.bags.start + self.bag + 1;
        self.end = self.input.offsets.get(next).map_or(usize::MAX, |&end| end as usize);
    }

    /// Ends all bags that are left.
    #[inline(always)]
    pub(crate) fn finish(mut self) {
        while self.bag < self.bags.len() {
            self.close();
        }
    }
}

/// Adds rows of a known length to sums that are kept in registers. `add` must be `#[inline(always)]`, which no closure can
/// be: what is not inlined into a kernel is not compiled for its instructions.
pub(crate) trait AddRows<const LEN: usize> {
    /// Adds the row at a place, times a weight.
    fn add(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32);
}

/// Rows that lie in memory as they are added.
struct Rows<'a> {
    rows: &'a [&'a [f32]],
    /// The same rows and those taken after them, to ask for.
    upcoming: &'a [&'a [f32]],
}

impl<const LEN: usize> AddRows<LEN> for Rows<'_> {
    #[inline(always)]
    fn add(&mut self, sum: &mut [f32; LEN], place: usize, weight: f32) {
        if asks_with_each::<LEN>() {
            prefetch_later_known::<LEN>(self.upcoming, place);
        }
        prefetch_near_known::<LEN>(self.upcoming, place);
        if let Some(row) = self.rows[place].first_chunk::<LEN>() {
            add_known(sum, weight, row);
        }
    }
}

/// Whether a row that is taken later is asked for with each that is added: with rows of one line, of which so little is
/// done that asking for a group of them waits.
#[inline(always)]
const fn asks_with_each<const LEN: usize>() -> bool {
    LEN <= 16
}

/// Adds up rows of a known length.
#[inline(always)]
fn add_up<const LEN: usize>(
    pooling: &mut Pooling<'_>,
    position: usize,
    rows: &[&[f32]],
    upcoming: &[&[f32]],
) {
    pooling.add_each::<LEN>(position, rows.len(), &mut Rows { rows, upcoming });
}

/// Adds a row times a weight to a sum that is kept in registers.
#[inline(always)]
pub(crate) fn add_known<const LEN: usize>(sum: &mut [f32; LEN], weight: f32, row: &[f32; LEN]) {
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum += weight * value;
    }
}

/// Checks that offsets start at 0, never fall and end at the number of ids.
///
/// # Errors
/// [`Error::InvalidBag`] names the offset, its position and what was expected.
pub fn check_offsets(offsets: &[i64], num_ids: usize) -> Result<()> {
    let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
        return Err(bag_error("offsets must hold at least the end of the last bag, got none".to_owned()));
    };
    if first != 0 {
        return Err(bag_error(format!("offsets must start at 0, got {first}")));
    }
    let falls = |pair: &[i64]| pair[0] > pair[1];
    // Looked through to the end: a search that may stop at every pair takes half as long again, or more.
    let any_falls = offsets.windows(2).fold(false, |found, pair| found | falls(pair));
    if any_falls && let Some(at) = offsets.iter().position(|&offset| offset > num_ids as i64) {
        // Where they fall, the number of ids may stand behind those that a caller gave.
        let beyond = offsets[at];
        return Err(bag_error(format!(
            "offsets must not exceed the number of ids, {num_ids}, got {beyond} at position {at}"
        )));
    }
    if any_falls && let Some(bag) = offsets.windows(2).position(falls) {
        let (before, after) = (offsets[bag], offsets[bag + 1]);
        return Err(bag_error(format!(
            "offsets must not fall, got {after} after {before} at position {}",
            bag + 1
        )));
    }
    if last as usize != num_ids {
        return Err(bag_error(format!("offsets must end at the {num_ids} ids, got {last}")));
    }
    Ok(())
}

#[inline(always)]
fn take_maximum(maxima: &mut [f32], positions: &mut [i64], row: &[f32], position: usize, is_first: bool) {
    for ((maximum, at), &value) in maxima.iter_mut().zip(positions).zip(row) {
        if is_first || value > *maximum {
            *maximum = value;
            *at = position as i64;
        }
    }
}

fn bag_error(message: String) -> Error {
    Error::InvalidBag { message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bags<'a>(offsets: &'a [i64], mode: PoolingMode) -> BagInput<'a> {
        BagInput { ids: &[1, 2, 3], offsets, mode, per_sample_weights: None, padding_idx: Some(3) }
    }

    /// Pools rows of one element into the second of three columns.
    fn pool(input: BagInput<'_>) -> (Vec<f32>, Vec<i64>) {
        input.validate(1).unwrap();
        let count = input.bags_a_table(1);
        let (mut pooled, mut at) = (vec![9.0; 3 * count], vec![9; 3 * count]);
        let max_positions = if input.mode == PoolingMode::Max { &mut at[..] } else { &mut [] };
        let columns = PooledColumns { pooled: &mut pooled, max_positions, stride: 3, first: 1, dim: 1 };
        let mut pooling = Pooling::new(input, 0..count, columns);
        for (position, &id) in input.ids.iter().enumerate() {
            pooling.take(position, &[id as f32 - 10.0]);
        }
        pooling.finish();
        assert!(pooled.iter().step_by(3).chain(pooled.iter().skip(2).step_by(3)).all(|&value| value == 9.0));
        let second = |number: &usize| number % 3 == 1;
        let columns = (0..3 * count).filter(second);
        columns.map(|place| (pooled[place], at[place])).unzip()
    }

    #[test]
    fn bags_are_pooled_without_padding() {
        let offsets = [0, 2, 2, 3];
        assert_eq!(pool(bags(&offsets, PoolingMode::Sum)).0, [-17.0, 0.0, 0.0]);
        assert_eq!(pool(bags(&offsets, PoolingMode::Mean)).0, [-8.5, 0.0, 0.0]);
        assert_eq!(pool(bags(&offsets, PoolingMode::Max)), (vec![-8.0, 0.0, 0.0], vec![1, -1, -1]));
    }

    #[test]
    fn weights_scale_rows() {
        let weights = [2.0, 0.5, 1.0];
        let input = BagInput { per_sample_weights: Some(&weights), ..bags(&[0, 3], PoolingMode::Sum) };
        assert_eq!(pool(input).0, [-22.0]);
    }

    #[test]
    fn bad_offsets_and_weights_are_refused() {
        let message = |input: BagInput<'_>| input.validate(1).unwrap_err().to_string();
        assert!(message(bags(&[], PoolingMode::Sum)).contains("got none"));
        assert!(message(bags(&[1, 3], PoolingMode::Sum)).contains("start at 0, got 1"));
        assert!(message(bags(&[0, 2, 1], PoolingMode::Sum)).contains("got 1 after 2 at position 2"));
        assert!(message(bags(&[0, 4], PoolingMode::Sum)).contains("the 3 ids, got 4"));
        let weighted = |mode| BagInput { per_sample_weights: Some(&[1.0]), ..bags(&[0, 3], mode) };
        assert!(message(weighted(PoolingMode::Max)).contains("not with max"));
        assert!(message(weighted(PoolingMode::Sum)).contains("expected 3 per_sample_weights"));
        assert!("median".parse::<PoolingMode>().unwrap_err().to_string().contains("median"));
        let uneven = bags(&[0, 1, 2, 3], PoolingMode::Sum).validate(2).unwrap_err().to_string();
        assert!(uneven.contains("2 tables need as many bags each, got 3 bags"), "{uneven}");
    }
}
