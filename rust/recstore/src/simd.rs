//! Runs a kernel compiled for the widest vector instructions of the machine.
//!
//! A kernel is one piece of scalar code; each level compiles that same code for its instructions. Only
//! `+ - * / sqrt` are used, rustc never contracts them to a fused multiply-add, and sums go over a fixed number of
//! lanes, so every level gives the same bits and `Baseline` is the oracle of the others.

#![expect(
    unsafe_code,
    reason = "a function compiled for more instructions than the target has can only be called unsafely"
)]

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// The vector instructions that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// What every processor of the target has: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2, 256 bits.
    Avx2,
    /// AVX-512 (F, DQ, VL), 512 bits.
    Avx512,
}

impl SimdLevel {
    const ALL: [Self; 3] = [Self::Baseline, Self::Avx2, Self::Avx512];

    /// Returns the widest level of this machine.
    pub fn detect() -> Self {
        Self::available().into_iter().max().unwrap_or(Self::Baseline)
    }

    /// Returns the levels this machine can run.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|level| level.is_available()).collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Baseline => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Self::Baseline
    }

    fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SimdLevel {
    type Err = Error;

    /// Reads `baseline`, `avx2` or `avx512`.
    ///
    /// # Errors
    /// [`Error::UnavailableSimd`] if the name is unknown or this machine cannot run the level.
    fn from_str(name: &str) -> Result<Self> {
        let available = Self::available();
        let found = available.iter().find(|level| level.name() == name);
        found.copied().ok_or_else(|| Error::UnavailableSimd {
            level: name.to_owned(),
            available: available.iter().map(|level| level.name()).collect::<Vec<_>>().join(", "),
        })
    }
}

/// Scalar code to be compiled for each level. `run` must be `#[inline(always)]`, and so must all it calls.
pub(crate) trait Kernel {
    /// Runs the kernel once.
    fn run(self);
}

/// A level that this machine was seen to have; only [`Simd::new`] makes one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Simd(SimdLevel);

impl Simd {
    /// Checks that this machine has `level`.
    pub(crate) fn new(level: SimdLevel) -> Result<Self> {
        level.name().parse().map(Self)
    }

    /// Returns the widest level of this machine.
    pub(crate) fn detect() -> Self {
        Self(SimdLevel::detect())
    }

    /// Runs `kernel` compiled for this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        #[cfg(target_arch = "x86_64")]
        match self.0 {
            SimdLevel::Baseline => kernel.run(),
            // SAFETY: 1. the processor has AVX2: `Simd::new` and `detect` checked it.
            SimdLevel::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: 1. the processor has AVX-512 F, DQ and VL: `Simd::new` and `detect` checked them.
            SimdLevel::Avx512 => unsafe { run_avx512(kernel) },
        }
        #[cfg(not(target_arch = "x86_64"))]
        kernel.run();
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<K: Kernel>(kernel: K) {
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn run_avx512<K: Kernel>(kernel: K) {
    kernel.run();
}

/// The number of running sums in [`sum_of_squares`]: fixed, so that every level adds in the same order.
const LANES: usize = 16;

/// Returns the sum of the squares of `count` values, added over a fixed number of lanes.
#[inline(always)]
pub(crate) fn sum_of_squares(count: usize, value: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let full = count - count % LANES;
    for start in (0..full).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += value(start + lane) * value(start + lane);
        }
    }
    for position in full..count {
        lanes[position - full] += value(position) * value(position);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_reads_back_from_its_name() {
        for level in SimdLevel::available() {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
    }

    #[test]
    fn an_unknown_level_is_refused_by_name() {
        let error = "sse9".parse::<SimdLevel>().unwrap_err().to_string();
        assert!(error.contains("\"sse9\"") && error.contains("baseline"), "{error}");
    }

    #[test]
    fn sum_of_squares_takes_every_value_once() {
        for count in [0, 1, 15, 16, 17, 64, 100] {
            let sum = (0..count).map(|j| (j * j) as f32).sum::<f32>();
            assert_eq!(sum_of_squares(count, |j| j as f32), sum);
        }
    }
}
