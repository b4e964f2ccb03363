//! Cells at the beginning of a text: what they stand for, and how long they are.
//!
//! A cell ends at the first byte that it cannot have; whoever reads it sees whether the cell may end there.

use std::sync::LazyLock;

/// A value, and the bytes of its cell.
pub(crate) type Cell<T> = Option<(T, usize)>;

/// The least integers whose dense values are looked up instead of computed.
const TABULATED: usize = 1 << 12;
/// More digits than these may be more than 64 bits.
const SAFE_DIGITS: usize = 18;
const HEX_DIGITS: usize = 8;
const NO_DIGIT: u8 = 0xff;

static DENSE_VALUES: LazyLock<Vec<f32>> =
    LazyLock::new(|| (0..TABULATED).map(|count| (1.0 + count as f64).ln() as f32).collect());

static HEX_VALUES: [u8; 256] = {
    let mut values = [NO_DIGIT; 256];
    let mut digit = 0;
    while digit < 16 {
        values[b"0123456789abcdef"[digit] as usize] = digit as u8;
        values[b"0123456789ABCDEF"[digit] as usize] = digit as u8;
        digit += 1;
    }
    values
};

/// Reads an integer of 64 bits; `None` within is an empty cell.
#[inline]
pub(crate) fn integer(text: &[u8]) -> Cell<Option<i64>> {
    let start = usize::from(text.first() == Some(&b'-'));
    let mut size = 0_i64;
    let mut end = start;
    while let Some(digit) = text.get(end).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
        size = size.wrapping_mul(10).wrapping_add(i64::from(digit));
        end += 1;
    }
    if end == start {
        return (start == 0).then_some((None, 0));
    }
    if end - start > SAFE_DIGITS {
        return Some((Some(long_integer(&text[..end])?), end));
    }
    Some((Some(if start == 1 { -size } else { size }), end))
}

#[cold]
fn long_integer(cell: &[u8]) -> Option<i64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

/// Reads at most eight hexadecimal digits; `None` within is an empty cell.
#[inline]
pub(crate) fn hexadecimal(text: &[u8]) -> Cell<Option<u32>> {
    if let Some(value) = text.first_chunk::<HEX_DIGITS>().and_then(|digits| eight_digits(*digits)) {
        return Some((Some(value), HEX_DIGITS));
    }
    let digits = text.iter().map(|byte| HEX_VALUES[usize::from(*byte)]);
    let mut value = 0;
    let mut length = 0;
    for digit in digits.take(HEX_DIGITS).take_while(|digit| *digit != NO_DIGIT) {
        value = value << 4 | u32::from(digit);
        length += 1;
    }
    Some(((length > 0).then_some(value), length))
}

/// The value of eight hexadecimal digits, all worked on at once in the bytes of a word.
#[inline]
fn eight_digits(digits: [u8; HEX_DIGITS]) -> Option<u32> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let word = u64::from_be_bytes(digits);
    // 1 in the bytes that can only be letters.
    let letters = word >> 6 & ONES;
    let values = (word & (0x0f * ONES)) + 9 * letters;
    // Digits are 0x30 to 0x39 with values up to 9, letters 0x41 to 0x46 or 0x61 to 0x66 with values from 10 to 15.
    let of_columns =
        (word & (0x80 * ONES)) | (word >> 4 & ONES ^ letters ^ ONES) | (!(word >> 5) & ONES & !letters);
    let of_values = (values & (0xf0 * ONES)) | ((values + 6 * ONES) >> 4 & ONES ^ letters);
    if of_columns | of_values != 0 {
        return None;
    }
    let pairs = (values | values >> 4) & 0x00ff_00ff_00ff_00ff;
    let quads = (pairs | pairs >> 8) & 0x0000_ffff_0000_ffff;
    Some((quads | quads >> 16) as u32)
}

/// Reads a finite decimal number without an exponent.
pub(crate) fn decimal(text: &[u8]) -> Cell<f64> {
    let length = text.iter().take_while(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'-')).count();
    let number: f64 = std::str::from_utf8(&text[..length]).ok()?.parse().ok()?;
    number.is_finite().then_some((number, length))
}

/// Passes over hexadecimal digits and dashes.
pub(crate) fn unread(text: &[u8]) -> usize {
    text.iter().take_while(|byte| **byte == b'-' || HEX_VALUES[usize::from(**byte)] != NO_DIGIT).count()
}

/// The hour of a date and hour `YYMMDDHH`.
pub(crate) fn hour_of(number: i64) -> Option<i64> {
    let (month, day, hour) = (number / 10_000 % 100, number / 100 % 100, number % 100);
    let is_one = (0..100_000_000).contains(&number)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24;
    is_one.then_some(hour)
}

/// `sign(x) ln(1 + |x|)` of a count.
#[inline]
pub(crate) fn dense_value(count: i64) -> f32 {
    match usize::try_from(count).ok().and_then(|count| DENSE_VALUES.get(count)) {
        Some(value) => *value,
        None => {
            let count = count as f64;
            (1.0 + count.abs()).ln().copysign(count) as f32
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn any_byte_in_any_place_is_a_digit_or_none() {
        for place in 0..HEX_DIGITS {
            for byte in 0..=u8::MAX {
                let mut digits = *b"0fA9a1F8";
                digits[place] = byte;
                let expected = std::str::from_utf8(&digits).ok().filter(|text| !text.contains('+'));
                let expected = expected.and_then(|text| u32::from_str_radix(text, 16).ok());
                assert_eq!(eight_digits(digits), expected, "{digits:?}");
            }
        }
    }

    #[test]
    fn integers_end_at_64_bits() {
        for (text, expected) in [
            ("", Some((None, 0))),
            ("x", Some((None, 0))),
            ("-", None),
            ("--1", None),
            ("-0", Some((Some(0), 2))),
            ("12\t3", Some((Some(12), 2))),
            ("9223372036854775807", Some((Some(i64::MAX), 19))),
            ("-9223372036854775808", Some((Some(i64::MIN), 20))),
            ("9223372036854775808", None),
            ("0000000000000000000000001", Some((Some(1), 25))),
        ] {
            assert_eq!(integer(text.as_bytes()), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn hexadecimal_cells_are_read_as_the_standard_library_reads_them(cell in "[0-9a-fA-F]{1,8}", rest in "\t?") {
            let expected = u32::from_str_radix(&cell, 16).ok();
            prop_assert_eq!(hexadecimal(format!("{cell}{rest}").as_bytes()), Some((expected, cell.len())));
        }

        #[test]
        fn integers_are_read_as_the_standard_library_reads_them(number: i64) {
            let cell = number.to_string();
            prop_assert_eq!(integer(format!("{cell}\t").as_bytes()), Some((Some(number), cell.len())));
        }

        #[test]
        fn dense_values_are_odd(count in 0..i64::MAX) {
            prop_assert_eq!(dense_value(-count).abs(), dense_value(count));
        }
    }
}
