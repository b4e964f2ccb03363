//! Connections of the gRPC port: as many at a time as there may be, and counted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::metrics::{Connections, OpenConnection, Refusal};

/// A connection that has its seat, and counts as open, until it is dropped.
#[derive(Debug)]
pub(super) struct Accepted {
    stream: TcpStream,
    _seat: OwnedSemaphorePermit,
    _open: OpenConnection,
}

/// Returns the connections that come to `listener`; those that find `limit` others are closed at once.
pub(super) fn accepted(
    listener: TcpListener,
    limit: usize,
    connections: Arc<Connections>,
) -> impl Stream<Item = io::Result<Accepted>> {
    let seats = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
    let seated = move |stream: TcpStream| {
        let peer = stream.peer_addr().ok()?;
        let Ok(seat) = Arc::clone(&seats).try_acquire_owned() else {
            let why = format!("the port has {limit} connections, which is its limit");
            connections.refused(Refusal::Limit, Some(peer), &why);
            return None;
        };
        Some(Accepted { stream, _seat: seat, _open: connections.opened(peer) })
    };
    TcpListenerStream::new(listener).filter_map(move |stream| match stream {
        Ok(stream) => seated(stream).map(Ok),
        Err(error) => Some(Err(error)),
    })
}

impl Accepted {
    fn stream(self: Pin<&mut Self>) -> Pin<&mut TcpStream> {
        Pin::new(&mut self.get_mut().stream)
    }
}

impl Connected for Accepted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream().poll_read(context, to)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(context)
    }
}
