//! An embedding store: named tables of float rows keyed by sparse 64-bit ids.
//!
//! A table grows by id, keeps its optimizer's state beside each row, and applies the optimizer's math itself.
//! Reads never change the store; updates are exact, atomic per table and equal to the bit for any number of threads.
//!
//! ```
//! use ndarray::array;
//! use recstore::{LocalStore, TableConfig, TableHandle};
//! use std::sync::Arc;
//!
//! # fn main() -> recstore::Result<()> {
//! let store = Arc::new(LocalStore::default());
//! let config = TableConfig::from_json(2, r#"{"optimizer": {"kind": "adagrad", "lr": 0.1}}"#)?;
//! let user = TableHandle::open(store, "user", &config)?;
//! let ids = array![7, i64::MIN, 7];
//! let before = user.read(ids.view())?;
//! user.update(ids.view(), array![[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]].view())?;
//! let after = user.read(ids.view())?;
//! assert!(after[[0, 0]] < before[[0, 0]]);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod calls;
mod checkpoint;
mod config;
mod disk;
mod error;
pub mod fork;
mod frozen;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod kernel;
mod lifecycle;
mod optimizer;
mod rows;
mod store;
mod table;

pub use calls::{
    ChangedRows, MAX_STEP, MemoryUse, OptimizerState, Step, StoreMemory, TableDescription, TableId,
    TableRead, TableStatistics, TableUpdate,
};
pub use checkpoint::{
    CheckpointFiles, Compression, Finding, FindingKind, Forgetting, Forgotten, HeldIds, IdsFound, KnownSaves,
    LoadOptions, LoadReport, Metadata, Progress, Pruned, Pruning, SERVER_SAVES, SERVER_STATE, SaveKind,
    SaveOptions, SaveReport, Shard, Verified, check_checkpoint_directory, checkpoint_files,
    checkpoint_metadata, checkpoint_snapshots, checkpoint_tables, commit as commit_snapshot, compact,
    forget as forget_in_checkpoint, ids_in_checkpoint, new_snapshot_name, note_unfinished, remove_checkpoint,
    verify as verify_checkpoint,
};
pub use config::{
    AdmissionConfig, Dtype, EvictionConfig, EvictionPolicy, InitializerConfig, NanPolicy, OptimizerConfig,
    StateDtype, TableConfig, check_local_path,
};
pub use disk::{Directory, FileError, FileKind, check_name, open_file, reading_way};
pub use error::{Error, Result};
pub use frozen::{
    Encoding, FrozenMemory, FrozenSpec, FrozenStore, FrozenTable, RowChanges, freeze, freeze_parts,
    freeze_without, ids_in_tensors,
};
pub use kernel::drawn::drawn_number;
pub use kernel::id_tally::IdTally;
#[cfg(feature = "rayon")]
pub use kernel::parallel::Rayon;
pub use kernel::parallel::{Executor, Serial};
pub use kernel::result_memory::ResultMemory;
pub use kernel::simd::SimdLevel;
pub use optimizer::{BiasCorrection, Convention, UpdateRule, optimizer_options, optimizers};
pub use rows::distinct::{are_distinct, arrivals, unique};
pub use rows::feature_hashing::{
    IdInputError, NgramTables, PADDING_TOKEN, bucket_ids, check_prefix_sizes, cross_ids, hash_strings,
    hash_text, prefix_ids,
};
pub use rows::gradient::{
    Coalesced, DistinctGradients, GradientChunk, GradientPart, MergedGradients, NotFinite, merge_gradients,
    merge_gradients_into,
};
pub use rows::pooling::{BagInput, PoolingMode, check_offsets};
pub use rows::rank_pieces::{
    RANK_FLAGS, RankBags, RankPiece, RankPieces, pool_rank_rows, spread_rank_gradients,
};
pub use rows::rank_requests::rank_requests;
pub use store::collector::{CollectedStep, GradientCollector, KeptGradients, OwnedGradients, PartialStep};
pub use store::embedding_store::{EmbeddingStore, InProcessStore, Publications};
pub use store::embedding_table::EmbeddingTable;
pub use store::handle::TableHandle;
pub use store::local_store::LocalStore;
pub use store::prefetch::{PrefetchId, PrefetchRequest, Prefetches};
pub use store::unapplied_gradients::UnappliedGradients;
pub use table::{CutProgress, CutRows, PlacedRows, TAG_WORDS as PLACES_TAG, TableValidator};
