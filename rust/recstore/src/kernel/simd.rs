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

use crate::kernel::small_float::widen_half;
use crate::{Error, Result};

/// The vector instructions that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// What every processor of the target has: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2, 256 bits, with F16C and POPCNT.
    Avx2,
    /// AVX-512 (F, DQ, VL), 512 bits, with the same.
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
            // Every processor with AVX2 has the others.
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("popcnt")
            }
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Self::Avx2.is_available()
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
    /// Runs the kernel once; `lanes` does what the compiler finds no vector instruction for.
    fn run(self, lanes: impl Lanes);
}

/// What is written for each level by hand. A value of a level's type exists only where its instructions are there.
pub(crate) trait Lanes: Copy {
    /// Returns a bit for each of `lanes` that equals `value`, the first in the lowest place.
    fn equal(self, lanes: &[i64; 8], value: i64) -> u32;

    /// Returns halves as float32, exactly.
    fn widen_halves(self, halves: [u16; 2]) -> [f32; 2];

    /// Returns bytes as numbers.
    fn widen_bytes(self, bytes: [u8; 16]) -> [f32; 16];
}

/// [`Lanes`] in plain Rust: what the others are held against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScalarLanes;

impl Lanes for ScalarLanes {
    #[inline(always)]
    fn equal(self, lanes: &[i64; 8], value: i64) -> u32 {
        let bits = lanes.iter().enumerate().map(|(lane, other)| u32::from(*other == value) << lane);
        bits.fold(0, |bits, bit| bits | bit)
    }

    #[inline(always)]
    fn widen_halves(self, halves: [u16; 2]) -> [f32; 2] {
        halves.map(widen_half)
    }

    #[inline(always)]
    fn widen_bytes(self, bytes: [u8; 16]) -> [f32; 16] {
        bytes.map(f32::from)
    }
}

/// [`Lanes`] with AVX2.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
struct Avx2Lanes(());

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2Lanes {
    #[inline(always)]
    fn equal(self, lanes: &[i64; 8], value: i64) -> u32 {
        // SAFETY: 1. the processor has AVX2: only `run_avx2` makes a value of this type.
        unsafe { equal_avx2(lanes, value) }
    }

    #[inline(always)]
    fn widen_halves(self, halves: [u16; 2]) -> [f32; 2] {
        // SAFETY: 1. the processor has F16C: only `run_avx2` makes a value of this type.
        unsafe { widen_halves_f16c(halves) }
    }

    #[inline(always)]
    fn widen_bytes(self, bytes: [u8; 16]) -> [f32; 16] {
        // SAFETY: 1. the processor has AVX2: only `run_avx2` makes a value of this type.
        unsafe { widen_bytes_avx2(bytes) }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn equal_avx2(lanes: &[i64; 8], value: i64) -> u32 {
    use std::arch::x86_64::{
        _mm256_castsi256_pd, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_pd, _mm256_set1_epi64x,
    };
    let value = _mm256_set1_epi64x(value);
    let half = |first: usize| {
        // SAFETY: 1. four of the eight lanes lie at `first`, which is 0 or 4; the load needs no alignment.
        let lanes = unsafe { _mm256_loadu_si256(lanes[first..].as_ptr().cast()) };
        _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(lanes, value))) as u32
    };
    half(0) | half(4) << 4
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn widen_bytes_avx2(bytes: [u8; 16]) -> [f32; 16] {
    use std::arch::x86_64::{_mm_cvtsi64_si128, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_storeu_ps};
    let mut numbers = [0.0; 16];
    for (half, numbers) in bytes.as_chunks::<8>().0.iter().zip(numbers.as_chunks_mut::<8>().0) {
        let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(*half)));
        // SAFETY: 1. the eight numbers are 32 bytes; the store needs no alignment.
        unsafe { _mm256_storeu_ps(numbers.as_mut_ptr(), _mm256_cvtepi32_ps(wide)) };
    }
    numbers
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "f16c")]
#[inline]
fn widen_halves_f16c([first, second]: [u16; 2]) -> [f32; 2] {
    use std::arch::x86_64::{_mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32, _mm_movehdup_ps};
    let wide = _mm_cvtph_ps(_mm_cvtsi32_si128((u32::from(first) | u32::from(second) << 16) as i32));
    [_mm_cvtss_f32(wide), _mm_cvtss_f32(_mm_movehdup_ps(wide))]
}

