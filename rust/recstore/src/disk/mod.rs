//! What lies on disk: the directories that files are opened in, rows in slot files, and which of them lie in memory.
//!
//! No slot file outlives the process: it has no name, and a checkpoint is what survives.

mod buffer_pool;
mod directory;
mod reads;
mod ring;
mod ring_pool;
mod slot;
mod slot_file;

pub(crate) use buffer_pool::{BufferPool, Resident};
pub use directory::{Directory, FileError, FileKind, check_name, open_file};
pub(crate) use reads::Reads;
pub use ring_pool::reading_way;
pub(crate) use slot::Slot;
pub(crate) use slot_file::SlotFile;
