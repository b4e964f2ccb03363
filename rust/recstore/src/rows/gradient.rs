//! Gradients on their way to a table, and the sum of those of equal ids.
//!
//! The counterparts of `torch.unique(sorted=True, return_inverse=True)` and of `index_add_` into zeros: distinct ids
//! come out in ascending order, and each sum starts at zero and takes its gradients in input order.

use std::borrow::Cow;

use crate::kernel::cache::{Cache, prefetch, prefetch_one, rows_near, rows_of_lines};
use crate::kernel::elements::{AddScaled, add_row, for_each_element};
use crate::kernel::parallel::{Executor, for_each_mut, parts_for};
use crate::kernel::simd::{Kernel, Lanes, Simd};
use crate::kernel::sorting::{CountedKeys, Keyed, SortedIds, SortedPart};
use crate::rows::distinct::are_distinct;
use crate::{Error, Result};

/// The rows of gradients worth waking a thread for.
const ROWS_PER_THREAD: usize = 4_096;

/// Gradients of ids, duplicates allowed: for each id a row of a matrix, taken as it is or times a weight.
///
/// The gradient of `ids[p]` are `dim` elements of row `row_of[p]` (row p where `row_of` is empty) from column
/// `first_column` on: the gradient of a bag serves all its ids, and that of several features lies in one matrix.
#[derive(Debug, Clone, Copy, Default)]
pub struct GradientPart<'a> {
    /// The ids, in input order.
    pub ids: &'a [i64],
    /// The matrix, row-major.
    pub gradients: &'a [f32],
    /// The elements of a row of the matrix.
    pub stride: usize,
    /// The first column that counts.
    pub first_column: usize,
    /// The matrix's row for each id; empty for a row of its own each.
    pub row_of: &'a [u32],
    /// A factor for each id; empty for none.
    pub weights: &'a [f32],
    /// An id whose gradients do not count.
    pub padding_idx: Option<i64>,
    /// What a lookup of these ids gave out as their places, or nothing: then the rows are searched for.
    pub places: &'a [u32],
    /// What was merged to these, if they are sums.
    pub merged_from: Option<Coalesced<'a>>,
}

/// What the rows of a part are the sums of.
#[derive(Debug, Clone, Copy)]
pub struct Coalesced<'a> {
    /// The first position of each id of the part among those merged; beyond `u32::MAX` it is not told.
    pub firsts: &'a [u32],
    /// How many positions were merged.
    pub count: usize,
    /// The first gradient among them that is not finite.
    pub not_finite: Option<NotFinite>,
}

/// A gradient that is not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NotFinite {
    /// Its id.
    pub id: i64,
    /// The position of the id in the backward passes.
    pub position: usize,
    /// The first value that is not finite.
    pub value: f32,
}

impl<'a> GradientPart<'a> {
    /// Returns gradients that hold a row of `dim` elements for each id.
    pub fn new(ids: &'a [i64], gradients: &'a [f32], dim: usize) -> Self {
        Self { ids, gradients, stride: dim, ..Self::default() }
    }

    /// Returns what is wrong with the lengths, as expected and actual.
    fn mismatch(&self, dim: usize) -> Option<(&'static str, usize, usize)> {
        // The greatest row bounds every slice that `row` takes, so the loops of a step check nothing of their
        // own.
        let rows = self.row_of.iter().copied().max().map_or(self.ids.len(), |row| row as usize + 1);
        let (expected, actual) = (rows * self.stride.max(dim), self.gradients.len());
        let fits = dim > 0 && self.first_column + dim <= self.stride && actual >= expected;
        // Bags without ids leave rows of the matrix unused.
        if !fits || actual > expected && self.row_of.is_empty() && rows > 0 {
            return Some(("gradient values", expected, actual));
        }
        let per_id = [("gradient rows", self.row_of.len()), ("gradient weights", self.weights.len())];
        let wrong = per_id.into_iter().find(|&(_, len)| len != 0 && len != self.ids.len());
        wrong.map(|(what, len)| (what, self.ids.len(), len))
    }

