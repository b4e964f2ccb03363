//! From ids to the indices of their rows and back.

pub(super) mod finding;
pub(super) mod id_allocator;
pub(super) mod id_lines;
pub(super) mod id_map;
mod id_pages;
pub(super) mod places;
pub(super) mod row_ids;
pub(super) mod row_index;
mod slots;
#[cfg(test)]
pub(super) mod without_pages;
