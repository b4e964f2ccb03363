//! Loading cache lines ahead of their use, and copying them.
//!
//! A processor has few requests of its first cache under way, often two dozen lines, and more of its second. So what is
//! used soon is asked for into the second cache a good way ahead, where many requests overlap, and into the first one
//! shortly before its use, when it need only come from the second.

#![expect(unsafe_code, reason = "the instruction takes a pointer")]

use crate::kernel::elements::with_row_len;

pub(crate) const LINE_BYTES: usize = 64;

/// The lines that are used before one that is asked for into the second cache now.
pub(crate) const LINES_LATER: usize = 128;

/// The lines that are used before one that is asked for into the first cache now.
pub(crate) const LINES_NEAR: usize = 16;

/// Which cache lines are asked for into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cache {
    /// For what is used next.
    First,
    /// For what is used later.
    Second,
}

/// Asks for every cache line of `values`. It changes nothing and waits for nothing.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T], cache: Cache) {
    prefetch_at(values.as_ptr(), values.len(), cache);
}

/// Asks for every cache line of the `count` values at `start`, which need not be readable.
#[inline(always)]
pub(crate) fn prefetch_at<T>(start: *const T, count: usize, cache: Cache) {
    let within = start.addr() % LINE_BYTES;
    let mut lines = (within + count * size_of::<T>()).div_ceil(LINE_BYTES);
    let mut first = start.cast::<i8>().wrapping_sub(within);
    while lines > 4 {
        for line in 0..4 {
            prefetch_line(first.wrapping_add(line * LINE_BYTES), cache);
        }
        first = first.wrapping_add(4 * LINE_BYTES);
        lines -= 4;
    }
    // Rows have few lines: no loop, whose length the compiler would first compute.
    for line in 0..4 {
        if lines > line {
            prefetch_line(first.wrapping_add(line * LINE_BYTES), cache);
        }
    }
}

/// Returns how many rows of `floats` are asked for together where that is to be about `lines` lines.
pub(crate) fn rows_of_lines(lines: usize, floats: usize) -> usize {
    const MAX: usize = 64;
    (lines * LINE_BYTES / (floats * size_of::<f32>())).clamp(1, MAX)
}

/// Returns how many rows of `floats` before its use one is asked for into the second cache.
#[inline(always)]
pub(crate) fn rows_later(floats: usize) -> usize {
    rows_of_lines(LINES_LATER, floats.next_multiple_of(LINE_BYTES / size_of::<f32>()))
}

/// Returns how many rows of `floats` before its use one is asked for into the first cache.
#[inline(always)]
pub(crate) fn rows_near(floats: usize) -> usize {
    rows_of_lines(LINES_NEAR, floats.next_multiple_of(LINE_BYTES / size_of::<f32>()))
}

/// Asks for the cache line of a value that lies within one.
#[inline(always)]
pub(crate) fn prefetch_one<T>(value: &T, cache: Cache) {
    prefetch_line(std::ptr::from_ref(value).cast(), cache);
}

#[inline(always)]
fn prefetch_line(address: *const i8, cache: Cache) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: 1. a prefetch is a hint: it is valid for any address, and reads and writes nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // Asked for into the first cache at once, random lines took 8 ns each, for a core has 24 of them
        // under way; by way of the second they took 4.
        match cache {
            Cache::First => _mm_prefetch::<_MM_HINT_T0>(address),
            Cache::Second => _mm_prefetch::<_MM_HINT_T1>(address),
        }
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: 1. as above.
    unsafe {
        use std::arch::asm;
        match cache {
            Cache::First => {
                asm!("prfm pldl1keep, [{address}]", address = in(reg) address, options(nostack, readonly));
            }
            Cache::Second => {
                asm!("prfm pldl2keep, [{address}]", address = in(reg) address, options(nostack, readonly));
            }
        }
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = (address, cache);
}

/// Asks for rows of `len` floats, to be used later; those that are empty lie nowhere.
#[inline(always)]
pub(crate) fn prefetch_rows(rows: &[&[f32]], len: usize) {
    with_row_len!(len, prefetch_known(rows), prefetch_any(rows));
}

#[inline(always)]
fn prefetch_known<const LEN: usize>(rows: &[&[f32]]) {
    for row in rows.iter().filter_map(|row| row.first_chunk::<LEN>()) {
        prefetch_row(row, Cache::Second);
    }
}

