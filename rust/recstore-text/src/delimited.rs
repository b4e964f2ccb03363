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
    separator: Vec<u8>,
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
    #[error("expected one separator or two equal ones that no cell has, got {0:?}")]
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
    /// The arrays are too short, or do not fit each other.
    #[error("expected arrays of {lines} rows, got {ids} ids, {labels} labels and {dense} dense values")]
    Room {
        /// Lines of the text.
        lines: usize,
        /// The length of the array of ids.
        ids: usize,
        /// The length of the array of labels.
        labels: usize,
        /// The length of the array of dense values.
        dense: usize,
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
        if !matches!(separator, [b'\t' | b',' | b';' | b'|' | b':'] | [b':', b':']) {
            return Err(BadLayout::Separator(separator.to_vec()));
        }
        let num_dense = count(|kind| kind == ColumnKind::Count);
        Ok(Self { kinds, separator: separator.to_vec(), threshold, num_fields, num_dense })
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
        self.check_room(text, &arrays)?;
        let Arrays { ids, labels, dense } = arrays;
        let (mut rows, mut at, mut line) = (0, 0, 1);
        while at < text.len() {
            if let Some(next) = blank_line(text, at) {
                at = next;
            } else {
                let mut row = Row {
                    ids: &mut ids[rows * self.num_fields..][..self.num_fields],
                    label: &mut labels[rows],
                    dense: &mut dense[rows * self.num_dense..][..self.num_dense],
                };
                at = self
                    .parse_line(text, at, &mut row)
                    .map_err(|bad| ParseError::Line { line, place: bad - at + 1 })?;
                rows += 1;
            }
            line += 1;
        }
        Ok(rows)
    }

    fn check_room(&self, text: &[u8], arrays: &Arrays<'_>) -> Result<(), ParseError> {
        let lines = Self::most_rows(text);
        let (ids, labels, dense) = (arrays.ids.len(), arrays.labels.len(), arrays.dense.len());
        if labels < lines || ids / self.num_fields < lines || dense < lines * self.num_dense {
            return Err(ParseError::Room { lines, ids, labels, dense });
        }
        Ok(())
    }

    /// Returns where the next line begins, or where the bad cell of this one does.
    fn parse_line(&self, text: &[u8], start: usize, row: &mut Row<'_>) -> Result<usize, usize> {
        let (mut at, mut field, mut dense) = (start, 0, 0);
        *row.label = f32::NAN;
        let (last, others) = self.kinds.split_last().ok_or(start)?;
        for kind in others {
            let end = at + self.parse_cell(*kind, &text[at..], row, &mut field, &mut dense).ok_or(at)?;
            at = end + self.separator_at(text, end).ok_or(at)?;
        }
        let end = at + self.parse_cell(*last, &text[at..], row, &mut field, &mut dense).ok_or(at)?;
        match text.get(end) {
            None => Ok(end),
            Some(b'\n') => Ok(end + 1),
            Some(_) => Err(at),
        }
    }

    #[inline]
    fn separator_at(&self, text: &[u8], at: usize) -> Option<usize> {
        match *self.separator {
            [separator] => (text.get(at) == Some(&separator)).then_some(1),
            _ => text[at..].starts_with(&self.separator).then_some(self.separator.len()),
        }
    }

    /// Reads a cell into its place in the row, and returns its length.
    #[inline]
    fn parse_cell(
        &self,
        kind: ColumnKind,
        text: &[u8],
        row: &mut Row<'_>,
        field: &mut usize,
        dense: &mut usize,
    ) -> Option<usize> {
        if kind == ColumnKind::Hex {
            let (value, length) = hexadecimal(text)?;
            row.put_id(field, value.map_or(MISSING, i64::from));
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
            ColumnKind::Count => {
                row.dense[*dense] = number.map_or(0.0, dense_value);
                *dense += 1;
            }
            ColumnKind::Click => *row.label = click(number?)?,
            ColumnKind::Hour => row.put_id(field, hour_of(number?)?),
            ColumnKind::Key => row.put_id(field, short(number?)?),
            ColumnKind::Category => row.put_id(field, number.map_or(Some(MISSING), short)?),
            _ => _ = number?,
        }
        Some(length)
    }
}

struct Row<'a> {
    ids: &'a mut [i64],
    label: &'a mut f32,
    dense: &'a mut [f32],
}

impl Row<'_> {
    #[inline]
    fn put_id(&mut self, field: &mut usize, value: i64) {
        self.ids[*field] = (*field as i64) << VALUE_BITS | value & VALUE_MASK;
        *field += 1;
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
