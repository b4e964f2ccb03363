//! What the gradients of a step can add up to at most: below the greatest float every sum is finite, and need not be
//! looked at.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use super::engine::Engine;
use crate::kernel::parallel::for_each_mut;
use crate::kernel::simd::{Kernel, Lanes};
use crate::rows::gradient::{GradientPart, Gradients};

/// The floats that are worth waking a thread for.
const FLOATS_PER_PIECE: usize = 1 << 16;

/// Returns for each of `gradients` a bound of the magnitude of every sum of theirs, infinite where one of them may not be
/// finite; 0 where there are none.
pub(super) fn bounds_of_sums(engine: Engine<'_>, gradients: &[Option<&Gradients<'_>>]) -> Vec<f64> {
    let regions = Regions::new(gradients);
    regions.search(engine);
    gradients.iter().map(|gradients| gradients.map_or(0.0, |gradients| regions.bound(gradients))).collect()
}

/// Columns of matrices of gradients. Where tables share a matrix, as those of one lookup do, they also share its
/// columns here: reading it row by row is many times faster than once for each table.
struct Regions<'a> {
    /// How many columns of each matrix are gradients.
    used: BTreeMap<Matrix, usize>,
    regions: BTreeMap<(Matrix, usize, usize), Region<'a>>,
}

/// A matrix's address, length and stride.
type Matrix = (usize, usize, usize);

struct Region<'a> {
    rows: &'a [f32],
    stride: usize,
    columns: Range<usize>,
    /// The bits of the greatest magnitude, which are ordered as magnitudes are; those of a NaN are greater than any.
    greatest: AtomicU32,
}

impl<'a> Regions<'a> {
    fn new(gradients: &[Option<&Gradients<'a>>]) -> Self {
        let parts = || {
            let each = gradients.iter().flatten();
            each.flat_map(|gradients| gradients.parts.iter().map(|part| (part, gradients.dim)))
        };
        let mut regions = Self { used: BTreeMap::new(), regions: BTreeMap::new() };
        for (part, dim) in parts() {
            *regions.used.entry(matrix(part)).or_default() += dim;
        }
        for (part, dim) in parts() {
            let columns = regions.columns(part, dim);
            let region = Region {
                rows: part.gradients,
                stride: part.stride,
                columns: columns.clone(),
                greatest: AtomicU32::new(0),
            };
            regions.regions.insert((matrix(part), columns.start, columns.end), region);
        }
        regions
    }

    /// Returns the columns that are searched for a part: its own, or all where half of them are gradients.
    fn columns(&self, part: &GradientPart<'_>, dim: usize) -> Range<usize> {
        let is_shared = 2 * self.used[&matrix(part)] >= part.stride;
        if is_shared { 0..part.stride } else { part.first_column..part.first_column + dim }
    }

    fn search(&self, engine: Engine<'_>) {
        let pieces = self.regions.values().flat_map(|region| {
            let rows = (FLOATS_PER_PIECE / region.stride).max(1);
            region.rows.chunks(rows * region.stride).map(move |rows| (region, rows))
        });
        for_each_mut(engine.executor, pieces, |(region, rows)| {
            engine.simd.run(GreatestMagnitude { region, rows });
        });
    }

    fn bound(&self, gradients: &Gradients<'_>) -> f64 {
        let bits = gradients.parts.iter().map(|part| {
            let columns = self.columns(part, gradients.dim);
            self.regions[&(matrix(part), columns.start, columns.end)].greatest.load(Ordering::Relaxed)
        });
        let greatest = f32::from_bits(bits.max().unwrap_or_default());
        // A NaN compares with nothing.
        let greatest = if greatest.is_finite() { f64::from(greatest) } else { f64::INFINITY };
        let weights = gradients.parts.iter().flat_map(|part| part.weights);
        let weight =
            weights.fold(
                1.0f32,
                |most, weight| if weight.is_nan() { f32::INFINITY } else { most.max(weight.abs()) },
            );
        // In double precision, where the product of three finite numbers of this size stays finite.
        greatest * f64::from(weight) * gradients.len().max(1) as f64
    }
}

fn matrix(part: &GradientPart<'_>) -> Matrix {
    (part.gradients.as_ptr().addr(), part.gradients.len(), part.stride)
}

/// Finds the greatest magnitude in a region's columns of some rows.
struct GreatestMagnitude<'a> {
    region: &'a Region<'a>,
    rows: &'a [f32],
}

