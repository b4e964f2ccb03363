//! What the tests that hold the store against libtorch have in common.

use std::sync::Arc;

use recstore_tch::{LocalStore, Result, TableConfig, TchTable};
use tch::{Device, Kind, Tensor};

/// Results of the same equations in single precision, taken in another order: rows are around 1 and a step rounds a
/// few times, at 6e-8 each, so that a hundred steps stay within this.
pub const TOLERANCE: f64 = 1e-5;

/// Opens a table of normal rows in a store of its own.
///
/// # Errors
/// If `optimizer`, JSON, is not valid.
pub fn open(dim: usize, optimizer: &str) -> Result<TchTable<LocalStore>> {
    let text = format!(
        r#"{{"block_size": 16, "initializer": {{"kind": "normal", "std": 1}}, "optimizer": {optimizer}}}"#
    );
    TchTable::open(Arc::new(LocalStore::default()), "t", &TableConfig::from_json(dim, &text)?)
}

/// Returns the ids from 0 up to `count`, so that the rows of all form a dense weight.
pub fn all_ids(count: i64) -> Tensor {
    Tensor::arange(count, (Kind::Int64, Device::Cpu))
}

/// Holds two tensors of one shape against each other, element by element.
///
/// # Panics
/// If they differ by more than [`TOLERANCE`].
pub fn assert_close(actual: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(actual.size(), expected.size(), "{what}");
    let difference = (actual - expected).abs().max().double_value(&[]);
    assert!(difference <= TOLERANCE, "{what}: {difference}");
}

/// Returns the elements of a tensor of any shape and strides, row-major.
pub fn elements<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    let mut values = vec![T::ZERO; tensor.numel()];
    let count = values.len();
    tensor.copy_data(&mut values, count);
    values
}
