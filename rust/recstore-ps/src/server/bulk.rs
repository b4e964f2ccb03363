//! The bulk port: a thread a connection, one request after another on each.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use recstore::{Error, Result as StoreResult};

use super::listener::Listener;
use super::terms::Terms;
use crate::config::ServerConfig;
use crate::durable::log::Staged;
use crate::following::Following;
use crate::handler::Handler;
use crate::metrics::Refusal;
use crate::ports::{Admission, Port, SILENT, Seat};
use crate::wire::address::BulkAddress;
use crate::wire::channel::Channel;
use crate::wire::codec::{
    Answer, ClientId, FrameError, Header, Kind, Management, Received, Request, read_frame, read_frame_beside,
    whole_of_pieces,
};
use crate::wire::gathered::Gathered;
use crate::wire::handshake::{Hello, WITH_STANDING, Welcome};
use crate::wire::socket::Socket;
use crate::wire::transport::Timed;

/// How long a peer that is turned away may take to hear why.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the first client may take, once the server serves.
const FIRST_CONNECTION: Duration = Duration::from_secs(60);

/// How long to wait for connections that were told to end, before it is looked again.
const LEAVING_PAUSE: Duration = Duration::from_millis(10);

/// Longer than any job.
const FOREVER: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// The bulk port and its connections.
#[derive(Debug)]
pub(super) struct Bulk {
    shared: Arc<Shared>,
    address: BulkAddress,
    acceptor: JoinHandle<()>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) handler: Arc<Handler>,
    /// Where this server follows another one.
    following: Option<Arc<Following>>,
    pub(super) config: ServerConfig,
    port: Port,
    usage: Mutex<Usage>,
    is_stopping: AtomicBool,
}

/// How the port has been used.
#[derive(Debug)]
struct Usage {
    is_new: bool,
    open: usize,
    /// When the last connection ended.
    unused_since: Instant,
}

impl Bulk {
    pub(super) fn start(
        handler: Arc<Handler>,
        following: Option<Arc<Following>>,
        config: ServerConfig,
        address: &BulkAddress,
    ) -> io::Result<Self> {
        let listener = Listener::bind(address)?;
        let address = listener.address()?;
        let usage = Mutex::new(Usage { is_new: true, open: 0, unused_since: Instant::now() });
        let (port, is_stopping) = (config.port_of(&handler.metrics().bulk), AtomicBool::new(false));
        let shared = Arc::new(Shared { handler, following, config, port, usage, is_stopping });
        let accepting = Arc::clone(&shared);
        let acceptor = thread::Builder::new()
            .name("recstore-accept".to_owned())
            .spawn(move || accept(&listener, &accepting))?;
        Ok(Self { shared, address, acceptor })
    }

    pub(super) fn address(&self) -> &BulkAddress {
        &self.address
    }

    /// Returns how long there has been no connection, if there is none. The first one may take a while to come.
    pub(super) fn unused_for(&self) -> Option<Duration> {
        let usage = self.shared.usage();
        let unused = usage.unused_since.elapsed();
        match (usage.open, usage.is_new) {
            (0, true) => unused.checked_sub(FIRST_CONNECTION),
            (0, false) => Some(unused),
            _ => None,
        }
    }

    pub(super) fn stop(self, grace: Duration) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        let port = &self.shared.port;
        // Whoever waits for a request reads the end; whoever carries one out can still answer.
        port.shutdown(Shutdown::Read);
        port.wait_until_empty(grace);
        port.shutdown(Shutdown::Both);
        // Wakes the acceptor, which sees that it is over.
        if self.address.knock(REFUSAL_TIMEOUT) {
            _ = self.acceptor.join();
        }
    }
}

