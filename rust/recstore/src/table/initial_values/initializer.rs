//! The initial value of a row: a pure function of (table seed, id, column).
//!
//! It does not depend on the order of insertion, on threads, shards, processes or machines, and a row that was
//! deleted starts again from the same value. The table's seed is drawn from the configured seed and the table's
//! name, so that two tables of one seed do not start with equal rows for equal ids.

use super::philox::{RoundKeys, WORDS, normal_quantile, normals, random_words, round_keys, unit};
use crate::config::{InitializerConfig, TableConfig};
use crate::kernel::simd::{Kernel, Lanes, Simd};

/// Fills rows with their initial values.
#[derive(Debug, Clone)]
pub(crate) struct Initializer {
    seed: u64,
    keys: RoundKeys,
    distribution: Distribution,
}

#[derive(Debug, Clone)]
enum Distribution {
    Constant(f32),
    Uniform { low: f64, width: f64 },
    Normal { mean: f32, std: f32 },
    TruncatedNormal { mean: f64, std: f64, low: f64, high: f64, p_low: f64, p_width: f64 },
}

impl Initializer {
    /// Prepares the initial values of the table `name`.
    pub(crate) fn new(name: &str, config: &TableConfig) -> Self {
        let seed = table_seed(name, config.seed);
        Self {
            seed,
            keys: round_keys([seed as u32, (seed >> 32) as u32]),
            distribution: Distribution::new(config),
        }
    }

    /// Returns the table's seed, drawn from the configured one and the table's name.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Writes the initial values of the rows of `ids`, one after the other.
    #[inline]
    pub(crate) fn fill(&self, simd: Simd, ids: &[i64], rows: &mut [f32]) {
        match self.distribution {
            Distribution::Constant(value) => rows.fill(value),
            _ => simd.run(Draw { initializer: self, ids, rows }),
        }
    }
}

/// Draws the values of some ids' rows. A kernel of its own: they are drawn in many places, and there is much code in it.
struct Draw<'a> {
    initializer: &'a Initializer,
    ids: &'a [i64],
    rows: &'a mut [f32],
}

impl Kernel for Draw<'_> {
    /// First the random words of all, then the value of each: both are chains of steps that wait for one another, and
    /// short ones of many rows overlap.
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { initializer, ids, rows } = self;
        let dim = rows.len() / ids.len().max(1);
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(dim.max(1))) {
            let (groups, rest) = row.as_chunks_mut::<WORDS>();
            let whole_groups = groups.len() as u32;
            for (group, columns) in (0..).zip(groups) {
                // Counted by columns from the first, so that a value depends on seed, id and column alone.
                *columns = random_words(*id, group, &initializer.keys).map(f32::from_bits);
            }
            if !rest.is_empty() {
                let words = random_words(*id, whole_groups, &initializer.keys);
                for (column, word) in rest.iter_mut().zip(&words) {
                    *column = f32::from_bits(*word);
                }
            }
        }
        // After the words of all rows, not row by row: dependent steps left the processor idle, 94 against 77
        // ns (dim 64) and 67 against 30 (dim 8).
        initializer.distribution.apply(rows);
    }
}

impl Distribution {
    fn new(config: &TableConfig) -> Self {
        match config.initializer {
            InitializerConfig::Zeros {} => Self::Constant(0.0),
            InitializerConfig::Constant { value } => Self::Constant(value as f32),
            InitializerConfig::Uniform { a, b } => Self::Uniform { low: a, width: b - a },
            InitializerConfig::Normal { mean, std } => Self::Normal { mean: mean as f32, std: std as f32 },
            InitializerConfig::TruncatedNormal { mean, std, a, b } => {
                let (low, high) = (a.unwrap_or(mean - 2.0 * std), b.unwrap_or(mean + 2.0 * std));
                let p_low = normal_probability((low - mean) / std);
                let p_width = normal_probability((high - mean) / std) - p_low;
                Self::TruncatedNormal { mean, std, low, high, p_low, p_width }
            }
            InitializerConfig::XavierUniform { gain } => {
                let fans = config.num_embeddings.unwrap_or(0) as f64 + config.dim as f64;
                let bound = gain * (6.0 / fans).sqrt();
                Self::Uniform { low: -bound, width: 2.0 * bound }
            }
        }
    }
}

