//! Checks what a bundle is called with by what its manifest says of its inputs.

use std::collections::HashMap;

use crate::bundle::Input;
use crate::error::{Error, Result};
use crate::manifest::Described;

pub(crate) fn check(expected: &[Described], inputs: &[Input<'_>]) -> Result<()> {
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
