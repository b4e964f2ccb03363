//! Lines of columns between separators.

use memchr::memchr_iter;

use crate::ColumnKind;
use crate::cells::{decimal, dense_value, hexadecimal, hour_of, integer, unread};

/// The lower bits of an id, which are its value; the number of its field is above them.
const VALUE_BITS: u32 = 40;
const VALUE_MASK: i64 = (1 << VALUE_BITS) - 1;
/// The value of an empty cell.
const MISSING: i64 = 1 << 32;

/// How lines are cut, and what their columns are.
#[derive(Debug, Clone)]
pub struct Delimited {
    kinds: Vec<ColumnKind>,
    separator: u8,
    is_doubled: bool,
    threshold: f64,
    num_fields: usize,
    num_dense: usize,
}

/// Arrays for at least as many rows as a text has lines.
#[derive(Debug)]
pub struct Arrays<'a> {
    /// The ids of each row's fields.
    pub ids: &'a mut [i64],
    /// A label a row, NaN where rows have none.
    pub labels: &'a mut [f32],
    /// The dense values of each row.
    pub dense: &'a mut [f32],
}

/// No lines can be cut so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadLayout {
    /// Ids would have nowhere to come from.
    #[error("expected a column that is a field, got none of {columns}")]
    NoField {
        /// How many columns there are.
        columns: usize,
    },
    /// A row has one label.
    #[error("expected at most one column that is a label, got {0}")]
    Labels(usize),
    /// A separator that cells may have, or none.
    #[error("expected one separator or two equal ones that no cell has, got \"{}\"", .0.escape_ascii())]
    Separator(Vec<u8>),
}

/// Why lines were not parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// A line is none of the format's.
    #[error("line {line} is bad from byte {place} on")]
    Line {
        /// Its number in the text, from 1.
        line: usize,
        /// The byte of the line where the cell begins that is bad, from 1.
        place: usize,
    },
    /// The arrays are too short.
    #[error("expected arrays for more than {rows} rows")]
    Room {
        /// The rows that they have room for.
        rows: usize,
    },
}

impl Delimited {
    /// Lines of columns of these `kinds`; ratings are positive from `threshold` on.
    pub fn new(kinds: Vec<ColumnKind>, separator: &[u8], threshold: f64) -> Result<Self, BadLayout> {
        let count = |is: fn(ColumnKind) -> bool| kinds.iter().filter(|kind| is(**kind)).count();
        let (num_fields, num_labels) = (count(ColumnKind::is_field), count(ColumnKind::is_label));
        if num_fields == 0 {
            return Err(BadLayout::NoField { columns: kinds.len() });
        }
        if num_labels > 1 {
            return Err(BadLayout::Labels(num_labels));
        }
        let (separator, is_doubled) = match *separator {
            [one @ (b'\t' | b',' | b';' | b'|' | b':')] => (one, false),
            [b':', b':'] => (b':', true),
            _ => return Err(BadLayout::Separator(separator.to_vec())),
        };
        let num_dense = count(|kind| kind == ColumnKind::Count);
        Ok(Self { kinds, separator, is_doubled, threshold, num_fields, num_dense })
    }

    /// Ids of a row.
    #[must_use]
    pub fn num_fields(&self) -> usize {
        self.num_fields
    }

    /// Dense values of a row.
    #[must_use]
    pub fn num_dense(&self) -> usize {
        self.num_dense
    }

    /// The lines of a text, and so the most rows that it can have.
    #[must_use]
    pub fn most_rows(text: &[u8]) -> usize {
        memchr_iter(b'\n', text).count() + usize::from(text.last().is_some_and(|byte| *byte != b'\n'))
    }

    /// Parses whole lines and returns how many rows they are; lines that are empty or all spaces are none.
    pub fn parse(&self, text: &[u8], arrays: Arrays<'_>) -> Result<usize, ParseError> {
        let Arrays { ids, labels, dense } = arrays;
        let (mut rows, mut at, mut line) = (0, 0, 1);
        let mut room = ids.chunks_exact_mut(self.num_fields).zip(labels.iter_mut());
        while at < text.len() {
            if let Some(next) = blank_line(text, at) {
                at = next;
            } else {
                let dense = dense.get_mut(rows * self.num_dense..(rows + 1) * self.num_dense);
                let ((ids, label), dense) = room.next().zip(dense).ok_or(ParseError::Room { rows })?;
                let mut row = Row { ids, label, dense, num_fields: 0, num_dense: 0 };
                at = self
                    .parse_line(text, at, &mut row)
                    .map_err(|bad| ParseError::Line { line, place: bad - at + 1 })?;
                rows += 1;
            }
            line += 1;
        }
        Ok(rows)
    }

