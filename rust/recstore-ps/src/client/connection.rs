//! One connection to a server: requests go out, replies come back, in order.

use std::io::{self, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use recstore::{Error, Shard};

use super::config::{RemoteConfig, WireDtype};
use super::sharing::Sharing;
use crate::wire::address::{UNIX_PREFIX, check_socket_path};
use crate::wire::channel::Channel;
use crate::wire::codec::{
    ClientId, Frame, FrameError, Kind, Managed, Management, Received, Reply, Request, read_frame, take_part,
    write_in_pieces, write_in_segment,
};
use crate::wire::gathered::Gathered;
use crate::wire::handshake::{Hello, VERSIONS, WITH_BFLOAT16, Welcome};
use crate::wire::replica_role::ReplicaRole;
use crate::wire::socket::Socket;
use crate::wire::store_metadata::StoreMetadata;
use crate::wire::transport::Timed;

/// Why an attempt failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Another attempt may do better.
    Passing(String),
    /// It will not.
    Final(String),
}

impl Failure {
    pub(crate) fn into_message(self) -> String {
        match self {
            Self::Passing(message) | Self::Final(message) => message,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Passing("the connection ended".to_owned()),
            // rustls hands its errors over within those of input and output.
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
pub(crate) struct Connection {
    address: String,
    stream: Channel,
    welcome: Welcome,
    last: u64,
    /// Whether rows and gradients go as bfloat16.
    is_narrow: bool,
    sharing: Sharing,
}

impl Connection {
    /// Connects to the server at `address`, whichever shard it is.
    pub(crate) fn open_any(
        address: &str,
        client: ClientId,
        config: &RemoteConfig,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let deadline = deadline.min(Instant::now() + config.connect_timeout);
        if config.tls.is_some() && address.starts_with(UNIX_PREFIX) {
            return Err(Failure::Final("a Unix socket is not encrypted: leave TLS away".to_owned()));
        }
        let tls = config.tls.as_ref().map(|tls| tls.connection(address)).transpose();
        let tls = tls.map_err(Failure::Final)?;
        let mut stream = Channel::of_client(Timed::new(connect(address, deadline)?, deadline), tls);
        let token = config.token.clone().unwrap_or_default().into_bytes();
        Hello { versions: VERSIONS, client, token }.write(&mut stream)?;
        let welcome = Welcome::read(&mut stream).map_err(|error| unwelcome(error, config.tls.is_some()))?;
        match &welcome.version {
            Err(refusal) => Err(Failure::Final(format!("the server refused: {refusal}"))),
            Ok(_) => {
                let sharing = Sharing::new(config.shared_memory && stream.hands_over());
                let address = address.to_owned();
                Ok(Self { address, stream, welcome, last: 0, is_narrow: false, sharing })
            }
        }
    }

    /// Connects to the server at `address`, which must be `shard`.
    pub(crate) fn open(
        address: &str,
        shard: Shard,
        client: ClientId,
        config: &RemoteConfig,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let mut opened = Self::open_any(address, client, config, deadline)?;
        let Shard { number, of } = opened.welcome.shard;
        if opened.welcome.shard != shard {
            let message = format!(
                "the server there is shard {number} of {of}, expected shard {} of {}",
                shard.number, shard.of
            );
            return Err(Failure::Final(message));
        }
        if config.wire_dtype == WireDtype::Bfloat16 {
            opened.narrow(deadline)?;
        }
        Ok(opened)
    }

    /// Has rows and gradients go as bfloat16 from here on.
    fn narrow(&mut self, deadline: Instant) -> Result<(), Failure> {
        // An older server does not know the verb.
        let version = self.version();
        if version < WITH_BFLOAT16 {
            return Err(Failure::Final(format!(
                "the server speaks version {version} of the protocol, and bfloat16 goes over the wire since version {WITH_BFLOAT16}: choose wire_dtype float32"
            )));
        }
        // One that does not lead its shard may end the connection: its standing is looked at behind this.
        if self.welcome.standing.leads() {
            let number = self.send(&Request::Manage(Management::Narrow {}), 0, deadline)?;
            let reply = self.receive(number, deadline, |_, _| Ok(()))?;
            reply.map_err(|error| Failure::Final(error.to_string()))?;
        }
        self.is_narrow = true;
        Ok(())
    }

    /// Returns where it was opened to.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Returns what tells this run of the server from others.
    pub(crate) fn incarnation(&self) -> u64 {
        self.welcome.incarnation
    }

    /// Returns what counted of the store when the connection was opened; none if nobody has said it.
    pub(crate) fn facts(&self) -> Option<&StoreMetadata> {
        self.welcome.facts.as_ref()
    }

    /// Whether the server says what counts of the store: one of an older release does not.
    pub(crate) fn tells_facts(&self) -> bool {
        self.welcome.tells_facts()
    }

    /// Returns the version of the protocol that both speak.
    pub(crate) fn version(&self) -> u16 {
        self.welcome.version.as_ref().copied().unwrap_or(0)
    }

    /// Returns which shard the server is.
    pub(crate) fn shard(&self) -> Shard {
        self.welcome.shard
    }

    /// Returns what the server is to its shard.
    pub(crate) fn standing(&self) -> &ReplicaRole {
        &self.welcome.standing
    }

    /// Makes a management request.
    ///
    /// # Errors
    /// What the server, or the connection, says.
    pub(crate) fn manage(&mut self, request: &Management, deadline: Instant) -> Result<Managed, String> {
        let request = Request::Manage(request.clone());
        let number = self.send(&request, 0, deadline).map_err(Failure::into_message)?;
        let reply = self.receive(number, deadline, |_, _| Ok(())).map_err(Failure::into_message)?;
        reply.map_err(|error| error.to_string())?.managed().map_err(|error| error.to_string())
    }

    /// Returns the connection itself, for what follows an answer.
    pub(crate) fn into_stream(self) -> Channel {
        self.stream
    }

    /// Returns the most bytes of a request or an answer.
    pub(crate) fn limit(&self) -> u64 {
        self.welcome.max_frame_bytes
    }

    /// Sends a request and returns its number.
    pub(crate) fn send(
        &mut self,
        request: &Request<'_>,
        sequence: u64,
        deadline: Instant,
    ) -> Result<u64, Failure> {
        // Before the request gets its number: to hand over a segment is a request of its own.
        self.share(request, deadline)?;
        self.last += 1;
        let limit = self.limit();
        let Self { stream, sharing, last, .. } = self;
        let mut stream = Gathered::new(stream.until(deadline));
        // Only gradients: rows that are written keep all their bits.
        let is_narrow = self.is_narrow && matches!(request, Request::Update(_));
        let mut write = |frame: &Frame<'_>| match sharing.write(frame)? {
            None if frame.body_len() as u64 > limit => write_in_pieces(frame, limit, &mut stream),
            Some(bytes) => write_in_segment(*last, bytes, &mut stream),
            None => frame.write(&mut stream),
        };
        request.with_frame(*last, sequence, |frame| match is_narrow {
            true => frame.narrowed(write),
            false => write(frame),
        })??;
        stream.flush()?;
        Ok(self.last)
    }

    /// Has the server share a larger segment, if a request wants one.
    fn share(&mut self, request: &Request<'_>, deadline: Instant) -> Result<(), Failure> {
        if !self.sharing.is_possible() {
            return Ok(());
        }
        let bytes = request.with_frame(0, 0, |frame| frame.bytes())?;
        if bytes as u64 > self.limit() {
            return Ok(());
        }
        let (segment, file) = match self.sharing.grown(bytes) {
            Ok(None) => return Ok(()),
            Ok(Some(grown)) => grown,
            Err(error) => {
                // Frames go over the socket as well, only slower.
                self.sharing.end(&error.to_string());
                return Ok(());
            }
        };
        match self.hand_over(&file, deadline)? {
            Ok(_) => self.sharing.take(segment),
            Err(refusal) => self.sharing.end(&refusal.to_string()),
        }
        Ok(())
    }

    fn hand_over(&mut self, file: &OwnedFd, deadline: Instant) -> Result<Result<Reply, Error>, Failure> {
        self.last += 1;
        let request = Request::Manage(Management::AttachSegment {});
        let bytes = request.with_frame(self.last, 0, |frame| frame.to_bytes())??;
        self.stream.until(deadline).hand_over(&bytes, file.as_fd())?;
        self.receive(self.last, deadline, |_, _| Ok(()))
    }

    /// Reads a frame from the socket, or one of those that it says lie in the segment: where, and up to where.
    fn next_frame(
        &mut self,
        shared: &mut Option<(usize, usize)>,
        deadline: Instant,
    ) -> Result<Received, Failure> {
        let limit = self.welcome.max_frame_bytes.saturating_mul(2);
        if shared.is_none() {
            let frame = read_frame(self.stream.until(deadline), limit)?;
            let Some(end) = frame.bytes_in_segment()? else { return Ok(frame) };
            *shared = Some((0, end));
        }
        let (place, end) = shared.unwrap_or_default();
        let (frame, place) = self.sharing.read(place, end, limit)?;
        *shared = Some((place, end));
        Ok(frame)
    }

    /// Waits for the reply to a request. `take` gets the rows that come before it, and how many floats came before them;
    /// none at the beginning.
    pub(crate) fn receive(
        &mut self,
        request: u64,
        deadline: Instant,
        mut take: impl FnMut(usize, &[f32]) -> Result<(), FrameError>,
    ) -> Result<Result<Reply, Error>, Failure> {
        let (mut place, mut over_the_socket, mut shared) = (0, 0, None);
        take(place, &[])?;
        loop {
            let frame = self.next_frame(&mut shared, deadline)?.widened()?;
            over_the_socket += if shared.is_none() { frame.bytes() } else { 0 };
            if frame.header.kind != Kind::Part {
                self.sharing.came_over_the_socket(over_the_socket);
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

fn connect(address: &str, deadline: Instant) -> Result<Socket, Failure> {
    if let Some(path) = address.strip_prefix(UNIX_PREFIX) {
        return connect_to_socket(Path::new(path));
    }
    let mut failure = Failure::Passing("the name has no address".to_owned());
    // All addresses of a name share one deadline.
    for address in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::Passing("no connection in time".to_owned()));
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                // A frame is flushed whole and then its answer is waited for: to hold bytes back and gather
                // more would only delay it.
                stream.set_nodelay(true)?;
                return Ok(stream.into());
            }
            Err(error) => failure = error.into(),
        }
    }
    Err(failure)
}

/// Connects to the server that listens on a Unix socket.
fn connect_to_socket(path: &Path) -> Result<Socket, Failure> {
    check_socket_path(path).map_err(|error| Failure::Final(error.to_string()))?;
    let found = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Failure::Passing("there is no socket".to_owned()),
        io::ErrorKind::ConnectionRefused => {
            Failure::Passing("no server listens on the socket any more: its file is left over".to_owned())
        }
        io::ErrorKind::PermissionDenied => {
            Failure::Final("the socket is for the user alone who started its server".to_owned())
        }
        _ => error.into(),
    };
    Ok(UnixStream::connect(path).map_err(found)?.into())
}
