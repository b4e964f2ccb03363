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
    if let Some(digits) = text.first_chunk::<HEX_DIGITS>() {
        let digits = digits.map(|byte| HEX_VALUES[usize::from(byte)]);
        if digits.iter().fold(0, |all, digit| all | digit) != NO_DIGIT {
            let value = digits.iter().fold(0, |value, digit| value << 4 | u32::from(*digit));
            return Some((Some(value), HEX_DIGITS));
        }
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
