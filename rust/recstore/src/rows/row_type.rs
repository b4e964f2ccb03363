//! The types in which rows are kept: float32, bfloat16 and float16, and those of 8 bits in [`super::coded_row`].
//!
//! Arithmetic is in float32 always. A narrower row is widened, changed and rounded back: by an optimizer's step
//! *stochastically*, up or down with the probability that makes the expected value exact, since a small update would
//! else be rounded away again and again; by a write, and for initial values, to the nearest.
//!
//! Source: Gupta et al. 2015, "Deep learning with limited numerical precision", section 3.

use bytemuck::{cast_slice, cast_slice_mut};

use crate::kernel::cache::{copy_row, copy_rows, prefetch_group, prefetch_near};
use crate::kernel::small_float::{nearest_half, stochastic_half, widen_half};

/// How the weights of a row are kept in the words of a record.
pub(crate) trait RowType: Copy + Send + Sync + 'static {
    /// Whether weights are kept as they are, in single precision.
    fn is_float32(self) -> bool {
        false
    }

    /// Returns the four-byte words that `dim` weights take.
    fn words(self, dim: usize) -> usize;

    /// Writes the weights in `words` to `row`.
    fn widen(self, words: &[f32], row: &mut [f32]);

    /// Writes the weights of rows of `dim` to `rows`, one behind the other. `upcoming` are the words of the same rows and
    /// of those used after them, to ask for.
    #[inline(always)]
    fn widen_each(self, words: &[&[f32]], upcoming: &[&[f32]], rows: &mut [f32], dim: usize) {
        prefetch_group(words, upcoming);
        for (place, (own, row)) in words.iter().zip(rows.chunks_exact_mut(dim)).enumerate() {
            prefetch_near(upcoming, place, own.len());
            self.widen(own, row);
        }
    }

    /// Writes `row` to `words`, rounded to the nearest, ties to even.
    fn round(self, row: &[f32], words: &mut [f32]);

    /// Writes `row` to `words`, rounded up or down as `noise` says.
    fn round_stochastically(self, row: &[f32], words: &mut [f32], noise: Noise);
}

/// Random bits for the columns of one row at one step: a pure function of what it was made from.
///
/// Source of the mixing: Chris Wellons, "Prospecting for hash functions" (2018), `lowbias32`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noise(u32);

impl Noise {
    /// Returns the noise of a row; `hash` mixes the table's seed, the id and the step.
    pub(crate) fn new(hash: u64) -> Self {
        Self((hash ^ (hash >> 32)) as u32)
    }

    /// Returns 16 random bits.
    #[inline(always)]
    pub(super) fn bits(self, column: usize) -> u32 {
        // The factor is odd, so that no two columns of a row start from the same number.
        let mut x = self.0 ^ (column as u32).wrapping_mul(0x9E37_79B9);
        x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
        x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
        x >> 16
    }
}

/// IEEE 754 single precision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Float32;

/// The upper half of a float32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bfloat16;

/// IEEE 754 half precision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Float16;

impl RowType for Float32 {
    #[inline(always)]
    fn is_float32(self) -> bool {
        true
    }

    #[inline(always)]
    fn words(self, dim: usize) -> usize {
        dim
    }

    #[inline(always)]
    fn widen(self, words: &[f32], row: &mut [f32]) {
        copy_row(words, row);
    }

    #[inline(always)]
    fn widen_each(self, words: &[&[f32]], upcoming: &[&[f32]], rows: &mut [f32], dim: usize) {
        copy_rows(words, upcoming, rows, dim);
    }

    #[inline(always)]
    fn round(self, row: &[f32], words: &mut [f32]) {
        words.copy_from_slice(row);
    }

    #[inline(always)]
    fn round_stochastically(self, row: &[f32], words: &mut [f32], _noise: Noise) {
        words.copy_from_slice(row);
    }
}

impl RowType for Bfloat16 {
    #[inline(always)]
    fn words(self, dim: usize) -> usize {
        dim.div_ceil(2)
    }

    #[inline(always)]
    fn widen(self, words: &[f32], row: &mut [f32]) {
        for (value, half) in row.iter_mut().zip(cast_slice::<f32, u16>(words)) {
            *value = f32::from_bits(u32::from(*half) << 16);
        }
    }

    #[inline(always)]
    fn round(self, row: &[f32], words: &mut [f32]) {
        for (half, value) in cast_slice_mut::<f32, u16>(words).iter_mut().zip(row) {
            let bits = value.to_bits();
            // Just below half a unit of what stays, and exactly half if that is odd: a tie carries over to
            // the even neighbour.
            let odd = bits >> 16 & 1;
            *half = upper_half(bits, 0x7FFF + odd);
        }
    }

    #[inline(always)]
    fn round_stochastically(self, row: &[f32], words: &mut [f32], noise: Noise) {
        for (column, (half, value)) in cast_slice_mut::<f32, u16>(words).iter_mut().zip(row).enumerate() {
            // The half that is dropped carries over as often as its share of a unit.
            *half = upper_half(value.to_bits(), noise.bits(column));
        }
    }
}

