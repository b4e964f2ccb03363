//! Sums and averages of squares, of 8 bits each: what steps divide by the roots of.
//!
//! ```text
//! value = (1 + code % 8 / 8) * 2^(code / 8) * scale, 0 for the code 0      record = scale (float32), codes, zeros
//! ```
//!
//! The scale is the least power of two with which the greatest of a row's values has a code, so codes reach 9 decimal
//! places below it. A value below all codes gets the least one and never zero: its root would be a divisor of nothing.
//! A value that has a code keeps it, whatever becomes of the scale. Where one of a row is not finite, so are others.
//!
//! Source: 8 bits for optimizer state are those of Dettmers et al. 2022, "8-bit optimizers via block-wise quantization",
//! section 2; floats of 5 bits of exponent and 3 of mantissa take the place of their table here, without a sign.

use bytemuck::{cast_slice, cast_slice_mut};

use super::coded_row::words_of_codes;
use super::row_type::{Noise, RowType};

/// The bits of a float32 behind those that a code has.
const DROPPED: u32 = 20;

/// The codes of a power of two and of those up to the next.
const CODES_AN_OCTAVE: u32 = 8;

/// Infinity as the bits that a code is made of.
const INFINITE: u32 = 0x7F80_0000 >> DROPPED;

/// Squares as codes, with a scale for each row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodedSquares;

impl RowType for CodedSquares {
    #[inline(always)]
    fn words(self, dim: usize) -> usize {
        words_of_codes(dim)
    }

    #[inline(always)]
    fn widen(self, words: &[f32], row: &mut [f32]) {
        let [scale, codes @ ..] = words else { return };
        let base = scale.to_bits() >> DROPPED;
        for (value, code) in row.iter_mut().zip(cast_slice::<f32, u8>(codes)) {
            let bits = (base + u32::from(*code)) << DROPPED;
            *value = if *code == 0 { 0.0 } else { f32::from_bits(bits) };
        }
    }

    #[inline(always)]
    fn round(self, row: &[f32], words: &mut [f32]) {
        const HALF: u32 = (1 << (DROPPED - 1)) - 1;
        encode(row, words, |_, bits| HALF + (bits >> DROPPED & 1));
    }

    #[inline(always)]
    fn round_stochastically(self, row: &[f32], words: &mut [f32], noise: Noise) {
        // Between the 16 random bits and the next greater ones; what has a code stays.
        encode(row, words, |column, _| noise.bits(column) << 4 | 8);
    }
}

/// Writes the codes of a row; `increment` is added to the bits of a value before those that a code lacks are dropped.
#[inline(always)]
fn encode(row: &[f32], words: &mut [f32], increment: impl Fn(usize, u32) -> u32) {
    let [scale, codes @ ..] = words else { return };
    let base = base_of(row);
    *scale = f32::from_bits(base << DROPPED);
    for (column, (code, value)) in cast_slice_mut::<f32, u8>(codes).iter_mut().zip(row).enumerate() {
        let bits = value.abs().to_bits();
        let kept = kept_bits(bits, increment(column, bits));
        *code = if bits == 0 { 0 } else { kept.saturating_sub(base).clamp(1, 255) as u8 };
    }
}

/// Returns the bits of which codes are made after adding `increment`; what is finite stays so.
#[inline(always)]
fn kept_bits(bits: u32, increment: u32) -> u32 {
    match bits >> DROPPED {
        kept if kept >= INFINITE => kept,
        _ => ((bits + increment) >> DROPPED).min(INFINITE - 1),
    }
}