    /// Returns where the next line begins, or where the bad cell of this one does.
    fn parse_line(&self, text: &[u8], start: usize, row: &mut Row<'_>) -> Result<usize, usize> {
        *row.label = f32::NAN;
        let (mut cell, mut end) = (start, start);
        for (column, kind) in self.kinds.iter().enumerate() {
            if column > 0 {
                cell = end + self.separator_at(text, end).ok_or(cell)?;
            }
            end = cell + self.parse_cell(*kind, &text[cell..], row).ok_or(cell)?;
        }
        match text.get(end) {
            None => Ok(end),
            Some(b'\n') => Ok(end + 1),
            Some(_) => Err(cell),
        }
    }

    #[inline]
    fn separator_at(&self, text: &[u8], at: usize) -> Option<usize> {
        let is_one = text.get(at) == Some(&self.separator);
        let is_whole = !self.is_doubled || text.get(at + 1) == Some(&self.separator);
        (is_one && is_whole).then_some(1 + usize::from(self.is_doubled))
    }

    /// Reads a cell into its place in the row, and returns its length.
    #[inline]
    fn parse_cell(&self, kind: ColumnKind, text: &[u8], row: &mut Row<'_>) -> Option<usize> {
        if kind == ColumnKind::Hex {
            let (value, length) = hexadecimal(text)?;
            row.put_id(value.map_or(MISSING, i64::from));
            return Some(length);
        }
        if kind == ColumnKind::Unread {
            return Some(unread(text));
        }
        if kind == ColumnKind::Rating {
            let (number, length) = decimal(text)?;
            *row.label = f32::from(u8::from(number >= self.threshold));
            return Some(length);
        }
        let (number, length) = integer(text)?;
        match kind {
            ColumnKind::Count => row.put_dense(number.map_or(0.0, dense_value)),
            ColumnKind::Click => *row.label = click(number?)?,
            ColumnKind::Hour => row.put_id(hour_of(number?)?),
            ColumnKind::Key => row.put_id(short(number?)?),
            ColumnKind::Category => row.put_id(number.map_or(Some(MISSING), short)?),
            _ => _ = number?,
        }
        Some(length)
    }
}

/// Where the cells of a row go, and how many fields and dense values there are so far.
struct Row<'a> {
    ids: &'a mut [i64],
    label: &'a mut f32,
    dense: &'a mut [f32],
    num_fields: usize,
    num_dense: usize,
}

impl Row<'_> {
    #[inline]
    fn put_id(&mut self, value: i64) {
        self.ids[self.num_fields] = (self.num_fields as i64) << VALUE_BITS | value & VALUE_MASK;
        self.num_fields += 1;
    }

    #[inline]
    fn put_dense(&mut self, value: f32) {
        self.dense[self.num_dense] = value;
        self.num_dense += 1;
    }
}

/// Returns where the line after one begins that is empty or has spaces only.
fn blank_line(text: &[u8], start: usize) -> Option<usize> {
    let spaces = text[start..].iter().take_while(|byte| **byte == b' ').count();
    match text.get(start + spaces) {
        None => Some(start + spaces),
        Some(b'\n') => Some(start + spaces + 1),
        Some(_) => None,
    }
}

fn click(number: i64) -> Option<f32> {
    match number {
        0 => Some(0.0),
        1 => Some(1.0),
        _ => None,
    }
}

/// A number that no other one of its length in bits shares an id with.
fn short(number: i64) -> Option<i64> {
    let half = 1 << (VALUE_BITS - 1);
    (-half..half).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format() -> Delimited {
        Delimited::new(vec![ColumnKind::Click, ColumnKind::Count, ColumnKind::Hex], b"\t", 0.0)
            .expect("a good layout")
    }

    #[test]
    fn rows_fill_the_arrays() {
        let (mut ids, mut labels, mut dense) = ([0; 3], [9.0; 3], [9.0; 3]);
        let arrays = Arrays { ids: &mut ids, labels: &mut labels, dense: &mut dense };
        assert_eq!(format().parse(b"1\t\tff\n  \n0\t0\t", arrays), Ok(2));
        assert_eq!((ids, labels, dense), ([255, MISSING, 0], [1.0, 0.0, 9.0], [0.0, 0.0, 9.0]));
    }

    #[test]
    fn arrays_that_are_too_short_are_an_error() {
        for (ids, labels, dense) in [(1, 2, 2), (2, 1, 2), (2, 2, 1)] {
            let (mut ids, mut labels, mut dense) = (vec![0; ids], vec![0.0; labels], vec![0.0; dense]);
            let arrays = Arrays { ids: &mut ids, labels: &mut labels, dense: &mut dense };
            let error = format().parse(b"1\t1\tff\n0\t0\t1\n", arrays).expect_err("no room for two rows");
            assert_eq!(error, ParseError::Room { rows: 1 });
            assert_eq!(error.to_string(), "expected arrays for more than 1 rows");
        }
    }
}
