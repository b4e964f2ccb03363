//! Checks of values against their ranges.

use crate::{Error, Result};

pub(super) fn invalid(message: String) -> Error {
    Error::InvalidConfig { message }
}

pub(super) fn require(holds: bool, message: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(invalid(message())) }
}

pub(super) fn finite(key: &str, value: f64) -> Result<()> {
    require((value as f32).is_finite(), || format!("{key} must be a finite float32, got {value}"))
}

pub(super) fn not_negative(key: &str, value: f64) -> Result<()> {
    finite(key, value)?;
    require(value >= 0.0, || format!("{key} must not be negative, got {value}"))
}

pub(super) fn positive(key: &str, value: f64) -> Result<()> {
    finite(key, value)?;
    require(value as f32 > 0.0, || format!("{key} must be positive, got {value}"))
}

pub(super) fn share(key: &str, value: f64) -> Result<()> {
    require((0.0..1.0).contains(&value), || format!("{key} must lie in [0, 1), got {value}"))
}
