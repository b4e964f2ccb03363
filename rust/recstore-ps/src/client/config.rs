//! Which servers a client calls, and for how long.

use std::time::Duration;

use crate::router::HashMethod;
use crate::wire::tls::ClientTls;

/// Which servers a client calls, and for how long.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteConfig {
    /// The bulk ports, `host:port`, in the order of the shards. Where servers follow one another, all of a shard stand
    /// together, with a bar between them: `host:port|host:port`.
    pub servers: Vec<String>,
    /// How ids are spread over them. All clients of the servers must say the same.
    pub hash_method: HashMethod,
    /// What the servers want to hear.
    pub token: Option<String>,
    /// Encrypts, and says whom to trust; servers without encryption are not called then.
    pub tls: Option<ClientTls>,
    /// The number of the worker that this client is, from 0, where servers know workers.
    pub worker: Option<u32>,
    /// How often a worker says that it lives.
    pub heartbeat: Duration,
    /// How long one attempt to connect may take.
    pub connect_timeout: Duration,
    /// How long a call may take, with all its attempts.
    pub timeout: Duration,
    /// How long servers may take to save or load.
    pub save_timeout: Duration,
}

impl RemoteConfig {
    /// Returns the default configuration for servers at `servers`, `host:port` each.
    pub fn new(servers: Vec<String>) -> Self {
        Self {
            servers,
            hash_method: HashMethod::default(),
            token: None,
            tls: None,
            worker: None,
            heartbeat: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            save_timeout: Duration::from_secs(3600),
        }
    }
}
