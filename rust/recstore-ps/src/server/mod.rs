//! A server of one shard: the bulk port, and the ports of gRPC and metrics beside it.

mod bulk;
mod exposition;
mod listener;
mod metrics_port;
mod sending;
mod terms;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use recstore::{EmbeddingStore, Shard};

use crate::config::{ServerConfig, ServerError};
use crate::following::Following;
use crate::grpc;
use crate::handler::Handler;
use crate::ports::{Listening, tell_of_limits};
use crate::wire::address::BulkAddress;
use bulk::Bulk;

/// A server that runs until it is told to stop.
#[derive(Debug)]
pub struct Server {
    bulk: Bulk,
    grpc: Option<Listening>,
    probe: Option<Listening>,
    metrics: Option<Listening>,
    handler: Arc<Handler>,
    following: Option<Arc<Following>>,
}

impl Server {
    /// Starts serving `store`.
    ///
    /// # Errors
    /// [`ServerError`]: an address that others can reach, without leave; a port that is taken.
    pub fn start(store: Arc<dyn EmbeddingStore>, config: ServerConfig) -> Result<Self, ServerError> {
        tell_of_limits(config.max_connections);
        let (address, metrics_address) = (config.address()?, config.metrics_address()?);
        let (shard, limit) = (config.shard, config.max_frame_bytes);
        let handler = match &config.kept {
            None => Handler::new(store, shard, limit, config.worker_sync)?,
            Some(kept) => Handler::kept(store, shard, limit, config.worker_sync, kept)?,
        };
        let handler = Arc::new(handler);
        let start_metrics =
            |address| metrics_port::start(&handler, &config, address).map_err(cannot(&address));
        let metrics = metrics_address.map(start_metrics).transpose()?;
        let start = |followed| Arc::new(Following::start(&handler, shard, followed, config.token.clone()));
        let following = config.kept.as_ref().and_then(|kept| kept.follows.as_ref()).map(start);
        let bulk = Bulk::start(Arc::clone(&handler), following.clone(), config.clone(), &address);
        let bulk = bulk.map_err(cannot(&address))?;
        // Complete before the ports of gRPC are opened, so that `stop` can take all of it down if one cannot
        // be.
        let mut server = Self { bulk, grpc: None, probe: None, metrics, handler, following };
        match server.open_grpc(&config) {
            Ok(()) => {
                server.tell_of_start(shard);
                Ok(server)
            }
            Err(error) => {
                server.stop(Duration::ZERO);
                Err(error)
            }
        }
    }

    /// Opens the ports of gRPC that are asked for.
    fn open_grpc(&mut self, config: &ServerConfig) -> Result<(), ServerError> {
        let ip = config.ip()?;
        let bulk_port = self.bulk.address().tcp().map_or(0, |address| address.port());
        if let Some(port) = config.grpc_port {
            let address = SocketAddr::new(ip, port);
            let started = grpc::start(&self.handler, config, address, bulk_port);
            self.grpc = Some(started.map_err(cannot(&address))?);
        }
        if let Some(port) = config.health_port {
            let address = SocketAddr::new(ip, port);
            let started = grpc::start_probe(&self.handler, config, address);
            self.probe = Some(started.map_err(cannot(&address))?);
        }
        Ok(())
    }

    fn tell_of_start(&self, shard: Shard) {
        let (grpc, metrics) = (self.grpc_address(), self.metrics_address());
        tracing::info!(shard = shard.number, of = shard.of, bulk = %self.address(), ?grpc, ?metrics, "serving");
    }

    /// Returns the address of the bulk port.
    pub fn address(&self) -> &BulkAddress {
        self.bulk.address()
    }

    /// Returns how long nobody has been connected to the bulk port; none while somebody is, or if nobody came in the first
    /// minute.
    pub fn unused_for(&self) -> Option<Duration> {
        self.bulk.unused_for()
    }

    /// Returns the address of the gRPC port, if there is one.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().map(Listening::address)
    }

    /// Returns the address of the health check alone, if there is one.
    pub fn health_address(&self) -> Option<SocketAddr> {
        self.probe.as_ref().map(Listening::address)
    }

    /// Returns the address of the port of metrics, if there is one.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Listening::address)
    }

    /// Returns what answers requests, for other ways to reach it.
    pub fn handler(&self) -> &Arc<Handler> {
        &self.handler
    }

    /// Stops: no new connections, no new requests; those under way are answered, as far as they end within `grace`.
    pub fn stop(self, grace: Duration) {
        let shard = self.handler.metrics().shard();
        tracing::info!(shard, "stopping");
        // Whoever watches is told first, and sends no one here any more.
        if let Some(probe) = self.probe {
            probe.stop(Duration::ZERO);
        }
        if let Some(following) = self.following {
            following.stop();
        }
        self.bulk.stop(grace);
        if let Some(grpc) = self.grpc {
            grpc.stop(grace);
        }
        if let Some(metrics) = self.metrics {
            metrics.stop(Duration::ZERO);
        }
        tracing::info!(shard, "stopped");
    }
}

/// Says where a server cannot listen.
fn cannot(address: &impl ToString) -> impl Fn(io::Error) -> ServerError {
    let address = address.to_string();
    move |error| ServerError::Bind { address: address.clone(), error }
}
