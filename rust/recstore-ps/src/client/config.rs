//! Which servers a client calls, and for how long.

use std::str::FromStr;
use std::time::Duration;

use recstore::Error;

use crate::router::HashMethod;
use crate::wire::tls::ClientTls;

/// Which servers a client calls, and for how long.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteConfig {
    /// The bulk ports, `host:port`, or `unix:` and the path of a Unix socket, in the order of the shards. Where servers
    /// follow one another, all of a shard stand together, with a bar between them: `host:port|host:port`.
    pub servers: Vec<String>,
    /// How ids are spread over them. All clients of the servers must say the same.
    pub hash_method: HashMethod,
    /// What the servers want to hear.
    pub token: Option<String>,
    /// Encrypts, and says whom to trust; servers without encryption are not called then.
    pub tls: Option<ClientTls>,
    /// How rows that are read and gradients travel.
    pub wire_dtype: WireDtype,
    /// Whether memory is shared with servers that are called by their Unix sockets, for what is large.
    pub shared_memory: bool,
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

/// How rows that are read, in lookups and prefetches, and gradients travel. All else travels as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WireDtype {
    /// As they are.
    #[default]
    Float32,
    /// Rounded to the nearest bfloat16, which is off by 2^-9 of a value at most: half the bytes.
    Bfloat16,
}

impl FromStr for WireDtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "float32" => Ok(Self::Float32),
            "bfloat16" => Ok(Self::Bfloat16),
            _ => Err(Error::InvalidConfig {
                message: format!("wire_dtype must be float32 or bfloat16, got \"{name}\""),
            }),
        }
    }
}

impl RemoteConfig {
    /// Returns the default configuration for servers at `servers`, `host:port` each.
    pub fn new(servers: Vec<String>) -> Self {
        Self {
            servers,
            hash_method: HashMethod::default(),
            token: None,
            tls: None,
            wire_dtype: WireDtype::default(),
            shared_memory: true,
            worker: None,
            heartbeat: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            save_timeout: Duration::from_secs(3600),
        }
    }
}
