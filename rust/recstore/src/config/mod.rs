//! What describes a table: one configuration, the same in JSON, in keywords and here.
//!
//! An unknown key or kind is refused by name, and so is a value out of its range; nothing is ignored.

mod initializer;
mod lifecycle;
mod local_path;
mod optimizer;
mod parts;
mod ranges;
mod table_config;

pub use initializer::InitializerConfig;
pub use lifecycle::{AdmissionConfig, EvictionConfig, EvictionPolicy};
pub use local_path::check_local_path;
pub use optimizer::{BiasCorrection, Convention, OptimizerConfig};
pub(crate) use table_config::MOST_FLOATS_A_BLOCK;
pub use table_config::{Dtype, NanPolicy, StateDtype, TableConfig};
