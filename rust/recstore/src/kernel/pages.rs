//! Zeroed memory for large arrays, in huge pages where the system has them.
//!
//! A table is read at random: with pages of 4 KiB every row costs a miss of the address cache besides those of the
//! data. Pages are supplied by the system when they are first touched, so what is reserved and not used costs nothing.

#![expect(unsafe_code, reason = "memory comes from the system as a pointer")]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

/// The alignment of every array: that of a cache line.
const LINE_BYTES: usize = 64;

/// The size of a huge page, and the alignment of arrays at least that large.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Arrays from this size on come from the system itself, so that freeing them gives their pages back.
const SYSTEM_BYTES: usize = 256 << 10;

/// A zeroed array of fixed length, aligned to a cache line.
#[derive(Debug)]
pub(crate) struct Pages<T: Pod> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: 1. the array is owned by this value alone, as a boxed slice owns its elements.
unsafe impl<T: Pod + Send> Send for Pages<T> {}
// SAFETY: 1. as for `Send`: shared access gives shared references to the elements only.
unsafe impl<T: Pod + Sync> Sync for Pages<T> {}

impl<T: Pod> Pages<T> {
    /// Returns `len` zeroed elements, and asks for huge pages, which are supplied whole, behind the first `small`.
    pub(crate) fn zeroed(len: usize, small: usize) -> Self {
        let bytes = len * size_of::<T>();
        let start = match bytes {
            0 => NonNull::dangling(),
            _ if from_system(bytes) => granted(system::map(bytes, small * size_of::<T>()), bytes).cast(),
            _ => heap::allocate(bytes).cast(),
        };
        Self { start, len }
    }

    /// Returns `len` zeroed elements, more than none, in huge pages; none where the system refuses them.
    pub(crate) fn try_zeroed(len: usize) -> Option<Self> {
        let bytes = len * size_of::<T>();
        let start = if from_system(bytes) { system::map(bytes, 0) } else { heap::try_allocate(bytes) };
        start.map(|start| Self { start: start.cast(), len })
    }

    /// Lets the system take the pages where memory runs short: each element then is as it was, or zero.
    pub(crate) fn lend_to_system(&mut self) {
        let bytes = size_of_val(&**self);
        if from_system(bytes) {
            system::lend(self.start.cast(), bytes);
        }
    }

    /// Makes the array longer, by zeroed elements, and asks for huge pages.
    pub(crate) fn grow(&mut self, len: usize) {
        let (bytes, old_bytes) = (len * size_of::<T>(), size_of_val(&**self));
        assert!(bytes >= old_bytes, "an array of {old_bytes} bytes cannot shrink to {bytes}");
        // What is smaller than a huge page has ordinary ones, and would keep them.
        if old_bytes >= HUGE_PAGE_BYTES && from_system(old_bytes) {
            self.start = system::grow(self.start.cast(), old_bytes, bytes).cast();
            self.len = len;
            return;
        }
        let mut longer = Self::zeroed(len, 0);
        longer[..self.len].copy_from_slice(self);
        *self = longer;
    }
}

impl<T: Pod> Default for Pages<T> {
    fn default() -> Self {
        Self::zeroed(0, 0)
    }
}

impl<T: Pod> Deref for Pages<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY:
        // 1. `start` is aligned and points to `len` elements that live as long as this value; it dangles for none.
        // 2. They were zeroed, which is a value of any `Pod`, or written since.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Pod> DerefMut for Pages<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: 1. and 2. as in `deref`; 3. `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Pod> Drop for Pages<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        match bytes {
            0 => {}
            _ if from_system(bytes) => system::free(self.start.cast(), bytes),
            _ => heap::free(self.start.cast(), bytes),
        }
    }
}

/// Returns the bytes that the system supplies for the first `used` of an array, whose first `small` lie in ordinary pages.
pub(crate) fn supplied_bytes(used: usize, small: usize, bytes: usize) -> usize {
    if bytes < small.saturating_add(HUGE_PAGE_BYTES) || used <= small {
        return used;
    }
    used.next_multiple_of(HUGE_PAGE_BYTES)
}