    /// Whether the matrix is the gradients of the ids, in their order, and nothing else.
    pub(super) fn is_one_row_an_id(&self, dim: usize) -> bool {
        let is_whole = self.stride == dim && self.gradients.len() == self.ids.len() * dim;
        is_whole && self.row_of.is_empty() && self.weights.is_empty() && self.padding_idx.is_none()
    }

    #[inline(always)]
    pub(super) fn row(&self, position: usize, dim: usize) -> &'a [f32] {
        let row = self.row_of.get(position).map_or(position, |&row| row as usize);
        &self.gradients[row * self.stride + self.first_column..][..dim]
    }

    /// Adds the gradient of the id at `position`.
    #[inline(always)]
    fn add_to(&self, position: usize, sum: &mut [f32]) {
        let row = self.row(position, sum.len());
        match self.weights.get(position) {
            None => add_row(sum, row),
            Some(weight) => for_each_element(&AddScaled(*weight), sum, [], row),
        }
    }
}

/// The gradients of one backward pass through one table.
#[derive(Debug, Clone, Default)]
pub struct GradientChunk<'a> {
    /// Its parts, in input order: one for each lookup of the pass.
    pub parts: Vec<GradientPart<'a>>,
}

impl<'a> GradientChunk<'a> {
    /// Returns gradients that hold a row of `dim` elements for each id.
    pub fn new(ids: &'a [i64], gradients: &'a [f32], dim: usize) -> Self {
        Self { parts: vec![GradientPart::new(ids, gradients, dim)] }
    }

    /// Returns the ids of all parts.
    pub fn ids(&self) -> impl Iterator<Item = i64> {
        self.parts.iter().flat_map(|part| part.ids).copied()
    }
}

/// Distinct ids in ascending order and the sum of the gradients of each, row-major.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MergedGradients {
    /// The distinct ids.
    pub ids: Vec<i64>,
    /// A row of `dim` elements for each of `ids`.
    pub sums: Vec<f32>,
}

/// Distinct ids in any order and the sum of the gradients of each, row-major; or ids and gradients in input order, if
/// they were left unmerged.
#[derive(Debug, Clone, PartialEq)]
pub struct DistinctGradients<'a> {
    /// The ids.
    pub ids: Cow<'a, [i64]>,
    /// A row of `dim` elements for each of `ids`.
    pub sums: Cow<'a, [f32]>,
}

/// The chunks of one step of a table, their positions counted through.
#[derive(Debug)]
pub(crate) struct Gradients<'a> {
    pub(crate) dim: usize,
    pub(crate) parts: Vec<GradientPart<'a>>,
    /// Where each part begins, and at the end where the last one ends.
    pub(crate) starts: Vec<usize>,
    /// Where each chunk ends.
    pub(super) chunk_ends: Vec<usize>,
}

