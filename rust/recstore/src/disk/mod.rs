//! Rows on disk: the files that they lie in, and which of them lie in memory.
//!
//! Nothing here outlives the process: a slot file has no name, and a checkpoint is what survives.

mod reads;
mod residence;
mod ring;
mod ring_pool;
mod slot;
mod slot_file;

pub(crate) use reads::Reads;
pub(crate) use residence::{Residence, Resident};
pub use ring_pool::reading_way;
pub(crate) use slot::Slot;
pub(crate) use slot_file::SlotFile;
