//! Rows on disk: the file that they lie in, and which of them lie in memory.
//!
//! Nothing here outlives the process: a slot file has no name, and a checkpoint is what survives.

mod residence;
mod slot_file;

pub(crate) use residence::{Residence, Resident};
pub(crate) use slot_file::SlotFile;
