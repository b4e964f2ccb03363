//! Where a bulk port is: a port of TCP, or a Unix socket.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What an address begins with that is the path of a Unix socket.
pub(crate) const UNIX_PREFIX: &str = "unix:";

/// The longest path of a Unix socket: `sun_path` without the zero at its end.
const MAX_PATH_BYTES: usize = 107;

/// Checks that the system takes a path for a socket.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for one that is too long.
pub(crate) fn check_socket_path(path: &Path) -> io::Result<()> {
    let len = path.as_os_str().len();
    if len <= MAX_PATH_BYTES {
        return Ok(());
    }
    let message =
        format!("a path of {len} bytes is too long for a Unix socket, which takes {MAX_PATH_BYTES}");
    Err(io::Error::new(ErrorKind::InvalidInput, message))
}

/// Where a bulk port is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BulkAddress {
    /// A port of TCP.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for BulkAddress {
    /// As clients write it: `host:port`, or `unix:` and the path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "{UNIX_PREFIX}{}", path.display()),
        }
    }
}

impl BulkAddress {
    /// Returns the address over TCP, if it is one.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(address) => Some(*address),
            Self::Unix(_) => None,
        }
    }

    /// Begins a connection and ends it, so that who accepts connections looks up. Returns whether it could.
    pub(crate) fn knock(&self, patience: Duration) -> bool {
        match self {
            Self::Tcp(address) => TcpStream::connect_timeout(&reachable(*address), patience).is_ok(),
            Self::Unix(path) => UnixStream::connect(path).is_ok(),
        }
    }
}

/// Returns an address by which this machine reaches a listener on any of its own.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}
