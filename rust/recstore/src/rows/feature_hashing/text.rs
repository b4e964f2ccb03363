//! The hash of text.

use super::{IdInputError, in_pieces, salt};
use crate::kernel::hash::mix;
use crate::kernel::parallel::Executor;

const WORD: usize = 8;

/// Hashes a text: its length is mixed, then each of its words of 8 bytes, little-endian, the last filled with zeros.
///
/// The length comes with the seed: seeds give unlike hashes, and 0 changes nothing.
#[must_use]
pub fn hash_text(text: &[u8], seed: i64) -> u64 {
    text.chunks(WORD).map(filled_word).fold(begin(text.len(), salt(seed)), join)
}

/// Writes to `ids` the hash of each of N texts, which lie one after the other in `characters`: the bits of
/// [`hash_text`].
///
/// `offsets` are N + 1: where each text begins, and where the last one ends. There may be characters before and behind.
///
/// # Errors
/// [`IdInputError::Offset`]: an offset falls, or lies outside of the characters.
///
/// # Panics
/// If there is not one offset more than ids.
pub fn hash_strings<Offset: Copy + Into<i64> + Sync>(
    executor: &dyn Executor,
    characters: &[u8],
    offsets: &[Offset],
    seed: i64,
    ids: &mut [i64],
) -> Result<(), IdInputError> {
    assert_eq!(offsets.len(), ids.len() + 1, "hash_strings: an offset for each end");
    check(offsets, characters.len())?;
    let salt = salt(seed);
    in_pieces(executor, ids, 1, |first, ids| {
        let mut start = place(offsets[first]);
        for (id, &end) in ids.iter_mut().zip(&offsets[first + 1..]) {
            let end = place(end);
            *id = hash_within(characters, start, end, salt) as i64;
            start = end;
        }
    });
    Ok(())
}

fn check<Offset: Copy + Into<i64>>(offsets: &[Offset], most: usize) -> Result<(), IdInputError> {
    let mut least = 0;
    for (position, &offset) in offsets.iter().enumerate() {
        let offset: i64 = offset.into();
        if offset < least || offset as u64 > most as u64 {
            return Err(IdInputError::Offset { offset, position, least, most });
        }
        least = offset;
    }
    Ok(())
}

/// The place that a checked offset means.
fn place(offset: impl Into<i64>) -> usize {
    let offset: i64 = offset.into();
    offset as usize
}

#[inline(always)]
fn begin(length: usize, salt: u64) -> u64 {
    mix((length as u64 ^ salt) as i64)
}

#[inline(always)]
fn join(hash: u64, word: u64) -> u64 {
    mix((hash ^ word) as i64)
}

/// Hashes `characters[start..end]`. Reads whole words, also beyond the text if there are characters.
#[inline(always)]
fn hash_within(characters: &[u8], start: usize, end: usize, salt: u64) -> u64 {
    let mut hash = begin(end - start, salt);
    let mut at = start;
    while at < end {
        hash = join(hash, word_within(characters, at, end));
        at += WORD;
    }
    hash
}

/// The word at a place before `end`: zeros stand for what lies behind `end`.
#[inline(always)]
fn word_within(characters: &[u8], at: usize, end: usize) -> u64 {
    match characters[at..].first_chunk::<WORD>() {
        // At least one byte lies before `end`, so the shift stays below 64; it is 0 for a word that lies
        // before it whole.
        Some(&bytes) => u64::from_le_bytes(bytes) & (u64::MAX >> (8 * WORD.saturating_sub(end - at))),
        None => filled_word(&characters[at..end]),
    }
}

fn filled_word(bytes: &[u8]) -> u64 {
    let mut word = [0; WORD];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::parallel::Serial;

    /// Computed by the definition, in Python's integers.
    #[test]
    fn texts_have_the_hashes_of_their_definition() {
        let expected = [
            ("", 0xE220_A839_7B1D_CDAF),
            ("a", 0x5E02_5F9A_DE9E_AF3E),
            ("12345678", 0x83DB_EC76_B33F_9CA3),
            ("123456789", 0x7CF4_6F00_F45F_A22A),
            ("Zürich, Bern and Zug", 0xF635_44BB_8940_3FAF),
        ];
        for (text, hash) in expected {
            assert_eq!(hash_text(text.as_bytes(), 0), hash, "{text}");
        }
    }

    #[test]
    fn zeros_at_the_end_count() {
        assert_ne!(hash_text(b"a", 0), hash_text(b"a\0", 0));
    }

    #[test]
    fn a_text_is_hashed_alone_whatever_lies_around_it() {
        let characters: Vec<u8> = (0..64).map(|number: u8| number.wrapping_mul(37) ^ 1).collect();
        for start in 0..64 {
            for end in start..=64 {
                let mut ids = [0];
                let offsets = [start as i32, end as i32];
                hash_strings(&Serial, &characters, &offsets, 5, &mut ids).unwrap();
                assert_eq!(ids[0] as u64, hash_text(&characters[start..end], 5), "{start}..{end}");
            }
        }
    }
}
