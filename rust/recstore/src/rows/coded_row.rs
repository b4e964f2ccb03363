//! Rows of 8 bits: a code for each weight, and the power of two by which a row's codes are multiplied.
//!
//! ```text
//! weight = code * scale      record = scale (float32), codes, zeros up to a multiple of four bytes
//! ```
//!
//! The scale is the least with which the row's greatest weight has a code. Codes are whole numbers from -127 to 127, or
//! e4m3. To multiply by a power of two is exact, so a row that keeps its scale keeps the weights that a step leaves
//! alone, and one that grows rounds them once. Each weight is a bfloat16 as well. Weights beyond 2^127 * 1.75 or so stop
//! there, and a row with a NaN or an infinity is all NaN.
//!
//! Source: the formats MXINT8 and MXFP8 of "OCP Microscaling Formats (MX) Specification", version 1.0 (2023), sections
//! 5.2 and 5.3, there with a scale for 32 elements, here with one a row.

use bytemuck::{cast_slice, cast_slice_mut};

use super::row_type::{Noise, RowType};
use crate::kernel::small_float::{nearest_e4m3, stochastic_e4m3, widen_e4m3};

/// What a code means.
pub(crate) trait Code: Copy + Send + Sync + 'static {
    /// The greatest code.
    const GREATEST: f32;

    /// Returns the value of a code.
    fn widen(code: u8) -> f32;

    /// Returns the code nearest to `value`, whose magnitude is [`Code::GREATEST`] at most.
    fn nearest(value: f32) -> u8;

    /// Returns one of the two codes around `value`, whose magnitude is [`Code::GREATEST`] at most; `noise` are 16 random
    /// bits.
    fn stochastic(value: f32, noise: u32) -> u8;
}

/// Whole numbers from -127 to 127.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int8;

/// Floats with an exponent of 4 bits and a mantissa of 3, up to 448.
#[derive(Debug, Clone, Copy)]
pub(crate) struct E4m3;

impl Code for Int8 {
    const GREATEST: f32 = 127.0;

    #[inline(always)]
    fn widen(code: u8) -> f32 {
        f32::from(code.cast_signed())
    }

    #[inline(always)]
    fn nearest(value: f32) -> u8 {
        // Floats of this size are one apart, and the last bits of one are those of the whole number added.
        const ONE_APART: f32 = 12_582_912.0;
        (value + ONE_APART).to_bits() as u8
    }

    #[inline(always)]
    fn stochastic(value: f32, noise: u32) -> u8 {
        // Less than a half up or down: a whole number stays what it is.
        Self::nearest(value + ((noise as f32 + 0.5) / 65_536.0 - 0.5))
    }
}

impl Code for E4m3 {
    const GREATEST: f32 = 448.0;

    #[inline(always)]
    fn widen(code: u8) -> f32 {
        widen_e4m3(code)
    }

    #[inline(always)]
    fn nearest(value: f32) -> u8 {
        nearest_e4m3(value)
    }

    #[inline(always)]
    fn stochastic(value: f32, noise: u32) -> u8 {
        stochastic_e4m3(value, noise)
    }
}

/// Rows of codes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coded<C>(pub(crate) C);

impl<C: Code> RowType for Coded<C> {
    #[inline(always)]
    fn words(self, dim: usize) -> usize {
        words_of_codes(dim)
    }

    #[inline(always)]
    fn widen(self, words: &[f32], row: &mut [f32]) {
        let [scale, codes @ ..] = words else { return };
        for (value, code) in row.iter_mut().zip(cast_slice::<f32, u8>(codes)) {
            *value = C::widen(*code) * scale;
        }
    }

    #[inline(always)]
    fn round(self, row: &[f32], words: &mut [f32]) {
        encode::<C>(row, words, |_, value| C::nearest(value));
    }

    #[inline(always)]
    fn round_stochastically(self, row: &[f32], words: &mut [f32], noise: Noise) {
        encode::<C>(row, words, |column, value| C::stochastic(value, noise.bits(column)));
    }
}

/// Returns the words of a scale and of `dim` codes behind it.
#[inline(always)]
pub(super) fn words_of_codes(dim: usize) -> usize {
    1 + dim.div_ceil(size_of::<f32>())
}

