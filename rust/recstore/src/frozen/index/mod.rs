//! Where the row of an id is in a frozen table.
//!
//! | kind | ids | bytes an id | reads |
//! |---|---|---|---|
//! | consecutive | all from the first to the last | 0 | nothing |
//! | bits | at least one in eight of those | 1.15 or less, 0.14 where nearly all are there | a line of [`bits`] |
//! | hashed | any others | 8.6, of them 8 for the id behind each row | a pilot of [`perfect_hash`] |
//! | lines | those of version 1 | 11.4 | a line of [`lines`] |

mod bits;
mod lines;
mod perfect_hash;

use std::ops::{Range, RangeInclusive};

use serde::{Deserialize, Serialize};

use super::checked::CheckedBytes;
use super::source::NO_ROW;
use crate::Result;
use crate::kernel::cache::LINE_BYTES;
use crate::kernel::simd::ScalarLanes;
use lines::{Line, LineMatch};
use perfect_hash::{HashShape, PerfectHash, ReadWord};

/// A table with fewer than one id in as many gets a hash in place of bits.
const IDS_PER_ROW: u64 = 8;

/// What a file says of its index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum IndexShape {
    /// Version 1 says nothing.
    #[default]
    #[serde(skip)]
    Lines,
    Consecutive {
        first: i64,
    },
    Bits {
        first: i64,
    },
    Hashed(HashShape),
}

/// An index, its bytes, and the ids in the order of their rows.
pub(super) struct BuiltIndex {
    pub(super) shape: IndexShape,
    pub(super) bytes: Vec<u8>,
    pub(super) ids: Vec<i64>,
}

/// Returns the index of ids.
///
/// # Errors
/// Says which id is there twice.
pub(super) fn build(mut ids: Vec<i64>) -> std::result::Result<BuiltIndex, String> {
    let first = ids.iter().copied().min().unwrap_or(0);
    let distance = ids.iter().copied().max().unwrap_or(0).wrapping_sub(first) as u64;
    if distance / IDS_PER_ROW >= ids.len().max(1) as u64 {
        let built = perfect_hash::build(ids)?;
        let mut bytes = built.bytes;
        bytes.resize(bytes.len().next_multiple_of(LINE_BYTES), 0);
        return Ok(BuiltIndex { shape: IndexShape::Hashed(built.shape), bytes, ids: built.ids });
    }
    ids.sort_unstable();
    if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("id {} is there twice", pair[0]));
    }
    Ok(if distance + 1 == ids.len() as u64 || ids.is_empty() {
        BuiltIndex { shape: IndexShape::Consecutive { first }, bytes: Vec::new(), ids }
    } else {
        BuiltIndex { shape: IndexShape::Bits { first }, bytes: bits::build(&ids), ids }
    })
}

impl IndexShape {
    /// Whether the file is one of version 1.
    pub(super) fn is_lines(&self) -> bool {
        *self == Self::Lines
    }

    /// Whether a row has its id behind it.
    pub(super) fn has_ids_in_rows(self) -> bool {
        matches!(self, Self::Hashed(_))
    }

    /// Gives the ids of lines of the index, the first of which has the number `line`, if ids lie there.
    pub(super) fn for_each_id(self, line: usize, lines: &[u8], take: impl FnMut(i64)) {
        match self {
            Self::Lines => {
                let lines = lines.as_chunks::<LINE_BYTES>().0;
                let lines: Vec<Line> = lines.iter().map(|line| bytemuck::pod_read_unaligned(line)).collect();
                lines::ids_of(&lines).for_each(take);
            }
            Self::Bits { first } => bits::ids_of(bits::first_of(first, line), lines).for_each(take),
            Self::Consecutive { .. } | Self::Hashed(_) => {}
        }
    }

    /// Returns how many lines it can have with so many rows. None: more than there is memory.
    pub(super) fn lines(self, rows: usize) -> Option<RangeInclusive<usize>> {
        Some(match self {
            Self::Lines => lines::num_buckets(rows)..=usize::MAX,
            Self::Consecutive { .. } => 0..=0,
            Self::Bits { .. } => 1..=usize::MAX,
            Self::Hashed(shape) => {
                let lines = shape.places()?[2].end.div_ceil(LINE_BYTES);
                lines..=lines
            }
        })
    }
}

/// The index of a file that is open.
#[derive(Debug)]
pub(super) enum Index {
    Lines { buckets: usize },
    Consecutive { first: i64 },
    Bits { first: i64 },
    Hashed(PerfectHash),
}

impl Index {
    /// Takes the index of so many rows. Where parts of a hash begin is read, and nothing else.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte that was read was changed, or it does not add up.
    pub(super) fn open(shape: IndexShape, from: CheckedBytes<'_>, rows: usize) -> Result<Self> {
        Ok(match shape {
            IndexShape::Lines => Self::Lines { buckets: lines::num_buckets(rows) },
            IndexShape::Consecutive { first } => Self::Consecutive { first },
            IndexShape::Bits { first } => Self::Bits { first },
            IndexShape::Hashed(shape) => {
                let starts = shape.places().map_or(0..0, |[starts, ..]| starts);
                let hash = PerfectHash::open(shape, from.get(starts)?, rows);
                Self::Hashed(hash.map_err(|message| from.refused(message))?)
            }
        })
    }

