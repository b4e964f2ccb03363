//! Servers of a test, and stores that call them.

#![allow(dead_code, reason = "every test file uses some of these")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::sync::Arc;
use std::time::Duration;

use recstore::{LocalStore, Serial, Shard};
use recstore_ps::router::HashMethod;
use recstore_ps::{RemoteConfig, RemoteStore, Server, ServerConfig};

/// A server for each shard, in this process.
pub(crate) struct Cluster {
    pub(crate) servers: Vec<Server>,
    pub(crate) stores: Vec<Arc<LocalStore>>,
}

impl Cluster {
    pub(crate) fn start(shards: usize) -> Self {
        Self::configured(shards, |_| {})
    }

    pub(crate) fn configured(of: usize, change: impl Fn(&mut ServerConfig)) -> Self {
        let start = |number| {
            let store = Arc::new(LocalStore::new(Box::new(Serial)));
            let mut config = ServerConfig::default();
            config.shard = Shard { number, of };
            change(&mut config);
            (Server::start(store.clone(), config).unwrap(), store)
        };
        let (servers, stores) = (0..of).map(start).unzip();
        Self { servers, stores }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.servers.iter().map(|server| server.address().to_string()).collect()
    }

    pub(crate) fn connect(&self) -> RemoteStore {
        connect(self.addresses(), Duration::from_secs(20))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.servers.drain(..).for_each(|server| server.stop(Duration::from_secs(5)));
    }
}

pub(crate) fn connect(servers: Vec<String>, timeout: Duration) -> RemoteStore {
    RemoteStore::connect(config(servers, timeout), Box::new(Serial)).unwrap()
}

pub(crate) fn config(servers: Vec<String>, timeout: Duration) -> RemoteConfig {
    let mut config = RemoteConfig::new(servers);
    config.timeout = timeout;
    config.hash_method = HashMethod::SimpleMod;
    config
}

/// A greeting that the server takes.
pub(crate) fn hello(version: u16) -> Vec<u8> {
    let mut bytes = b"RECSTORE".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend([7; 16]);
    bytes
}
