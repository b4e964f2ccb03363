//! Checkpoints that a server makes of its tables.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prometheus::{Gauge, IntCounter, IntCounterVec, Opts, Registry, Result};
use recstore::{Result as StoreResult, SaveReport};

use super::registered;

/// The checkpoints of a server, each of all its tables.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    shard: usize,
    made: IntCounter,
    failed: IntCounter,
    last: Mutex<Option<Last>>,
}

/// The last checkpoint that was made.
#[derive(Debug, Clone, Copy)]
struct Last {
    at: SystemTime,
    took: Duration,
}

impl Checkpoints {
    pub(super) fn new(registry: &Registry, shard: usize) -> Result<Self> {
        let total =
            Opts::new("recstore_checkpoints_total", "Checkpoints of the server's own, by what came of them.");
        let total = registered(registry, IntCounterVec::new(total, &["outcome"])?)?;
        let [made, failed] = ["ok", "failed"].map(|outcome| total.with_label_values(&[outcome]));
        Ok(Self { shard, made, failed, last: Mutex::default() })
    }

    /// Makes a checkpoint, counts it and tells of it.
    pub(crate) fn make(&self, save: impl FnOnce() -> StoreResult<SaveReport>) -> StoreResult<SaveReport> {
        let (began, shard) = (Instant::now(), self.shard);
        let saved = save();
        let took = began.elapsed();
        match &saved {
            Ok(SaveReport { rows, bytes, .. }) => {
                self.made.inc();
                *self.last.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(Last { at: SystemTime::now(), took });
                tracing::info!(shard, rows, bytes, seconds = took.as_secs_f64(), "checkpoint");
            }
            Err(error) => {
                self.failed.inc();
                tracing::error!(shard, %error, "no checkpoint");
            }
        }
        saved
    }

    /// Adds what is to be said of the last checkpoint, once there is one.
    pub(crate) fn add_last(&self, to: &Registry) -> Result<()> {
        let Some(last) = *self.last.lock().unwrap_or_else(PoisonError::into_inner) else { return Ok(()) };
        let at = last.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        for (name, meaning, value) in [
            (
                "recstore_last_checkpoint_timestamp_seconds",
                "When the last checkpoint was made, Unix time.",
                at,
            ),
            ("recstore_last_checkpoint_duration_seconds", "How long the last checkpoint took.", last.took),
        ] {
            registered(to, Gauge::new(name, meaning)?)?.set(value.as_secs_f64());
        }
        Ok(())
    }
}
