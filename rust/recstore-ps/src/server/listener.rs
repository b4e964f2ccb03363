//! What the bulk port listens on: a port of TCP, or a Unix socket, which only its own user may call.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::ports::BACKLOG;
use crate::wire::address::{BulkAddress, check_socket_path};
use crate::wire::socket::Socket;

/// What accepts connections.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

impl Listener {
    /// Listens at `address`, a port 0 at any that is free.
    pub(super) fn bind(address: &BulkAddress) -> io::Result<Self> {
        match address {
            BulkAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                rustix::net::listen(&listener, BACKLOG)?;
                Ok(Self::Tcp(listener))
            }
            BulkAddress::Unix(path) => {
                let listener = bound(path)?;
                let file = SocketFile { path: path.clone(), inode: fs::metadata(path)?.ino() };
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                Ok(Self::Unix(listener, file))
            }
        }
    }

    pub(super) fn address(&self) -> io::Result<BulkAddress> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(BulkAddress::Tcp),
            Self::Unix(_, file) => Ok(BulkAddress::Unix(file.path.clone())),
        }
    }

    /// Waits for a connection, and returns it and who it is. A peer on this machine is told as a loopback address.
    pub(super) fn accept(&self) -> io::Result<(Socket, SocketAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                _ = stream.set_nodelay(true);
                Ok((stream.into(), peer))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept()?;
                let (peer, own) =
                    (rustix::net::sockopt::socket_peercred(&stream)?.uid, rustix::process::geteuid());
                // For a moment before its file was made private, others could call the socket.
                if peer != own && !peer.is_root() {
                    return Err(ErrorKind::PermissionDenied.into());
                }
                Ok((stream.into(), SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)))
            }
        }
    }
}

/// The file of a socket, which goes with its server if it still is the server's own.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            _ = fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`; a socket there that nobody listens on any more is replaced.
fn bound(path: &Path) -> io::Result<UnixListener> {
    check_socket_path(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => {
                return Err(io::Error::new(ErrorKind::AddrInUse, "another server listens on this socket"));
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path)?,
            Err(error) => return Err(error),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    UnixListener::bind(path)
}
