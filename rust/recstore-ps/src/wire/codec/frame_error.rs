//! Why bytes are no frame, or hold what they should not.

use std::fmt::Display;
use std::io;

use serde::de::DeserializeOwned;

use super::version::VERSION;

/// Why bytes are no frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The connection failed or ended.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A layout that this program does not know.
    #[error("a frame of version {0}, expected {VERSION}")]
    Version(u8),
    /// The body is larger than allowed.
    #[error("a frame of {bytes} bytes exceeds the limit of {limit}")]
    TooLarge {
        /// Its bytes.
        bytes: u64,
        /// The most allowed.
        limit: u64,
    },
    /// Its JSON is not what its kind has, while the frame is whole: the connection can go on.
    #[error("{0}")]
    Form(String),
    /// Anything else.
    #[error("malformed frame: {0}")]
    Malformed(String),
}

/// Returns an error that says what is wrong with a frame.
pub(super) fn malformed(message: impl Display) -> FrameError {
    FrameError::Malformed(message.to_string())
}

/// Reads a value from JSON.
///
/// # Errors
/// [`FrameError::Form`].
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, FrameError> {
    serde_json::from_str(text).map_err(|error| FrameError::Form(format!("unreadable JSON: {error}")))
}
