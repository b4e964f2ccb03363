//! The row type of a table, which is known when the program runs only.

use super::dtype::Dtype;
use super::row_type::{Noise, RowType};
use crate::kernel::simd::{Kernel, Lanes, Simd};

/// Evaluates an expression with the row type of a table.
macro_rules! with_row_type {
    ($dtype:expr, $row_type:ident => $body:expr) => {
        match $dtype {
            $crate::rows::dtype::Dtype::Float32 => {
                let $row_type = $crate::rows::row_type::Float32;
                $body
            }
            $crate::rows::dtype::Dtype::Bfloat16 => {
                let $row_type = $crate::rows::row_type::Bfloat16;
                $body
            }
            $crate::rows::dtype::Dtype::Float16 => {
                let $row_type = $crate::rows::row_type::Float16;
                $body
            }
            $crate::rows::dtype::Dtype::Int8 => {
                let $row_type = $crate::rows::coded_row::Coded($crate::rows::coded_row::Int8);
                $body
            }
            $crate::rows::dtype::Dtype::Float8E4m3fn => {
                let $row_type = $crate::rows::coded_row::Coded($crate::rows::coded_row::E4m3);
                $body
            }
        }
    };
}
pub(crate) use with_row_type;

/// A row type that is known when the program runs only, and what its conversions are compiled for. Around them lies far
/// more code, which need not be compiled for each row type too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnyRowType {
    pub(crate) dtype: Dtype,
    pub(crate) simd: Simd,
}

impl RowType for AnyRowType {
    #[inline(always)]
    fn is_float32(self) -> bool {
        self.dtype == Dtype::Float32
    }

    #[inline(always)]
    fn words(self, dim: usize) -> usize {
        with_row_type!(self.dtype, row_type => row_type.words(dim))
    }

    #[inline(always)]
    fn widen(self, words: &[f32], row: &mut [f32]) {
        self.simd.run(Widen { dtype: self.dtype, words, row });
    }

    #[inline(always)]
    fn widen_each(self, words: &[&[f32]], upcoming: &[&[f32]], rows: &mut [f32], dim: usize) {
        self.simd.run(WidenEach { dtype: self.dtype, words, upcoming, rows, dim });
    }

    #[inline(always)]
    fn round(self, row: &[f32], words: &mut [f32]) {
        self.simd.run(Round { dtype: self.dtype, row, words });
    }

    #[inline(always)]
    fn round_stochastically(self, row: &[f32], words: &mut [f32], noise: Noise) {
        with_row_type!(self.dtype, row_type => row_type.round_stochastically(row, words, noise));
    }
}

struct Widen<'a> {
    dtype: Dtype,
    words: &'a [f32],
    row: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        with_row_type!(self.dtype, row_type => row_type.widen(self.words, self.row));
    }
}

struct WidenEach<'a> {
    dtype: Dtype,
    words: &'a [&'a [f32]],
    upcoming: &'a [&'a [f32]],
    rows: &'a mut [f32],
    dim: usize,
}

impl Kernel for WidenEach<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let Self { dtype, words, upcoming, rows, dim } = self;
        with_row_type!(dtype, row_type => row_type.widen_each(words, upcoming, rows, dim));
    }
}

struct Round<'a> {
    dtype: Dtype,
    row: &'a [f32],
    words: &'a mut [f32],
}

impl Kernel for Round<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        with_row_type!(self.dtype, row_type => row_type.round(self.row, self.words));
    }
}
