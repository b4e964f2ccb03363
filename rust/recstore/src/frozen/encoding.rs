//! How frozen tables keep their rows: as numbers of 32 or 16 bits, or as codes of 8 or 4 with a scale and a bias a row.
//!
//! ```text
//! value = code * scale + bias      bias = the least value, scale = (greatest - bias) / greatest code, both float16
//! row   = codes, scale, bias       two codes of 4 bits in a byte, the first in its lower half
//! ```
//!
//! Source: the rows of FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfRef`, `fbgemm/src/QuantUtils.cc`, which are
//! these to the bit, so that rows go both ways.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::kernel::simd::Lanes;
use crate::kernel::small_float::{nearest_half, widen_half};
use crate::rows::pooling::add_known;
use crate::{Error, Result};

/// How the rows of a frozen table are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Encoding {
    /// As they were trained.
    Float32,
    /// The upper half of each float32, rounded to the nearest.
    Bfloat16,
    /// IEEE 754 half precision, rounded to the nearest.
    Float16,
    /// Codes of 8 bits.
    Int8,
    /// Codes of 4 bits.
    Int4,
}

impl Encoding {
    /// All of them, from the widest to the narrowest.
    pub const ALL: [Self; 5] = [Self::Float32, Self::Bfloat16, Self::Float16, Self::Int8, Self::Int4];

    /// Returns the bytes of a row of `dim` values.
    #[must_use]
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::Float32 => dim * 4,
            Self::Bfloat16 | Self::Float16 => dim * 2,
            Self::Int8 => dim + SCALE_AND_BIAS,
            Self::Int4 => dim.div_ceil(2) + SCALE_AND_BIAS,
        }
    }

    /// Writes a row to its [`Encoding::row_bytes`]. Returns the value that the encoding has no number for, if there is one:
    /// of 16 bits and less those beyond 65,504 (bfloat16 has them), and of codes those that are not finite.
    pub fn encode(self, row: &[f32], bytes: &mut [u8]) -> std::result::Result<(), f32> {
        match self {
            Self::Float32 => write_each(row, bytes, |value| value.to_le_bytes()),
            Self::Bfloat16 => write_each(row, bytes, |value| bfloat16(value).to_le_bytes()),
            Self::Float16 => {
                check_halves(row, |value| value.abs() <= GREATEST_HALF || !value.is_finite())?;
                write_each(row, bytes, |value| nearest_half(value).to_le_bytes());
            }
            Self::Int8 => encode_codes::<8>(row, bytes)?,
            Self::Int4 => encode_codes::<4>(row, bytes)?,
        }
        Ok(())
    }

    /// Returns the bytes of rows, one behind the other.
    ///
    /// # Errors
    /// [`Error::Unencodable`] names the id whose row has a value that the encoding has no number for.
    pub fn encode_all(self, ids: &[i64], rows: &[f32]) -> Result<Vec<u8>> {
        let dim = rows.len().checked_div(ids.len()).unwrap_or(0);
        let mut bytes = vec![0; ids.len() * self.row_bytes(dim)];
        let pieces = bytes.chunks_mut(self.row_bytes(dim).max(1));
        for ((id, row), bytes) in ids.iter().zip(rows.chunks(dim.max(1))).zip(pieces) {
            self.encode(row, bytes).map_err(|value| Error::Unencodable {
                id: *id,
                value,
                encoding: self.to_string(),
            })?;
        }
        Ok(bytes)
    }

    /// Reads a row from its bytes.
    #[inline(always)]
    pub(super) fn decode(self, lanes: impl Lanes, bytes: &[u8], row: &mut [f32]) {
        match self {
            Self::Float32 => read_each(bytes, row, f32::from_le_bytes),
            Self::Bfloat16 => {
                read_each(bytes, row, |half| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16));
            }
            Self::Float16 => read_each(bytes, row, |half| widen_half(u16::from_le_bytes(half))),
            Self::Int8 => decode_bytes(lanes, bytes, row),
            Self::Int4 => decode_nibbles(lanes, bytes, row),
        }
    }

    /// Adds a row of a known length, times a weight, to a sum: the same as [`Encoding::decode`] and an addition.
    #[inline(always)]
    pub(super) fn add_to<const LEN: usize>(
        self,
        lanes: impl Lanes,
        sum: &mut [f32; LEN],
        weight: f32,
        bytes: &[u8],
    ) {
        let mut row = [0.0; LEN];
        self.decode(lanes, bytes, &mut row);
        add_known(sum, weight, &row);
    }
}

/// The bytes of both in a row of codes.
const SCALE_AND_BIAS: usize = 4;
const GREATEST_HALF: f32 = 65_504.0;

/// The codes that are read together.
const CODES_AT_ONCE: usize = 16;

fn check_halves(row: &[f32], fits: impl Fn(f32) -> bool) -> std::result::Result<(), f32> {
    row.iter().copied().find(|value| !fits(*value)).map_or(Ok(()), Err)
}

