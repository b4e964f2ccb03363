//! What is told of a worker.

use serde::{Deserialize, Serialize};

/// What is known of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerState {
    /// Its number.
    pub worker: u32,
    /// The steps that it has made, where staleness is bounded.
    pub steps: u64,
    /// The seconds since it was last heard of.
    pub silent_for: f64,
}
