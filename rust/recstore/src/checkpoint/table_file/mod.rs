//! One file of a checkpoint: some rows of a table as safetensors.
//!
//! Most tensors are columns, with a row for each id: `ids`, `rows`, a `slot.<name>` for each optimizer slot, and what is
//! known of the rows' usage. Others are about the table: in a delta `deleted_ids`, and what admission and eviction have to
//! remember. Columns are written and read some rows at a time, so that neither takes much memory.

mod layout;
mod opened;
mod reader;
mod writer;

pub(super) use layout::{ADMISSION_COUNTS, ADMISSION_IDS, DELETED, IDS, LEAVING, Layout, TableState};
pub(super) use opened::OpenedFile;
pub(super) use reader::{Reader, saved_slots};
pub(super) use writer::Writer;

/// About how many bytes are copied or read at a time.
pub(super) const BYTES_PER_CHUNK: usize = 512 << 10;
