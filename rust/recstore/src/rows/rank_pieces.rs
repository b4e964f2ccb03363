//! Rows of several tables as ranks send them: for each rank the rows of each table, one table after the other, and a few
//! elements behind them for what a rank tells besides.

use std::ops::Range;

use crate::kernel::cache::{Cache, prefetch};
use crate::kernel::parallel::{Executor, for_each_mut, piece_size};
use crate::{Error, Result, check_offsets};

/// The elements behind the rows for a rank: a cache line.
pub const RANK_FLAGS: usize = 16;

/// How many positions ahead rows are asked for.
const AHEAD: usize = 8;

/// The ids that one rank has in one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPiece {
    /// Which of all ids they are.
    pub ids: Range<usize>,
    /// Which of all elements are their rows.
    pub floats: Range<usize>,
}

/// Where the rows of each rank and table lie.
#[derive(Debug)]
pub struct RankPieces<'a> {
    dims: &'a [usize],
    /// Those of the first rank first.
    pieces: Vec<RankPiece>,
    floats: usize,
}

impl<'a> RankPieces<'a> {
    /// Places as many ids as `counts` says, those of the first rank's tables first.
    pub fn new(counts: &[usize], dims: &'a [usize]) -> Self {
        let (mut pieces, mut ids, mut floats) = (Vec::with_capacity(counts.len()), 0, 0);
        for of_rank in counts.chunks(dims.len().max(1)) {
            for (&count, &dim) in of_rank.iter().zip(dims) {
                pieces.push(RankPiece { ids: ids..ids + count, floats: floats..floats + count * dim });
                (ids, floats) = (ids + count, floats + count * dim);
            }
            floats += RANK_FLAGS;
        }
        Self { dims, pieces, floats }
    }

    /// Returns how many ids there are.
    pub fn num_ids(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.ids.end)
    }

    /// Returns how many elements there are, flags included.
    pub fn num_floats(&self) -> usize {
        self.floats
    }

    /// Returns the pieces, those of the first rank first.
    pub fn all(&self) -> &[RankPiece] {
        &self.pieces
    }

    /// Returns the pieces of a table, one a rank.
    pub fn of_table(&self, table: usize) -> impl Iterator<Item = &RankPiece> {
        self.pieces.iter().skip(table).step_by(self.dims.len().max(1))
    }

    /// Returns the way from places in a table to its rows.
    fn finder(&self, table: usize) -> RowFinder {
        let mut finder = RowFinder { dim: self.dims[table], ends: Vec::new(), starts: Vec::new() };
        let mut end = 0;
        for piece in self.of_table(table) {
            finder.starts.push((end, piece.floats.start));
            end += piece.ids.len();
            finder.ends.push(end);
        }
        finder
    }

    /// Fills the flags of all ranks.
    pub fn fill_flags(&self, values: &mut [f32], value: f32) {
        for last in self.pieces.iter().skip(self.dims.len().max(1) - 1).step_by(self.dims.len().max(1)) {
            values[last.floats.end..][..RANK_FLAGS].fill(value);
        }
    }
}

/// Finds the row of a place among the ids of one table, those of the first rank first.
struct RowFinder {
    dim: usize,
    /// The place behind each rank's last one.
    ends: Vec<usize>,
    /// The first place of each rank, and where its row starts.
    starts: Vec<(usize, usize)>,
}

impl RowFinder {
    /// Returns the rank and the first element of a row; none for a place that no rank has.
    fn find(&self, place: i64) -> Option<(usize, usize)> {
        let place = usize::try_from(place).ok()?;
        let rank = self.ends.partition_point(|&end| end <= place);
        let &(first, start) = self.starts.get(rank)?;
        Some((rank, start + (place - first) * self.dim))
    }
}

/// Bags of several features, each over one table; bag `b` of feature `f` is number `f * bags + b`.
#[derive(Debug, Clone, Copy)]
pub struct RankBags<'a> {
    /// The table of each feature.
    pub tables: &'a [usize],
    /// The place of each id among those of its table.
    pub places: &'a [i64],
    /// Where the ids of each bag begin, and at the end where those of the last one end.
    pub offsets: &'a [i64],
}

impl RankBags<'_> {
    fn bags(&self) -> usize {
        (self.offsets.len() - 1) / self.tables.len().max(1)
    }

    fn ids(&self, feature: usize, bags: Range<usize>) -> Range<usize> {
        let first = feature * self.bags();
        self.offsets[first + bags.start] as usize..self.offsets[first + bags.end] as usize
    }

    /// Returns the first column of each feature, and at the end how many there are.
    fn columns(&self, dims: &[usize]) -> Vec<usize> {
        let mut columns = vec![0];
        columns.extend(self.tables.iter().scan(0, |sum, &table| {
            *sum += dims[table];
            Some(*sum)
        }));
        columns
    }

    /// Returns the rank of each id, and where its row starts.
    fn rows(&self, pieces: &RankPieces<'_>) -> Result<Vec<(usize, usize)>> {
        // First: all that follows takes slices by the offsets.
        check_offsets(self.offsets, self.places.len())?;
        let refused = |message: String| Error::InvalidBag { message };
        if self.tables.is_empty() || !(self.offsets.len() - 1).is_multiple_of(self.tables.len()) {
            let (bags, features) = (self.offsets.len() - 1, self.tables.len());
            return Err(refused(format!("{bags} bags are not as many for each of {features} features")));
        }
        if let Some(table) = self.tables.iter().find(|&&table| table >= pieces.dims.len()) {
            return Err(refused(format!("there are {} tables, got number {table}", pieces.dims.len())));
        }
        let mut rows = Vec::with_capacity(self.places.len());
        for (feature, &table) in self.tables.iter().enumerate() {
            let finder = pieces.finder(table);
            for position in self.ids(feature, 0..self.bags()) {
                let place = self.places[position];
                let outside = || refused(format!("place {place} at position {position} is of no row"));
                rows.push(finder.find(place).ok_or_else(outside)?);
            }
        }
        Ok(rows)
    }
}