impl Distribution {
    /// Turns random words, which are the bits of `values`, into values. Loops, not closures: those would be compiled
    /// without a kernel's instructions.
    #[inline(always)]
    fn apply(&self, values: &mut [f32]) {
        match *self {
            Self::Constant(value) => values.fill(value),
            Self::Uniform { low, width } => {
                for value in values {
                    *value = (low + width * unit(value.to_bits())) as f32;
                }
            }
            Self::Normal { mean, std } => apply_normal(values, mean, std),
            Self::TruncatedNormal { mean, std, low, high, p_low, p_width } => {
                for value in values {
                    let normal = normal_quantile(p_low + p_width * unit(value.to_bits()));
                    *value = (mean + std * normal).clamp(low, high) as f32;
                }
            }
        }
    }
}

/// As many values as are drawn together: they keep vector units busy, and few enough are seldom in the tails.
const TOGETHER: usize = 64;

#[inline(always)]
fn apply_normal(values: &mut [f32], mean: f32, std: f32) {
    let (blocks, rest) = values.as_chunks_mut::<TOGETHER>();
    for block in blocks {
        *block = normal_block(block, mean, std);
    }
    if !rest.is_empty() {
        let mut block = [0.0; TOGETHER];
        block[..rest.len()].copy_from_slice(rest);
        rest.copy_from_slice(&normal_block(&block, mean, std)[..rest.len()]);
    }
}

#[inline(always)]
fn normal_block(block: &[f32; TOGETHER], mean: f32, std: f32) -> [f32; TOGETHER] {
    let mut words = [0; TOGETHER];
    for (word, value) in words.iter_mut().zip(block) {
        *word = value.to_bits();
    }
    let mut values = normals(&words);
    for value in &mut values {
        *value = mean + std * *value;
    }
    values
}

/// Returns the probability that a standard normal number lies below `z`.
fn normal_probability(z: f64) -> f64 {
    // Not the C library's, whose last bits differ between machines.
    0.5 * libm::erfc(-z / std::f64::consts::SQRT_2)
}

/// Spreads configured seeds; odd, so that the product has an inverse.
const SEED_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// Returns the seed with which the table `copy` has the initial values, and the noise of rounding, that the table `name`
/// has with `seed`.
pub(crate) fn seed_of_copy(name: &str, seed: u64, copy: &str) -> u64 {
    let factored = name_hash(name) ^ name_hash(copy) ^ seed.wrapping_mul(SEED_FACTOR);
    factored.wrapping_mul(inverse(SEED_FACTOR))
}

/// Returns the inverse of an odd number modulo 2^64. Each of Newton's steps doubles the bits that are right.
fn inverse(odd: u64) -> u64 {
    // Three bits of an odd number's square are those of 1.
    (0..5).fold(odd, |found, _| found.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(found))))
}

