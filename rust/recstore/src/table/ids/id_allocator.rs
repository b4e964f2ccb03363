//! Hands out row indices, the freed ones first.

use super::row_index::RowIndex;

/// Indices from zero upwards; freed ones come back last in, first out. An index is never handed out twice at a time:
/// only the id map knows which index an id has, and it forgets it when the index is freed.
#[derive(Debug, Default)]
pub(crate) struct IdAllocator {
    next: u32,
    freed: Vec<RowIndex>,
}

impl IdAllocator {
    /// The most indices that can be in use: the greatest two numbers mean something else to lookups and steps.
    pub(crate) const LIMIT: usize = u32::MAX as usize - 1;

    /// Returns an index that is not in use. The caller keeps within [`Self::LIMIT`].
    pub(crate) fn allocate(&mut self) -> RowIndex {
        self.freed.pop().unwrap_or_else(|| {
            self.next += 1;
            RowIndex(self.next - 1)
        })
    }

    /// Takes back an index that is in use.
    pub(crate) fn free(&mut self, index: RowIndex) {
        self.freed.push(index);
    }

    /// Returns what [`IdAllocator::high_water`] is when `more` indices are in use.
    pub(crate) fn high_water_after(&self, more: usize) -> usize {
        self.high_water() + more.saturating_sub(self.freed.len())
    }

    /// Returns the bytes in use.
    pub(crate) fn bytes(&self) -> usize {
        Self::bytes_for(self.freed.len())
    }

    /// Returns the bytes in use when so many indices are free.
    pub(crate) fn bytes_for(freed: usize) -> usize {
        freed * size_of::<RowIndex>()
    }

    /// Returns how many indices were ever handed out: all in use lie below.
    pub(crate) fn high_water(&self) -> usize {
        self.next as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_indices_are_reused_before_new_ones() {
        let mut allocator = IdAllocator::default();
        assert_eq!([0, 1, 2].map(RowIndex), [(); 3].map(|()| allocator.allocate()));
        allocator.free(RowIndex(1));
        assert_eq!([1, 3].map(RowIndex), [(); 2].map(|()| allocator.allocate()));
        assert_eq!(allocator.high_water(), 4);
    }
}
