//! Loading cache lines ahead of their use, and copying them.

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
    let within = start.addr() % LINE_BYTES;
    let lines = (within + count * size_of::<T>()).div_ceil(LINE_BYTES);
    let first = start.cast::<i8>().wrapping_sub(within);
    let mut line = 0;
    while line + 4 <= lines {
        for step in 0..4 {
            prefetch_line(first.wrapping_add((line + step) * LINE_BYTES));
        }
        line += 4;
    }
    while line < lines {
        prefetch_line(first.wrapping_add(line * LINE_BYTES));
        line += 1;
    }
}

/// Returns how many rows of `floats` are asked for together where that is to be about `lines` lines.
pub(crate) fn rows_of_lines(lines: usize, floats: usize) -> usize {
    const MOST: usize = 64;
    (lines * LINE_BYTES / (floats * size_of::<f32>())).clamp(1, MOST)
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

/// Copies a row. The pieces stay vector instructions: a call of the C library's copy costs more than a short row.
#[inline(always)]
pub(crate) fn copy_row(from: &[f32], to: &mut [f32]) {
    let (from, to) = copy_pieces::<16>(from, to);
    let (from, to) = copy_pieces::<4>(from, to);
    for (from, to) in from.iter().zip(to) {
        *to = *from;
    }
}

/// Copies pieces of `LEN` and returns what is left.
#[inline(always)]
fn copy_pieces<'a, 'b, const LEN: usize>(from: &'a [f32], to: &'b mut [f32]) -> (&'a [f32], &'b mut [f32]) {
    let (from_pieces, from_rest) = from.as_chunks::<LEN>();
    let (to_pieces, to_rest) = to.as_chunks_mut::<LEN>();
    for (from, to) in from_pieces.iter().zip(to_pieces) {
        *to = *from;
        // Costs nothing, and keeps the compiler from making that call of the loop.
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }
    (from_rest, to_rest)
}
