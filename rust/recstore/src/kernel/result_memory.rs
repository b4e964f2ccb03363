//! Memory of large results, kept for the next ones.
//!
//! glibc takes what is larger than 32 MiB from the system with every call and gives it back after, and the system zeroes it
//! first: up to half of the time that a lookup takes. A model asks for the same sizes at every step.

use std::sync::{Mutex, TryLockError};

use crate::kernel::pages::Pages;

/// What is kept at most: two results of 1 M rows of dim 64. The system may take it back where memory runs short.
const KEPT_BYTES: usize = 512 << 20;

/// Sizes are rounded up to a multiple of this part of them, so that results of about the same size share memory. What is
/// not used of it is not supplied.
const SIZES_PER_DOUBLING: usize = 8;

static KEPT: Mutex<FreeList> = Mutex::new(FreeList(Vec::new()));

/// Memory of a large result. It is not initialized in that it holds what the last result left.
#[derive(Debug)]
pub struct ResultMemory(Option<Pages<u64>>);

impl ResultMemory {
    /// What is smaller an allocator keeps itself.
    pub const LARGE_BYTES: usize = 32 << 20;

    /// Returns memory of at least `bytes`, aligned to a cache line; none where the system refuses it.
    pub fn new(bytes: usize) -> Option<Self> {
        let bytes = rounded(bytes);
        let pages = with_kept(|kept| kept.take(bytes)).flatten();
        pages.or_else(|| Pages::try_zeroed(bytes / size_of::<u64>())).map(|pages| Self(Some(pages)))
    }

    /// Where it lies.
    pub fn start(&mut self) -> *mut u8 {
        self.0.as_mut().expect("taken by drop alone").as_mut_ptr().cast()
    }
}

impl Drop for ResultMemory {
    fn drop(&mut self) {
        let mut pages = self.0.take().expect("taken by drop alone");
        if size_of_val(&*pages) <= KEPT_BYTES {
            pages.lend_to_system();
            with_kept(|kept| kept.put(pages));
        }
    }
}

/// Nobody waits here: another thread that is busy with what is kept may be gone, in a forked process for good.
fn with_kept<R>(change: impl FnOnce(&mut FreeList) -> R) -> Option<R> {
    match KEPT.try_lock() {
        Ok(mut kept) => Some(change(&mut kept)),
        Err(TryLockError::Poisoned(kept)) => Some(change(&mut kept.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of((bytes.next_power_of_two() / 2 / SIZES_PER_DOUBLING).max(size_of::<u64>()))
}

/// What is not in use, the longest kept first.
struct FreeList(Vec<Pages<u64>>);

impl FreeList {
    /// Takes the smallest memory of at least `bytes` that does not waste as much again.
    fn take(&mut self, bytes: usize) -> Option<Pages<u64>> {
        let fits = |pages: &Pages<u64>| (bytes..2 * bytes).contains(&size_of_val(&**pages));
        let fitting = self.0.iter().enumerate().filter(|(_, pages)| fits(pages));
        let (best, _) = fitting.min_by_key(|(_, pages)| pages.len())?;
        Some(self.0.remove(best))
    }

    /// Keeps memory, and lets go of the longest kept where there is too much.
    fn put(&mut self, pages: Pages<u64>) {
        self.0.push(pages);
        while self.bytes() > KEPT_BYTES {
            self.0.remove(0);
        }
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|pages| size_of_val(&**pages)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE_BYTES: usize = ResultMemory::LARGE_BYTES;

    fn of(bytes: usize) -> Pages<u64> {
        Pages::zeroed(bytes / size_of::<u64>(), 0)
    }

    fn sizes(kept: &FreeList) -> Vec<usize> {
        kept.0.iter().map(|pages| size_of_val(&**pages)).collect()
    }

    #[test]
    fn the_smallest_that_fits_is_taken() {
        let mut kept = FreeList(vec![of(LARGE_BYTES * 2), of(LARGE_BYTES), of(LARGE_BYTES * 3)]);
        assert!(kept.take(LARGE_BYTES * 4).is_none(), "none is large enough");
        assert!(kept.take(LARGE_BYTES / 2).is_none(), "the least would be twice as large");
        let taken = kept.take(LARGE_BYTES + 8).expect("two fit");
        assert_eq!(size_of_val(&*taken), LARGE_BYTES * 2);
        assert_eq!(sizes(&kept), [LARGE_BYTES, LARGE_BYTES * 3]);
    }

    #[test]
    fn the_longest_kept_goes_first() {
        let mut kept = FreeList(Vec::new());
        for part in [2, 4, 4, 2] {
            kept.put(of(KEPT_BYTES / part));
        }
        assert_eq!(sizes(&kept), [KEPT_BYTES / 4, KEPT_BYTES / 4, KEPT_BYTES / 2]);
    }

    #[test]
    fn sizes_of_one_step_fall_together() {
        assert_eq!(rounded(LARGE_BYTES), LARGE_BYTES);
        assert_eq!(rounded(LARGE_BYTES + 1), LARGE_BYTES / 8 * 9);
        assert_eq!(rounded(LARGE_BYTES / 8 * 9), LARGE_BYTES / 8 * 9);
        assert_eq!(rounded(2 * LARGE_BYTES - 1), 2 * LARGE_BYTES);
    }

    #[test]
    fn memory_comes_back_and_is_writable() {
        let mut first = ResultMemory::new(LARGE_BYTES).expect("there is room");
        let start = first.start();
        let mut second = ResultMemory::new(LARGE_BYTES).expect("there is room");
        assert_ne!(second.start(), start, "the first is in use");
        drop(first);
        drop(second);
        let mut all: Vec<_> =
            (0..2).map(|_| ResultMemory::new(LARGE_BYTES).expect("there is room")).collect();
        assert!(all.iter_mut().any(|memory| memory.start() == start));
        for memory in &mut all {
            memory.0.as_mut().expect("not dropped").fill(7);
        }
    }

    #[test]
    fn memory_that_the_system_refuses_is_none() {
        assert!(ResultMemory::new(1 << 60).is_none());
    }
}
