//! Binary floats of 16 and 8 bits: IEEE 754 half precision, and e4m3 without infinities.
//!
//! One is a sign, an exponent and `MANTISSA` bits; exponents are counted from minus `BIAS`. Source of e4m3:
//! Micikevicius et al. 2022, "FP8 formats for deep learning", section 3.

/// The bits of a half's mantissa, and its bias.
const HALF: (u32, u32) = (10, 15);

/// The same of e4m3.
const E4M3: (u32, u32) = (3, 7);

/// Below this the distance between floats is fixed.
const fn least_normal(bias: u32) -> f32 {
    power_of_two(1 - bias as i32)
}

const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Returns the bits of `value` without its sign, of the float nearest to it, of two equally near ones the even one. It
/// may have a greater exponent than the format.
#[inline(always)]
fn nearest<const MANTISSA: u32, const BIAS: u32>(value: f32) -> u32 {
    // At 2^23 floats are one apart: adding it rounds to a whole number of the distance between small ones.
    const ONE_APART: f32 = power_of_two(23);
    let dropped = 23 - MANTISSA;
    let (magnitude, least) = (value.abs(), least_normal(BIAS));
    let biased = with_bias::<BIAS>(magnitude);
    let odd = biased >> dropped & 1;
    let normal = biased.wrapping_add((1 << (dropped - 1)) - 1 + odd) >> dropped;
    let small = magnitude.min(least) * small_steps::<MANTISSA, BIAS>() + ONE_APART;
    if magnitude < least { small.to_bits() & 0x7F_FFFF } else { normal }
}

/// Returns the same of one of the two floats around `value`; `noise` are 16 random bits.
#[inline(always)]
fn stochastic<const MANTISSA: u32, const BIAS: u32>(value: f32, noise: u32) -> u32 {
    // A small one is given the exponent of the least normal one, which is taken away from what is found: floats below that
    // are as far apart as those above it.
    let (magnitude, least) = (value.abs(), least_normal(BIAS));
    let (lift, lifted_by) = if magnitude < least { (least, 1 << MANTISSA) } else { (0.0, 0) };
    let biased = with_bias::<BIAS>(magnitude + lift);
    // The noise fills the bits that are dropped: 16 and 7 zeros are the 23 of a float, and the mantissa's are
    // taken off.
    (biased.wrapping_add(noise << 7 >> MANTISSA) >> (23 - MANTISSA)).wrapping_sub(lifted_by)
}

/// Returns how many of the distances between small floats are one.
#[inline(always)]
const fn small_steps<const MANTISSA: u32, const BIAS: u32>() -> f32 {
    power_of_two((BIAS + MANTISSA - 1) as i32)
}

/// Returns a magnitude's bits with the exponent counted from minus `BIAS`.
#[inline(always)]
fn with_bias<const BIAS: u32>(magnitude: f32) -> u32 {
    magnitude.to_bits().wrapping_sub((127 - BIAS) << 23)
}

/// Returns a half as a float32, exactly.
#[inline(always)]
pub(crate) fn widen_half(half: u16) -> f32 {
    // Exponent and mantissa go to the right place; multiplying sets the exponent's bias right, below normal too.
    const TO_BIAS: f32 = power_of_two(127 - 15);
    const FIRST_INFINITE: u32 = 0x7C00 << 13;
    let magnitude = u32::from(half & 0x7FFF) << 13;
    let bits = (f32::from_bits(magnitude) * TO_BIAS).to_bits();
    let special = if magnitude >= FIRST_INFINITE { 0x7F80_0000 } else { 0 };
    f32::from_bits(bits | special | u32::from(half & 0x8000) << 16)
}

/// Returns the half nearest to `value`, of two equally near ones the even one.
#[inline(always)]
pub(crate) fn nearest_half(value: f32) -> u16 {
    half_of(value, nearest::<{ HALF.0 }, { HALF.1 }>(value))
}

/// Returns one of the two halves around `value`; `noise` are 16 random bits.
#[inline(always)]
pub(crate) fn stochastic_half(value: f32, noise: u32) -> u16 {
    half_of(value, stochastic::<{ HALF.0 }, { HALF.1 }>(value, noise))
}