fn write_each<const N: usize>(row: &[f32], bytes: &mut [u8], bits: impl Fn(f32) -> [u8; N]) {
    for (value, bytes) in row.iter().zip(bytes.as_chunks_mut::<N>().0) {
        *bytes = bits(*value);
    }
}

#[inline(always)]
fn read_each<const N: usize>(bytes: &[u8], row: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (element, bytes) in row.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *element = value(*bytes);
    }
}

/// Rounds to the nearest, ties to even; what is not a number stays so.
fn bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The quiet bit: a NaN whose bits are set in the lower half alone would become infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn encode_codes<const BITS: u32>(row: &[f32], bytes: &mut [u8]) -> std::result::Result<(), f32> {
    // False for a NaN too, for which there is no code.
    check_halves(row, |value| value.abs() <= GREATEST_HALF)?;
    let most = ((1u32 << BITS) - 1) as f32;
    let (least, greatest) =
        row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(least, greatest), &value| {
            (least.min(value), greatest.max(value))
        });
    let (least, greatest) = if row.is_empty() { (0.0, 0.0) } else { (least, greatest) };
    // The range begins at the bias as it is kept, so codes make up for its rounding. Rounded up, it lies
    // above the least value, whose code would be negative: hence the clamp below.
    let bias = nearest_half(least);
    let (scale, inverse) = scale_of(greatest - widen_half(bias), most);
    let (codes, behind) = bytes.split_at_mut(bytes.len() - SCALE_AND_BIAS);
    behind[..2].copy_from_slice(&scale.to_le_bytes());
    behind[2..].copy_from_slice(&bias.to_le_bytes());
    let code = |value: f32| ((value - widen_half(bias)) * inverse).round_ties_even().clamp(0.0, most) as u8;
    let values_a_byte = (8 / BITS) as usize;
    for (byte, values) in codes.iter_mut().zip(row.chunks(values_a_byte)) {
        *byte = (0..).zip(values).fold(0, |byte, (place, &value)| byte | code(value) << (place * BITS));
    }
    Ok(())
}

/// Returns the scale of a row as float16, and what values are multiplied with to become codes. Rows of equal values, and
/// those whose scale is too small to be divided by, have a scale of 1: then all codes are 0 or so.
fn scale_of(range: f32, most: f32) -> (u16, f32) {
    let scale = nearest_half(if range == 0.0 { 1.0 } else { range / most });
    let inverse = 1.0 / widen_half(scale);
    match widen_half(scale) == 0.0 || inverse.is_infinite() {
        true => (nearest_half(1.0), 1.0),
        false => (scale, inverse),
    }
}

/// Returns the codes of a row, one of 8 bits or two of 4 a byte, its scale and its bias.
#[inline(always)]
fn codes_of(lanes: impl Lanes, bytes: &[u8], count: usize) -> (&[u8], [f32; 2]) {
    let (codes, behind) = bytes.split_at(count);
    let half = |place: usize| u16::from_le_bytes([behind[place], behind[place + 1]]);
    (codes, lanes.widen_halves([half(0), half(2)]))
}

#[inline(always)]
fn decode_bytes(lanes: impl Lanes, bytes: &[u8], row: &mut [f32]) {
    let (codes, [scale, bias]) = codes_of(lanes, bytes, row.len());
    let (pieces, rest) = row.as_chunks_mut::<CODES_AT_ONCE>();
    let (whole, behind) = codes.as_chunks::<CODES_AT_ONCE>();
    for (piece, codes) in pieces.iter_mut().zip(whole) {
        *piece = values_of(lanes, *codes, scale, bias);
    }
    for (value, code) in rest.iter_mut().zip(behind) {
        *value = f32::from(*code) * scale + bias;
    }
}

#[inline(always)]
fn decode_nibbles(lanes: impl Lanes, bytes: &[u8], row: &mut [f32]) {
    let (codes, [scale, bias]) = codes_of(lanes, bytes, row.len().div_ceil(2));
    let (pieces, rest) = row.as_chunks_mut::<CODES_AT_ONCE>();
    let (whole, behind) = codes.split_at(pieces.len() * CODES_AT_ONCE / 2);
    for (piece, codes) in pieces.iter_mut().zip(whole.as_chunks::<{ CODES_AT_ONCE / 2 }>().0) {
        // Spread first, a byte a code: of that and of widening bytes the compiler makes vectors, of both at once it
        // makes none.
        let mut pairs = [0u16; CODES_AT_ONCE / 2];
        for (pair, &code) in pairs.iter_mut().zip(codes) {
            *pair = (u16::from(code & 0xF) | u16::from(code & 0xF0) << 4).to_le();
        }
        *piece = values_of(lanes, bytemuck::cast(pairs), scale, bias);
    }
    for (place, value) in rest.iter_mut().enumerate() {
        *value = f32::from(behind[place / 2] >> (place % 2 * 4) & 0xF) * scale + bias;
    }
}

