//! Tables that train no longer: one file each, mapped into memory, whose pages all processes of a machine share,
//! or copied to huge pages.
//!
//! A file is plain safetensors: an index that says where the row of an id is, the rows, and a checksum for every 64 KiB,
//! which is compared when a block is first read.

mod bags;
mod blocks;
mod changed;
mod checked;
mod encoding;
mod followed;
mod forgetting;
mod index;
mod layout;
mod mapped;
mod merging;
mod record;
mod source;
mod store;
mod table;
mod walk;
mod writer;

pub use changed::RowChanges;
pub use encoding::Encoding;
pub use forgetting::{freeze_without, ids_in_tensors};
pub use mapped::FrozenMemory;
pub use merging::freeze_parts;
pub use store::FrozenStore;
pub use table::FrozenTable;
pub use writer::{FrozenSpec, freeze};