/// [`Lanes`] with AVX-512.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
struct Avx512Lanes(());

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512Lanes {
    #[inline(always)]
    fn equal(self, lanes: &[i64; 8], value: i64) -> u32 {
        // SAFETY: 1. the processor has AVX-512 F: only `run_avx512` makes a value of this type.
        unsafe { equal_avx512(lanes, value) }
    }

    #[inline(always)]
    fn widen_halves(self, halves: [u16; 2]) -> [f32; 2] {
        // SAFETY: 1. the processor has F16C: only `run_avx512` makes a value of this type.
        unsafe { widen_halves_f16c(halves) }
    }

    #[inline(always)]
    fn widen_bytes(self, bytes: [u8; 16]) -> [f32; 16] {
        // SAFETY: 1. the processor has AVX-512 F: only `run_avx512` makes a value of this type.
        unsafe { widen_bytes_avx512(bytes) }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
#[inline]
fn equal_avx512(lanes: &[i64; 8], value: i64) -> u32 {
    use std::arch::x86_64::{_mm512_cmpeq_epi64_mask, _mm512_loadu_si512, _mm512_set1_epi64};
    // SAFETY: 1. the eight lanes are 64 bytes; the load needs no alignment.
    let lanes = unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) };
    u32::from(_mm512_cmpeq_epi64_mask(lanes, _mm512_set1_epi64(value)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
#[inline]
fn widen_bytes_avx512(bytes: [u8; 16]) -> [f32; 16] {
    use std::arch::x86_64::{_mm_loadu_si128, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_storeu_ps};
    let mut numbers = [0.0; 16];
    // SAFETY: 1. the bytes are 16, and the numbers 64 bytes; neither needs an alignment.
    unsafe {
        let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()));
        _mm512_storeu_ps(numbers.as_mut_ptr(), _mm512_cvtepi32_ps(wide));
    }
    numbers
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

    /// Returns what every machine has: for single rows.
    pub(crate) fn baseline() -> Self {
        Self(SimdLevel::Baseline)
    }

    /// Runs `kernel` compiled for this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        #[cfg(target_arch = "x86_64")]
        match self.0 {
            SimdLevel::Baseline => kernel.run(ScalarLanes),
            // SAFETY: 1. the processor has AVX2: `Simd::new` and `detect` checked it.
            SimdLevel::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: 1. the processor has AVX-512 F, DQ and VL: `Simd::new` and `detect` checked them.
            SimdLevel::Avx512 => unsafe { run_avx512(kernel) },
        }
        #[cfg(not(target_arch = "x86_64"))]
        kernel.run(ScalarLanes);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,popcnt")]
fn run_avx2<K: Kernel>(kernel: K) {
    kernel.run(Avx2Lanes(()));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,f16c,popcnt")]
fn run_avx512<K: Kernel>(kernel: K) {
    // AVX-512 brings fused multiply-adds, but rustc contracts nothing to them: all levels give the same bits.
    kernel.run(Avx512Lanes(()));
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

    struct Compare<'a>(&'a [i64; 8], i64, &'a mut u32);

    impl Kernel for Compare<'_> {
        #[inline(always)]
        fn run(self, lanes: impl Lanes) {
            *self.2 = lanes.equal(self.0, self.1);
        }
    }

    #[test]
    fn every_level_finds_the_same_equal_lanes() {
        for pattern in 0..256u32 {
            let lanes =
                std::array::from_fn(|lane| if pattern >> lane & 1 == 1 { i64::MIN } else { lane as i64 });
            for level in SimdLevel::available() {
                let mut found = 0;
                Simd::new(level).unwrap().run(Compare(&lanes, i64::MIN, &mut found));
                assert_eq!(found, pattern, "{level}");
                Simd::new(level).unwrap().run(Compare(&lanes, 99, &mut found));
                assert_eq!(found, 0, "{level}");
            }
        }
    }

    struct Widen<'a>([u16; 2], &'a mut [f32; 2]);

    impl Kernel for Widen<'_> {
        #[inline(always)]
        fn run(self, lanes: impl Lanes) {
            *self.1 = lanes.widen_halves(self.0);
        }
    }

    #[test]
    fn every_level_widens_all_halves_alike() {
        for half in 0..=u16::MAX {
            for level in SimdLevel::available() {
                let mut found = [9.0; 2];
                Simd::new(level).unwrap().run(Widen([half, !half], &mut found));
                let expected = [half, !half].map(widen_half);
                // What is no number stays none; all others have the same bits.
                let same = |(found, expected): (&f32, f32)| {
                    found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
                };
                assert!(
                    found.iter().zip(expected).all(same),
                    "{half:#x} at {level}: {found:?}, {expected:?}"
                );
            }
        }
    }

    struct WidenBytes<'a>([u8; 16], &'a mut [f32; 16]);

    impl Kernel for WidenBytes<'_> {
        #[inline(always)]
        fn run(self, lanes: impl Lanes) {
            *self.1 = lanes.widen_bytes(self.0);
        }
    }

    #[test]
    fn every_level_widens_all_bytes_at_every_place() {
        for first in 0..=u8::MAX {
            let bytes: [u8; 16] = std::array::from_fn(|place| first.wrapping_add(place as u8 * 17));
            for level in SimdLevel::available() {
                let mut found = [9.0; 16];
                Simd::new(level).unwrap().run(WidenBytes(bytes, &mut found));
                assert_eq!(found, bytes.map(f32::from), "{level}");
            }
        }
    }
}
