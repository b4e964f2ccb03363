//! Checks of values against their ranges.

use serde::Serialize;

use crate::{Error, Result};

/// Where a number of a configuration may lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Range {
    /// Any float32 that is finite.
    Finite,
    /// From 0.
    NotNegative,
    /// Above 0.
    Positive,
    /// From 0 and below 1.
    Share,
}

impl Range {
    /// # Errors
    /// [`Error::InvalidConfig`] for a value outside; it begins with the key.
    pub(crate) fn check(self, key: &str, value: f64) -> Result<()> {
        let (single, is_share) = (value as f32, (0.0..1.0).contains(&value));
        require(self == Self::Share || single.is_finite(), || {
            format!("{key} must be a finite float32, got {value}")
        })?;
        let (holds, expected) = match self {
            Self::Finite => (true, ""),
            Self::NotNegative => (value >= 0.0, "not be negative"),
            Self::Positive => (single > 0.0, "be positive"),
            Self::Share => (is_share, "lie in [0, 1)"),
        };
        require(holds, || format!("{key} must {expected}, got {value}"))
    }
}

pub(crate) fn invalid(message: String) -> Error {
    Error::InvalidConfig { message }
}

pub(crate) fn require(holds: bool, message: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(invalid(message())) }
}
