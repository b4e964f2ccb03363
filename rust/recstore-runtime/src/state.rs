//! The tensors that a program needs beside its inputs.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

use crate::element::DType;
use crate::error::{Error, Result};
use crate::program::View;

/// A tensor of a file.
pub(crate) struct StateTensor<'a> {
    shape: Vec<i64>,
    dtype: &'static str,
    bytes: &'a [u8],
    is_handle: bool,
}

impl<'a> StateTensor<'a> {
    /// The words of a table's handle.
    pub(crate) fn of_words(words: &'a [i64]) -> Self {
        let dtype = DType::Int64.name();
        Self { shape: vec![words.len() as i64], dtype, bytes: bytemuck::cast_slice(words), is_handle: true }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { dtype: self.dtype, shape: &self.shape, bytes: self.bytes, is_handle: self.is_handle }
    }
}

/// The tensors of a file that was read.
pub(crate) struct State<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl<'a> State<'a> {
    pub(crate) fn parse(path: &'a Path, bytes: &'a [u8]) -> Result<Self> {
        let damaged = |error: safetensors::SafeTensorError| Error::damaged(path, error.to_string());
        Ok(Self { path, tensors: SafeTensors::deserialize(bytes).map_err(damaged)? })
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<StateTensor<'a>> {
        let found =
            self.tensors.tensor(name).map_err(|error| Error::damaged(self.path, error.to_string()))?;
        let shape = found.shape().iter().map(|&size| size as i64).collect();
        let dtype = self.type_of(name, found.dtype())?;
        if !dtype.has(found.data()) {
            return Err(Error::damaged(self.path, format!("its tensor {name} has bytes that are no bools")));
        }
        Ok(StateTensor { shape, dtype: dtype.name(), bytes: found.data(), is_handle: false })
    }

    fn type_of(&self, name: &str, dtype: Dtype) -> Result<DType> {
        Ok(match dtype {
            Dtype::F32 => DType::Float32,
            Dtype::F64 => DType::Float64,
            Dtype::F16 => DType::Float16,
            Dtype::BF16 => DType::BFloat16,
            Dtype::I64 => DType::Int64,
            Dtype::I32 => DType::Int32,
            Dtype::I16 => DType::Int16,
            Dtype::I8 => DType::Int8,
            Dtype::U8 => DType::UInt8,
            Dtype::BOOL => DType::Bool,
            other => {
                let reason = format!("this runtime has no type for its tensor {name}, {other}");
                return Err(Error::unfit(self.path, reason));
            }
        })
    }
}
