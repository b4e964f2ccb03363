//! How a server is set up.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use recstore::{Error, Shard};

use crate::durable::state_directory::KeptState;
use crate::metrics::Connections;
use crate::ports::{Limits, Port, pool};
use crate::wire::address::BulkAddress;
use crate::wire::tls::ServerTls;
use crate::wire::token::check_token;
use crate::workers::WorkerSync;

/// How a server is set up.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// The address to listen on; this machine alone by default.
    pub host: String,
    /// The bulk port; 0 takes any that is free.
    pub port: u16,
    /// A Unix socket in the place of the bulk port, for clients of this machine and this user. Large frames of theirs go
    /// through shared memory.
    pub unix_socket: Option<PathBuf>,
    /// The gRPC port, beside the bulk port; 0 takes any that is free, `None` has none.
    pub grpc_port: Option<u16>,
    /// A port of the gRPC health check alone, without encryption and token, for probes; as `grpc_port`.
    pub health_port: Option<u16>,
    /// Where metrics are told: by default to this machine alone. They are neither encrypted nor guarded by the token, and
    /// hold names of tables and figures, but no row.
    pub metrics_host: String,
    /// The port of metrics, over HTTP; 0 takes any that is free, `None` has none.
    pub metrics_port: Option<u16>,
    /// Which of the shards this is.
    pub shard: Shard,
    /// What clients must know.
    pub token: Option<String>,
    /// Encrypts both ports.
    pub tls: Option<ServerTls>,
    /// Keeps the tables in a directory; without one they go with the server. The store must be empty.
    pub kept: Option<KeptState>,
    /// How workers train together.
    pub worker_sync: WorkerSync,
    /// Allows an address that other machines reach without both encryption and a token.
    pub insecure: bool,
    /// The most connections of each port at a time: one more closes the longest idle one, or is turned away.
    pub max_connections: usize,
    /// The most bytes of a request or an answer: a connection takes no more memory than one of each.
    pub max_frame_bytes: u64,
    /// How long a connection may have nothing to ask; over a Unix socket, as long as its client lives.
    pub idle_timeout: Duration,
    /// How long a request may take to come, and an answer to be taken.
    pub transfer_timeout: Duration,
    /// How long a new connection may take to say who it is.
    pub handshake_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 0,
            unix_socket: None,
            grpc_port: None,
            health_port: None,
            metrics_host: "127.0.0.1".to_owned(),
            metrics_port: None,
            shard: Shard { number: 0, of: 1 },
            token: None,
            tls: None,
            kept: None,
            worker_sync: WorkerSync::default(),
            insecure: false,
            max_connections: 1024,
            max_frame_bytes: 256 << 20,
            idle_timeout: Duration::from_secs(600),
            transfer_timeout: Duration::from_secs(60),
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Other machines could read and change the tables.
    #[error(
        "{address} can be reached from other machines: give the server TLS and a token, listen on a loopback address, or set insecure where the network is trusted"
    )]
    Insecure {
        /// The address.
        address: String,
    },
    /// Nobody but the system sees what goes over a Unix socket.
    #[error("{} is a Unix socket, which is not encrypted: leave TLS away, or listen on a port", path.display())]
    EncryptedSocket {
        /// The socket.
        path: PathBuf,
    },
    /// The address is none, or taken.
    #[error("cannot listen on {address}: {error}")]
    Bind {
        /// The address.
        address: String,
        /// What the system says.
        error: io::Error,
    },
    /// What the directory of checkpoint and log has cannot be used, or workers are wanted that cannot be.
    #[error(transparent)]
    Store(#[from] Error),
    /// There is no such shard.
    #[error("there is no shard {number} of {of}")]
    Shard {
        /// The shard asked for.
        number: usize,
        /// How many there are.
        of: usize,
    },
}

impl ServerConfig {
    /// Returns where to listen.
    pub(crate) fn address(&self) -> Result<BulkAddress, ServerError> {
        check_token(self.token.as_deref())?;
        let Shard { number, of } = self.shard;
        if number >= of {
            return Err(ServerError::Shard { number, of });
        }
        if let Some(path) = &self.unix_socket {
            return match self.tls {
                None => Ok(BulkAddress::Unix(path.clone())),
                Some(_) => Err(ServerError::EncryptedSocket { path: path.clone() }),
            };
        }
        let address = resolved(&self.host, self.port)?;
        let is_guarded = self.tls.is_some() && self.token.is_some();
        match address.ip().is_loopback() || is_guarded || self.insecure {
            true => Ok(BulkAddress::Tcp(address)),
            false => Err(ServerError::Insecure { address: format!("{}:{}", self.host, self.port) }),
        }
    }

    /// Returns a port with the limits of all ports.
    pub(crate) fn port_of(&self, connections: &Arc<Connections>) -> Port {
        let limits = Limits {
            connections: self.max_connections,
            handshake: self.handshake_timeout,
            idle: self.idle_timeout,
            transfer: self.transfer_timeout,
        };
        Port::new(pool(), limits, Arc::clone(connections))
    }

    /// Returns the address of the ports beside the bulk port.
    pub(crate) fn ip(&self) -> Result<IpAddr, ServerError> {
        Ok(resolved(&self.host, 0)?.ip())
    }

    /// Returns where to tell metrics, if they are wanted.
    pub(crate) fn metrics_address(&self) -> Result<Option<SocketAddr>, ServerError> {
        self.metrics_port.map(|port| resolved(&self.metrics_host, port)).transpose()
    }
}

fn resolved(host: &str, port: u16) -> Result<SocketAddr, ServerError> {
    let cannot = |error| ServerError::Bind { address: format!("{host}:{port}"), error };
    let found = (host, port).to_socket_addrs().map_err(cannot)?.next();
    found.ok_or_else(|| cannot(io::Error::other("the name has no address")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_reach_a_server_only_with_leave() {
        let open =
            |insecure| ServerConfig { host: "0.0.0.0".to_owned(), insecure, ..ServerConfig::default() };
        let refused = open(false).address().unwrap_err().to_string();
        assert!(refused.contains("0.0.0.0:0 can be reached from other machines"), "{refused}");
        assert!(open(true).address().is_ok());
        assert!(ServerConfig { host: "::1".to_owned(), ..ServerConfig::default() }.address().is_ok());
    }

    #[test]
    fn a_shard_that_is_none_and_a_name_that_is_none_are_refused() {
        let shard = Shard { number: 2, of: 2 };
        let message = |config: ServerConfig| config.address().unwrap_err().to_string();
        let refused = message(ServerConfig { shard, ..ServerConfig::default() });
        assert_eq!(refused, "there is no shard 2 of 2");
        let host = "no such host".to_owned();
        let refused = message(ServerConfig { host, ..ServerConfig::default() });
        assert!(refused.starts_with("cannot listen on no such host:0: "), "{refused}");
    }
}
