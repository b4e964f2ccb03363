//! What a server keeps on disk.

pub(crate) mod directory_lock;
pub(crate) mod journal;
pub(crate) mod log;
pub(crate) mod moves;
pub(crate) mod state_directory;