/// Writes the sums of bags to `pooled`: a row a bag, the columns of each feature behind those of the one before.
///
/// # Errors
/// [`Error::InvalidBag`] if bags, places and pieces do not fit together.
///
/// # Panics
/// If `values` or `pooled` is of another length.
pub fn pool_rank_rows(
    executor: &dyn Executor,
    pieces: &RankPieces<'_>,
    bags: RankBags<'_>,
    values: &[f32],
    pooled: &mut [f32],
) -> Result<()> {
    assert_eq!(values.len(), pieces.num_floats(), "pool_rank_rows: the rows of all pieces");
    let (rows, columns) = (bags.rows(pieces)?, bags.columns(pieces.dims));
    let stride = columns[bags.tables.len()];
    assert_eq!(pooled.len(), bags.bags() * stride, "pool_rank_rows: a row a bag");
    if pooled.is_empty() {
        return Ok(());
    }
    let size = piece_size(executor, bags.bags(), 2 * stride);
    let blocks = pooled.chunks_mut(size * stride).enumerate();
    for_each_mut(executor, blocks, |(number, block)| {
        for (feature, &table) in bags.tables.iter().enumerate() {
            let dim = pieces.dims[table];
            for (within, pooled) in block.chunks_mut(stride).enumerate() {
                let bag = number * size + within;
                let sum = &mut pooled[columns[feature]..][..dim];
                add_rows(sum, &rows, bags.ids(feature, bag..bag + 1), values);
            }
        }
    });
    Ok(())
}

/// Writes to `sum` the sum of the rows of some ids.
fn add_rows(sum: &mut [f32], rows: &[(usize, usize)], ids: Range<usize>, values: &[f32]) {
    if ids.is_empty() {
        return sum.fill(0.0);
    }
    for position in ids.clone() {
        if let Some(&(_, upcoming)) = rows.get(position + AHEAD) {
            prefetch(&values[upcoming..][..sum.len().min(values.len() - upcoming)], Cache::First);
        }
        let row = &values[rows[position].1..][..sum.len()];
        if position == ids.start {
            sum.copy_from_slice(row);
        } else {
            add(sum, row);
        }
    }
}

fn add(sum: &mut [f32], row: &[f32]) {
    for (sum, &value) in sum.iter_mut().zip(row) {
        *sum += value;
    }
}

/// Writes to `values` the sums of the gradients of bags by row, in input order; zeros as flags.
///
/// # Errors
/// As [`pool_rank_rows`].
///
/// # Panics
/// If `values` or `gradients`, which hold a row a bag, are of another length.
pub fn spread_rank_gradients(
    executor: &dyn Executor,
    pieces: &RankPieces<'_>,
    bags: RankBags<'_>,
    gradients: &[f32],
    values: &mut [f32],
) -> Result<()> {
    assert_eq!(values.len(), pieces.num_floats(), "spread_rank_gradients: the rows of all pieces");
    let (rows, columns) = (bags.rows(pieces)?, bags.columns(pieces.dims));
    let stride = columns[bags.tables.len()];
    assert_eq!(gradients.len(), bags.bags() * stride, "spread_rank_gradients: a row a bag");
    // One thread a table: features may share a table's rows, and their sums keep the order of positions.
    values.fill(0.0);
    for_each_mut(executor, of_tables(pieces, values).into_iter().enumerate(), |(table, mut parts)| {
        for (feature, _) in bags.tables.iter().enumerate().filter(|(_, of)| **of == table) {
            let dim = pieces.dims[table];
            for bag in 0..bags.bags() {
                let gradient = &gradients[bag * stride + columns[feature]..][..dim];
                for position in bags.ids(feature, bag..bag + 1) {
                    let (rank, start) = rows[position];
                    let (first, part) = &mut parts[rank];
                    add(&mut part[start - *first..][..dim], gradient);
                }
            }
        }
    });
    Ok(())
}

