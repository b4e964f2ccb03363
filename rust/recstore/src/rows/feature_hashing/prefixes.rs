//! The ids of the prefixes of codes: exact, each prefix its own.

use super::{IdInputError, in_pieces};
use crate::kernel::parallel::Executor;

/// A level of codes: how many there are, and the id of the first prefix that ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Level {
    size: u64,
    first: u64,
}

/// Writes to `ids` for each code the id of the prefix that ends with it.
///
/// `codes` are rows of as many codes as there are `sizes`. Prefixes of a level follow those of the level before, in the
/// order of their codes: the number that the codes are in mixed radix, and the number of all shorter prefixes.
///
/// # Errors
/// [`IdInputError::Size`], [`IdInputError::Prefixes`]: see [`check_prefix_sizes`]. [`IdInputError::Code`]: a code is not
/// one of its level.
///
/// # Panics
/// If `ids` is not as long as `codes`, or these are no whole rows.
pub fn prefix_ids(
    executor: &dyn Executor,
    codes: &[i64],
    sizes: &[i64],
    ids: &mut [i64],
) -> Result<(), IdInputError> {
    let levels = levels(sizes)?;
    assert_eq!(codes.len(), ids.len(), "prefix_ids: an id for each code");
    assert!(codes.len().is_multiple_of(sizes.len()), "prefix_ids: whole rows of codes");
    check_codes(codes, sizes)?;
    let width = sizes.len().max(1);
    in_pieces(executor, ids, width, |first, ids| {
        let rows = codes[first * width..].chunks_exact(width);
        for (ids, codes) in ids.chunks_exact_mut(width).zip(rows) {
            let mut number = 0;
            for ((id, &code), level) in ids.iter_mut().zip(codes).zip(&levels) {
                number = number * level.size + code as u64;
                *id = (level.first + number) as i64;
            }
        }
    });
    Ok(())
}

/// Checks that codes of these sizes have prefixes, and not more than there are ids from 0 on.
///
/// # Errors
/// [`IdInputError::Size`]: a level has no codes. [`IdInputError::Prefixes`]: there are more than 2^63 prefixes.
pub fn check_prefix_sizes(sizes: &[i64]) -> Result<(), IdInputError> {
    levels(sizes).map(drop)
}

fn levels(sizes: &[i64]) -> Result<Vec<Level>, IdInputError> {
    const MAX: u128 = 1 << 63;
    let (mut prefixes, mut first) = (1u128, 0u128);
    let mut levels = Vec::with_capacity(sizes.len());
    for (level, &size) in sizes.iter().enumerate() {
        if size < 1 {
            return Err(IdInputError::Size { level, size });
        }
        levels.push(Level { size: size as u64, first: first as u64 });
        // None overflows: both factors are at most 2^63.
        prefixes *= size as u128;
        first += prefixes;
        if first > MAX {
            return Err(IdInputError::Prefixes { sizes: sizes.to_vec(), level });
        }
    }
    Ok(levels)
}

fn check_codes(codes: &[i64], sizes: &[i64]) -> Result<(), IdInputError> {
    let of_no_level = |(&code, &size): (&i64, &i64)| !(0..size).contains(&code);
    let Some(position) = codes.iter().zip(sizes.iter().cycle()).position(of_no_level) else {
        return Ok(());
    };
    let level = position % sizes.len();
    Err(IdInputError::Code { code: codes[position], position, level, size: sizes[level] })
}
