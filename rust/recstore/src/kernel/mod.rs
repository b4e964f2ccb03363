//! What loops over rows are made of: vector instructions, caches, pages, threads, sorting.

pub(crate) mod bits;
pub(crate) mod cache;
pub(crate) mod drawn;
pub(crate) mod elements;
pub(crate) mod hash;
pub(crate) mod id_tally;
pub(crate) mod pages;
pub(crate) mod parallel;
pub(crate) mod result_memory;
pub(crate) mod simd;
pub(crate) mod small_float;
pub(crate) mod sorting;
pub(crate) mod squares;
