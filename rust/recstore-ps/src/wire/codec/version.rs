//! The version of frames.

/// The version of the layout.
pub const VERSION: u8 = 1;
