//! A server of one shard: the bulk port, and the gRPC port beside it.

mod bulk;
mod config;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use recstore::EmbeddingStore;

use crate::grpc::Grpc;
use crate::handler::Handler;
use bulk::Bulk;
pub use config::{ServerConfig, ServerError};

/// A server that runs until it is told to stop.
#[derive(Debug)]
pub struct Server {
    bulk: Bulk,
    grpc: Option<Grpc>,
    handler: Arc<Handler>,
}

impl Server {
    /// Starts serving `store`.
    ///
    /// # Errors
    /// [`ServerError`]: an address that others can reach, without leave; a port that is taken.
    pub fn start(store: Arc<dyn EmbeddingStore>, config: ServerConfig) -> Result<Self, ServerError> {
        let address = config.address()?;
        let (shard, limit) = (config.shard, config.max_frame_bytes);
        let handler = match &config.wal {
            None => Handler::new(store, shard, limit, config.teamwork)?,
            Some(directory) => Handler::durable(store, shard, limit, config.teamwork, directory)?,
        };
        let handler = Arc::new(handler);
        let cannot = |address: SocketAddr| {
            move |error: io::Error| ServerError::Bind { address: address.to_string(), error }
        };
        let bulk = Bulk::start(Arc::clone(&handler), config.clone(), address).map_err(cannot(address))?;
        let start_grpc = |port| {
            let address = SocketAddr::new(address.ip(), port);
            let started = Grpc::start(Arc::clone(&handler), &config, address, bulk.address().port());
            started.map_err(cannot(address))
        };
        match config.grpc_port.map(start_grpc).transpose() {
            Ok(grpc) => Ok(Self { bulk, grpc, handler }),
            Err(error) => {
                bulk.stop(Duration::ZERO);
                Err(error)
            }
        }
    }

    /// Returns the address of the bulk port.
    pub fn address(&self) -> SocketAddr {
        self.bulk.address()
    }

    /// Returns the address of the gRPC port, if there is one.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().map(Grpc::address)
    }

    /// Returns what answers requests, for other ways to reach it.
    pub fn handler(&self) -> &Arc<Handler> {
        &self.handler
    }

    /// Stops: no new connections, no new requests; those under way are answered, as far as they end within `grace`.
    pub fn stop(self, grace: Duration) {
        self.bulk.stop(grace);
        if let Some(grpc) = self.grpc {
            grpc.stop(grace);
        }
    }
}