fn accept(listener: &Listener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        if shared.is_stopping() {
            return;
        }
        match accepted {
            Ok((stream, peer)) => shared.begin(stream, peer),
            // Out of descriptors, or a peer that went away: others may still come.
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

impl Shared {
    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection a thread, unless all others have requests under way.
    fn begin(self: &Arc<Self>, stream: Socket, peer: SocketAddr) {
        if let Err(why) = self.make_room() {
            self.port.connections().refused(Refusal::Limit, peer, &why);
            return self.turn_away(stream, why);
        }
        let control = stream.control();
        let seat = Arc::new(self.port.seat(peer, move |how| control.shutdown(how)));
        // Looked at again: `stop` may have ended all seats before this one was among them.
        if self.is_stopping() {
            return;
        }
        self.count(|open| open + 1);
        let serving = Arc::clone(self);
        let serve = move || {
            // A panic ends this connection only.
            if let Ok(Err(error)) = catch_unwind(AssertUnwindSafe(|| serving.serve(stream, &seat))) {
                tell_of_bad_form(&seat, &error);
            }
            // Counted as open until another may come in its place.
            drop(seat);
            serving.count(|open| open - 1);
        };
        if thread::Builder::new().name("recstore-bulk".to_owned()).spawn(serve).is_err() {
            self.count(|open| open - 1);
        }
    }

    /// Waits for a place.
    ///
    /// # Errors
    /// Says why there will be none.
    fn make_room(&self) -> Result<(), String> {
        loop {
            match self.port.make_room() {
                Admission::Free => return Ok(()),
                Admission::Soon => self.port.wait_for_end(LEAVING_PAUSE),
                Admission::Full(why) => return Err(why),
            }
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }

    fn count(&self, change: impl FnOnce(usize) -> usize) {
        let mut usage = self.usage();
        usage.open = change(usage.open);
        (usage.is_new, usage.unused_since) = (false, Instant::now());
    }

    /// Says why, unless that would have to be encrypted: that much work is not for one who is turned away.
    fn turn_away(&self, stream: Socket, why: String) {
        if self.config.tls.is_none() {
            let mut stream = Timed::new(stream, Instant::now() + REFUSAL_TIMEOUT);
            _ = self.welcome(Err(why)).write(&mut stream);
        }
    }

    fn welcome(&self, version: Result<u16, String>) -> Welcome {
        Welcome {
            version,
            incarnation: self.handler.incarnation(),
            max_frame_bytes: self.config.max_frame_bytes,
            shard: self.config.shard,
            facts: self.handler.facts(),
            standing: self.handler.standing(),
        }
    }

    /// Answers one request after another until the peer ends, fails or breaks the rules.
    fn serve(&self, stream: Socket, seat: &Arc<Seat>) -> Result<(), FrameError> {
        let socket = Timed::new(stream, Instant::now() + self.config.handshake_timeout);
        let mut stream = Channel::of_server(socket, self.config.tls.as_ref().map(|tls| &tls.config))?;
        let hello = Hello::read(&mut stream);
        let accepted = match &hello {
            Ok(hello) => hello.accept(self.config.token.as_deref()).and_then(|version| self.admit(version)),
            Err(error) => Err(error.to_string()),
        };
        let is_refused = accepted.is_err();
        if let Err(why) = &accepted {
            self.tell_of_refusal(seat, &hello, why);
        }
        let told = self.welcome(accepted).write(&mut stream);
        let (Ok(hello), false) = (hello, is_refused) else { return Ok(()) };
        told?;
        seat.heard();
        let _connected = self.handler.connect(hello.client);
        let mut terms = Terms::default();
        // A process of this machine that went away has closed its socket.
        let idle_timeout = if stream.hands_over() { FOREVER } else { self.config.idle_timeout };
        loop {
            let idle = (idle_timeout, self.config.transfer_timeout);
            let (from, limit) = (stream.waiting(idle.0, idle.1), self.config.max_frame_bytes);
            match from.wait_for_bytes() {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(()),
                waited => waited?,
            }
            // Closed as idle, at the same moment as the request began: the client sends it again.
            let Some(_under_way) = seat.begin() else { return Ok(()) };
            let stage = |header: &Header, bytes| self.handler.stage(header, bytes);
            let (frame, staged) = read_frame_beside(from, limit, stage)?;
            let (began, timeout) = (Instant::now(), self.config.transfer_timeout);
            let frame = match frame.header.kind {
                // As many times as long as a frame: pieces that are small get no more.
                Kind::Piece => whole_of_pieces(frame, limit, |pieces| {
                    read_frame(stream.until(began + timeout * pieces), limit)
                })?,
                _ => terms.frame_of(frame, limit)?,
            };
            let frame = frame.widened()?;
            self.answer(&mut stream, hello.client, frame, staged, &mut terms)?;
        }
    }

    /// Refuses clients that would not understand that the server does not lead its shard.
    fn admit(&self, version: u16) -> Result<u16, String> {
        let standing = self.handler.standing();
        match standing.leads() || version >= WITH_STANDING {
            true => Ok(version),
            false => Err(standing.to_string()),
        }
    }

    /// Counts a peer that is refused, unless it went away before it said anything, as those that try the port do.
    fn tell_of_refusal(&self, seat: &Seat, hello: &io::Result<Hello>, why: &str) {
        let reason = match hello {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return,
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Refusal::Silent,
            Ok(hello) if hello.accept(None).is_ok() => Refusal::Token,
            _ => Refusal::Handshake,
        };
        seat.refused(reason, if reason == Refusal::Silent { SILENT } else { why });
    }

    fn answer(
        &self,
        stream: &mut Channel,
        client: ClientId,
        frame: Received,
        staged: Option<Staged>,
        terms: &mut Terms,
    ) -> Result<(), FrameError> {
        let metrics = self.handler.metrics();
        metrics.bytes_received.inc_by(frame.bytes() as u64);
        let (number, sequence) = (frame.header.request, frame.header.sequence);
        let request = match Request::of(&frame) {
            Err(FrameError::Form(message)) => {
                return self.reply(stream, number, &Err(Error::InvalidConfig { message }));
            }
            request => request?,
        };
        if let Request::Manage(Management::Follow(follow)) = &request {
            return self.send_changes(stream, client, number, follow);
        }
        if let Request::Manage(Management::AttachSegment {}) = &request {
            // Admission for the largest answer, and for a segment to have the next power of two.
            let limit = self.config.max_frame_bytes.saturating_mul(4);
            let attached = terms.attach(stream.take_handed(), limit);
            return self.reply(stream, number, &attached);
        }
        let outcome = self.guarded(|| match (&request, &self.following) {
            (Request::Manage(Management::Promote {}), Some(following)) => {
                following.promote().map(Answer::Managed)
            }
            _ => self.handler.handle_staged(client, sequence, &request, staged),
        });
        if outcome.is_err() && self.is_for_the_leader(&request) {
            // Who finds the connection ended looks for the server that leads.
            return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
        }
        terms.is_narrow |= matches!(&request, Request::Manage(Management::Narrow {})) && outcome.is_ok();
        // The answer is made: the request's memory can go before the peer takes it.
        drop(frame);
        let mut stream = Gathered::new(stream.until(Instant::now() + self.config.transfer_timeout));
        let sent = terms.send(number, &outcome, &mut stream)?;
        stream.flush()?;
        metrics.bytes_sent.inc_by(sent);
        Ok(())
    }

    /// Whether another server is to be asked, since this one does not lead its shard.
    fn is_for_the_leader(&self, request: &Request<'_>) -> bool {
        let is_about_leading =
            matches!(request, Request::Manage(Management::Promote {} | Management::StandDown { .. }));
        !is_about_leading && !self.handler.leads()
    }

    /// A panic becomes an error of the request that met it.
    fn guarded(&self, work: impl FnOnce() -> StoreResult<Answer>) -> StoreResult<Answer> {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            Err(Error::Unsupported {
                operation: "a call on a server",
                message: format!("shard {} met an internal panic", self.config.shard.number),
            })
        })
    }
}

/// Counts a peer whose connection ends in the middle of a request, unless it only went away.
fn tell_of_bad_form(seat: &Seat, error: &FrameError) {
    let reason = match error {
        FrameError::Io(error) => match error.kind() {
            io::ErrorKind::TimedOut => Refusal::Slow,
            io::ErrorKind::InvalidData => Refusal::Form,
            _ => return,
        },
        _ => Refusal::Form,
    };
    seat.refused(reason, &error.to_string());
}