/// Returns the bytes that the system has not supplied for an array of `bytes`, of which nothing from `start` to `end` was
/// touched, and all else was.
pub(crate) fn untouched_bytes(start: usize, end: usize, bytes: usize) -> usize {
    let page = if bytes < HUGE_PAGE_BYTES { LINE_BYTES } else { HUGE_PAGE_BYTES };
    (end / page * page).saturating_sub(start.next_multiple_of(page))
}

/// Returns the greatest size up to `bytes` for arrays of which nothing lies idle.
pub(crate) fn whole_pages(bytes: usize) -> usize {
    if bytes < HUGE_PAGE_BYTES { bytes } else { bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES }
}

/// Memory that must be had.
fn granted(start: Option<NonNull<u8>>, bytes: usize) -> NonNull<u8> {
    start.unwrap_or_else(|| std::alloc::handle_alloc_error(heap::layout(bytes)))
}

fn from_system(bytes: usize) -> bool {
    cfg!(all(target_os = "linux", not(miri))) && bytes >= SYSTEM_BYTES
}

/// Arrays from Rust's allocator.
mod heap {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    pub(super) fn allocate(bytes: usize) -> NonNull<u8> {
        super::granted(try_allocate(bytes), bytes)
    }

    pub(super) fn try_allocate(bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: 1. the layout has a size above zero: the callers ask for nothing else.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)) })
    }

    pub(super) fn free(start: NonNull<u8>, bytes: usize) {
        // SAFETY: 1. `start` came from `allocate` with the same size, and nothing refers to it any more.
        unsafe { dealloc(start.as_ptr(), layout(bytes)) }
    }

    pub(super) fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, super::LINE_BYTES)
            .unwrap_or_else(|_| panic!("an array of {bytes} bytes is larger than the address space"))
    }
}

/// Arrays from the system.
#[cfg(all(target_os = "linux", not(miri)))]
mod system {
    use std::ptr::{NonNull, null_mut};

    use super::{HUGE_PAGE_BYTES, granted};

    /// What the system maps is a multiple of this.
    const PAGE_BYTES: usize = 4096;

    /// Maps zero pages, huge ones where there is room for them behind the first `small` bytes.
    pub(super) fn map(bytes: usize, small: usize) -> Option<NonNull<u8>> {
        let bytes = mapped(bytes);
        if bytes < small.saturating_add(HUGE_PAGE_BYTES) {
            return map_anywhere(bytes);
        }
        let start = map_aligned(bytes)?;
        // SAFETY: 1. `small` is less than `bytes`.
        advise_huge(unsafe { start.add(small.next_multiple_of(PAGE_BYTES)) }, bytes - small);
        Some(start)
    }

    /// Returns what is mapped for an array: whole huge pages, since half of one would be made of ordinary pages and stay so
    /// when the array grows.
    fn mapped(bytes: usize) -> usize {
        // Whole huge pages: each growth of the id map had left up to 2 MiB of ordinary ones, half of the map
        // after 1 M ids, and a lookup of rows of 8 took 53 ns instead of 43.
        bytes.next_multiple_of(if bytes < HUGE_PAGE_BYTES { PAGE_BYTES } else { HUGE_PAGE_BYTES })
    }

    /// Maps zero pages aligned to huge ones.
    fn map_aligned(bytes: usize) -> Option<NonNull<u8>> {
        // The system aligns to its small pages; the spare huge page leaves room to align to a large one.
        let whole = map_anywhere(bytes + HUGE_PAGE_BYTES)?;
        let head = whole.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: 1. `head` is less than a huge page, by which the mapping is longer than `bytes`.
        let start = unsafe { whole.add(head) };
        // SAFETY: 1. as above: what lies behind the array is the rest of the spare huge page.
        let end = unsafe { start.add(bytes) };
        trim(whole, head);
        trim(end, HUGE_PAGE_BYTES - head);
        Some(start)
    }

    /// Makes a mapping longer: its pages move to another address, their content stays where it is.
    pub(super) fn grow(start: NonNull<u8>, old_bytes: usize, bytes: usize) -> NonNull<u8> {
        // `mremap` alone may choose an address that no huge page fits, so the target is mapped first. Pages
        // move, and their content is not copied.
        let target = granted(map(bytes, 0), bytes);
        let (old_bytes, bytes) = (mapped(old_bytes), mapped(bytes));
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY:
        // 1. Both ranges are mappings of ours; the caller gives up `start`, and nothing refers to `target` yet, whose
        //    pages are replaced by those of `start` and zero pages behind them.
        let moved = unsafe {
            libc::mremap(start.as_ptr().cast(), old_bytes, bytes, how, target.as_ptr().cast::<libc::c_void>())
        };
        granted(NonNull::new(moved.cast()).filter(|_| moved != libc::MAP_FAILED), bytes);
        advise_huge(target, bytes);
        target
    }

