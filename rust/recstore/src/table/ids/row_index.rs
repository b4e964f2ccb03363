//! The place of a row in its table.

/// The place of a row in its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RowIndex(pub(crate) u32);

/// The index of an id without a row.
pub(crate) const NO_INDEX: u32 = u32::MAX;
