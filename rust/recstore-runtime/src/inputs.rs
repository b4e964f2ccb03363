//! What a bundle is asked with, checked by what its manifest says of its inputs.

use std::collections::HashMap;

use crate::element::{DType, Element};
use crate::error::{Error, Result};
use crate::manifest::{Described, Ranges};
use crate::program::View;

/// A tensor that a bundle is asked with: elements of the caller, one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    dtype: DType,
    shape: &'a [i64],
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    /// Takes elements as a tensor of a shape.
    ///
    /// # Errors
    /// [`Error::Input`]: they are not as many as the shape has.
    pub fn new<T: Element>(values: &'a [T], shape: &'a [i64]) -> Result<Self> {
        Self::of_bytes(T::DTYPE, bytemuck::cast_slice(values), shape)
    }

    /// Takes bytes as a tensor of a type and shape.
    ///
    /// # Errors
    /// [`Error::Input`]: they are not as many as the shape has, not aligned as the type needs, or no bools.
    pub fn of_bytes(dtype: DType, bytes: &'a [u8], shape: &'a [i64]) -> Result<Self> {
        let size = |bytes: usize, &size: &i64| bytes.checked_mul(usize::try_from(size).ok()?);
        let needed = shape.iter().try_fold(dtype.size(), size);
        if needed != Some(bytes.len()) {
            let name = dtype.name();
            return Err(Error::Input(format!(
                "{} bytes are no {name} tensor of shape {shape:?}",
                bytes.len()
            )));
        }
        if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(dtype.size()) {
            return Err(Error::Input(format!(
                "{} tensors must begin at a multiple of {}",
                dtype.name(),
                dtype.size()
            )));
        }
        if !dtype.has(bytes) {
            return Err(Error::Input("bool tensors have bytes of 0 and 1 alone".to_owned()));
        }
        Ok(Self { dtype, shape, bytes })
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { dtype: self.dtype.name(), shape: self.shape, bytes: self.bytes, is_handle: false }
    }
}

pub(crate) fn check(expected: &[Described], ranges: &Ranges, inputs: &[Input<'_>]) -> Result<()> {
    if inputs.len() != expected.len() {
        let names: Vec<_> = expected.iter().map(|each| each.name.as_str()).collect();
        let (number, names) = (expected.len(), names.join(", "));
        return Err(Error::Input(format!(
            "the bundle takes {number} tensors, {names}; got {}",
            inputs.len()
        )));
    }
    let mut sizes: HashMap<&str, (i64, &str)> = HashMap::new();
    for (description, input) in expected.iter().zip(inputs) {
        check_tensor(description, input)?;
        for (place, (name, &size)) in description.sizes.iter().zip(input.shape).enumerate() {
            let Some(name) = name else { continue };
            if let Some(range) = ranges.get(name).filter(|range| !range.has(size)) {
                return Err(Error::Input(format!(
                    "input {}: size {size} of dimension {place} must be {range}, for which the program was exported",
                    description.name
                )));
            }
            let &mut (first, whose) = sizes.entry(name).or_insert((size, &description.name));
            if size != first {
                return Err(Error::Input(format!(
                    "input {}: size {size} of dimension {place} must be equal to that of {whose}, {first}",
                    description.name
                )));
            }
        }
    }
    Ok(())
}

fn check_tensor(description: &Described, input: &Input<'_>) -> Result<()> {
    let Described { name, dtype, shape, .. } = description;
    let fits = input.shape.len() == shape.len()
        && shape.iter().zip(input.shape).all(|(&expected, &size)| expected == -1 || expected == size);
    if fits && input.dtype == *dtype {
        return Ok(());
    }
    let told = format!("expected {} {shape:?}, got {} {:?}", dtype.name(), input.dtype.name(), input.shape);
    Err(Error::Input(format!("input {name}: {told}")))
}
