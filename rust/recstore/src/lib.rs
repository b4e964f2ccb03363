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

mod bits;
mod cache;
mod checkpoint;
mod collector;
mod config;
mod disk;
mod distinct;
mod elements;
mod error;
pub mod fork;
mod gradient;
mod handle;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
mod lifecycle;
mod memory;
mod optimizer;
mod pages;
mod parallel;
mod pooling;
mod prefetch;
mod result_memory;
mod row_type;
mod simd;
mod sorting;
mod store;
mod table;

pub use checkpoint::{
    CheckpointFiles, Compression, LoadOptions, LoadReport, Progress, SaveKind, SaveOptions, SaveReport,
    Shard, checkpoint_files, checkpoint_metadata, commit as commit_snapshot, compact, new_snapshot_name,
};
pub use collector::{GradientCollector, KeptGradients, OwnedGradients};
pub use config::{
    AdmissionConfig, BiasCorrection, Convention, Dtype, EvictionConfig, EvictionPolicy, InitializerConfig,
    NanPolicy, OptimizerConfig, TableConfig,
};
pub use distinct::are_distinct;
pub use error::{Error, Result};
pub use gradient::{
    DistinctGradients, GradientChunk, GradientPart, MergedGradients, merge_gradients, merge_gradients_into,
    unique,
};
pub use handle::TableHandle;
pub use memory::MemoryUse;
pub use optimizer::UpdateRule;
#[cfg(feature = "rayon")]
pub use parallel::Rayon;
pub use parallel::{Executor, Serial};
pub use pooling::{BagInput, PoolingMode, check_offsets};
pub use prefetch::{PrefetchId, PrefetchRequest, PrefetchingStore};
pub use result_memory::ResultMemory;
pub use simd::SimdLevel;
pub use store::{
    EmbeddingStore, LocalStore, OptimizerState, Step, StoreMemory, TableDescription, TableId,
    TableStatistics, TableUpdate,
};
pub use table::{RowlessTable, TAG_WORDS as PLACES_TAG};
