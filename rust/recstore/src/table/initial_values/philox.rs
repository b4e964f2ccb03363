//! Random numbers that are a pure function of (seed, id, column): Philox4x32-10, and the normal distribution over it.
//!
//! Only integer arithmetic and `+ - * / sqrt` in double precision are used, so that every machine gives the same bits.

use std::f32::consts::SQRT_2;

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The counters of a group.
const LANES: usize = 8;

/// The random words of a group.
pub(crate) const WORDS: usize = 4 * LANES;

/// What each round mixes in, words of 32 bits.
pub(crate) type RoundKeys = [[u64; 2]; ROUNDS];

/// Returns the keys of the rounds.
pub(crate) fn round_keys(key: [u32; 2]) -> RoundKeys {
    std::array::from_fn(|round| {
        [0, 1].map(|half| u64::from(key[half].wrapping_add(WEYL[half].wrapping_mul(round as u32))))
    })
}

/// Returns the random words of the columns from `WORDS * group` on, for an id and the keys of the rounds.
///
/// Column `8 * word + lane` of a group is that word of Philox4x32-10 for the counter (id, `8 * group + lane`).
///
/// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
#[inline(always)]
pub(crate) fn random_words(id: i64, group: u32, keys: &RoundKeys) -> [u32; WORDS] {
    const LOW: u64 = u32::MAX as u64;
    // Words of 32 bits in lanes of 64: the product of two needs them, and vector instructions multiply them so where
    // the compiler can see that the upper halves are empty.
    let mut counter = [[id as u64 & LOW; LANES], [id as u64 >> 32; LANES], [0; LANES], [0; LANES]];
    for (lane, block) in counter[2].iter_mut().enumerate() {
        *block = u64::from(group) * LANES as u64 + lane as u64;
    }
    for key in keys {
        let [c0, c1, c2, c3] = counter;
        for lane in 0..LANES {
            let product0 = u64::from(MULTIPLIERS[0]) * (c0[lane] & LOW);
            let product1 = u64::from(MULTIPLIERS[1]) * (c2[lane] & LOW);
            counter[0][lane] = (product1 >> 32) ^ c1[lane] ^ key[0];
            counter[1][lane] = product1 & LOW;
            counter[2][lane] = (product0 >> 32) ^ c3[lane] ^ key[1];
            counter[3][lane] = product0 & LOW;
        }
    }
    let mut words = [0; WORDS];
    for (words, lanes) in words.chunks_exact_mut(LANES).zip(counter) {
        for (word, lane) in words.iter_mut().zip(lanes) {
            *word = lane as u32;
        }
    }
    words
}

/// Returns a standard normal number for each random word, of single precision: up to 5.4 standard deviations.
///
/// It is the square root of 2 times the inverse error function of a number in (-1, 1) with 24 random bits.
///
/// Source: Giles 2012, "Approximating the erfinv function", GPU Computing Gems (Jade edition), chapter 10.
#[inline(always)]
pub(crate) fn normals<const N: usize>(words: &[u32; N]) -> [f32; N] {
    const CENTRE_ENDS: f32 = 5.0;
    let (mut x, mut one_less_square) = ([0.0; N], [0.0; N]);
    for j in 0..N {
        // Half a step off the whole numbers, so x never is 1 in magnitude, where the logarithm is infinite. 1
        // - x * x would lose the last bits near 1, the product of two exact factors does not.
        x[j] = ((words[j] as i32 >> 8) as f32 + 0.5) * (1.0 / 8_388_608.0);
        one_less_square[j] = (1.0 - x[j]) * (1.0 + x[j]);
    }
    let logarithms = ln_single(&one_less_square);
    let (mut w, mut from_centre) = ([0.0; N], [0.0; N]);
    for j in 0..N {
        w[j] = -logarithms[j];
        from_centre[j] = w[j] - 2.5;
    }
    let mut normals = polynomial_single(&CENTRE, &from_centre);
    let mut beyond = 0;
    for j in 0..N {
        normals[j] = SQRT_2 * (x[j] * normals[j]);
        beyond |= u32::from(w[j] >= CENTRE_ENDS);
    }
    // One branch for all: the tails, one number in 300, are computed for the whole group then. Drawn one by
    // one they took 122 against 113 ns a row, and 16 at a time 230, compiled to gathers.
    if beyond > 0 {
        let mut from_tail = [0.0; N];
        for j in 0..N {
            from_tail[j] = w[j].sqrt() - 3.0;
        }
        let tail = polynomial_single(&TAIL, &from_tail);
        for j in 0..N {
            normals[j] = if w[j] >= CENTRE_ENDS { SQRT_2 * (x[j] * tail[j]) } else { normals[j] };
        }
    }
    normals
}

