//! Connections of a port: those that are open, and those that were refused.

use std::net::SocketAddr;
use std::sync::Arc;

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, Result};

use super::registered;

/// Why a peer is refused.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Refusal {
    /// There are as many connections as there may be.
    Limit,
    /// It speaks another protocol, or another version, or cannot encrypt.
    Handshake,
    /// It does not know the token.
    Token,
}

const REFUSALS: [&str; 3] = ["limit", "handshake", "token"];

/// The connections of one port.
#[derive(Debug)]
pub(crate) struct Connections {
    shard: usize,
    port: &'static str,
    open: IntGauge,
    refused: [IntCounter; REFUSALS.len()],
}

impl Connections {
    /// Returns those of the bulk port and those of the gRPC port.
    pub(super) fn of_ports(registry: &Registry, shard: usize) -> Result<[Arc<Self>; 2]> {
        let open = Opts::new("recstore_connections", "Open connections, by port.");
        let open = registered(registry, IntGaugeVec::new(open, &["port"])?)?;
        let refused = Opts::new(
            "recstore_refused_connections_total",
            "Connections (over gRPC with a wrong token: calls) that were refused, by port and reason.",
        );
        let refused = registered(registry, IntCounterVec::new(refused, &["port", "reason"])?)?;
        Ok(["bulk", "grpc"].map(|port| {
            Arc::new(Self {
                shard,
                port,
                open: open.with_label_values(&[port]),
                refused: REFUSALS.map(|reason| refused.with_label_values(&[port, reason])),
            })
        }))
    }

    /// Counts a connection until what is returned is dropped.
    pub(crate) fn opened(self: &Arc<Self>, peer: SocketAddr) -> OpenConnection {
        self.open.inc();
        tracing::debug!(shard = self.shard, port = self.port, %peer, "connection opened");
        OpenConnection { of: Arc::clone(self), peer }
    }

    /// Counts a peer that is refused.
    pub(crate) fn refused(&self, reason: Refusal, peer: Option<SocketAddr>, why: &str) {
        self.refused[reason as usize].inc();
        let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
        tracing::warn!(shard = self.shard, port = self.port, peer, why, "peer refused");
    }
}

/// A connection that is open until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    of: Arc<Connections>,
    peer: SocketAddr,
}

impl OpenConnection {
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