/// Cuts values into the pieces of each table, one a rank: where it starts, and the rows.
fn of_tables<'v>(pieces: &RankPieces<'_>, values: &'v mut [f32]) -> Vec<Vec<(usize, &'v mut [f32])>> {
    let mut tables: Vec<Vec<_>> = pieces.dims.iter().map(|_| Vec::new()).collect();
    let (mut rest, mut at) = (values, 0);
    for (number, piece) in pieces.all().iter().enumerate() {
        let (_, from) = rest.split_at_mut(piece.floats.start - at);
        let (own, behind) = from.split_at_mut(piece.floats.len());
        tables[number % pieces.dims.len()].push((piece.floats.start, own));
        (rest, at) = (behind, piece.floats.end);
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::{Rayon, Serial};
    use proptest::prelude::*;

    #[derive(Debug)]
    struct Case {
        counts: Vec<usize>,
        dims: Vec<usize>,
        tables: Vec<usize>,
        places: Vec<i64>,
        offsets: Vec<i64>,
    }

    /// Two ranks, three tables, and features whose bags hold up to three ids.
    fn cases() -> impl Strategy<Value = Case> {
        let sizes = (prop::collection::vec(1..9usize, 6), prop::collection::vec(1..5usize, 3));
        let features = (prop::collection::vec(0..3usize, 1..5), 0..9usize);
        (sizes, features, prop::collection::vec((0..4usize, any::<u16>()), 200)).prop_map(
            |((counts, dims), (tables, bags), drawn)| {
                let (mut offsets, mut places, mut drawn) = (vec![0], Vec::new(), drawn.into_iter());
                for &table in &tables {
                    let rows = counts[table] + counts[table + 3];
                    for _ in 0..bags {
                        let (size, _) = drawn.next().unwrap_or((1, 0));
                        let ids = drawn.by_ref().take(size).map(|(_, place)| i64::from(place) % rows as i64);
                        places.extend(ids);
                        offsets.push(places.len() as i64);
                    }
                }
                Case { counts, dims, tables, places, offsets }
            },
        )
    }

    /// The row of a place, by walking over all pieces.
    fn start_of(case: &Case, table: usize, place: i64) -> usize {
        let (mut start, mut left) = (0, place as usize);
        for (number, &count) in case.counts.iter().enumerate() {
            let of = number % 3;
            if of == table && left < count {
                return start + left * case.dims[of];
            }
            left -= if of == table { count } else { 0 };
            start += count * case.dims[of] + if of == 2 { RANK_FLAGS } else { 0 };
        }
        unreachable!("the place is of a row")
    }

    proptest! {
        #[test]
        fn bags_are_pooled_and_gradients_spread_row_by_row(case in cases()) {
            let pieces = RankPieces::new(&case.counts, &case.dims);
            let bags = RankBags { tables: &case.tables, places: &case.places, offsets: &case.offsets };
            let count = bags.bags();
            let stride: usize = case.tables.iter().map(|&table| case.dims[table]).sum();
            let values: Vec<f32> = (0..pieces.num_floats()).map(|number| (number as f32).sin()).collect();
            let gradients: Vec<f32> = (0..count * stride).map(|number| (number as f32).cos()).collect();
            let (mut pooled, mut spread) = (vec![0.0; count * stride], vec![0.0; values.len()]);
            let mut column = 0;
            for (feature, &table) in case.tables.iter().enumerate() {
                for bag in 0..count {
                    for position in bags.ids(feature, bag..bag + 1) {
                        let start = start_of(&case, table, case.places[position]);
                        for element in 0..case.dims[table] {
                            let at = bag * stride + column + element;
                            pooled[at] += values[start + element];
                            spread[start + element] += gradients[at];
                        }
                    }
                }
                column += case.dims[table];
            }
            for executor in [&Serial as &dyn Executor, &Rayon] {
                let (mut found, mut back) = (vec![7.0; pooled.len()], vec![7.0; spread.len()]);
                pool_rank_rows(executor, &pieces, bags, &values, &mut found).expect("they fit");
                spread_rank_gradients(executor, &pieces, bags, &gradients, &mut back).expect("they fit");
                prop_assert_eq!(&found, &pooled);
                prop_assert_eq!(&back, &spread);
            }
        }
    }

    #[test]
    fn a_place_of_no_row_is_refused() {
        let pieces = RankPieces::new(&[1, 2], &[1]);
        let pool = |place, offsets: &[i64]| {
            let bags = RankBags { tables: &[0], places: &[place], offsets };
            pool_rank_rows(&Serial, &pieces, bags, &[0.5; 35], &mut [0.0]).map_err(|error| error.to_string())
        };
        assert!(pool(2, &[0, 1]).is_ok());
        for place in [3, -1] {
            assert!(pool(place, &[0, 1]).unwrap_err().contains("at position 0 is of no row"));
        }
        assert!(pool(0, &[0, 2]).unwrap_err().contains("offsets"));
    }

    #[test]
    fn flags_lie_behind_the_rows_of_each_rank() {
        let pieces = RankPieces::new(&[1, 2], &[3]);
        let mut values = vec![0.0; pieces.num_floats()];
        pieces.fill_flags(&mut values, 1.0);
        assert_eq!(values.iter().sum::<f32>(), 2.0 * RANK_FLAGS as f32);
        assert!(
            pieces.all().iter().all(|piece| values[piece.floats.clone()].iter().all(|&value| value == 0.0))
        );
    }
}
