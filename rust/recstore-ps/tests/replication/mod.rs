//! Servers that lead and follow, and what their metrics say of it.

#![allow(dead_code, reason = "every test file uses some of these")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use recstore::{LocalStore, Serial};
use recstore_ps::{FollowedServer, KeptState, Server, ServerConfig};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Which server another one follows.
pub(crate) struct Follows {
    pub(crate) leader: String,
    pub(crate) synchronous: bool,
}

impl Follows {
    pub(crate) fn the(leader: &Server, synchronous: bool) -> Option<Self> {
        Some(Self { leader: leader.address().to_string(), synchronous })
    }
}

/// Returns the configuration of a server with a log and a port of metrics.
pub(crate) fn config(directory: &Path, follows: Option<Follows>) -> ServerConfig {
    let (mut config, mut kept) = (ServerConfig::default(), KeptState::logged(directory));
    let followed =
        |Follows { leader, synchronous }| FollowedServer { address: leader, tls: None, synchronous };
    kept.follows = follows.map(followed);
    (config.kept, config.metrics_port) = (Some(kept), Some(0));
    config
}

pub(crate) fn start(config: ServerConfig) -> Server {
    Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap()
}

/// Returns a figure of the metrics that a server tells at an address.
pub(crate) fn figure_at(address: &str, name: &str) -> Option<f64> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")))?;
    line.rsplit(' ').next()?.parse().ok()
}

pub(crate) fn figure(server: &Server, name: &str) -> Option<f64> {
    figure_at(&server.metrics_address()?.to_string(), name)
}

pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