impl<'a> Gradients<'a> {
    pub(crate) fn new(dim: usize, chunks: &[GradientChunk<'a>]) -> Self {
        let mut gradients = Self { dim, parts: Vec::new(), starts: vec![0], chunk_ends: Vec::new() };
        for chunk in chunks {
            for part in &chunk.parts {
                gradients.starts.push(gradients.len() + part.ids.len());
                gradients.parts.push(*part);
            }
            gradients.chunk_ends.push(gradients.len());
        }
        gradients
    }

    /// Checks that every part holds what its ids need; `owner` names whose they are.
    pub(crate) fn validate(&self, operation: &'static str, owner: impl Fn() -> String) -> Result<()> {
        for part in &self.parts {
            if let Some((what, expected, actual)) = part.mismatch(self.dim) {
                let what = format!("{what} for {} ids of {} of dim {}", part.ids.len(), owner(), self.dim);
                return Err(Error::LengthMismatch { operation, what, expected, actual });
            }
        }
        Ok(())
    }

    /// Returns the number of positions.
    pub(crate) fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Returns the part of a position and the position within it.
    #[inline(always)]
    fn locate(&self, position: usize) -> (&GradientPart<'a>, usize) {
        match &self.parts[..] {
            [part] => (part, position),
            parts => {
                let part = self.starts[1..].partition_point(|&end| end <= position);
                (&parts[part], position - self.starts[part])
            }
        }
    }

    #[inline(always)]
    pub(crate) fn id(&self, position: usize) -> i64 {
        let (part, position) = self.locate(position);
        part.ids[position]
    }

    /// Whether rows of the matrix belong to positions by a list.
    pub(crate) fn has_row_of(&self) -> bool {
        self.parts.iter().any(|part| !part.row_of.is_empty())
    }

    /// Returns these gradients with the rows of the matrix for positions, and the row of each position: if nothing else
    /// depends on it. Who sorts the rows in the place of positions need not look them up by positions in no order.
    pub(crate) fn by_row(&self) -> Option<(Self, &'a [u32])> {
        let [part] = self.parts[..] else { return None };
        let by_row = Self {
            dim: self.dim,
            parts: vec![GradientPart { row_of: &[], ..part }],
            starts: self.starts.clone(),
            chunk_ends: self.chunk_ends.clone(),
        };
        (self.is_plain() && !part.row_of.is_empty()).then_some((by_row, part.row_of))
    }

    /// Asks for the number of the row that belongs to a position, and for its id if that is needed.
    #[inline(always)]
    pub(crate) fn prefetch_lists(&self, position: usize, needs_id: bool) {
        let (part, position) = self.locate(position);
        part.row_of.get(position).into_iter().for_each(|row| prefetch_one(row, Cache::First));
        if needs_id {
            prefetch_one(&part.ids[position], Cache::First);
        }
    }

    /// Returns the gradient at a position, before any weight.
    #[inline(always)]
    pub(crate) fn row(&self, position: usize) -> &'a [f32] {
        let (part, position) = self.locate(position);
        part.row(position, self.dim)
    }

