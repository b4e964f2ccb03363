//! A port whose connections are tasks, on threads of its own.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::TcpStream;
use tokio::runtime::{self, Runtime};
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;

use super::pool::Seat;
use super::pool::{Admission, Port};
use super::watched::{Stream, Watched};
use crate::metrics::Refusal;

/// How long to wait when no connection can be taken, for the system may be out of descriptors.
const PAUSE: Duration = Duration::from_millis(10);

/// How long to wait for connections that were told to end.
const LEAVING_PAUSE: Duration = Duration::from_millis(1);

/// Connections that the system keeps until they are accepted.
pub(crate) const BACKLOG: i32 = 1024;

/// The times within the limit of a silent peer at which it is looked for.
const LOOKS: u32 = 10;

/// Becomes true when the port is to end.
pub(crate) type Stop = watch::Receiver<bool>;

/// How connections are encrypted, and the protocol that clients must ask for.
#[derive(Debug)]
pub(crate) struct Encryption(Arc<ServerConfig>);

impl Encryption {
    pub(crate) fn new(config: &ServerConfig, protocol: &[u8]) -> Self {
        let mut config = config.clone();
        config.alpn_protocols = vec![protocol.to_vec()];
        Self(Arc::new(config))
    }
}

/// How a port takes its connections.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) port: Port,
    pub(crate) encryption: Option<Encryption>,
    /// What a peer reads for which there is no room, if it need not be encrypted.
    pub(crate) farewell: &'static [u8],
}

/// A port that is open until it is stopped.
#[derive(Debug)]
pub(crate) struct Listening {
    address: SocketAddr,
    port: Port,
    runtime: Runtime,
    stop: watch::Sender<bool>,
}

impl Listening {
    /// Listens at `address`, and does with each connection what `serve` says, on so many threads.
    pub(crate) fn start<F>(
        address: SocketAddr,
        threads: usize,
        rules: Rules,
        serve: impl Fn(Stream, Arc<Seat>, Stop) -> F + Clone + Send + 'static,
    ) -> io::Result<Self>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(address)?;
        // Once more, for a longer queue than the standard library asks for.
        rustix::net::listen(&listener, BACKLOG)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name(format!("recstore-{}", rules.port.connections().port()))
            .enable_all()
            .build()?;
        let (stop, told) = watch::channel(false);
        let port = rules.port.clone();
        runtime.spawn(close_silent(port.clone()));
        runtime.spawn(accept(listener, Arc::new(rules), serve, told));
        Ok(Self { address, port, runtime, stop })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more connections and no more requests, and waits for those under way.
    pub(crate) fn stop(self, grace: Duration) {
        _ = self.stop.send(true);
        // Peers that have not said who they are have no request to wait for.
        self.port.end_unidentified();
        self.port.wait_until_empty(grace);
        self.runtime.shutdown_background();
    }
}

/// Waits until the port is to end.
pub(super) async fn stopped(stop: &mut Stop) {
    _ = stop.wait_for(|is_over| *is_over).await;
}

async fn close_silent(port: Port) {
    let between = port.limits().handshake / LOOKS;
    loop {
        tokio::time::sleep(between).await;
        port.close_silent();
    }
}

async fn accept<F>(
    listener: TcpListener,
    rules: Arc<Rules>,
    serve: impl Fn(Stream, Arc<Seat>, Stop) -> F + Clone + Send + 'static,
    stop: Stop,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut until = stop.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(&mut until) => return,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        _ = stream.set_nodelay(true);
        if let Some(seat) = rules.seat(&stream, peer).await {
            let (serve, stop) = (serve.clone(), stop.clone());
            tokio::spawn(
                seat.serve(Arc::clone(&rules), stream, move |stream, seat| serve(stream, seat, stop)),
            );
        }
    }
}

/// A seat, and the word that its connection is to end.
struct Seated {
    seat: Arc<Seat>,
    ends: Arc<Notify>,
}

impl Rules {
    /// Returns the seat of a connection, or says that there is none.
    async fn seat(&self, stream: &TcpStream, peer: SocketAddr) -> Option<Seated> {
        loop {
            match self.port.make_room() {
                Admission::Free => break,
                Admission::Soon => tokio::time::sleep(LEAVING_PAUSE).await,
                Admission::Full(why) => {
                    self.port.connections().refused(Refusal::Limit, peer, &why);
                    if self.encryption.is_none() {
                        _ = stream.try_write(self.farewell);
                    }
                    return None;
                }
            }
        }
        let ends = Arc::new(Notify::new());
        let end = Arc::clone(&ends);
        // `notify_one` is kept for who waits later: the connection may be told to end before it is served.
        let seat = Arc::new(self.port.seat(peer, move |_| end.notify_one()));
        Some(Seated { seat, ends })
    }

    /// Encrypts a connection where that is wanted.
    async fn encrypted(&self, stream: TcpStream, seat: &Arc<Seat>) -> Option<Stream> {
        let Some(Encryption(config)) = &self.encryption else { return Some(Watched::boxed(stream, seat)) };
        match TlsAcceptor::from(Arc::clone(config)).accept(stream).await {
            Ok(stream) => Some(Watched::boxed(stream, seat)),
            Err(error) => {
                seat.refused(Refusal::Handshake, &format!("it does not encrypt: {error}"));
                None
            }
        }
    }
}

impl Seated {
    /// Serves a connection until it ends or gives way.
    async fn serve<F: Future<Output = ()>>(
        self,
        rules: Arc<Rules>,
        stream: TcpStream,
        serve: impl FnOnce(Stream, Arc<Seat>) -> F,
    ) {
        let Self { seat, ends } = self;
        let serving = async {
            if let Some(stream) = rules.encrypted(stream, &seat).await {
                serve(stream, Arc::clone(&seat)).await;
            }
        };
        tokio::select! {
            () = serving => {}
            () = ends.notified() => {}
        }
    }
}
