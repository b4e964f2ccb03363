//! Parts of the store that benches measure alone. Not part of the interface: anything here may change at any time.

use crate::kernel::simd::Simd;
use crate::table::{self, FindRows, RowIndex};

/// The map from ids to indices of rows.
#[derive(Debug, Default)]
pub struct IdMap(table::IdMap);

impl IdMap {
    /// Gives each of `ids`, which are new and distinct, the next index.
    pub fn insert(&mut self, ids: &[i64]) {
        let indices: Vec<RowIndex> = (self.0.len() as u32..).map(RowIndex).take(ids.len()).collect();
        self.0.insert_each(ids, &indices);
        self.0.gather(usize::MAX);
    }

    /// Writes the index of each id to `indices`, `u32::MAX` for one that is not there.
    pub fn find(&self, ids: &[i64], indices: &mut [u32]) {
        Simd::detect().run(FindRows { ids: &self.0, of: ids, indices });
    }

    /// Returns the bytes allocated.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// Asks for the cache line that holds the first of `values`.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    crate::kernel::cache::prefetch(values, crate::kernel::cache::Cache::First);
}

/// Zeroed memory as the store uses it, of `lines` cache lines, for yardsticks that read the same kind of memory.
pub fn zeroed_lines(lines: usize) -> impl std::ops::DerefMut<Target = [f32]> {
    const FLOATS_PER_LINE: usize = 16;
    crate::kernel::pages::Pages::zeroed(lines * FLOATS_PER_LINE, 0)
}

/// Mixes the bits of an id.
#[inline(always)]
pub fn mix(id: i64) -> u64 {
    crate::kernel::hash::mix(id)
}