    /// Whether the gradient at a position is its row of the matrix, as it is.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.chunk_ends.len() == 1 && self.parts.iter().all(|part| part.weights.is_empty())
    }

    /// Sums the gradients at `positions`, which ascend: each chunk's on their own, from zero, then the chunks' sums. With
    /// each it asks for the gradient at one of the positions `later`, for whoever sums that.
    #[inline(always)]
    pub(crate) fn sum(
        &self,
        positions: impl Iterator<Item = usize>,
        mut later: impl Iterator<Item = usize>,
        sum: &mut [f32],
        chunk_sum: &mut [f32],
    ) {
        // No copy of the first gradient: zero plus -0.0 is 0.0, as in `index_add_` into zeros.
        sum.fill(0.0);
        if self.chunk_ends.len() == 1 {
            for position in positions {
                later.next().into_iter().for_each(|position| prefetch(self.row(position), Cache::First));
                self.add_to(position, sum);
            }
            return;
        }
        // Chunk by chunk, not in one run: sums of floats depend on their grouping, and a chunk that was
        // merged before the step must give the same bits as the chunk it was merged from.
        let mut end = 0;
        for position in positions {
            later.next().into_iter().for_each(|position| prefetch(self.row(position), Cache::First));
            if position >= end {
                if end > 0 {
                    add_row(sum, chunk_sum);
                }
                chunk_sum.fill(0.0);
                end = self.chunk_ends[self.chunk_ends.partition_point(|&end| end <= position)];
            }
            self.add_to(position, chunk_sum);
        }
        if end > 0 {
            add_row(sum, chunk_sum);
        }
    }

    #[inline(always)]
    fn add_to(&self, position: usize, sum: &mut [f32]) {
        let (part, position) = self.locate(position);
        part.add_to(position, sum);
    }

    /// Calls `body` with the ids sorted.
    pub(super) fn sorted<R>(&self, executor: &dyn Executor, body: impl FnOnce(&SortedIds) -> R) -> R {
        let ids: Vec<_> = self
            .parts
            .iter()
            .map(|part| CountedKeys { keys: part.ids, padding: part.padding_idx, numbers: &[] })
            .collect();
        SortedIds::with(executor, &ids, parts_for(executor, self.len() * self.dim), body)
    }

    /// Writes the sums of all distinct ids to `sums`.
    fn write_sums(&self, executor: &dyn Executor, simd: Simd, sorted: &SortedIds, mut sums: &mut [f32]) {
        let pieces = sorted.parts.iter().flat_map(|part| {
            let (own, behind) = std::mem::take(&mut sums).split_at_mut(part.len() * self.dim);
            sums = behind;
            // Sums of distinct ids lie apart, so threads share a part without a lock and no sum crosses a
            // thread.
            own.chunks_mut(ROWS_PER_THREAD * self.dim)
                .enumerate()
                .map(move |(piece, sums)| (part, piece, sums))
        });
        for_each_mut(executor, pieces, |(part, piece, sums)| {
            simd.run(SumGradients { gradients: self, part, first: piece * ROWS_PER_THREAD, sums });
        });
    }

    /// Returns the gradients where they lie if they are those of distinct ids, a row each.
    pub(crate) fn as_they_lie(&self) -> Option<DistinctGradients<'a>> {
        let [part] = &self.parts[..] else { return None };
        let (ids, sums) = (Cow::Borrowed(part.ids), Cow::Borrowed(part.gradients));
        (part.is_one_row_an_id(self.dim) && are_distinct(part.ids)).then_some(DistinctGradients { ids, sums })
    }

    /// Returns distinct ids, in any order, and their sums.
    pub(crate) fn distinct(&self, executor: &dyn Executor, simd: Simd) -> DistinctGradients<'a> {
        self.as_they_lie().unwrap_or_else(|| {
            let MergedGradients { ids, sums } = self.merged(executor, simd);
            DistinctGradients { ids: Cow::Owned(ids), sums: Cow::Owned(sums) }
        })
    }

    /// Returns distinct ids in ascending order and their sums.
    pub(crate) fn merged(&self, executor: &dyn Executor, simd: Simd) -> MergedGradients {
        self.sorted(executor, |sorted| self.merge_sorted(executor, simd, sorted))
    }

    pub(super) fn merge_sorted(
        &self,
        executor: &dyn Executor,
        simd: Simd,
        sorted: &SortedIds,
    ) -> MergedGradients {
        let (ids, sums) = (vec![0; sorted.len()], vec![0.0; sorted.len() * self.dim]);
        let mut merged = MergedGradients { ids, sums };
        sorted.write_ids(&mut merged.ids);
        self.write_sums(executor, simd, sorted, &mut merged.sums);
        merged
    }
}

impl MergedGradients {
    /// Returns them as the gradients of one chunk.
    pub(crate) fn as_gradients(&self, dim: usize) -> Gradients<'_> {
        Gradients::new(dim, &[GradientChunk::new(&self.ids, &self.sums, dim)])
    }

    /// Returns all but those at the `refused` places, which ascend.
    pub(crate) fn without(self, refused: &[usize], dim: usize) -> Self {
        if refused.is_empty() {
            return self;
        }
        let rows = self.ids.iter().zip(self.sums.chunks_exact(dim)).enumerate();
        let kept = rows.filter(|(place, _)| refused.binary_search(place).is_err());
        let (ids, sums): (Vec<i64>, Vec<&[f32]>) = kept.map(|(_, row)| row).unzip();
        Self { ids, sums: sums.concat() }
    }
}

/// Writes the sums of the distinct ids of a part from `first` on, one after another.
struct SumGradients<'a, 'g> {
    gradients: &'a Gradients<'g>,
    part: &'a SortedPart<u64>,
    first: usize,
    sums: &'a mut [f32],
}

