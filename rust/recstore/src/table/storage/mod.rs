//! Where the records of rows lie, in memory and on disk.

mod layout;
pub(super) mod records;
pub(super) mod slot_group;
pub(super) mod tier;
pub(super) mod transfer;