/// Evaluates a polynomial whose highest coefficient comes first, at all places step by step: a step at one place waits for
/// the step before it, and the processor does those of others meanwhile.
#[inline(always)]
fn polynomial_single<const N: usize>(coefficients: &[f32; 9], x: &[f32; N]) -> [f32; N] {
    let mut sums = [coefficients[0]; N];
    for coefficient in &coefficients[1..] {
        for j in 0..N {
            // No `mul_add`: a fused product rounds once, and would give other bits on machines that have
            // none.
            sums[j] = sums[j] * x[j] + coefficient;
        }
    }
    sums
}

/// Returns the natural logarithms of normal positive numbers.
///
/// Source: Moshier, Cephes mathematical library, `logf`.
#[inline(always)]
fn ln_single<const N: usize>(x: &[f32; N]) -> [f32; N] {
    const SQRT_HALF_BITS: u32 = 0x3F35_04F3;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let (mut f, mut exponents) = ([0.0; N], [0.0; N]);
    for j in 0..N {
        let bits = x[j].to_bits();
        let exponent = (bits.wrapping_sub(SQRT_HALF_BITS) as i32) >> 23;
        f[j] = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23)) - 1.0;
        exponents[j] = exponent as f32;
    }
    let mut logarithms = polynomial_single(&LN, &f);
    for j in 0..N {
        let square = f[j] * f[j];
        let y = logarithms[j] * f[j] * square + exponents[j] * LN_2_LOW - 0.5 * square;
        // The high part of ln 2 has nine bits, so its product with an exponent is exact.
        logarithms[j] = f[j] + y + exponents[j] * LN_2_HIGH;
    }
    logarithms
}

/// The inverse error function within about 0.9966 of zero, over x.
const CENTRE: [f32; 9] = [
    2.810_226_4e-8,
    3.432_739_4e-7,
    -3.523_387_7e-6,
    -4.391_506_5e-6,
    2.185_808_7e-4,
    -1.253_725e-3,
    -4.177_681_6e-3,
    0.246_640_73,
    1.501_409_4,
];
/// The inverse error function beyond, over x.
const TAIL: [f32; 9] = [
    -2.002_142_6e-4,
    1.009_505_6e-4,
    1.349_343_2e-3,
    -3.673_428_4e-3,
    5.739_507_7e-3,
    -7.622_461_3e-3,
    9.438_870_5e-3,
    1.001_674,
    2.832_976_8,
];
const LN: [f32; 9] = [
    7.037_683_6e-2,
    -0.115_146_1,
    0.116_769_99,
    -0.124_201_41,
    0.142_493_23,
    -0.166_680_58,
    0.200_007_15,
    -0.249_999_94,
    0.333_333_3,
];

/// Maps a random word to the middle of its interval in `(0, 1)`.
#[inline(always)]
pub(crate) fn unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

/// Returns the quantile of the standard normal distribution at `p` in `(0, 1)`, to about 1e-15.
///
/// Source: Wichura 1988, algorithm AS 241 (PPND16), Applied Statistics 37(3).
#[inline(always)]
pub(crate) fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if (-0.425..=0.425).contains(&q) {
        let r = 0.180_625 - q * q;
        return q * polynomial(&CENTRE_NUMERATOR, r) / polynomial(&CENTRE_DENOMINATOR, r);
    }
    let r = (-ln(if q < 0.0 { p } else { 1.0 - p })).sqrt();
    let tail = if r <= 5.0 {
        polynomial(&TAIL_NUMERATOR, r - 1.6) / polynomial(&TAIL_DENOMINATOR, r - 1.6)
    } else {
        polynomial(&FAR_NUMERATOR, r - 5.0) / polynomial(&FAR_DENOMINATOR, r - 5.0)
    };
    if q < 0.0 { -tail } else { tail }
}

/// Evaluates a polynomial whose highest coefficient comes first.
#[inline(always)]
fn polynomial(coefficients: &[f64; 8], x: f64) -> f64 {
    let mut sum = 0.0;
    for coefficient in coefficients {
        sum = sum * x + coefficient;
    }
    sum
}

/// Returns the natural logarithm of a normal positive number, by the series of `2 artanh((m - 1) / (m + 1))`.
#[inline(always)]
fn ln(x: f64) -> f64 {
    const SQRT_HALF_BITS: u64 = 0x3FE6_A09E_667F_3BCD;
    let bits = x.to_bits();
    let shifted = bits.wrapping_sub(SQRT_HALF_BITS);
    let exponent = (shifted as i64) >> 52;
    let mantissa = f64::from_bits(bits.wrapping_sub((exponent as u64) << 52));
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for odd in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / odd;
    }
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * sum
}

