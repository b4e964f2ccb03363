//! The hash of text whose values are ids, for columns of it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use recstore::hash_text;

const NUMBER: usize = size_of::<i64>();

/// Hashes N texts that lie one after the other.
///
/// `offsets` are N + 1 numbers of 64 bits in the machine's order: where each text begins in `characters`, and where the
/// last one ends. Returns N numbers of 64 bits.
#[pyfunction]
pub(crate) fn hash_texts<'py>(
    py: Python<'py>,
    offsets: &[u8],
    characters: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let hashes = py.detach(|| hash_each(offsets, characters)).ok_or_else(|| {
        PyValueError::new_err("hash_texts: an offset is not within the characters, or not in order")
    })?;
    Ok(PyBytes::new(py, &hashes))
}

fn hash_each(offsets: &[u8], characters: &[u8]) -> Option<Vec<u8>> {
    let mut places = offsets.chunks_exact(NUMBER).map(|bytes| {
        let number = i64::from_ne_bytes(bytes.try_into().expect("a chunk has the bytes of a number"));
        usize::try_from(number).ok()
    });
    let mut start = places.next()??;
    let mut hashes = Vec::with_capacity(offsets.len() - NUMBER);
    for place in places {
        let end = place?;
        hashes.extend_from_slice(&hash_text(characters.get(start..end)?).to_ne_bytes());
        start = end;
    }
    Some(hashes)
}
