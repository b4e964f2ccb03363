//! Ids made of something else: of text, of several ids, of the last tokens of a sequence, of codes; and ids made few.
//!
//! Pure functions of their arguments, with the same results on every machine and on any number of threads. docs/ids.md
//! has their equations and values that tests compare. All hashes are chains of splitmix64.

mod buckets;
mod crosses;
mod ngrams;
mod prefixes;
mod text;

pub use buckets::bucket_ids;
pub use crosses::cross_ids;
pub use ngrams::{NgramTables, PADDING_TOKEN};
pub use prefixes::{check_prefix_sizes, prefix_ids};
pub use text::{hash_strings, hash_text};

use crate::kernel::hash::mix;
use crate::kernel::parallel::{Executor, for_each_mut};

/// What ids cannot be made of.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdInputError {
    /// An offset lies before the one ahead of it, or beyond the characters.
    #[error("hash_strings: offset {offset} at position {position} is not from {least} to {most}")]
    Offset {
        /// The offset.
        offset: i64,
        /// Its position among the offsets.
        position: usize,
        /// The offset before it, or 0.
        least: i64,
        /// The number of characters.
        most: usize,
    },

    /// A number of something is too small or too large.
    #[error("{operation}: {what} must be from {least} to {most}, got {actual}")]
    Count {
        /// The function that was called.
        operation: &'static str,
        /// What is counted.
        what: &'static str,
        /// The least allowed.
        least: i64,
        /// The most allowed.
        most: i64,
        /// The number given.
        actual: i64,
    },

    /// A level of codes has no codes.
    #[error("prefix_ids: the size of level {level} must be at least 1, got {size}")]
    Size {
        /// The level, counted from 0.
        level: usize,
        /// Its size.
        size: i64,
    },

    /// There are more prefixes than ids.
    #[error("prefix_ids: codes of sizes {sizes:?} have more than 2^63 prefixes up to level {level}")]
    Prefixes {
        /// The sizes of all levels.
        sizes: Vec<i64>,
        /// The level at which there are too many, counted from 0.
        level: usize,
    },

    /// A code is not one of its level.
    #[error(
        "prefix_ids: code {code} at position {position} is not from 0 to below {size}, the size of level {level}"
    )]
    Code {
        /// The code.
        code: i64,
        /// Its position among the codes, flattened.
        position: usize,
        /// The level, counted from 0.
        level: usize,
        /// The level's size.
        size: i64,
    },
}

/// Turns a count that is from 1 to `most` into one of memory.
fn count(operation: &'static str, what: &'static str, actual: i64, most: i64) -> Result<usize, IdInputError> {
    match usize::try_from(actual) {
        Ok(count) if (1..=most).contains(&actual) => Ok(count),
        _ => Err(IdInputError::Count { operation, what, least: 1, most, actual }),
    }
}

/// What a seed changes at the beginning of a hash: nothing if it is 0. Two seeds never change the same.
fn salt(seed: i64) -> u64 {
    mix(seed) ^ mix(0)
}

/// The hash of an id, with which every chain over ids begins.
#[inline(always)]
fn first_hash(id: i64, salt: u64) -> u64 {
    mix(id ^ salt as i64)
}

/// The hash of one id more.
#[inline(always)]
fn next_hash(hash: u64, id: i64) -> u64 {
    mix(hash.wrapping_add(id as u64) as i64)
}

/// Calls `body` with pieces of `ids` and the number of the first place of each; a place has `width` ids.
fn in_pieces(
    executor: &dyn Executor,
    ids: &mut [i64],
    width: usize,
    body: impl Fn(usize, &mut [i64]) + Sync,
) {
    // Some ten microseconds at least: what is smaller is not worth waking a thread.
    const IDS_PER_PIECE: usize = 32_768;
    const PIECES_PER_THREAD: usize = 4;
    let most = executor.num_threads().max(1) * PIECES_PER_THREAD;
    let pieces = (ids.len() / IDS_PER_PIECE).clamp(1, most);
    let places = (ids.len() / width).div_ceil(pieces).max(1);
    let pieces = ids.chunks_mut(places * width).enumerate();
    for_each_mut(executor, pieces, |(number, ids)| body(number * places, ids));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::Serial;

    #[test]
    fn a_seed_of_zero_changes_nothing() {
        assert_eq!(salt(0), 0);
        assert_eq!(first_hash(7, salt(0)), mix(7));
        assert_ne!(salt(1), salt(-1));
    }

    #[test]
    fn pieces_begin_where_the_last_one_ended() {
        struct Many;
        impl Executor for Many {
            fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
                (0..count).for_each(body);
            }
            fn num_threads(&self) -> usize {
                3
            }
        }
        for executor in [&Serial as &dyn Executor, &Many] {
            for places in [0, 1, 7, 100_000] {
                let mut ids = vec![0; places * 3];
                in_pieces(executor, &mut ids, 3, |first, ids| {
                    for (place, ids) in ids.chunks_mut(3).enumerate() {
                        ids.fill((first + place) as i64);
                    }
                });
                assert!(ids.iter().enumerate().all(|(place, &id)| id == place as i64 / 3));
            }
        }
    }
}
