//! Rows of text, parsed into arrays.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use recstore_text::{Arrays, ColumnKind, Delimited};

/// The rows of a text: how many, ids, labels and dense values.
type Rows<'py> = (usize, Bound<'py, PyByteArray>, Bound<'py, PyByteArray>, Bound<'py, PyByteArray>);

/// Parses whole lines of columns of the given kinds; ratings are positive from `threshold` on.
///
/// Returns the number of rows, and as bytes ids (64-bit integers, field by field within a row), labels (32-bit numbers,
/// NaN where no column is one) and dense values (32-bit numbers, row by row), for as many rows or more.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
pub(crate) fn parse_delimited<'py>(
    py: Python<'py>,
    text: &[u8],
    kinds: Vec<String>,
    separator: &[u8],
    threshold: f64,
) -> PyResult<Rows<'py>> {
    let kinds =
        kinds.iter().map(|kind| kind.parse()).collect::<Result<Vec<ColumnKind>, _>>().map_err(raise)?;
    let format = Delimited::new(kinds, separator, threshold).map_err(raise)?;
    let most_rows = Delimited::most_rows(text);
    let (num_ids, num_dense) = (most_rows * format.num_fields(), most_rows * format.num_dense());
    let (mut rows, mut others) = (0, None);
    let ids = PyByteArray::new_with(py, num_ids * size_of::<i64>(), |ids| {
        let mut dense = None;
        let labels = PyByteArray::new_with(py, most_rows * size_of::<f32>(), |labels| {
            let filled = PyByteArray::new_with(py, num_dense * size_of::<f32>(), |dense| {
                let arrays = Arrays { ids: array(ids)?, labels: array(labels)?, dense: array(dense)? };
                rows = py.detach(|| format.parse(text, arrays)).map_err(raise)?;
                Ok(())
            })?;
            dense = Some(filled);
            Ok(())
        })?;
        others = dense.map(|dense| (labels, dense));
        Ok(())
    })?;
    let (labels, dense) =
        others.ok_or_else(|| PyValueError::new_err("parse_delimited: nothing was filled"))?;
    Ok((rows, ids, labels, dense))
}

fn array<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(bytes: &mut [u8]) -> PyResult<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(raise)
}

fn raise(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("parse_delimited: {error}"))
}
