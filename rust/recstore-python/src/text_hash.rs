//! The hash of text whose values are ids, for columns of it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use recstore::hash_text;

/// Gives N texts that lie one after the other in `characters` the lower `bits` bits of their hashes.
///
/// `offsets` are N + 1 numbers of `width` bytes, 4 or 8, in the machine's order: where each text begins, and where the
/// last one ends. A bit that is 0 in `validity`, the lowest of the first byte first, tells that a text is missing, from
/// bit `first_bit` on. `missing` stands for those; a hash of that value is given with its lowest bit turned over.
/// Returns N numbers of 64 bits.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a column of Arrow, and what becomes of it")]
pub(crate) fn hash_texts<'py>(
    py: Python<'py>,
    offsets: &[u8],
    width: usize,
    characters: &[u8],
    validity: Option<&[u8]>,
    first_bit: usize,
    bits: u32,
    missing: u64,
) -> PyResult<Bound<'py, PyByteArray>> {
    let wrong = |message: &str| PyValueError::new_err(format!("hash_texts: {message}"));
    if !matches!(width, 4 | 8) || !(1..=64).contains(&bits) {
        return Err(wrong("expected offsets of 4 or 8 bytes, and from 1 to 64 bits"));
    }
    let texts = Texts { offsets, width, characters, validity, first_bit };
    let mask = u64::MAX >> (64 - bits);
    let values = py.detach(|| texts.values(mask, missing));
    let values = values.ok_or_else(|| {
        wrong("an offset is not within the characters, or not in order, or a text has no bit of validity")
    })?;
    Ok(PyByteArray::new(py, &values))
}

/// A column of Arrow.
#[derive(Debug, Clone, Copy)]
struct Texts<'a> {
    offsets: &'a [u8],
    width: usize,
    characters: &'a [u8],
    validity: Option<&'a [u8]>,
    first_bit: usize,
}

impl Texts<'_> {
    fn values(self, mask: u64, missing: u64) -> Option<Vec<u8>> {
        let mut places = self.offsets.chunks_exact(self.width).map(place);
        let mut start = places.next()??;
        let mut values = Vec::with_capacity(self.offsets.len() / self.width * size_of::<u64>());
        for (number, end) in places.enumerate() {
            let end = end?;
            let text = self.characters.get(start..end)?;
            let value = if self.is_there(number)? { apart(hash_text(text) & mask, missing) } else { missing };
            values.extend_from_slice(&value.to_ne_bytes());
            start = end;
        }
        Some(values)
    }

    fn is_there(self, number: usize) -> Option<bool> {
        let bit = self.first_bit + number;
        self.validity.map_or(Some(true), |bits| bits.get(bit / 8).map(|byte| byte >> (bit % 8) & 1 == 1))
    }
}

/// Reads an offset; none that is negative.
fn place(bytes: &[u8]) -> Option<usize> {
    let wide = match bytes.try_into() {
        Ok(narrow) => i64::from(i32::from_ne_bytes(narrow)),
        Err(_) => i64::from_ne_bytes(bytes.try_into().ok()?),
    };
    usize::try_from(wide).ok()
}

/// A value that is not `missing`.
fn apart(value: u64, missing: u64) -> u64 {
    if value == missing { value ^ 1 } else { value }
}