#[inline(always)]
fn encode<C: Code>(row: &[f32], words: &mut [f32], code: impl Fn(usize, f32) -> u8) {
    let [kept, codes @ ..] = words else { return };
    let (scale, inverse) = scale_of(row, C::GREATEST);
    *kept = scale;
    for (column, (place, value)) in cast_slice_mut::<f32, u8>(codes).iter_mut().zip(row).enumerate() {
        *place = code(column, (value * inverse).clamp(-C::GREATEST, C::GREATEST));
    }
}

/// Returns the least power of two by which the weight of greatest magnitude can be divided to be `greatest` or less, of
/// those with which `greatest` is finite, and one over it; NaN where a weight is not finite.
#[inline(always)]
fn scale_of(row: &[f32], greatest: f32) -> (f32, f32) {
    const MANTISSA: u32 = 0x7F_FFFF;
    const INFINITE: u32 = 255 << 23;
    // Magnitudes are in the order of their bits, and NaN is behind infinity.
    let most = row.iter().fold(0, |most, value| most.max(value.to_bits() & !(1 << 31)));
    let over = MANTISSA - (greatest.to_bits() & MANTISSA);
    let exponent = ((most + over) >> 23).min(254);
    // Neither is below the least normal float.
    let scale = exponent.saturating_sub((greatest.to_bits() >> 23) - 127).max(1);
    // A power of two and its inverse, so both products with a weight are exact.
    match most < INFINITE {
        true => (f32::from_bits(scale << 23), f32::from_bits((254 - scale) << 23)),
        false => (f32::NAN, 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The scale and the weights of a row, by the definition, in double precision.
    fn by_definition<C: Code>(row: &[f32]) -> (f64, Vec<f64>) {
        let most = row.iter().fold(0.0, |most: f64, value| most.max(f64::from(*value).abs()));
        let fits = |exponent: &i32| most <= f64::from(C::GREATEST) * 2f64.powi(*exponent);
        let scale = 2f64.powi((-126..128).find(fits).unwrap());
        let codes: Vec<f64> = (0..=255)
            .map(|code| f64::from(C::widen(code)))
            .filter(|code| code.abs() <= f64::from(C::GREATEST))
            .collect();
        let nearest = |value: &f32| {
            let distance = |code: &f64| (code * scale - f64::from(*value)).abs();
            codes.iter().copied().min_by(|one, other| distance(one).total_cmp(&distance(other))).unwrap()
                * scale
        };
        (scale, row.iter().map(nearest).collect())
    }

    fn words_of<C: Code>(code: C, row: &[f32]) -> Vec<f32> {
        let mut words = vec![0.0; Coded(code).words(row.len())];
        Coded(code).round(row, &mut words);
        words
    }

    fn widened<C: Code>(code: C, words: &[f32], dim: usize) -> Vec<f32> {
        let mut row = vec![f32::MAX; dim];
        Coded(code).widen(words, &mut row);
        row
    }

    fn is_nearest<C: Code>(code: C, row: &[f32]) -> bool {
        let words = words_of(code, row);
        let (scale, expected) = by_definition::<C>(row);
        let got = widened(code, &words, row.len());
        let off = |(got, value): (&f32, &f32)| (f64::from(*got) - f64::from(*value)).abs();
        let far = |(expected, value): (&f64, &f32)| (expected - f64::from(*value)).abs();
        f64::from(words[0]) == scale && got.iter().zip(row).map(off).eq(expected.iter().zip(row).map(far))
    }

    /// Whether stochastic rounding keeps a row that was rounded before, and gives neighbours of others.
    fn stays<C: Code>(code: C, row: &[f32], hash: u64) -> bool {
        let words = words_of(code, row);
        let kept = widened(code, &words, row.len());
        let mut again = words.clone();
        Coded(code).round_stochastically(&kept, &mut again, Noise::new(hash));
        let same_scale = words_of(code, &kept)[0] == words[0];
        let same_weights = widened(code, &again, row.len()) == kept;
        let mut chosen = words.clone();
        Coded(code).round_stochastically(row, &mut chosen, Noise::new(hash));
        let step = 2.0 * (1.0 / 16.0) * row.iter().fold(0f32, |most, value| most.max(value.abs()));
        let near =
            widened(code, &chosen, row.len()).iter().zip(row).all(|(got, value)| (got - value).abs() <= step);
        // A greatest weight that is rounded down may fit half the scale.
        (same_weights || !same_scale) && near
    }

    proptest! {
        #[test]
        fn weights_are_rounded_to_the_nearest(row in prop::collection::vec(-9f32..9.0, 1..20), scale in -100..100i32) {
            let row: Vec<f32> = row.iter().map(|value| value * 2f32.powi(scale)).collect();
            prop_assert!(is_nearest(Int8, &row), "int8 {row:?}");
            prop_assert!(is_nearest(E4m3, &row), "e4m3 {row:?}");
        }

        #[test]
        fn rounded_weights_stay_and_others_go_to_a_neighbour(row in prop::collection::vec(-9f32..9.0, 1..20), hash in any::<u64>()) {
            prop_assert!(stays(Int8, &row, hash), "int8 {row:?}");
            prop_assert!(stays(E4m3, &row, hash), "e4m3 {row:?}");
        }

        #[test]
        fn weights_are_bfloat16(row in prop::collection::vec(-9f32..9.0, 1..20)) {
            for kept in [widened(Int8, &words_of(Int8, &row), row.len()), widened(E4m3, &words_of(E4m3, &row), row.len())] {
                prop_assert!(kept.iter().all(|value| value.to_bits() & 0xFFFF == 0), "{kept:?}");
            }
        }
    }

    #[test]
    fn whole_numbers_are_kept() {
        let row: Vec<f32> = (-127..=127).map(|value| value as f32).collect();
        assert_eq!(widened(Int8, &words_of(Int8, &row), row.len()), row);
        assert_eq!(words_of(Int8, &[127.0])[0], 1.0);
        assert_eq!(words_of(Int8, &[127.1])[0], 2.0);
        assert_eq!(words_of(E4m3, &[448.0])[0], 1.0);
        assert_eq!(words_of(E4m3, &[448.1])[0], 2.0);
    }

    #[test]
    fn the_ends_of_the_range_are_kept() {
        let row = [f32::MAX, -f32::MAX, 0.0, f32::MIN_POSITIVE, 1e-45];
        let kept = [widened(Int8, &words_of(Int8, &row), 5), widened(E4m3, &words_of(E4m3, &row), 5)];
        for kept in kept {
            assert!(kept[0].is_finite() && kept[0] >= 0.87 * f32::MAX && kept[1] == -kept[0], "{kept:?}");
            assert_eq!(kept[2..], [0.0; 3]);
        }
        for row in [[0.0f32; 3], [1e-45; 3], [-0.0; 3]] {
            assert_eq!(widened(Int8, &words_of(Int8, &row), 3), [0.0; 3]);
            assert_eq!(widened(E4m3, &words_of(E4m3, &row), 3), [0.0; 3]);
        }
    }

    #[test]
    fn a_row_that_is_not_finite_is_not_a_number() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(widened(Int8, &words_of(Int8, &[1.0, bad, 0.0]), 3).iter().all(|value| value.is_nan()));
            assert!(widened(E4m3, &words_of(E4m3, &[1.0, bad, 0.0]), 3).iter().all(|value| value.is_nan()));
        }
    }

    #[test]
    fn stochastic_rounding_is_right_on_average() {
        fn mean<C: Code>(code: C, value: f32) -> f64 {
            let count = 20_000;
            let one = |hash| {
                let mut words = [0.0; 2];
                Coded(code).round_stochastically(&[1.0, value], &mut words, Noise::new(hash));
                f64::from(widened(code, &words, 2)[1])
            };
            (0..count).map(|number| one(crate::kernel::hash::mix(number))).sum::<f64>() / count as f64
        }
        for value in [0.9f32, -0.33, 0.011, 0.001, -0.0001] {
            let int8 = mean(Int8, value) - f64::from(value);
            assert!(int8.abs() < 0.02 / 64.0, "{value}: {int8}");
            let e4m3 = mean(E4m3, value) - f64::from(value);
            assert!(e4m3.abs() < 0.02 * f64::from(value.abs() / 8.0).max(2f64.powi(-17)), "{value}: {e4m3}");
        }
    }
}
