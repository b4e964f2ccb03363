//! Where the row of an id is in a frozen table of version 1: ids lie in cache lines, in the order of their hashes.
//!
//! ```text
//! line = up to 7 ids, and a word: the number of ids in all lines before, and in its upper half that of its own
//! ```
//!
//! The hash of an id says its bucket among the lines. An id whose bucket is full lies in the next line that is not. A search
//! ends at the first line with room, or whose last id has a greater hash. Rows have the order of the ids: the place of an id among all is its row's.
//! Lines are filled to four fifths, so an id takes 64 / 5.6 = 11.4 bytes, and nearly all searches read one line.

use crate::kernel::hash::mix;
use crate::kernel::simd::Lanes;

/// A line of the index.
pub(super) type Line = [i64; 8];

/// The ids that a line has room for, and the word behind them.
const IDS_PER_LINE: usize = 7;

/// Ids a line on average, in fifths.
const FIFTHS: usize = 4 * IDS_PER_LINE;

#[inline(always)]
fn own_count(line: &Line) -> usize {
    (line[IDS_PER_LINE] >> 32) as u32 as usize
}

#[inline(always)]
fn count_before(line: &Line) -> usize {
    line[IDS_PER_LINE] as u32 as usize
}

/// Returns how many lines are buckets of so many ids. What does not fit into the last ones lies in lines behind them.
pub(super) fn num_buckets(ids: usize) -> usize {
    (ids * 5).div_ceil(FIFTHS).max(1)
}

/// Returns the line that an id is looked for in first.
#[inline(always)]
pub(super) fn bucket(id: i64, buckets: usize) -> usize {
    ((u128::from(mix(id)) * buckets as u128) >> u64::BITS) as usize
}

/// What a line says of an id.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LineMatch {
    /// The number of its row.
    At(usize),
    /// It is nowhere.
    Nowhere,
    /// It is in the next line, if it is anywhere.
    Behind,
}

/// Looks for an id in a line. None: the line has more ids than it has room for, or rows that are not among `rows`.
#[inline(always)]
pub(super) fn look(lanes: impl Lanes, line: &Line, id: i64, rows: usize) -> Option<LineMatch> {
    let (before, count) = (count_before(line), own_count(line));
    // Mapped bytes may change after their checksum was compared: numbers are checked at each use.
    if count > IDS_PER_LINE || before + count > rows {
        return None;
    }
    let equal = lanes.equal(line, id) & ((1 << count) - 1);
    Some(match equal {
        0 if count == IDS_PER_LINE && mix(line[IDS_PER_LINE - 1]) < mix(id) => LineMatch::Behind,
        0 => LineMatch::Nowhere,
        bits => LineMatch::At(before + bits.trailing_zeros() as usize),
    })
}

/// Returns the ids of all lines, in the order of their rows.
pub(super) fn ids_of(lines: &[Line]) -> impl Iterator<Item = i64> {
    lines.iter().flat_map(|line| line[..own_count(line).min(IDS_PER_LINE)].iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::ScalarLanes;
    use proptest::prelude::*;

    /// Sorts ids by their hashes and returns their lines, as version 1 wrote them.
    fn build(ids: &mut [i64]) -> Vec<Line> {
        ids.sort_unstable_by_key(|&id| mix(id));
        let buckets = num_buckets(ids.len());
        let mut lines = vec![Line::default(); buckets];
        let mut last = 0;
        for (number, &id) in ids.iter().enumerate() {
            // Never before the last line: ids keep the order of their hashes, by which `look` knows where a
            // search ends.
            let line = bucket(id, buckets).max(last);
            last = if own_count(&lines[line]) == IDS_PER_LINE { line + 1 } else { line };
            if last == lines.len() {
                lines.push(Line::default());
            }
            put(&mut lines[last], number, id);
        }
        lines
    }

    fn put(line: &mut Line, number: usize, id: i64) {
        let count = own_count(line);
        line[count] = id;
        line[IDS_PER_LINE] = (number - count) as i64 | ((count + 1) as i64) << 32;
    }

    /// Where an id is, and how many lines were read.
    fn find(lines: &[Line], buckets: usize, rows: usize, id: i64) -> (Option<usize>, usize) {
        for (read, line) in lines[bucket(id, buckets)..].iter().enumerate() {
            match look(ScalarLanes, line, id, rows).unwrap() {
                LineMatch::At(number) => return (Some(number), read + 1),
                LineMatch::Nowhere => return (None, read + 1),
                LineMatch::Behind => {}
            }
        }
        (None, lines.len())
    }

    proptest! {
        #[test]
        fn each_id_is_found_where_it_is_and_no_other(
            ids in prop::collection::hash_set(any::<i64>(), 0..300), others in prop::collection::vec(any::<i64>(), 0..50)
        ) {
            let mut sorted: Vec<i64> = ids.iter().copied().collect();
            let lines = build(&mut sorted);
            prop_assert_eq!(&ids_of(&lines).collect::<Vec<_>>(), &sorted);
            let buckets = num_buckets(ids.len());
            for (place, &id) in sorted.iter().enumerate() {
                prop_assert_eq!(find(&lines, buckets, sorted.len(), id).0, Some(place));
            }
            for id in others {
                prop_assert_eq!(find(&lines, buckets, sorted.len(), id).0.is_some(), ids.contains(&id));
            }
        }
    }

    #[test]
    fn ids_take_twelve_bytes_and_searches_read_one_line() {
        let count = 200_000i64;
        let mut ids: Vec<i64> = (0..count).map(|id| id * id * 31).collect();
        let lines = build(&mut ids);
        assert!(size_of_val(&*lines) <= 12 * ids.len());
        let buckets = num_buckets(ids.len());
        let read: usize = ids.iter().map(|&id| find(&lines, buckets, ids.len(), id).1).sum();
        assert!((read as f64) < 1.2 * ids.len() as f64, "{read} lines for {count} ids");
        let read: usize = (0..count).map(|id| find(&lines, buckets, ids.len(), !id).1).sum();
        assert!((read as f64) < 1.2 * count as f64, "{read} lines for {count} ids without rows");
    }

    #[test]
    fn a_line_that_says_too_much_is_none() {
        let line = |before: i64, count: i64| [1, 2, 3, 4, 5, 6, 7, before | count << 32];
        assert_eq!(look(ScalarLanes, &line(0, 8), 1, 100), None);
        assert_eq!(look(ScalarLanes, &line(98, 3), 1, 100), None);
        assert_eq!(look(ScalarLanes, &line(97, 3), 3, 100), Some(LineMatch::At(99)));
        assert_eq!(
            look(ScalarLanes, &line(97, 3), 4, 100),
            Some(LineMatch::Nowhere),
            "of the three it is none"
        );
        let behind = |id: &i64| mix(7) < mix(*id);
        let (greater, less) = ((8..).find(behind).unwrap(), (8..).find(|id| !behind(id)).unwrap());
        assert_eq!(look(ScalarLanes, &line(0, 7), greater, 100), Some(LineMatch::Behind));
        assert_eq!(look(ScalarLanes, &line(0, 7), less, 100), Some(LineMatch::Nowhere));
    }
}
