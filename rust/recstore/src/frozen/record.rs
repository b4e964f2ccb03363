//! How a row lies in its file: its bytes, its id behind them where no index has it, and what keeps it within a cache line.

use super::encoding::Encoding;
use crate::kernel::cache::LINE_BYTES;

const ID_BYTES: usize = size_of::<i64>();

/// The bytes of a row, and of what lies behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    row: usize,
    has_id: bool,
    /// From one row to the next.
    stride: usize,
}

impl Record {
    /// Returns how rows of a dim lie.
    pub(super) fn new(encoding: Encoding, dim: usize, has_id: bool) -> Self {
        let row = encoding.row_bytes(dim);
        let stride = if has_id { within_a_line(row + ID_BYTES) } else { row };
        Self { row, has_id, stride }
    }

    #[inline(always)]
    pub(super) fn row_bytes(self) -> usize {
        self.row
    }

    pub(super) fn has_id(self) -> bool {
        self.has_id
    }

    #[inline(always)]
    pub(super) fn stride(self) -> usize {
        self.stride
    }

    /// Returns the bytes of a row, if the record is that of an id.
    #[inline(always)]
    pub(super) fn row_of(self, record: &[u8], id: i64) -> Option<&[u8]> {
        let (row, behind) = record.split_at(self.row);
        (!self.has_id || behind.first_chunk() == Some(&id.to_le_bytes())).then_some(row)
    }

    /// Returns the id of a record that has one.
    pub(super) fn id_of(self, record: &[u8]) -> Option<i64> {
        let behind = record[self.row..].first_chunk().filter(|_| self.has_id);
        behind.map(|bytes| i64::from_le_bytes(*bytes))
    }

    /// Puts the id and what follows behind a row.
    pub(super) fn close(self, record: &mut Vec<u8>, id: i64) {
        let start = record.len() - self.row;
        if self.has_id {
            record.extend(id.to_le_bytes());
        }
        record.resize(start + self.stride, 0);
    }
}

/// Returns the bytes that a record takes so that it lies within a cache line: half as many again as it has, or fewer. One
/// that would take more may lie in two lines, as may one that is longer than a line.
fn within_a_line(bytes: usize) -> usize {
    let whole = bytes.next_power_of_two();
    match whole <= LINE_BYTES && 2 * whole <= 3 * bytes {
        true => whole,
        false => bytes.next_multiple_of(size_of::<f32>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_usual_dims_lie_within_a_line() {
        let stride = |encoding, dim| Record::new(encoding, dim, true).stride;
        let int8 = [4, 8, 16, 32, 64, 128].map(|dim| stride(Encoding::Int8, dim));
        assert_eq!(int8, [16, 20, 32, 64, 76, 140]);
        let int4 = [8, 16, 32, 64, 128].map(|dim| stride(Encoding::Int4, dim));
        assert_eq!(int4, [16, 20, 32, 64, 76]);
        assert_eq!(Record::new(Encoding::Int8, 16, false).stride, 20, "as FBGEMM's");
    }

    #[test]
    fn a_record_is_that_of_its_id() {
        let record = Record::new(Encoding::Int4, 3, true);
        let mut bytes = vec![9, 1, 2, 3, 4, 5, 6];
        record.close(&mut bytes, -7);
        assert_eq!(bytes.len(), 1 + 16);
        assert_eq!(record.row_of(&bytes[1..], -7), Some(&bytes[1..7]));
        assert_eq!(record.row_of(&bytes[1..], 7), None);
        assert_eq!(record.id_of(&bytes[1..]), Some(-7));
    }
}
