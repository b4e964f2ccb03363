//! Loading cache lines ahead of their use.

#![expect(unsafe_code, reason = "the instruction takes a pointer")]

const LINE_BYTES: usize = 64;

/// Asks for every cache line of `values`. It changes nothing and waits for nothing.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T]) {
    prefetch_at(values.as_ptr(), values.len());
}

/// Asks for every cache line of the `count` values at `start`, which need not be readable.
#[inline(always)]
pub(crate) fn prefetch_at<T>(start: *const T, count: usize) {
    let first = start.addr() & !(LINE_BYTES - 1);
    let end = start.addr() + count * size_of::<T>();
    for line in (first..end).step_by(LINE_BYTES) {
        prefetch_line(start.cast::<i8>().with_addr(line));
    }
}

/// Asks for the cache line of a value that lies within one.
#[inline(always)]
pub(crate) fn prefetch_one<T>(value: &T) {
    prefetch_line(std::ptr::from_ref(value).cast());
}

#[inline(always)]
fn prefetch_line(address: *const i8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: 1. a prefetch is a hint: it is valid for any address, and reads and writes nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address);
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: 1. as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{address}]", address = in(reg) address, options(nostack, readonly));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = address;
}
