//! Between tensors and the slices that the store takes.

use tch::{Kind, TchError, Tensor};

use crate::{Error, Result};

/// The call and the table that a conversion is for.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) operation: &'static str,
    pub(crate) table: &'a str,
}

impl Context<'_> {
    /// Returns the ids of a tensor of any shape, strides and device, row-major.
    pub(crate) fn ids(self, ids: &Tensor) -> Result<Vec<i64>> {
        match ids.f_kind()? {
            Kind::Int64 => Ok(to_vec(ids)?),
            Kind::Int => Ok(to_vec(&ids.f_to_kind(Kind::Int64)?)?),
            actual => Err(self.wrong_kind("int64 or int32 ids".to_owned(), actual)),
        }
    }

    /// Returns the elements of `rows`, which have to be shaped as `ids` with `dim` after them.
    pub(crate) fn rows(
        self,
        what: &'static str,
        rows: &Tensor,
        ids: &Tensor,
        dim: usize,
    ) -> Result<Vec<f32>> {
        let actual = rows.f_kind()?;
        if actual != Kind::Float {
            return Err(self.wrong_kind(format!("float32 {what}"), actual));
        }
        let (expected, actual) = (shape_of_rows(ids, dim), rows.size());
        if actual != expected {
            let Self { operation, table } = self;
            return Err(Error::Shape { operation, table: table.to_owned(), what, expected, actual });
        }
        Ok(to_vec(rows)?)
    }

    fn wrong_kind(self, expected: String, actual: Kind) -> Error {
        Error::Kind { operation: self.operation, table: self.table.to_owned(), expected, actual }
    }
}

/// Returns the shape of `ids` with `dim` after it.
pub(crate) fn shape_of_rows(ids: &Tensor, dim: usize) -> Vec<i64> {
    let mut shape = ids.size();
    shape.push(dim as i64);
    shape
}

/// Returns the elements of a tensor of any shape, strides and device, row-major.
pub(crate) fn to_vec<T: tch::kind::Element + Copy>(tensor: &Tensor) -> std::result::Result<Vec<T>, TchError> {
    let mut values = vec![T::ZERO; tensor.numel()];
    let count = values.len();
    tensor.f_copy_data(&mut values, count)?;
    Ok(values)
}