const CENTRE_NUMERATOR: [f64; 8] = [
    2_509.080_928_730_122_7,
    33_430.575_583_588_13,
    67_265.770_927_008_7,
    45_921.953_931_549_87,
    13_731.693_765_509_46,
    1_971.590_950_306_551_3,
    133.141_667_891_784_38,
    3.387_132_872_796_366_5,
];
const CENTRE_DENOMINATOR: [f64; 8] = [
    5_226.495_278_852_545,
    28_729.085_735_721_943,
    39_307.895_800_092_71,
    21_213.794_301_586_597,
    5_394.196_021_424_751,
    687.187_007_492_057_9,
    42.313_330_701_600_91,
    1.0,
];
const TAIL_NUMERATOR: [f64; 8] = [
    7.745_450_142_783_414e-4,
    0.022_723_844_989_269_184,
    0.241_780_725_177_450_6,
    1.270_458_252_452_368_4,
    3.647_848_324_763_204_5,
    5.769_497_221_460_691,
    4.630_337_846_156_546,
    1.423_437_110_749_683_5,
];
const TAIL_DENOMINATOR: [f64; 8] = [
    1.050_750_071_644_416_9e-9,
    5.475_938_084_995_345e-4,
    0.015_198_666_563_616_457,
    0.148_103_976_427_480_08,
    0.689_767_334_985_1,
    1.676_384_830_183_803_8,
    2.053_191_626_637_759,
    1.0,
];
const FAR_NUMERATOR: [f64; 8] = [
    2.010_334_399_292_288_1e-7,
    2.711_555_568_743_487_6e-5,
    0.001_242_660_947_388_078_4,
    0.026_532_189_526_576_124,
    0.296_560_571_828_504_87,
    1.784_826_539_917_291_3,
    5.463_784_911_164_114,
    6.657_904_643_501_103,
];
const FAR_DENOMINATOR: [f64; 8] = [
    2.044_263_103_389_939_8e-15,
    1.421_511_758_316_446e-7,
    1.846_318_317_510_054_8e-5,
    7.868_691_311_456_133e-4,
    0.014_875_361_290_850_615,
    0.136_929_880_922_735_8,
    0.599_832_206_555_888,
    1.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Philox4x32-10 for one counter: what the lanes are held against.
    fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
        for _ in 0..ROUNDS {
            let product0 = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
            let product1 = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
            counter = [
                (product1 >> 32) as u32 ^ counter[1] ^ key[0],
                product1 as u32,
                (product0 >> 32) as u32 ^ counter[3] ^ key[1],
                product0 as u32,
            ];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        counter
    }

    #[test]
    fn every_lane_is_a_counter_of_its_own() {
        for (id, group) in [(0, 0), (-1, 3), (i64::MIN + 77, 1 << 20)] {
            let key = [5, 0x8000_0001];
            let words = random_words(id, group, &round_keys(key));
            for lane in 0..LANES {
                let block = group * LANES as u32 + lane as u32;
                let expected = philox4x32([id as u32, (id >> 32) as u32, block, 0], key);
                assert_eq!([0, 1, 2, 3].map(|word| words[word * LANES + lane]), expected);
            }
        }
    }

    #[test]
    fn normals_are_the_quantiles_of_their_words() {
        let words = (0..64u32).map(|j| j.wrapping_mul(0x0404_1041)).chain([
            0,
            1 << 8,
            u32::MAX,
            1 << 31,
            (1 << 31) - 1,
        ]);
        for word in words {
            let unit = (f64::from(word as i32 >> 8) + 0.5) / f64::from(1 << 24) + 0.5;
            let (got, expected) = (f64::from(normals(&[word; WORDS])[7]), normal_quantile(unit));
            assert!((got - expected).abs() <= 3e-6 * expected.abs().max(0.1), "{word}: {got} {expected}");
        }
    }

    #[test]
    fn the_logarithm_is_right_to_single_precision() {
        for step in 1..4_000u32 {
            let x = f32::from_bits(0x3380_0000 + step * 0x0003_3333);
            let expected = f64::from(x).ln();
            assert!(
                (f64::from(ln_single(&[x])[0]) - expected).abs() <= 2e-7 * expected.abs().max(0.5),
                "{x}"
            );
        }
    }

    #[test]
    fn philox_gives_the_published_vectors() {
        // Known answers of the reference implementation, Random123, file kat_vectors.
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn ln_agrees_with_the_standard_library() {
        for exponent in -40..3 {
            for step in 1..50 {
                let x = f64::from(step) * 2f64.powi(exponent);
                assert!((ln(x) - x.ln()).abs() <= 1e-14 * x.ln().abs().max(1.0), "{x}");
            }
        }
    }

    #[test]
    fn normal_quantile_inverts_the_distribution() {
        for p in [1e-10, 1e-5, 0.01, 0.074, 0.075, 0.3, 0.5, 0.7, 0.926, 0.99, 0.999_999] {
            let back = 0.5 * libm::erfc(-normal_quantile(p) / std::f64::consts::SQRT_2);
            assert!((back - p).abs() <= 1e-13 * p.max(1e-3) + 1e-12 * p, "{p} {back}");
        }
    }
}
