//! Where the row of an id is in a table whose ids lie close together: a bit for each id from the first to the last.
//!
//! ```text
//! line = the number of bits that are set in all lines before, and 448 bits
//! ```
//!
//! Rows have the order of the ids: the number of a row is that of the bits set before its own.

use crate::kernel::cache::LINE_BYTES;

const WORDS: usize = LINE_BYTES / size_of::<u64>();
const IDS_PER_LINE: u64 = ((WORDS - 1) * u64::BITS as usize) as u64;

/// Returns the lines of ids, which ascend from the first.
pub(super) fn build(ids: &[i64]) -> Vec<u8> {
    let Some((first, last)) = ids.first().zip(ids.last()) else { return Vec::new() };
    let mut lines = vec![[0u64; WORDS]; place(*first, *last).0 + 1];
    for &id in ids {
        let (line, bit) = place(*first, id);
        lines[line][1 + bit / 64] |= 1 << (bit % 64);
    }
    let mut before = 0;
    for line in &mut lines {
        line[0] = before;
        before += line[1..].iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
    }
    lines.into_iter().flatten().flat_map(u64::to_le_bytes).collect()
}

/// Returns the line of an id, and its bit there. An id before the first has a line far behind the last.
#[inline(always)]
pub(super) fn place(first: i64, id: i64) -> (usize, usize) {
    let distance = id.wrapping_sub(first) as u64;
    ((distance / IDS_PER_LINE) as usize, (distance % IDS_PER_LINE) as usize)
}

/// Returns the id of the first bit of a line.
pub(super) fn first_of(first: i64, line: usize) -> i64 {
    first.wrapping_add((line as u64).wrapping_mul(IDS_PER_LINE) as i64)
}

/// Returns the number of the row that a bit stands for, if it is set.
#[inline(always)]
pub(super) fn number(line: &[u8; LINE_BYTES], bit: usize) -> Option<usize> {
    let words = words(line);
    let (own, within) = (1 + bit / 64, bit % 64);
    let mut before = words[0];
    for (number, word) in words.iter().enumerate().skip(1) {
        // Without a branch: all words are counted, those behind the bit's own with no bit left.
        let below = match number {
            number if number < own => u64::MAX,
            number if number == own => (1 << within) - 1,
            _ => 0,
        };
        before += u64::from((word & below).count_ones());
    }
    (words[own] >> within & 1 == 1).then_some(before as usize)
}

#[inline(always)]
fn words(line: &[u8; LINE_BYTES]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(line.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// Returns the ids of lines, the first of which begins with `first`.
pub(super) fn ids_of(first: i64, lines: &[u8]) -> impl Iterator<Item = i64> {
    lines.as_chunks().0.iter().enumerate().flat_map(move |(line, bytes)| {
        let (words, first) = (words(bytes), first_of(first, line));
        let is_set = move |bit: &u64| words[1 + (bit / 64) as usize] >> (bit % 64) & 1 == 1;
        (0..IDS_PER_LINE).filter(is_set).map(move |bit| first.wrapping_add(bit as i64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_have_the_order_of_the_ids(
            first in prop::sample::select(vec![i64::MIN, -1_000, 0, i64::MAX - 3_000]),
            distances in prop::collection::btree_set(0i64..3_000, 1..400),
        ) {
            let ids: Vec<i64> = distances.iter().map(|distance| first + distance).collect();
            let (lines, from) = (build(&ids), ids[0]);
            let found = |id| {
                let (line, bit) = place(from, id);
                lines.as_chunks().0.get(line).and_then(|line| number(line, bit))
            };
            let places: Vec<_> = ids.iter().map(|&id| found(id)).collect();
            prop_assert_eq!(places, (0..ids.len()).map(Some).collect::<Vec<_>>());
            for id in (0..3_000).map(|distance| first + distance).chain([i64::MIN, i64::MAX]) {
                prop_assert_eq!(found(id).is_some(), ids.contains(&id), "{}", id);
            }
            prop_assert_eq!(ids_of(from, &lines).collect::<Vec<_>>(), ids);
        }
    }
}