/// Gives what was found of a half the sign of `value`. The greatest finite half is never passed; infinity and NaN stay
/// what they are.
#[inline(always)]
fn half_of(value: f32, found: u32) -> u16 {
    const GREATEST: u32 = 0x7BFF;
    let magnitude = value.abs();
    let half = if magnitude == f32::INFINITY { 0x7C00 } else { found.min(GREATEST) };
    // Last: a NaN is equal to nothing, so the line above made it a number.
    let half = if magnitude.is_nan() { 0x7E00 } else { half };
    (value.to_bits() >> 16 & 0x8000 | half) as u16
}

/// Returns e4m3 as a float32, exactly. There is none for a NaN.
#[inline(always)]
pub(crate) fn widen_e4m3(code: u8) -> f32 {
    const MIN_NORMAL: f32 = least_normal(E4M3.1);
    const FIRST_NORMAL: u32 = 1 << 23;
    let magnitude = u32::from(code & 0x7F) << 20;
    let normal = f32::from_bits(magnitude + ((127 - E4M3.1) << 23));
    // With the exponent of the least normal one, which is taken away again: no number below normal need be multiplied.
    let small = f32::from_bits(magnitude + ((128 - E4M3.1) << 23)) - MIN_NORMAL;
    let value = if magnitude < FIRST_NORMAL { small } else { normal };
    f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
}

/// Returns the e4m3 nearest to `value`, whose magnitude is 448 at most, of two equally near ones the even one.
#[inline(always)]
pub(crate) fn nearest_e4m3(value: f32) -> u8 {
    e4m3_of(value, nearest::<{ E4M3.0 }, { E4M3.1 }>(value))
}

/// Returns one of the two e4m3 around `value`, whose magnitude is 448 at most; `noise` are 16 random bits.
#[inline(always)]
pub(crate) fn stochastic_e4m3(value: f32, noise: u32) -> u8 {
    e4m3_of(value, stochastic::<{ E4M3.0 }, { E4M3.1 }>(value, noise))
}

#[inline(always)]
fn e4m3_of(value: f32, found: u32) -> u8 {
    (value.to_bits() >> 24 & 0x80 | found) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use proptest::prelude::*;

    /// The value of e4m3 by its definition.
    fn by_definition(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    fn codes() -> impl Iterator<Item = u8> {
        (0..=255).filter(|code| code & 0x7F != 0x7F)
    }

    #[test]
    fn every_e4m3_is_widened_exactly_and_comes_back() {
        for code in codes() {
            let value = widen_e4m3(code);
            assert_eq!(f64::from(value), by_definition(code), "{code:#x}");
            assert_eq!(nearest_e4m3(value), code);
            assert!([0, 1, 0x7FFF, 0xFFFF].iter().all(|&noise| stochastic_e4m3(value, noise) == code));
        }
        assert_eq!(widen_e4m3(0x7E), 448.0);
    }

    #[test]
    fn half_way_between_two_the_even_one_is_nearest() {
        let ascending: Vec<u8> = (0..0x7F).collect();
        for pair in ascending.windows(2) {
            let middle = (widen_e4m3(pair[0]) + widen_e4m3(pair[1])) / 2.0;
            assert_eq!(nearest_e4m3(middle) & 1, 0, "{middle}");
            assert!(pair.contains(&nearest_e4m3(middle)));
            assert_eq!(nearest_e4m3(middle.next_up()), pair[1]);
            assert_eq!(nearest_e4m3(middle.next_down()), pair[0]);
        }
    }

    proptest! {
        #[test]
        fn no_other_e4m3_is_nearer(value in -448f32..448.0, scale in 0..12i32) {
            let value = value * 2f32.powi(-scale);
            let distance = |code: u8| (by_definition(code) - f64::from(value)).abs();
            let found = distance(nearest_e4m3(value));
            prop_assert!(codes().all(|code| distance(code) >= found));
        }

        #[test]
        fn noise_chooses_one_of_the_two_around_a_value(value in -448f32..448.0, scale in 0..12i32, noise in 0..0x1_0000u32) {
            let value = value * 2f32.powi(-scale);
            let found = by_definition(stochastic_e4m3(value, noise));
            let (low, high) = (found.min(f64::from(value)), found.max(f64::from(value)));
            let between = codes().map(by_definition).filter(|&other| low < other && other < high);
            prop_assert_eq!(between.count(), 0);
        }

        #[test]
        fn every_half_is_widened_exactly(half in any::<u16>()) {
            let (got, expected) = (widen_half(half), f16::from_bits(half).to_f32());
            prop_assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
        }
    }
}
