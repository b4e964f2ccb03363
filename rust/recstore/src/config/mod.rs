//! What describes a table: one configuration, the same in JSON, in keywords and here.
//!
//! An unknown key or kind is refused by name, and so is a value out of its range; nothing is ignored.

mod initializer;
mod lifecycle;
mod local_path;
mod parts;
mod table_config;

pub use crate::optimizer::{OptimizerConfig, StateDtype};
pub use crate::rows::dtype::Dtype;
pub use initializer::InitializerConfig;
pub use lifecycle::{AdmissionConfig, EvictionConfig, EvictionPolicy};
pub use local_path::check_local_path;
pub(crate) use table_config::MAX_FLOATS_PER_BLOCK;
pub use table_config::{NanPolicy, TableConfig};