impl Kernel for GreatestMagnitude<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Region { stride, columns, greatest, .. } = self.region;
        let mut most = 0;
        if columns.len() == *stride {
            most = greatest_bits(self.rows);
        } else {
            for row in self.rows.chunks_exact(*stride) {
                most = most.max(greatest_bits(&row[columns.clone()]));
            }
        }
        greatest.fetch_max(most, Ordering::Relaxed);
    }
}

/// One plain loop: lanes written out were compiled to gathers, which took five times as long.
#[inline(always)]
fn greatest_bits(values: &[f32]) -> u32 {
    let mut greatest = 0;
    for value in values {
        greatest = greatest.max(value.to_bits() & 0x7FFF_FFFF);
    }
    greatest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::Serial;
    use crate::kernel::simd::Simd;
    use crate::rows::gradient::GradientChunk;

    const IDS: [i64; 3] = [4, 5, 4];

    fn bounds(gradients: &[Option<&Gradients<'_>>]) -> Vec<f64> {
        bounds_of_sums(Engine { executor: &Serial, simd: Simd::detect() }, gradients)
    }

    /// The gradients of three ids in some columns of a matrix.
    fn columns_of(matrix: &[f32], columns: Range<usize>) -> Gradients<'_> {
        let part = GradientPart {
            stride: matrix.len() / IDS.len(),
            first_column: columns.start,
            ..GradientPart::new(&IDS, matrix, 1)
        };
        Gradients::new(columns.len(), &[GradientChunk { parts: vec![part] }])
    }

    #[test]
    fn a_bound_is_the_greatest_magnitude_times_the_positions() {
        let matrix: Vec<f32> = (0..12).map(|value| value as f32 - 11.5).collect();
        assert_eq!(bounds(&[Some(&columns_of(&matrix, 0..4))]), [3.0 * 11.5]);
        assert_eq!(bounds(&[Some(&columns_of(&matrix, 3..4))]), [3.0 * 8.5]);
        let none = Gradients::new(4, &[GradientChunk::new(&[], &[], 4)]);
        assert_eq!(bounds(&[None, Some(&none)]), [0.0, 0.0]);
    }

    #[test]
    fn a_weight_counts() {
        let mut gradients = columns_of(&[1.0, -2.0, 0.5], 0..1);
        gradients.parts[0].weights = &[0.5, -3.0, 1.0];
        assert_eq!(bounds(&[Some(&gradients)]), [3.0 * 2.0 * 3.0]);
        gradients.parts[0].weights = &[0.5, f32::NAN, 1.0];
        assert_eq!(bounds(&[Some(&gradients)]), [f64::INFINITY]);
    }

    #[test]
    fn whoever_shares_a_matrix_shares_its_bound() {
        let mut matrix = vec![1.0; 3 * 4];
        matrix[4 + 2] = -7.0;
        let (first, second) = (columns_of(&matrix, 0..1), columns_of(&matrix, 2..3));
        assert_eq!(bounds(&[Some(&first), Some(&second)]), [21.0, 21.0]);
        // Too few of its columns to read them all.
        assert_eq!(bounds(&[Some(&first), None]), [3.0, 0.0]);
        matrix[4 + 3] = f32::NAN;
        let (first, second) = (columns_of(&matrix, 0..1), columns_of(&matrix, 2..3));
        assert_eq!(bounds(&[Some(&first), Some(&second)]), [f64::INFINITY; 2]);
        assert_eq!(bounds(&[Some(&second)]), [21.0]);
    }

    #[test]
    fn every_level_and_every_piece_counts() {
        let ids = vec![0; 3 * FLOATS_PER_PIECE];
        let mut values = vec![0.5; ids.len()];
        for place in [0, FLOATS_PER_PIECE - 1, FLOATS_PER_PIECE, values.len() - 1] {
            values[place] = -3.0;
            let gradients = Gradients::new(1, &[GradientChunk::new(&ids, &values, 1)]);
            for level in crate::SimdLevel::available() {
                let engine = Engine { executor: &Serial, simd: Simd::new(level).unwrap() };
                assert_eq!(bounds_of_sums(engine, &[Some(&gradients)]), [3.0 * ids.len() as f64], "{level}");
            }
            values[place] = 0.5;
        }
    }
}