impl Kernel for SumGradients<'_, '_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        const ROWS_AHEAD: usize = 16;
        let Self { gradients, part, first, sums } = self;
        if let [one] = &gradients.parts[..]
            && one.is_one_row_an_id(gradients.dim)
        {
            return sum_rows(
                part.places(first..first + sums.len() / gradients.dim),
                one.gradients,
                gradients.dim,
                sums,
            );
        }
        let mut chunk_sum = vec![0.0; gradients.dim];
        for (number, sum) in (first..).zip(sums.chunks_exact_mut(gradients.dim)) {
            let later = part.positions_behind(number, ROWS_AHEAD);
            gradients.sum(part.positions(number), later, sum, &mut chunk_sum);
        }
    }
}

/// Sums the rows of equal keys, which lie side by side in `places`, from zero and in their order. How many there are of
/// a key cannot be predicted, so nothing branches by it: a row is added to the sum before it, or to none of its bits.
#[inline(always)]
fn sum_rows(places: &[Keyed<u64>], rows: &[f32], dim: usize, sums: &mut [f32]) {
    const LINES_AHEAD: usize = 128;
    let ahead = rows_of_lines(LINES_AHEAD, dim);
    let row = |place: &Keyed<u64>| &rows[place.position as usize * dim..][..dim];
    let (mut sum, mut rank) = (0, places.first().map_or(0, |place| place.rank));
    let mut kept = 0;
    for (number, place) in places.iter().enumerate() {
        // Into the second cache far ahead and into the first shortly before use: a core has about two dozen
        // lines under way to its first cache, and at least twice as many to its second.
        if let Some(later) = places.get(number + ahead) {
            prefetch(row(later), Cache::Second);
        }
        if let Some(next) = places.get(number + rows_near(dim)) {
            prefetch(row(next), Cache::First);
        }
        // With a branch on duplicates a merge took 22 ns an id (dim 16) and 30 (dim 64), without it 17 and
        // 24.
        let next = sum + dim * usize::from(place.rank != rank);
        kept = if place.rank == rank { kept } else { 0 };
        rank = place.rank;
        add_kept(&mut sums[sum..next + dim], next - sum, kept, row(place));
        (sum, kept) = (next, u32::MAX);
    }
}

/// Writes `row` added to those bits of the sum at the front that are in `kept` to `sums` from `to` on.
#[inline(always)]
fn add_kept(sums: &mut [f32], to: usize, kept: u32, row: &[f32]) {
    // Pieces of 64 come first: many pieces of 16 were compiled to gathers and scatters, 1.2 against 0.33 ns a
    // float.
    let start = add_kept_pieces::<64>(sums, to, kept, row, 0);
    let start = add_kept_pieces::<16>(sums, to, kept, row, start);
    let start = add_kept_pieces::<8>(sums, to, kept, row, start);
    add_kept_pieces::<1>(sums, to, kept, row, start);
}

#[inline(always)]
fn add_kept_pieces<const LEN: usize>(
    sums: &mut [f32],
    to: usize,
    kept: u32,
    row: &[f32],
    mut start: usize,
) -> usize {
    while let Some(row) = row[start..].first_chunk::<LEN>() {
        let mut piece = [0.0; LEN];
        piece.copy_from_slice(&sums[start..start + LEN]);
        for (sum, value) in piece.iter_mut().zip(row) {
            // A mask of bits and no factor of zero: infinity times zero is NaN.
            *sum = f32::from_bits(sum.to_bits() & kept) + value;
        }
        sums[to + start..][..LEN].copy_from_slice(&piece);
        start += LEN;
    }
    start
}

