//! A connection, encrypted or not. Its deadlines are those of the socket beneath, so that no peer stretches them by
//! sending an encrypted record byte by byte.

use std::io::{self, BufRead as _, BufReader, IoSlice, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, ServerConfig, ServerConnection, StreamOwned};

use crate::wire::socket;
use crate::wire::transport::Timed;

type Socket = Timed<socket::Socket>;

/// A connection, encrypted or not.
#[derive(Debug)]
pub(crate) enum Channel {
    /// Read ahead, so that a small frame comes in one call of the system.
    Plain(BufReader<Socket>),
    Server(Box<StreamOwned<ServerConnection, Socket>>),
    Client(Box<StreamOwned<ClientConnection, Socket>>),
}

impl Channel {
    /// Begins a server's side, encrypted where there is a configuration.
    pub(crate) fn of_server(socket: Socket, tls: Option<&Arc<ServerConfig>>) -> io::Result<Self> {
        let Some(config) = tls else { return Ok(Self::Plain(BufReader::new(socket))) };
        let connection = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        Ok(Self::Server(Box::new(StreamOwned::new(connection, socket))))
    }

    /// Begins a client's side, encrypted where there is a connection to do it.
    pub(crate) fn of_client(socket: Socket, tls: Option<ClientConnection>) -> Self {
        match tls {
            None => Self::Plain(BufReader::new(socket)),
            Some(connection) => Self::Client(Box::new(StreamOwned::new(connection, socket))),
        }
    }

    fn socket(&mut self) -> &mut Socket {
        match self {
            Self::Plain(stream) => stream.get_mut(),
            Self::Server(stream) => &mut stream.sock,
            Self::Client(stream) => &mut stream.sock,
        }
    }

    /// Whether descriptors can be handed over.
    pub(crate) fn hands_over(&self) -> bool {
        matches!(self, Self::Plain(stream) if stream.get_ref().stream().hands_over())
    }

    /// Writes `bytes`, with a descriptor.
    ///
    /// # Errors
    /// As the system's call; over TCP, and over an encrypted connection, none can be handed over.
    pub(crate) fn hand_over(&mut self, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let sent = self.socket().stream().hand_over(bytes, descriptor)?;
        self.write_all(&bytes[sent..])
    }

    /// Takes the descriptor that came over last.
    pub(crate) fn take_handed(&mut self) -> Option<OwnedFd> {
        self.socket().stream_mut().take_handed()
    }

    /// Reads and writes until `deadline`.
    pub(crate) fn until(&mut self, deadline: Instant) -> &mut Self {
        self.socket().until(deadline);
        self
    }

    /// Waits for the first byte of what comes next.
    ///
    /// # Errors
    /// There is none: the peer has ended, or was silent for too long.
    pub(crate) fn wait_for_bytes(&mut self) -> io::Result<()> {
        let is_over = match self {
            Self::Plain(stream) => stream.fill_buf()?.is_empty(),
            Self::Server(stream) => stream.fill_buf()?.is_empty(),
            Self::Client(stream) => stream.fill_buf()?.is_empty(),
        };
        match is_over {
            true => Err(io::ErrorKind::UnexpectedEof.into()),
            false => Ok(()),
        }
    }

    /// Waits up to `idle` for the first byte, and then up to `rest` for all others.
    pub(crate) fn waiting(&mut self, idle: Duration, rest: Duration) -> &mut Self {
        self.socket().waiting(idle, rest);
        self
    }
}

impl Read for Channel {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(bytes),
            Self::Server(stream) => stream.read(bytes),
            Self::Client(stream) => stream.read(bytes),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.get_mut().write(bytes),
            Self::Server(stream) => stream.write(bytes),
            Self::Client(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.get_mut().write_vectored(pieces),
            Self::Server(stream) => stream.write_vectored(pieces),
            Self::Client(stream) => stream.write_vectored(pieces),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.get_mut().flush(),
            Self::Server(stream) => stream.flush(),
            Self::Client(stream) => stream.flush(),
        }
    }
}
