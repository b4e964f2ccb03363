//! What lies on disk: the directories that files are opened in, rows in slot files, and which of them lie in memory.
//!
//! No slot file outlives the process: it has no name, and a checkpoint is what survives.

mod directory;
mod reads;
mod residence;
mod ring;
mod ring_pool;
mod slot;
mod slot_file;

pub use directory::{Directory, FileError, FileKind, check_name, open_file};
pub(crate) use reads::Reads;
pub(crate) use residence::{Residence, Resident};
pub use ring_pool::reading_way;
pub(crate) use slot::Slot;
pub(crate) use slot_file::SlotFile;