/// FNV-1a.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// Mixes a table's name into the configured seed, by the finalizer of `SplitMix64`.
fn table_seed(name: &str, seed: u64) -> u64 {
    let mut mixed = name_hash(name) ^ seed.wrapping_mul(SEED_FACTOR);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::SimdLevel;

    #[test]
    fn a_copy_has_the_seed_of_its_table() {
        for seed in [0, 1, 77, u64::MAX] {
            let copied = seed_of_copy("user", seed, "user.copy");
            assert_eq!(table_seed("user.copy", copied), table_seed("user", seed));
        }
    }

    fn rows(text: &str, dim: usize, ids: std::ops::Range<i64>) -> Vec<f32> {
        let config = TableConfig::from_json(dim, text).unwrap();
        let initializer = Initializer::new("t", &config);
        let mut rows = vec![0.0; dim * ids.clone().count()];
        for (id, row) in ids.zip(rows.chunks_mut(dim)) {
            initializer.fill(Simd::detect(), &[id], row);
        }
        rows
    }

    fn moments(values: &[f32]) -> (f64, f64) {
        let count = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
        let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }

    #[test]
    fn distributions_have_their_moments() {
        let wide = 7; // Not a multiple of the words a call gives.
        for (text, mean, std) in [
            (r#"{"initializer": {"kind": "constant", "value": 0.5}}"#, 0.5, 0.0),
            (r#"{"initializer": {"kind": "uniform", "a": -1, "b": 3}}"#, 1.0, 4.0 / 12f64.sqrt()),
            (r#"{"initializer": {"kind": "normal", "mean": 2, "std": 3}}"#, 2.0, 3.0),
            // The standard deviation of a normal cut at two sigma is 0.8796 sigma.
            (r#"{"initializer": {"kind": "truncated_normal", "std": 2}}"#, 0.0, 2.0 * 0.8796),
            // 6 / (93 + 7) = 0.06; the bound is its root.
            (r#"{"num_embeddings": 93, "initializer": {"kind": "xavier_uniform"}}"#, 0.0, 0.02f64.sqrt()),
        ] {
            let (got_mean, got_std) = moments(&rows(text, wide, -10_000..10_000));
            let tolerance = 0.02 * std;
            assert!((got_mean - mean).abs() <= tolerance, "{text}: mean {got_mean}");
            assert!((got_std - std).abs() <= tolerance + 1e-6, "{text}: std {got_std}");
        }
    }

    #[test]
    fn a_truncated_normal_stays_within_its_bounds() {
        let text = r#"{"initializer": {"kind": "truncated_normal", "std": 1, "a": -0.5, "b": 0.25}}"#;
        assert!(rows(text, 8, 0..5000).iter().all(|x| (-0.5..=0.25).contains(x)));
    }

    #[test]
    fn a_value_depends_on_seed_name_id_and_column_alone() {
        let row = |name: &str, seed: u64, id: i64, dim: usize| {
            let config = TableConfig { seed, ..TableConfig::new(dim) };
            let mut row = vec![0.0; dim];
            Initializer::new(name, &config).fill(Simd::detect(), &[id], &mut row);
            row
        };
        let base = row("t", 1, i64::MIN, 8);
        assert_eq!(base, row("t", 1, i64::MIN, 8));
        assert_eq!(base[..3], row("t", 1, i64::MIN, 3)[..]);
        assert_ne!(base, row("u", 1, i64::MIN, 8));
        assert_ne!(base, row("t", 2, i64::MIN, 8));
        assert_ne!(base, row("t", 1, i64::MIN + 1, 8));
        assert_ne!(base, row("t", 1, 0, 8));
    }

    #[test]
    fn rows_drawn_together_at_any_level_are_those_drawn_one_by_one() {
        let ids: Vec<i64> = (-20..20).map(|id| id * 0x0123_4567_89AB).collect();
        for kind in ["uniform", "normal", "truncated_normal", "zeros"] {
            let text = format!(r#"{{"initializer": {{"kind": "{kind}"}}}}"#);
            for dim in [1, 3, 8, 31, 32, 33, 64, 100, 129] {
                let config = TableConfig::from_json(dim, &text).unwrap();
                let initializer = Initializer::new("t", &config);
                let mut row = vec![f32::NAN; dim];
                for level in SimdLevel::available() {
                    let mut together = vec![f32::NAN; ids.len() * dim];
                    initializer.fill(Simd::new(level).unwrap(), &ids, &mut together);
                    for (id, of_all) in ids.iter().zip(together.chunks_exact(dim)) {
                        initializer.fill(Simd::baseline(), &[*id], &mut row);
                        assert_eq!(of_all, row, "{kind}, dim {dim}, id {id}, {level}");
                    }
                }
                initializer.fill(Simd::detect(), &[], &mut []);
            }
        }
    }

    #[test]
    fn values_are_the_same_on_every_machine() {
        // Written down once: a change here breaks every table whose rows were not all written.
        let row = rows(r#"{"seed": 3, "initializer": {"kind": "normal", "std": 1}}"#, 3, 42..43);
        let bits: Vec<u32> = row.iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, GOLDEN, "{row:?}");
    }

    const GOLDEN: [u32; 3] = [3_215_190_676, 3_221_054_023, 1_066_394_527];
}
