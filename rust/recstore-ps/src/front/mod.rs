//! The ports of a served model: HTTP and gRPC of the Open Inference Protocol, health, and metrics.
//!
//! Connections, encryption, tokens and bodies are seen to here, on threads of their own, and so is health: it is answered
//! whatever the program behind the ports is busy with. That program takes the requests that have come whole, and gives
//! their answers, by number and in any order.

mod grpc;
mod http;
mod memory_budget;
mod queue;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::Registry;

use crate::metrics::Connections;
use crate::ports::{
    Encryption, Limits, Listening, Port, Rules, pool, serve_http1, serve_http2, tell_of_limits,
};
use crate::wire::tls::ServerTls;
use memory_budget::MemoryBudget;
pub use queue::{Answer, Arrival, Event};
use queue::{Pending, Queue};

/// How the ports of a model are set up.
#[derive(Debug)]
pub struct FrontConfig {
    /// The most connections of each port.
    pub max_connections: usize,
    /// The most bytes of a request.
    pub max_body: usize,
    /// The most bytes of all requests under way, of each protocol.
    pub max_pending_bytes: usize,
    /// What clients must know.
    pub token: Option<String>,
    /// Encrypts the ports of requests.
    pub tls: Option<ServerTls>,
    /// How long a new connection may take to say who it is.
    pub handshake_timeout: Duration,
    /// How long a connection may have nothing to ask.
    pub idle_timeout: Duration,
    /// How long a request may take to come, and an answer to be accepted.
    pub transfer_timeout: Duration,
}

/// What a port serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The protocol over HTTP.
    Http,
    /// The protocol over gRPC.
    Grpc,
    /// Health alone, over HTTP, without encryption and token.
    Health,
    /// Metrics alone, likewise.
    Metrics,
}

/// What is counted of a port.
#[derive(Debug)]
pub struct Counts {
    /// Its name, as in labels of metrics.
    pub port: &'static str,
    /// Open connections.
    pub open: u64,
    /// Peers that were refused or closed, by reason.
    pub refused: Vec<(&'static str, u64)>,
}

/// The ports of a model.
#[derive(Debug)]
pub struct Front {
    shared: Arc<Shared>,
    connections: [Arc<Connections>; Kind::ALL.len()],
    open: Mutex<Vec<Listening>>,
}

/// What the connections of all ports share.
#[derive(Debug)]
struct Shared {
    config: FrontConfig,
    is_ready: AtomicBool,
    queue: Arc<Queue>,
    http_room: Arc<MemoryBudget>,
    grpc_room: Arc<MemoryBudget>,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Http, Self::Grpc, Self::Health, Self::Metrics];

    /// Returns the name of the port in labels of metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["http", "grpc", "health", "metrics"][self as usize]
    }

    /// Returns the kind of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn threads(self) -> usize {
        if matches!(self, Self::Http | Self::Grpc) { 2 } else { 1 }
    }

    fn protocol(self) -> &'static [u8] {
        if self == Self::Grpc { b"h2" } else { b"http/1.1" }
    }
}

impl Front {
    /// Prepares ports; none is open yet.
    ///
    /// # Errors
    /// As the system's calls.
    pub fn new(config: FrontConfig) -> io::Result<Self> {
        tell_of_limits(config.max_connections);
        let connections = Connections::of_ports(&Registry::new(), None, Kind::ALL.map(Kind::name))
            .map_err(io::Error::other)?;
        // One for each protocol: the requests of one cannot take all memory from the other.
        let room = || Arc::new(MemoryBudget::new(config.max_pending_bytes));
        let (http_room, grpc_room) = (room(), room());
        let (is_ready, queue) = (AtomicBool::new(true), Arc::new(Queue::new()?));
        let shared = Arc::new(Shared { config, is_ready, queue, http_room, grpc_room });
        Ok(Self { shared, connections, open: Mutex::default() })
    }

    /// Opens a port, and returns its address.
    ///
    /// # Errors
    /// As the system's calls.
    pub fn listen(&self, kind: Kind, address: SocketAddr) -> io::Result<SocketAddr> {
        let (rules, shared) = (self.rules(kind), Arc::clone(&self.shared));
        let listening = match kind {
            Kind::Grpc => Listening::start(address, kind.threads(), rules, move |stream, seat, stop| {
                let shared = Arc::clone(&shared);
                serve_http2(stream, seat, stop, move |call, seat| {
                    grpc::answer(Arc::clone(&shared), call, seat)
                })
            }),
            _ => Listening::start(address, kind.threads(), rules, move |stream, seat, stop| {
                let shared = Arc::clone(&shared);
                serve_http1(stream, seat, stop, true, move |request, seat| {
                    http::answer(Arc::clone(&shared), kind, request, seat)
                })
            }),
        }?;
        let address = listening.address();
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push(listening);
        Ok(address)
    }

    fn rules(&self, kind: Kind) -> Rules {
        let config = &self.shared.config;
        let limits = Limits {
            connections: config.max_connections,
            handshake: config.handshake_timeout,
            idle: config.idle_timeout,
            transfer: config.transfer_timeout,
        };
        let tls = config.tls.as_ref().filter(|_| matches!(kind, Kind::Http | Kind::Grpc));
        Rules {
            port: Port::new(pool(), limits, Arc::clone(&self.connections[kind as usize])),
            encryption: tls.map(|tls| Encryption::new(&tls.config, kind.protocol())),
            farewell: if kind == Kind::Grpc { b"" } else { http::FULL },
        }
    }

    /// Says whether health is to say ready.
    pub fn set_ready(&self, is_ready: bool) {
        self.shared.is_ready.store(is_ready, Ordering::Relaxed);
    }

    /// Takes what has come: requests, and the numbers of those whose clients have gone. There is something while
    /// [`AsFd::as_fd`] can be read.
    #[must_use]
    pub fn take(&self) -> Vec<Event> {
        self.shared.queue.take()
    }

    /// Answers a request. One whose client has gone needs none.
    pub fn answer(&self, number: u64, answer: Answer) {
        self.shared.queue.answer(number, answer);
    }

    /// Returns what is counted of each port.
    #[must_use]
    pub fn counts(&self) -> Vec<Counts> {
        let counts = |of: &Arc<Connections>| Counts {
            port: of.port(),
            open: of.open(),
            refused: of.refusals().collect(),
        };
        self.connections.iter().map(counts).collect()
    }

    /// Takes no more connections and requests, and gives answers so long to be accepted.
    pub fn stop(&self, grace: Duration) {
        // Taken out first, so that nothing is locked during the grace.
        let open = std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner));
        open.into_iter().for_each(|listening| listening.stop(grace));
    }
}

impl AsFd for Front {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.queue.as_fd()
    }
}

impl Shared {
    fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    fn ask(&self, asked: Arrival) -> Pending {
        Queue::ask(&self.queue, asked)
    }
}
