//! What a server counts of its work, in the form that Prometheus reads.
//!
//! To record is to add to a few atomic numbers, which were looked up once. What tables and log are like is found out when
//! somebody asks. `docs/operations.md` tells what every metric means.

mod checkpoints;
mod connections;
mod requests;
mod verb;
mod warnings;

use std::collections::HashMap;
use std::sync::Arc;

use prometheus::core::Collector;
use prometheus::{IntCounter, IntGaugeVec, Opts, Registry, Result};
use recstore::Shard;

pub(crate) use checkpoints::Checkpoints;
pub(crate) use connections::{Connections, OpenConnection, Refusal};
pub(crate) use requests::Requests;

/// What a server counts.
#[derive(Debug)]
pub(crate) struct Metrics {
    shard: usize,
    pub(crate) registry: Registry,
    pub(crate) requests: Requests,
    pub(crate) bytes_received: IntCounter,
    pub(crate) bytes_sent: IntCounter,
    pub(crate) bulk: Arc<Connections>,
    pub(crate) grpc: Arc<Connections>,
    pub(crate) health: Arc<Connections>,
    pub(crate) exposition: Arc<Connections>,
    pub(crate) checkpoints: Checkpoints,
}

impl Metrics {
    pub(crate) fn new(shard: Shard) -> Self {
        Self::made(shard.number).expect("names and labels of metrics are constants that go together")
    }

    /// Returns the number of the shard, for log lines.
    pub(crate) fn shard(&self) -> usize {
        self.shard
    }

    fn made(shard: usize) -> Result<Self> {
        let registry = of_shard(shard)?;
        let version = Opts::new("recstore_build_info", "1, with the version of the server as a label.");
        let version = registered(&registry, IntGaugeVec::new(version, &["version"])?)?;
        version.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let bytes = |name, meaning| registered(&registry, IntCounter::new(name, meaning)?);
        let ports = ["bulk", "grpc", "health", "metrics"];
        let [bulk, grpc, health, exposition] = Connections::of_ports(&registry, Some(shard), ports)?;
        Ok(Self {
            shard,
            requests: Requests::new(&registry, shard)?,
            bytes_received: bytes(
                "recstore_received_bytes_total",
                "Bytes of frames that came from clients.",
            )?,
            bytes_sent: bytes("recstore_sent_bytes_total", "Bytes of frames that went to clients.")?,
            bulk,
            grpc,
            health,
            exposition,
            checkpoints: Checkpoints::new(&registry, shard)?,
            registry,
        })
    }
}

/// Returns an empty registry whose metrics are labelled with the shard.
pub(crate) fn of_shard(shard: usize) -> Result<Registry> {
    Registry::new_custom(None, Some(HashMap::from([("shard".to_owned(), shard.to_string())])))
}

pub(crate) fn registered<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> Result<C> {
    registry.register(Box::new(collector.clone())).map(|()| collector)
}
