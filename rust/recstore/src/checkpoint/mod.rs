//! Checkpoints: the tables of a store in a directory, written while they are trained on.
//!
//! A directory holds *snapshots*, each the tables at one moment: full ones, and deltas that hold what changed since the
//! one before. Data lies in files of their own, which never change; the manifest lists those that count and is replaced
//! in one move, so a reader sees the old snapshots or the new ones, whenever a save ends. `docs/checkpoint_format.md`
//! tells the format byte by byte.

mod compact;
mod compression;
mod entries;
mod files;
mod flusher;
mod ids;
mod known_saves;
mod lineage;
mod load;
mod manifest;
mod metadata;
mod options;
mod parts;
mod place;
mod progress;
mod prune;
mod reports;
mod save;
mod saves;
mod table_file;
mod unfinished;
mod verify;

pub use compact::{Forgetting, Forgotten, compact, forget};
pub use compression::Compression;
pub use files::new_snapshot_name;
pub use ids::{HeldIds, IdsFound, checkpoint_tables, ids_in_checkpoint};
pub use known_saves::KnownSaves;
pub use load::{CheckpointFiles, checkpoint_files, checkpoint_metadata};
pub(crate) use load::{LoadingStore, load};
pub use manifest::{check_checkpoint_directory, remove_checkpoint};
pub use metadata::Metadata;
pub use options::{LoadOptions, SaveKind, SaveOptions, Shard};
pub use parts::commit;
pub(crate) use parts::save_part;
pub use place::{SERVER_SAVES, SERVER_STATE};
pub use progress::Progress;
pub use prune::{Pruned, Pruning};
pub use reports::{LoadReport, SaveReport};
pub(crate) use save::save;
pub(crate) use saves::Saves;
pub use unfinished::note_unfinished;
pub use verify::{Finding, FindingKind, Verified, checkpoint_snapshots, verify};