    fn advise_huge(start: NonNull<u8>, bytes: usize) {
        // SAFETY: 1. the range is a mapping of ours; the advice changes no content. A refusal is harmless.
        unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    }

    /// Pages that are not written again before the system takes them become zero pages.
    pub(super) fn lend(start: NonNull<u8>, bytes: usize) {
        // Not MADV_DONTNEED: pages stay until memory runs short, and the next result finds them without a
        // fault.
        // SAFETY: 1. the range is a mapping of ours that nothing refers to, of elements for which zero is a value. A refusal
        //    is harmless.
        unsafe { libc::madvise(start.as_ptr().cast(), mapped(bytes), libc::MADV_FREE) };
    }

    fn map_anywhere(bytes: usize) -> Option<NonNull<u8>> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: 1. a private anonymous mapping at an address of the system's choice touches no memory in use.
        let start = unsafe { libc::mmap(null_mut(), bytes, access, kind, -1, 0) };
        NonNull::new(start.cast::<u8>()).filter(|_| start != libc::MAP_FAILED)
    }

    fn trim(start: NonNull<u8>, bytes: usize) {
        if bytes > 0 {
            unmap(start, bytes);
        }
    }

    fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: 1. the range was mapped by `map_anywhere` and nothing refers to it. A refusal leaves it mapped.
        unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
    }

    /// Gives back what was mapped for an array.
    pub(super) fn free(start: NonNull<u8>, bytes: usize) {
        unmap(start, mapped(bytes));
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod system {
    pub(super) use super::heap::free;

    use std::ptr::NonNull;

    pub(super) fn map(bytes: usize, _small: usize) -> Option<NonNull<u8>> {
        super::heap::try_allocate(bytes)
    }

    pub(super) fn lend(_: NonNull<u8>, _: usize) {}

    pub(super) fn grow(_: NonNull<u8>, _: usize, _: usize) -> NonNull<u8> {
        unreachable!("no array comes from the system here")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_array_keeps_its_content_and_is_zero_behind() {
        let mut pages = Pages::<f32>::default();
        let mut written = 0;
        for len in [0, 10, 10, 60_000, 70_000, 600_000, 2_000_000] {
            pages.grow(len);
            assert!((0..written).all(|place| pages[place] == place as f32), "{len}");
            assert!(pages[written..].iter().all(|&value| value == 0.0), "{len}");
            written = len;
            (0..len).for_each(|place| pages[place] = place as f32);
        }
    }

    #[test]
    fn arrays_of_every_size_are_zero_aligned_and_writable() {
        for len in [0, 1, 63, 1000, SYSTEM_BYTES / 4, SYSTEM_BYTES / 4 + 1, (5 << 20) / 4 + 3] {
            for small in [0, 1_000_000, usize::MAX / 8] {
                let mut pages = Pages::<f32>::zeroed(len, small);
                assert_eq!(pages.len(), len);
                assert!(pages.iter().all(|&value| value == 0.0));
                assert!(len == 0 || pages.as_ptr().addr().is_multiple_of(LINE_BYTES));
                pages.fill(1.5);
                assert_eq!(pages.iter().filter(|&&value| value == 1.5).count(), len);
            }
        }
    }

    #[test]
    fn a_page_of_which_a_part_was_touched_is_supplied_whole() {
        let page = HUGE_PAGE_BYTES;
        assert_eq!(untouched_bytes(0, 3 * page, 3 * page), 3 * page);
        assert_eq!(untouched_bytes(page - 64, 3 * page + 64, 4 * page), 2 * page);
        assert_eq!(untouched_bytes(page + 64, 2 * page - 64, 4 * page), 0);
        assert_eq!(untouched_bytes(2 * page, 0, 4 * page), 0);
        assert_eq!(untouched_bytes(64, 640, page / 2), 576);
    }
}
