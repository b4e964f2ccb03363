//! A stream that tells its seat when the peer takes no more bytes.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::pool::Seat;

/// What goes over a connection, encrypted or not.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// A connection, encrypted or not.
pub(crate) type Stream = Box<dyn Duplex>;

/// A stream whose peer has until a limit to take what is written, all of it.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    seat: Arc<Seat>,
    is_stalled: bool,
}

impl<S: Duplex + 'static> Watched<S> {
    pub(super) fn boxed(stream: S, seat: &Arc<Seat>) -> Stream {
        Box::new(Self { stream, seat: Arc::clone(seat), is_stalled: false })
    }

    /// Tells the seat of a change; only a flush shows that all has been taken.
    fn told<T>(&mut self, written: Poll<io::Result<T>>, is_flush: bool) -> Poll<io::Result<T>> {
        let is_stalled = written.is_pending() || (self.is_stalled && !is_flush);
        if is_stalled != self.is_stalled {
            self.is_stalled = is_stalled;
            self.seat.stalled(is_stalled);
        }
        written
    }
}

impl<S: Duplex> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl<S: Duplex + 'static> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.told(written, false)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.told(written, false)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.told(flushed, true)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