/// Returns the upper half of a float's bits after adding `increment`, which moves a finite value to infinity at most;
/// infinity and NaN stay what they are.
#[inline(always)]
fn upper_half(bits: u32, increment: u32) -> u16 {
    const INFINITE: u32 = 0x7F80_0000;
    const QUIET: u32 = 0x0040_0000;
    let magnitude = bits & 0x7FFF_FFFF;
    // A NaN whose bits are all set would carry over into its sign, and be zero.
    let rounded = if magnitude < INFINITE { bits.wrapping_add(increment) } else { bits };
    // A NaN may have its bits in the half that is dropped; without this one it would be infinity.
    let kept = if magnitude > INFINITE { rounded | QUIET } else { rounded };
    (kept >> 16) as u16
}

impl RowType for Float16 {
    #[inline(always)]
    fn words(self, dim: usize) -> usize {
        dim.div_ceil(2)
    }

    #[inline(always)]
    fn widen(self, words: &[f32], row: &mut [f32]) {
        for (value, half) in row.iter_mut().zip(cast_slice::<f32, u16>(words)) {
            *value = widen_half(*half);
        }
    }

    #[inline(always)]
    fn round(self, row: &[f32], words: &mut [f32]) {
        for (half, value) in cast_slice_mut::<f32, u16>(words).iter_mut().zip(row) {
            *half = nearest_half(*value);
        }
    }

    #[inline(always)]
    fn round_stochastically(self, row: &[f32], words: &mut [f32], noise: Noise) {
        for (column, (half, value)) in cast_slice_mut::<f32, u16>(words).iter_mut().zip(row).enumerate() {
            *half = stochastic_half(*value, noise.bits(column));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    fn rounded(row_type: impl RowType, value: f32) -> f32 {
        let (mut words, mut back) = ([0.0], [0.0]);
        row_type.round(&[value], &mut words);
        row_type.widen(&words, &mut back);
        back[0]
    }

    fn same(got: f32, expected: f32) -> bool {
        got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
    }

    proptest! {
        #[test]
        fn rounding_to_the_nearest_agrees_with_the_crate_half(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            let expected = bf16::from_f32(value).to_f32();
            prop_assert!(same(rounded(Bfloat16, value), expected), "{value} {expected}");
            let exact = f16::from_f32(value).to_f32();
            let expected = if exact.is_infinite() && value.is_finite() { exact.signum() * 65_504.0 } else { exact };
            prop_assert!(same(rounded(Float16, value), expected), "{value} {expected}");
        }

        #[test]
        fn stochastic_rounding_gives_a_neighbour_and_keeps_what_fits(value in -70_000f32..70_000.0, scale in 0..40i32, hash in any::<u64>()) {
            let value = value * 2f32.powi(-scale);
            prop_assert!(stays_near(Bfloat16, value, hash, 2f32.powi(-133)));
            prop_assert!(stays_near(Float16, value.clamp(-65_504.0, 65_504.0), hash, 2f32.powi(-24)));
        }
    }

    fn stochastic(row_type: impl RowType, value: f32, hash: u64) -> f32 {
        let (mut words, mut back) = ([0.0], [0.0]);
        row_type.round_stochastically(&[value], &mut words, Noise::new(hash));
        row_type.widen(&words, &mut back);
        back[0]
    }

    /// How far apart two numbers of a type are at most, relative to them.
    fn distance(row_type: impl RowType) -> f32 {
        let mut words = [0.0];
        row_type.round(&[1.0 + 1.0 / 256.0], &mut words);
        let mut back = [0.0];
        row_type.widen(&words, &mut back);
        if back[0] == 1.0 { 1.0 / 128.0 } else { 1.0 / 1024.0 }
    }

    fn stays_near(row_type: impl RowType, value: f32, hash: u64, finest: f32) -> bool {
        let kept = rounded(row_type, value);
        let moved = (stochastic(row_type, value, hash) - value).abs();
        moved <= (value.abs() * distance(row_type)).max(finest) && stochastic(row_type, kept, hash) == kept
    }

    #[test]
    fn stochastic_rounding_is_right_on_average() {
        fn mean(row_type: impl RowType, value: f32) -> f64 {
            let count = 20_000;
            let hash = crate::kernel::hash::mix;
            (0..count).map(|n| f64::from(stochastic(row_type, value, hash(n)))).sum::<f64>() / count as f64
        }
        fn check(row_type: impl RowType, value: f32) {
            let step = (value.abs() * distance(row_type)).max(2f32.powi(-24));
            let error = mean(row_type, value) - f64::from(value);
            assert!(error.abs() <= 0.02 * f64::from(step), "{value}: {error}");
        }
        for value in [0.1f32, -3.3, 1e-6, 2e-8, 1234.5] {
            check(Bfloat16, value);
            check(Float16, value);
        }
    }

    #[test]
    fn columns_have_noise_of_their_own() {
        let noise = Noise::new(7);
        let bits: std::collections::HashSet<u32> = (0..64).map(|column| noise.bits(column)).collect();
        assert!(bits.len() > 60);
    }
}
