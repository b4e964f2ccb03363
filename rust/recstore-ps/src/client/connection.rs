//! One connection to a server: requests go out, replies come back, in order.

use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Instant;

use recstore::{Error, Shard};

use super::config::RemoteConfig;
use crate::wire::channel::Channel;
use crate::wire::codec::{ClientId, FrameError, Kind, Reply, Request, read_frame, take_part};
use crate::wire::facts::Facts;
use crate::wire::gathered::Gathered;
use crate::wire::handshake::{Hello, VERSIONS, Welcome};
use crate::wire::transport::Timed;

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Another attempt may do better.
    Passing(String),
    /// It will not.
    Final(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Passing("the connection ended".to_owned()),
            _ => match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(refusal) if is_refusal(refusal) => {
                    Self::Final(format!("no encrypted connection: {refusal}"))
                }
                _ => Self::Passing(error.to_string()),
            },
        }
    }
}

/// Says what it may mean that a server does not greet.
fn unwelcome(error: io::Error, is_encrypted: bool) -> Failure {
    let is_silent = matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::TimedOut);
    match error.into() {
        Failure::Passing(message) if is_silent && !is_encrypted => {
            Failure::Passing(format!("{message}, and no greeting: the server may ask for encryption"))
        }
        failure => failure,
    }
}

/// Whether one side does not accept the other's certificate, as it will not the next time.
fn is_refusal(error: &rustls::Error) -> bool {
    use rustls::AlertDescription as Alert;
    use rustls::Error::{AlertReceived, InvalidCertificate, NoCertificatesPresented, PeerIncompatible};
    let refuses = |alert: &Alert| {
        matches!(
            alert,
            Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::CertificateRequired
                | Alert::UnknownCA
                | Alert::DecryptError
                | Alert::AccessDenied
                | Alert::HandshakeFailure
                | Alert::ProtocolVersion
        )
    };
    match error {
        InvalidCertificate(_) | NoCertificatesPresented | PeerIncompatible(_) => true,
        AlertReceived(alert) => refuses(alert),
        _ => false,
    }
}

impl From<FrameError> for Failure {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Io(error) => error.into(),
            other => Self::Passing(other.to_string()),
        }
    }
}

/// A connection that has been welcomed.
#[derive(Debug)]
pub(super) struct Connection {
    address: String,
    stream: Channel,
    welcome: Welcome,
    last: u64,
}

impl Connection {
    /// Connects to the server at `address`, which must be `shard`.
    pub(super) fn open(
        address: &str,
        shard: Shard,
        client: ClientId,
        config: &RemoteConfig,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let deadline = deadline.min(Instant::now() + config.connect_timeout);
        let tls = config.tls.as_ref().map(|tls| tls.connection(address)).transpose();
        let tls = tls.map_err(Failure::Final)?;
        let mut stream = Channel::of_client(Timed::new(connect(address, deadline)?, deadline), tls);
        let token = config.token.clone().unwrap_or_default().into_bytes();
        Hello { versions: VERSIONS, client, token }.write(&mut stream)?;
        let welcome = Welcome::read(&mut stream).map_err(|error| unwelcome(error, config.tls.is_some()))?;
        if let Err(refusal) = &welcome.version {
            return Err(Failure::Final(format!("the server refused: {refusal}")));
        }
        if welcome.shard != shard {
            let Shard { number, of } = welcome.shard;
            let message = format!(
                "the server there is shard {number} of {of}, expected shard {} of {}",
                shard.number, shard.of
            );
            return Err(Failure::Final(message));
        }
        Ok(Self { address: address.to_owned(), stream, welcome, last: 0 })
    }

    /// Returns where it was opened to.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Returns what tells this run of the server from others.
    pub(super) fn incarnation(&self) -> u64 {
        self.welcome.incarnation
    }

    /// Returns what counted of the store when the connection was opened; none if nobody has said it.
    pub(super) fn facts(&self) -> Option<&Facts> {
        self.welcome.facts.as_ref()
    }

    /// Whether the server says what counts of the store: one of an older release does not.
    pub(super) fn tells_facts(&self) -> bool {
        self.welcome.tells_facts()
    }

    /// Returns the most bytes of a request or an answer.
    pub(super) fn limit(&self) -> u64 {
        self.welcome.max_frame_bytes
    }

    /// Sends a request and returns its number.
    pub(super) fn send(
        &mut self,
        request: &Request<'_>,
        sequence: u64,
        deadline: Instant,
    ) -> Result<u64, Failure> {
        self.last += 1;
        let mut stream = Gathered::new(self.stream.until(deadline));
        request.with_frame(self.last, sequence, |frame| frame.write(&mut stream))??;
        stream.flush()?;
        Ok(self.last)
    }

    /// Waits for the reply to a request. `take` gets the rows that come before it, and how many floats came before them;
    /// none at the beginning.
    pub(super) fn receive(
        &mut self,
        request: u64,
        deadline: Instant,
        mut take: impl FnMut(usize, &[f32]) -> Result<(), FrameError>,
    ) -> Result<Result<Reply, Error>, Failure> {
        let limit = self.welcome.max_frame_bytes.saturating_mul(2);
        let mut place = 0;
        take(place, &[])?;
        loop {
            let frame = read_frame(self.stream.until(deadline), limit)?;
            if frame.header.kind != Kind::Part {
                return Ok(Reply::of(frame, request)?);
            }
            take_part(&frame, request, |rows| {
                take(place, rows)?;
                place += rows.len();
                Ok(())
            })?;
        }
    }
}

fn connect(address: &str, deadline: Instant) -> Result<TcpStream, Failure> {
    let mut failure = Failure::Passing("the name has no address".to_owned());
    for address in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::Passing("no connection in time".to_owned()));
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => failure = error.into(),
        }
    }
    Err(failure)
}
