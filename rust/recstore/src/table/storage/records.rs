//! The records of a table while several threads change them, each other ones.

#![expect(unsafe_code, reason = "the compiler cannot see that threads change different records")]

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::layout::Layout;
use crate::kernel::cache::{Cache, prefetch_at};
use crate::kernel::pages::Pages;
use crate::table::ids::row_index::RowIndex;

/// All records of a table, borrowed exclusively.
pub(crate) struct SharedRecords<'a> {
    slabs: Vec<NonNull<f32>>,
    layout: Layout,
    borrow: PhantomData<&'a mut [f32]>,
}

/// Where a record begins.
#[derive(Clone, Copy)]
pub(crate) struct RecordStart(NonNull<f32>);

// SAFETY: 1. it stands for a mutable borrow of floats, which may go to another thread.
unsafe impl Send for SharedRecords<'_> {}
// SAFETY: 1. records are floats, which may go to other threads; 2. `record_mut` asks its caller to keep threads apart.
unsafe impl Sync for SharedRecords<'_> {}

impl<'a> SharedRecords<'a> {
    pub(crate) fn new(slabs: &'a mut [Pages<f32>], layout: Layout) -> Self {
        let slabs = slabs.iter_mut().map(|slab| NonNull::from(&mut **slab).cast()).collect();
        Self { slabs, layout, borrow: PhantomData }
    }

    /// Returns where the record of `index` lies.
    ///
    /// # Panics
    /// If no slab holds the index.
    #[inline(always)]
    pub(crate) fn locate(&self, index: RowIndex) -> RecordStart {
        let (slab, start) = self.layout.locate(index);
        // SAFETY:
        // 1. `locate` gives the start of a record below the slab's size, and every slab has room for that many.
        // 2. The slabs are borrowed as long as `self` lives, so they are neither freed nor moved.
        RecordStart(unsafe { self.slabs[slab].add(start) })
    }

    /// Asks for the cache lines of a record.
    #[inline(always)]
    pub(crate) fn prefetch(&self, start: RecordStart, cache: Cache) {
        prefetch_at(start.0.as_ptr().cast_const(), self.layout.stride(), cache);
    }

    /// Asks for the first cache line of a record, to be used later.
    #[inline(always)]
    pub(crate) fn prefetch_first(&self, start: RecordStart) {
        prefetch_at(start.0.as_ptr().cast_const(), 1, Cache::Second);
    }

    /// Returns a record: its weights and its slots.
    ///
    /// # Safety
    /// 1. `start` was located by `self`.
    /// 2. While the record returned is used, no other one that begins there is.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "threads share the table and change different records")]
    pub(crate) unsafe fn record_mut(&self, start: RecordStart) -> &mut [f32] {
        // SAFETY:
        // 1. `locate` gave the first of a record's floats within a slab that lives as long as `self`.
        // 2. The table is borrowed exclusively by `self`, and the caller keeps apart those who share it.
        unsafe { std::slice::from_raw_parts_mut(start.0.as_ptr(), self.layout.stride()) }
    }
}