/// Merges each chunk on its own, then the merged chunks in their order; rows have `dim` elements, and ids ascend.
///
/// A chunk that comes merged already therefore gives the same bits as the chunk it was merged from.
///
/// # Errors
/// [`Error::LengthMismatch`] if a chunk does not hold `dim` values an id.
pub fn merge_gradients(
    executor: &dyn Executor,
    dim: usize,
    chunks: &[GradientChunk<'_>],
) -> Result<MergedGradients> {
    let gradients = Gradients::new(dim, chunks);
    gradients.validate("merge_gradients", || "the merge".to_owned())?;
    Ok(gradients.merged(executor, Simd::detect()))
}

/// Merges one chunk as [`merge_gradients`], into memory of the caller's that has room for every id of the chunk, and
/// returns the number of distinct ids.
///
/// # Errors
/// [`Error::LengthMismatch`] if the chunk does not hold `dim` values an id, or there is less room.
pub fn merge_gradients_into(
    executor: &dyn Executor,
    dim: usize,
    chunk: GradientChunk<'_>,
    ids: &mut [i64],
    sums: &mut [f32],
) -> Result<usize> {
    const OPERATION: &str = "merge_gradients";
    let gradients = Gradients::new(dim, &[chunk]);
    gradients.validate(OPERATION, || "the merge".to_owned())?;
    gradients.sorted(executor, |sorted| {
        let count = sorted.len();
        if ids.len() < count || sums.len() < count * dim {
            let (what, actual) = ("rows of room for the sums".to_owned(), ids.len().min(sums.len() / dim));
            return Err(Error::LengthMismatch { operation: OPERATION, what, expected: count, actual });
        }
        sorted.write_ids(ids);
        gradients.write_sums(executor, Simd::detect(), sorted, &mut sums[..count * dim]);
        Ok(count)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::Serial;
    use crate::rows::distinct::unique;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn chunks_are_summed_one_by_one() {
        // (1e8 + 1) + (-1e8 + 1) in single precision is 0 by chunk, 1 in one run.
        let chunk = |gradients| GradientChunk::new(&[5, 5], gradients, 1);
        let merged = merge_gradients(&Serial, 1, &[chunk(&[1e8, 1.0]), chunk(&[-1e8, 1.0])]).unwrap();
        assert_eq!(merged.sums, [0.0]);
    }

    #[test]
    fn the_parts_of_a_chunk_are_summed_in_one_run() {
        let part = |gradients| GradientPart::new(&[5], gradients, 1);
        let parts = [[1e8], [1.0], [-1e8], [1.0]];
        let chunk = GradientChunk { parts: parts.iter().map(|gradients| part(gradients)).collect() };
        assert_eq!(merge_gradients(&Serial, 1, &[chunk]).unwrap().sums, [1.0]);
    }

    #[test]
    fn a_chunk_of_the_wrong_length_is_refused() {
        let message = |part: GradientPart<'_>, dim| {
            merge_gradients(&Serial, dim, &[GradientChunk { parts: vec![part] }]).unwrap_err().to_string()
        };
        let wide = GradientPart::new(&[5, 6], &[1.0; 3], 2);
        assert!(
            message(wide, 2).contains("expected 4 gradient values for 2 ids of the merge of dim 2, got 3")
        );
        assert!(message(GradientPart::new(&[5], &[], 0), 0).contains("dim 0"));
        let few = GradientPart { row_of: &[0], ..GradientPart::new(&[5, 6], &[1.0; 4], 2) };
        assert!(message(few, 2).contains("expected 2 gradient rows"), "{}", message(few, 2));
        let few = GradientPart { weights: &[0.5; 3], ..GradientPart::new(&[5, 6], &[1.0; 4], 2) };
        assert!(
            message(few, 2).contains("expected 2 gradient weights for 2 ids of the merge of dim 2, got 3")
        );
        let beyond = GradientPart { row_of: &[0, 2], ..GradientPart::new(&[5, 6], &[1.0; 4], 2) };
        assert!(message(beyond, 2).contains("expected 6 gradient values"), "{}", message(beyond, 2));
    }

    #[test]
    fn a_part_picks_its_columns_rows_weights_and_leaves_padding_out() {
        let part = GradientPart {
            ids: &[7, 8, 7, 9],
            gradients: &[0.0, 1.0, 2.0, 0.0, 10.0, 20.0],
            stride: 3,
            first_column: 1,
            row_of: &[0, 0, 1, 1],
            weights: &[1.0, 3.0, 0.5, 1.0],
            padding_idx: Some(9),
            ..GradientPart::default()
        };
        let merged = merge_gradients(&Serial, 2, &[GradientChunk { parts: vec![part] }]).unwrap();
        assert_eq!(merged, MergedGradients { ids: vec![7, 8], sums: vec![6.0, 12.0, 3.0, 6.0] });
    }

    #[test]
    fn too_little_room_is_refused() {
        let chunk = GradientChunk::new(&[5, 6], &[1.0; 4], 2);
        let refused = merge_gradients_into(&Serial, 2, chunk, &mut [0; 2], &mut [0.0; 2]);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("expected 2 rows of room for the sums, got 1"), "{message}");
    }

    #[test]
    fn many_ids_are_sorted_as_few() {
        let ids: Vec<i64> =
            (0..20_000).map(crate::kernel::hash::mix).map(|id| id as i64 >> (id % 50)).collect();
        let (mut distinct, mut inverse) = (vec![0; ids.len()], vec![0; ids.len()]);
        let count = unique(&Serial, &ids, &mut distinct, &mut inverse);
        let mut expected = ids;
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(distinct[..count], expected);
    }

    proptest! {
        #[test]
        fn merging_agrees_with_a_map(
            ids in prop::collection::vec(prop_oneof![-3..3i64, Just(i64::MIN), Just(i64::MAX)], 0..90),
            dim in prop::sample::select(vec![1, 2, 7, 8, 16, 25, 64, 90, 128]),
        ) {
            let gradients: Vec<f32> = (0..ids.len() * dim).map(|j| 3.0 - j as f32 * 0.1).collect();
            let mut model = BTreeMap::<i64, Vec<f32>>::new();
            for (id, gradient) in ids.iter().zip(gradients.chunks_exact(dim)) {
                let sum = model.entry(*id).or_insert_with(|| vec![0.0; dim]);
                sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
            }
            let chunk = GradientChunk::new(&ids, &gradients, dim);
            let merged = merge_gradients(&Serial, dim, std::slice::from_ref(&chunk)).unwrap();
            prop_assert_eq!(&merged.ids, &model.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(&merged.sums, &model.values().flatten().copied().collect::<Vec<_>>());
            // A chunk of two parts goes another way, from the same zeros in the same order.
            let (front, behind) = ids.split_at(ids.len() / 2);
            let (front_rows, rows_behind) = gradients.split_at(front.len() * dim);
            let parts = vec![GradientPart::new(front, front_rows, dim), GradientPart::new(behind, rows_behind, dim)];
            prop_assert_eq!(&merge_gradients(&Serial, dim, &[GradientChunk { parts }]).unwrap(), &merged);
            let (mut distinct, mut sums) = (vec![0; ids.len()], vec![f32::NAN; ids.len() * dim]);
            let count = merge_gradients_into(&Serial, dim, chunk, &mut distinct, &mut sums).unwrap();
            prop_assert_eq!(&distinct[..count], &merged.ids);
            prop_assert_eq!(&sums[..dim * count], &merged.sums);
            let mut inverse = vec![0; ids.len()];
            let mut distinct = vec![0; ids.len()];
            let count = unique(&Serial, &ids, &mut distinct, &mut inverse);
            distinct.truncate(count);
            prop_assert_eq!(inverse.iter().map(|&row| distinct[row as usize]).collect::<Vec<_>>(), ids);
            prop_assert_eq!(distinct, merged.ids);
        }
    }
}
