//! Connections of a port: those that are open, and those that were refused or closed.

use std::net::SocketAddr;
use std::sync::Arc;

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, Result};

use super::registered;
use super::warnings::Warnings;

/// Why a peer is refused, or its connection closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There are as many connections as there may be, all with requests under way.
    Limit,
    /// It was the longest idle one when another peer needed its place.
    Evicted,
    /// It did not identify itself in time.
    Silent,
    /// It speaks another protocol, or another version, or cannot encrypt.
    Handshake,
    /// It does not know the token.
    Token,
    /// It said something else than a request.
    Form,
    /// It did not send its request, or did not accept its answer, in time.
    Slow,
}

const REFUSALS: [&str; 7] = ["limit", "evicted", "silent", "handshake", "token", "form", "slow"];

/// The connections of one port.
#[derive(Debug)]
pub(crate) struct Connections {
    /// The shard, for log lines of a server that has one.
    shard: Option<usize>,
    port: &'static str,
    open: IntGauge,
    refused: [IntCounter; REFUSALS.len()],
    warnings: Warnings,
}

impl Connections {
    /// Returns those of some ports.
    pub(crate) fn of_ports<const N: usize>(
        registry: &Registry,
        shard: Option<usize>,
        ports: [&'static str; N],
    ) -> Result<[Arc<Self>; N]> {
        let open = Opts::new("recstore_connections", "Open connections, by port.");
        let open = registered(registry, IntGaugeVec::new(open, &["port"])?)?;
        let refused = Opts::new(
            "recstore_refused_connections_total",
            "Connections (over gRPC with a wrong token: calls) that were refused or closed, by port and reason.",
        );
        let refused = registered(registry, IntCounterVec::new(refused, &["port", "reason"])?)?;
        Ok(ports.map(|port| {
            Arc::new(Self {
                shard,
                port,
                open: open.with_label_values(&[port]),
                refused: REFUSALS.map(|reason| refused.with_label_values(&[port, reason])),
                warnings: Warnings::default(),
            })
        }))
    }

    pub(crate) fn port(&self) -> &'static str {
        self.port
    }

    /// Returns how many connections are open.
    pub(crate) fn open(&self) -> u64 {
        self.open.get().unsigned_abs()
    }

    /// Returns how many peers were refused, by reason.
    pub(crate) fn refusals(&self) -> impl Iterator<Item = (&'static str, u64)> {
        REFUSALS.iter().copied().zip(self.refused.iter().map(IntCounter::get))
    }

    /// Counts a connection until what is returned is dropped.
    pub(crate) fn opened(self: &Arc<Self>, peer: SocketAddr) -> OpenConnection {
        self.open.inc();
        tracing::debug!(shard = self.shard, port = self.port, %peer, "connection opened");
        OpenConnection { of: Arc::clone(self), peer }
    }

    /// Counts a peer that is refused, and logs the first one of an address in a second.
    pub(crate) fn refused(&self, reason: Refusal, peer: SocketAddr, why: &str) {
        self.refused[reason as usize].inc();
        if self.warnings.is_due(peer.ip()) {
            let peer = peer.to_string();
            tracing::warn!(shard = self.shard, port = self.port, peer, why, "peer refused");
        }
    }
}

/// A connection that is open until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    of: Arc<Connections>,
    peer: SocketAddr,
}

impl OpenConnection {
    pub(crate) fn connections(&self) -> &Connections {
        &self.of
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.of.open.dec();
        tracing::debug!(shard = self.of.shard, port = self.of.port, peer = %self.peer, "connection closed");
    }
}
