//! By how much a call makes a table larger.

/// By how much a call makes a table larger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Growth {
    pub(super) rows: usize,
    /// Ids without a row that admission begins to count.
    pub(super) candidates: usize,
}

impl Growth {
    pub(super) const NONE: Self = Self { rows: 0, candidates: 0 };

    pub(super) fn of_rows(rows: usize) -> Self {
        Self { rows, ..Self::NONE }
    }
}