    /// Returns all ids in the order of their rows, if they do not lie in those.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte of them was changed.
    pub(super) fn ids(&self, from: CheckedBytes<'_>, rows: usize) -> Result<Option<Vec<i64>>> {
        let ids: Vec<i64> = match self {
            Self::Lines { .. } => lines::ids_of(bytemuck::cast_slice(from.all()?)).collect(),
            Self::Consecutive { first } => consecutive(*first, rows).collect(),
            Self::Bits { first } => bits::ids_of(*first, from.all()?).collect(),
            Self::Hashed(_) => return Ok(None),
        };
        match ids.len() == rows {
            true => Ok(Some(ids)),
            false => Err(from.refused(format!("its index has {} ids, there are {rows} rows", ids.len()))),
        }
    }

    /// Asks for what says where ids are. `hashes` are for [`Index::find`]. Not inlined, as no vector instruction would make it
    /// faster.
    #[inline(never)]
    pub(super) fn seek(&self, from: CheckedBytes<'_>, ids: &[i64], hashes: &mut [u64]) {
        let hashes = hashes.iter_mut().zip(ids);
        match self {
            Self::Consecutive { .. } => {}
            Self::Bits { first } => {
                for (_, &id) in hashes {
                    prefetch_line(from, bits::place(*first, id).0);
                }
            }
            Self::Hashed(hashed) => {
                for (hash, &id) in hashes {
                    *hash = hashed.hash(id);
                    let place = hashed.pilot_place(*hash);
                    from.prefetch(place..place + 1);
                }
            }
            Self::Lines { buckets } => {
                for (hash, &id) in hashes {
                    let bucket = lines::bucket(id, *buckets);
                    prefetch_line(from, bucket);
                    *hash = bucket as u64;
                }
            }
        }
    }

    /// Writes the number of the row that an id has if it has one, [`NO_ROW`] where it is known that it has none.
    ///
    /// # Errors
    /// [`crate::Error::Frozen`]: a byte that was read was changed.
    #[inline(always)]
    pub(super) fn find(
        &self,
        from: CheckedBytes<'_>,
        rows: usize,
        (ids, hashes): (&[i64], &[u64]),
        numbers: &mut [usize],
    ) -> Result<()> {
        match self {
            Self::Consecutive { first } => {
                for (number, id) in numbers.iter_mut().zip(ids) {
                    let distance = id.wrapping_sub(*first) as u64;
                    *number = if distance < rows as u64 { distance as usize } else { NO_ROW };
                }
                Ok(())
            }
            Self::Bits { first } => numbers.iter_mut().zip(ids).try_for_each(|(number, &id)| {
                *number = number_in_bits(from, bits::place(*first, id), rows)?;
                Ok(())
            }),
            Self::Hashed(hashed) => find_hashed(hashed, from, rows, hashes, numbers),
            Self::Lines { .. } => find_in_lines(from, rows, (ids, hashes), numbers),
        }
    }
}

/// Not inlined, as no vector instruction would make it faster.
#[inline(never)]
fn find_hashed(
    hashed: &PerfectHash,
    from: CheckedBytes<'_>,
    rows: usize,
    hashes: &[u64],
    numbers: &mut [usize],
) -> Result<()> {
    for (number, &hash) in numbers.iter_mut().zip(hashes) {
        let found = hashed.number(from, hash)?;
        *number = if found < rows { found } else { NO_ROW };
    }
    Ok(())
}

/// Not inlined: it is for files of an earlier version alone.
#[inline(never)]
fn find_in_lines(
    from: CheckedBytes<'_>,
    rows: usize,
    (ids, hashes): (&[i64], &[u64]),
    numbers: &mut [usize],
) -> Result<()> {
    for (number, (&id, &hash)) in numbers.iter_mut().zip(ids.iter().zip(hashes)) {
        *number = number_in_lines(from, hash as usize, id, rows)?;
    }
    Ok(())
}

#[inline(always)]
fn line_range(line: usize) -> Range<usize> {
    let start = line.saturating_mul(LINE_BYTES);
    start..start.saturating_add(LINE_BYTES)
}

#[inline(always)]
fn prefetch_line(from: CheckedBytes<'_>, line: usize) {
    from.prefetch(line_range(line));
}

#[inline(always)]
fn number_in_bits(from: CheckedBytes<'_>, (line, bit): (usize, usize), rows: usize) -> Result<usize> {
    if line >= from.len() / LINE_BYTES {
        return Ok(NO_ROW);
    }
    let found = from.get(line_range(line))?.first_chunk().and_then(|line| bits::number(line, bit));
    match found {
        Some(number) if number >= rows => Err(says_too_much(from, line)),
        found => Ok(found.unwrap_or(NO_ROW)),
    }
}

fn number_in_lines(from: CheckedBytes<'_>, bucket: usize, id: i64, rows: usize) -> Result<usize> {
    for number in bucket..from.len() / LINE_BYTES {
        // Compared before it is believed. A sound checksum does not make the line's numbers fit the file: `look` checks those.
        let line: &[Line] = bytemuck::cast_slice(from.get(line_range(number))?);
        match lines::look(ScalarLanes, &line[0], id, rows) {
            Some(LineMatch::At(number)) => return Ok(number),
            Some(LineMatch::Nowhere) => return Ok(NO_ROW),
            Some(LineMatch::Behind) => {}
            None => return Err(says_too_much(from, number)),
        }
    }
    Ok(NO_ROW)
}

/// Returns so many ids from the first on.
pub(super) fn consecutive(first: i64, rows: usize) -> impl Iterator<Item = i64> {
    (0..rows).map(move |row| first.wrapping_add(row as i64))
}

#[cold]
fn says_too_much(from: CheckedBytes<'_>, line: usize) -> crate::Error {
    from.refused(format!("line {line} of the index says more ids or rows than there are"))
}

impl ReadWord for CheckedBytes<'_> {
    #[inline(always)]
    fn word(self, place: usize) -> Result<u16> {
        let bytes = self.get(place..place + size_of::<u16>())?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
}