/// Returns the bits of the scale, as codes are made of them.
#[inline(always)]
fn base_of(row: &[f32]) -> u32 {
    const UP: u32 = (1 << DROPPED) - 1;
    let most = row.iter().fold(0, |most, value| most.max(value.abs().to_bits()));
    let least = kept_bits(most, UP).saturating_sub(u8::MAX.into()).next_multiple_of(CODES_AN_OCTAVE);
    // That of the least normal float.
    least.max(CODES_AN_OCTAVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::hash::mix;
    use proptest::prelude::*;

    fn widened(words: &[f32], dim: usize) -> Vec<f32> {
        let mut row = vec![f32::MAX; dim];
        CodedSquares.widen(words, &mut row);
        row
    }

    fn nearest(row: &[f32]) -> Vec<f32> {
        let mut words = vec![0.0; CodedSquares.words(row.len())];
        CodedSquares.round(row, &mut words);
        widened(&words, row.len())
    }

    fn drawn(row: &[f32], hash: u64) -> Vec<f32> {
        let mut words = vec![0.0; CodedSquares.words(row.len())];
        CodedSquares.round_stochastically(row, &mut words, Noise::new(hash));
        widened(&words, row.len())
    }

    /// The values of all codes with a scale, by the definition.
    fn codes(scale: f64) -> Vec<f64> {
        let value = |code: i32| (1.0 + f64::from(code % 8) / 8.0) * 2f64.powi(code / 8) * scale;
        std::iter::once(0.0).chain((1..256).map(value)).collect()
    }

    fn scale_of(row: &[f32]) -> f64 {
        let mut words = vec![0.0; CodedSquares.words(row.len())];
        CodedSquares.round(row, &mut words);
        words[0].into()
    }

    proptest! {
        #[test]
        fn values_are_rounded_to_the_nearest_code(row in prop::collection::vec(0f32..9.0, 1..20), power in -60..60i32) {
            let row: Vec<f32> = row.iter().map(|value| value * 2f32.powi(power)).collect();
            let codes = codes(scale_of(&row));
            prop_assert!(codes[255] >= row.iter().copied().fold(0.0, f32::max).into());
            for (value, got) in row.iter().zip(nearest(&row)) {
                let off = (f64::from(got) - f64::from(*value)).abs();
                let least = codes.iter().map(|code| (code - f64::from(*value)).abs()).fold(f64::MAX, f64::min);
                let is_below_all = *value > 0.0 && f64::from(*value) < codes[1];
                prop_assert!(off == least || is_below_all && f64::from(got) == codes[1], "{value} {got}");
            }
        }

        #[test]
        fn what_has_a_code_keeps_it_and_the_rest_goes_to_a_neighbour(row in prop::collection::vec(0f32..9.0, 1..20), hash in any::<u64>()) {
            let kept = nearest(&row);
            prop_assert_eq!(&drawn(&kept, hash), &kept);
            for (value, got) in row.iter().zip(drawn(&row, hash)) {
                prop_assert!((got - value).abs() <= value / 8.0 || *value < 1e-7, "{value} {got}");
            }
        }
    }

    #[test]
    fn what_is_not_zero_never_becomes_zero() {
        let row = [1.0, 1e-30, 0.0, 1e-45];
        for kept in [nearest(&row), drawn(&row, 7)] {
            assert!(kept[1] > 0.0 && kept[1] < 1e-9 && kept[2] == 0.0 && kept[3] == kept[1], "{kept:?}");
        }
        assert_eq!(nearest(&[0.0; 3]), [0.0; 3]);
        assert!(nearest(&[1e-45])[0] < 1e-37);
    }

    #[test]
    fn the_greatest_floats_stay_finite_and_others_are_told() {
        let most = drawn(&[f32::MAX], u64::MAX)[0];
        assert!(most.is_finite() && most >= 0.93 * f32::MAX);
        assert_eq!(nearest(&[f32::INFINITY]), [f32::INFINITY]);
        assert!(nearest(&[f32::NAN, 1.0])[0].is_nan());
    }

    #[test]
    fn rounding_is_right_on_average() {
        for value in [0.9f32, 0.33, 0.011, 1e-5] {
            let count = 20_000;
            let sum: f64 = (0..count).map(|number| f64::from(drawn(&[1.0, value], mix(number))[1])).sum();
            let error = (sum / count as f64 - f64::from(value)).abs();
            // Six deviations of the mean: values lie at most an eighth apart.
            assert!(error < 6.0 * f64::from(value) / 16.0 / (count as f64).sqrt(), "{value}: {error}");
        }
    }
}