#[inline(always)]
fn prefetch_any(rows: &[&[f32]]) {
    for row in rows.iter().filter(|row| !row.is_empty()) {
        prefetch(row, Cache::Second);
    }
}

/// Asks for as many rows as `rows`, which are used now, of those used later. `upcoming` are the same rows and those used
/// after them.
#[inline(always)]
pub(crate) fn prefetch_group(rows: &[&[f32]], upcoming: &[&[f32]]) {
    let len = rows.first().map_or(1, |row| row.len());
    let later = upcoming.get(rows_later(len)..).unwrap_or_default();
    prefetch_rows(&later[..later.len().min(rows.len())], len);
}

/// Asks for one of the `rows` of `len` floats behind the one at `place`, which is used now, into the first cache.
#[inline(always)]
pub(crate) fn prefetch_near(rows: &[&[f32]], place: usize, len: usize) {
    if let Some(row) = rows.get(place + rows_near(len)).filter(|row| !row.is_empty()) {
        prefetch(row, Cache::First);
    }
}

/// Asks for one of the rows that are used later into the second cache, as [`prefetch_near_known`] does.
#[inline(always)]
pub(crate) fn prefetch_later_known<const LEN: usize>(rows: &[&[f32]], place: usize) {
    if let Some(row) = rows.get(place + rows_later(LEN)).and_then(|row| row.first_chunk::<LEN>()) {
        prefetch_row(row, Cache::Second);
    }
}

/// As [`prefetch_near`], rows of a known length.
#[inline(always)]
pub(crate) fn prefetch_near_known<const LEN: usize>(rows: &[&[f32]], place: usize) {
    if let Some(row) = rows.get(place + rows_near(LEN)).and_then(|row| row.first_chunk::<LEN>()) {
        prefetch_row(row, Cache::First);
    }
}

#[inline(always)]
fn prefetch_row<const LEN: usize>(row: &[f32; LEN], cache: Cache) {
    for line in row.chunks(LINE_BYTES / size_of::<f32>()) {
        prefetch_one(&line[0], cache);
    }
    // A row that begins within a line ends in one more.
    if !row.as_ptr().addr().is_multiple_of(LINE_BYTES) {
        prefetch_one(&row[LEN - 1], cache);
    }
}

/// Copies rows of `len` floats to one place, one behind the other. `upcoming` are the same rows and those used after them:
/// with each row one of them is asked for into the second cache, and one into the first.
#[inline(always)]
pub(crate) fn copy_rows(rows: &[&[f32]], upcoming: &[&[f32]], to: &mut [f32], len: usize) {
    with_row_len!(len, copy_known(rows, upcoming, to), copy_any(rows, upcoming, to, len));
}

#[inline(always)]
fn copy_known<const LEN: usize>(rows: &[&[f32]], upcoming: &[&[f32]], to: &mut [f32]) {
    let (to, _) = to.as_chunks_mut::<LEN>();
    for (place, (from, to)) in rows.iter().zip(to).enumerate() {
        prefetch_later_known::<LEN>(upcoming, place);
        prefetch_near_known::<LEN>(upcoming, place);
        if let Some(from) = from.first_chunk::<LEN>() {
            // A plain store. Past the caches (`vmovntps`) it took 29 against 27 ns, and the output's next
            // reader 0.39 instead of 0.20 ms; asked for ahead (`prefetchw`) 27.1 against 25.2.
            *to = *from;
        }
    }
}

#[inline(always)]
fn copy_any(rows: &[&[f32]], upcoming: &[&[f32]], to: &mut [f32], len: usize) {
    for (place, (from, to)) in rows.iter().zip(to.chunks_exact_mut(len)).enumerate() {
        if let Some(row) = upcoming.get(place + rows_later(len)).filter(|row| !row.is_empty()) {
            prefetch(row, Cache::Second);
        }
        prefetch_near(upcoming, place, len);
        copy_row(from, to);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_every_length_are_copied_whole() {
        for len in 1..=130 {
            let all: Vec<f32> = (0..5 * len).map(|number| number as f32).collect();
            let rows: Vec<&[f32]> = all.chunks_exact(len).collect();
            let mut copied = vec![-1.0; all.len() + 3];
            prefetch_rows(&[rows[0], &[]], len);
            copy_rows(&rows, &rows, &mut copied, len);
            assert_eq!(copied[..all.len()], all);
            assert_eq!(copied[all.len()..], [-1.0; 3], "rows of {len}");
        }
    }
}
