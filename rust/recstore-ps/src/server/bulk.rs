//! The bulk port: a thread a connection, one request after another on each.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use recstore::{Error, Result as StoreResult};

use super::listener::Listener;
use super::terms::Terms;
use crate::config::ServerConfig;
use crate::durable::log::Staged;
use crate::following::Following;
use crate::handler::Handler;
use crate::metrics::{OpenConnection, Refusal};
use crate::wire::address::BulkAddress;
use crate::wire::channel::Channel;
use crate::wire::codec::{
    Answer, ClientId, FrameError, Header, Management, Received, Request, read_frame_beside,
};
use crate::wire::gathered::Gathered;
use crate::wire::handshake::{Hello, WITH_STANDING, Welcome};
use crate::wire::socket::Socket;
use crate::wire::transport::Timed;

/// How long a peer that is turned away may take to hear why.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the first client may take, once the server serves.
const FIRST_CONNECTION: Duration = Duration::from_secs(60);

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
    connections: Mutex<Connections>,
    ended: Condvar,
}

#[derive(Debug)]
struct Connections {
    stopping: bool,
    last: u64,
    open: HashMap<u64, Socket>,
    /// When the last one ended.
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
        let (stopping, last, open, unused_since) = (false, 0, HashMap::new(), Instant::now());
        let connections = Mutex::new(Connections { stopping, last, open, unused_since });
        let shared = Arc::new(Shared { handler, following, config, connections, ended: Condvar::new() });
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
        let connections = self.shared.lock();
        let unused = connections.unused_since.elapsed();
        match (connections.open.is_empty(), connections.last) {
            (false, _) => None,
            (true, 0) => unused.checked_sub(FIRST_CONNECTION),
            (true, _) => Some(unused),
        }
    }

    pub(super) fn stop(self, grace: Duration) {
        let mut connections = self.shared.lock();
        connections.stopping = true;
        // Whoever waits for a request reads the end; whoever carries one out can still answer.
        connections.open.values().for_each(|stream| _ = stream.shutdown(Shutdown::Read));
        let all_ended = |connections: &mut Connections| !connections.open.is_empty();
        let waited = self.shared.ended.wait_timeout_while(connections, grace, all_ended);
        let (connections, _) = waited.unwrap_or_else(PoisonError::into_inner);
        connections.open.values().for_each(|stream| _ = stream.shutdown(Shutdown::Both));
        drop(connections);
        // Wakes the acceptor, which sees that it is over.
        if self.address.knock(REFUSAL_TIMEOUT) {
            _ = self.acceptor.join();
        }
    }
}

fn accept(listener: &Listener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        if shared.lock().stopping {
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
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection a thread, unless there are too many.
    fn begin(self: &Arc<Self>, stream: Socket, peer: SocketAddr) {
        let Ok(control) = stream.try_clone() else { return };
        let Some(number) = self.register(control) else {
            let limit = self.config.max_connections;
            let why = format!("the server has {limit} connections, which is its limit");
            self.handler.metrics().bulk.refused(Refusal::Limit, Some(peer), &why);
            return self.turn_away(stream, why);
        };
        let serving = Arc::clone(self);
        let connection = self.handler.metrics().bulk.opened(peer);
        let serve = move || {
            // A panic ends this connection only.
            _ = catch_unwind(AssertUnwindSafe(|| serving.serve(stream, &connection)));
            serving.forget(number);
            // Counted as open until another may come in its place.
            drop(connection);
        };
        if thread::Builder::new().name(format!("recstore-bulk-{number}")).spawn(serve).is_err() {
            self.forget(number);
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    fn register(&self, control: Socket) -> Option<u64> {
        let mut connections = self.lock();
        if connections.open.len() >= self.config.max_connections {
            return None;
        }
        connections.last += 1;
        let number = connections.last;
        connections.open.insert(number, control);
        Some(number)
    }

    fn forget(&self, number: u64) {
        let mut connections = self.lock();
        connections.open.remove(&number);
        connections.unused_since = Instant::now();
        drop(connections);
        self.ended.notify_all();
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
    fn serve(&self, stream: Socket, connection: &OpenConnection) -> Result<(), FrameError> {
        let socket = Timed::new(stream, Instant::now() + self.config.handshake_timeout);
        let mut stream = Channel::of_server(socket, self.config.tls.as_ref().map(|tls| &tls.config))?;
        let hello = Hello::read(&mut stream);
        let accepted = match &hello {
            Ok(hello) => hello.accept(self.config.token.as_deref()).and_then(|version| self.admit(version)),
            Err(error) => Err(error.to_string()),
        };
        let is_refused = accepted.is_err();
        if let Err(why) = &accepted {
            self.tell_of_refusal(connection, &hello, why);
        }
        self.welcome(accepted).write(&mut stream)?;
        let hello = hello?;
        if is_refused {
            return Ok(());
        }
        let mut terms = Terms::default();
        // A process of this machine that went away has closed its socket.
        let idle_timeout = if stream.hands_over() { FOREVER } else { self.config.idle_timeout };
        loop {
            let idle = (idle_timeout, self.config.transfer_timeout);
            let (from, limit) = (stream.waiting(idle.0, idle.1), self.config.max_frame_bytes);
            let stage = |header: &Header, bytes| self.handler.stage(header, bytes);
            let (frame, staged) = read_frame_beside(from, limit, stage)?;
            let frame = terms.frame_of(frame, limit)?.widened()?;
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
    fn tell_of_refusal(&self, connection: &OpenConnection, hello: &io::Result<Hello>, why: &str) {
        let reason = match hello {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return,
            Ok(hello) if hello.accept(None).is_ok() => Refusal::Token,
            _ => Refusal::Handshake,
        };
        self.handler.metrics().bulk.refused(reason, Some(connection.peer()), why);
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
            // Room for the largest answer, and for a segment to have the next power of two.
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