#[inline(always)]
fn values_of(lanes: impl Lanes, codes: [u8; CODES_AT_ONCE], scale: f32, bias: f32) -> [f32; CODES_AT_ONCE] {
    let mut values = lanes.widen_bytes(codes);
    for value in &mut values {
        *value = *value * scale + bias;
    }
    values
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

impl FromStr for Encoding {
    type Err = Error;

    /// Reads `float32`, `bfloat16`, `float16`, `int8` or `int4`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|encoding| encoding.to_string() == name);
        found.ok_or_else(|| Error::InvalidConfig {
            message: format!(
                "rows are frozen as float32, bfloat16, float16, int8 or int4, not as \"{name}\""
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::ScalarLanes;
    use proptest::prelude::*;

    fn through(encoding: Encoding, row: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; encoding.row_bytes(row.len())];
        encoding.encode(row, &mut bytes).unwrap();
        let mut back = vec![f32::NAN; row.len()];
        encoding.decode(ScalarLanes, &bytes, &mut back);
        back
    }

    proptest! {
        #[test]
        fn float32_is_kept_to_the_bit(bits in prop::collection::vec(any::<u32>(), 0..9)) {
            let row: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            let back: Vec<u32> = through(Encoding::Float32, &row).iter().map(|value| value.to_bits()).collect();
            prop_assert_eq!(back, bits);
        }

        #[test]
        fn halves_are_those_of_the_crate_half(row in prop::collection::vec(-60_000f32..60_000.0, 0..9)) {
            let expected: Vec<f32> = row.iter().map(|&value| half::f16::from_f32(value).to_f32()).collect();
            prop_assert_eq!(through(Encoding::Float16, &row), expected);
            let expected: Vec<f32> = row.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect();
            prop_assert_eq!(through(Encoding::Bfloat16, &row), expected);
        }

        /// Half a step of the codes, and what float16 takes off the least value and the scale.
        #[test]
        fn codes_are_near(row in prop::collection::vec(-9f32..9.0, 1..40)) {
            for (encoding, codes) in [(Encoding::Int8, 255.0), (Encoding::Int4, 15.0)] {
                let range = row.iter().fold(0f32, |most, value| most.max(value.abs())) * 2.0;
                let bound = range / codes * 0.51 + range / 2048.0 * 2.0 + 1e-4;
                for (value, back) in row.iter().zip(through(encoding, &row)) {
                    prop_assert!((value - back).abs() <= bound, "{encoding}: {value} became {back}");
                }
            }
        }
    }

    #[test]
    fn equal_values_and_tiny_ranges_are_kept() {
        for encoding in [Encoding::Int8, Encoding::Int4] {
            assert_eq!(through(encoding, &[0.5; 5]), [0.5; 5]);
            assert_eq!(through(encoding, &[0.0; 3]), [0.0; 3]);
            assert_eq!(through(encoding, &[]), [0f32; 0]);
            let back = through(encoding, &[1.0, 1.0 + f32::EPSILON]);
            assert!(back.iter().all(|value| (value - 1.0).abs() < 1e-3), "{back:?}");
        }
    }

    /// From `torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf([[0, 0.25, 0.5, 1.0]], bits)`.
    #[test]
    fn codes_have_the_layout_of_fbgemm() {
        let mut bytes = [0; 8];
        Encoding::Int8.encode(&[0.0, 0.25, 0.5, 1.0], &mut bytes).unwrap();
        assert_eq!(bytes, [0, 64, 128, 255, 0x04, 0x1C, 0, 0]);
        let mut bytes = [0; 6];
        Encoding::Int4.encode(&[0.0, 0.25, 0.5, 1.0], &mut bytes).unwrap();
        assert_eq!(bytes, [0x40, 0xF8, 0x44, 0x2C, 0, 0]);
    }

    #[test]
    fn what_has_no_number_is_told() {
        let mut bytes = [0; 16];
        for encoding in [Encoding::Float16, Encoding::Int8, Encoding::Int4] {
            let size = encoding.row_bytes(2);
            assert_eq!(encoding.encode(&[1.0, 70_000.0], &mut bytes[..size]), Err(70_000.0));
        }
        let size = Encoding::Int8.row_bytes(2);
        assert_eq!(Encoding::Int8.encode(&[f32::INFINITY, 0.0], &mut bytes[..size]), Err(f32::INFINITY));
        assert!(Encoding::Int8.encode(&[0.0, f32::NAN], &mut bytes[..size]).is_err_and(f32::is_nan));
    }

    #[test]
    fn names_are_read_back() {
        for encoding in Encoding::ALL {
            assert_eq!(encoding.to_string().parse(), Ok(encoding));
        }
        let message = "int2".parse::<Encoding>().unwrap_err().to_string();
        assert!(message.contains("int8 or int4, not as \"int2\""), "{message}");
    }
}
