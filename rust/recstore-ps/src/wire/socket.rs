//! The socket of a connection: TCP, or a Unix socket between processes of one machine, which can hand over descriptors.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::transport::Transport;

/// The socket of a connection.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(Arc<TcpStream>),
    Unix(UnixSocket),
}

/// A Unix socket, and the descriptor that came over it last.
#[derive(Debug)]
pub(crate) struct UnixSocket {
    stream: Arc<UnixStream>,
    handed: Option<OwnedFd>,
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(UnixSocket { stream: Arc::new(stream), handed: None })
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(Arc::new(stream))
    }
}

/// What ends a connection that another thread has.
pub(crate) struct Control(Arc<dyn AsFd + Send + Sync>);

impl Control {
    /// Ends reading, writing or both. The peer may have ended it before.
    pub(crate) fn shutdown(&self, how: Shutdown) {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        _ = rustix::net::shutdown(&self.0, how);
    }
}

impl Socket {
    /// Returns what ends the connection, over the same descriptor.
    pub(crate) fn control(&self) -> Control {
        match self {
            Self::Tcp(stream) => Control(Arc::clone(stream) as _),
            Self::Unix(UnixSocket { stream, .. }) => Control(Arc::clone(stream) as _),
        }
    }

    /// Whether descriptors can be handed over.
    pub(crate) fn hands_over(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Writes some of `bytes`, with a descriptor.
    pub(crate) fn hand_over(&self, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
        let Self::Unix(UnixSocket { stream, .. }) = self else {
            return Err(ErrorKind::Unsupported.into());
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        with.push(SendAncillaryMessage::ScmRights(&descriptors));
        // A peer that has gone is an error of the call, not a signal that ends the process.
        Ok(sendmsg(&**stream, &[IoSlice::new(bytes)], &mut with, SendFlags::NOSIGNAL)?)
    }

    /// Takes the descriptor that came over last.
    pub(crate) fn take_handed(&mut self) -> Option<OwnedFd> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(socket) => socket.handed.take(),
        }
    }
}

impl Read for UnixSocket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = RecvAncillaryBuffer::new(&mut space);
        let pieces = &mut [IoSliceMut::new(bytes)];
        // Closed on exec: a program that another thread starts now must not inherit the descriptor.
        let received = recvmsg(&*self.stream, pieces, &mut with, RecvFlags::CMSG_CLOEXEC)?;
        for message in with.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // All but the last are closed.
                self.handed = descriptors.last().or(self.handed.take());
            }
        }
        Ok(received.bytes)
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&**stream).read(bytes),
            Self::Unix(socket) => socket.read(bytes),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&**stream).write(bytes),
            Self::Unix(socket) => (&*socket.stream).write(bytes),
        }
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&**stream).write_vectored(pieces),
            Self::Unix(socket) => (&*socket.stream).write_vectored(pieces),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Transport for Socket {
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            Self::Unix(socket) => socket.stream.set_read_timeout(Some(timeout)),
        }
    }

    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
            Self::Unix(socket) => socket.stream.set_write_timeout(Some(timeout)),
        }
    }
}
