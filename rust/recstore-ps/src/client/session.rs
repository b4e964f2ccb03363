//! Calls on several servers at a time: sent to all, then awaited from all, and repeated where they failed.
//!
//! A call writes its requests to all servers before it reads the first answer, so they work at the same time and no
//! threads are needed, which a forked child would not have.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use recstore::{Error, Shard};

use super::addresses::Addresses;
use super::call::Call;
use super::config::RemoteConfig;
use super::connection::{Connection, Failure};
use super::failed::Changes;
use super::tables::Tables;
use crate::router::HashMethod;
use crate::wire::codec::{ClientId, FrameError, Management, Reply, largest_request};
use crate::wire::store_metadata::StoreMetadata;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// How long a server may take to answer where another one can be asked instead.
const SHORT_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections kept for the next calls to a server.
const MAX_IDLE: usize = 8;

/// A process's connections, tables and changes under way. A forked child begins one of its own.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) process: u32,
    client: ClientId,
    config: RemoteConfig,
    links: Vec<Link>,
    pub(super) tables: Mutex<Tables>,
    pub(super) changes: Mutex<Changes>,
    /// What all servers say of the store, once they were asked.
    agreed: Mutex<Option<StoreMetadata>>,
}

/// The way to one server.
#[derive(Debug)]
struct Link {
    shard: Shard,
    /// Changes when the server is started again elsewhere, or another one leads the shard.
    addresses: Mutex<Addresses>,
    /// The last promotion that is known among the servers of the shard.
    epoch: AtomicU64,
    idle: Mutex<Vec<Connection>>,
    /// The most bytes that the server takes at a time; 0 before it was asked.
    limit: AtomicU64,
    /// The version of the protocol that both speak; 0 before the first connection.
    version: AtomicU64,
}

/// What came of a call.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The answer, and which run of the server gave it.
    Answered(Reply, u64),
    /// The server, or this program, refused: nothing has changed there.
    Refused(Error),
    /// Nobody knows whether the server did it.
    Unknown(Error),
}

impl Outcome {
    /// Returns the answer, or why there is none.
    pub(super) fn answer(self) -> Result<(Reply, u64), Error> {
        match self {
            Self::Answered(reply, incarnation) => Ok((reply, incarnation)),
            Self::Refused(error) | Self::Unknown(error) => Err(error),
        }
    }
}

/// What is done with rows as they come: gets the number of a call, how many floats of its answer came before, and those
/// that come now; none at the beginning of an answer.
pub(super) type TakeRows<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<(), FrameError> + 'a;

/// What is known of a call while attempts go on.
enum Attempt {
    Failed(String),
    Over(Outcome),
}

impl Session {
    pub(super) fn new(config: &RemoteConfig, tables: Tables) -> Self {
        let of = config.servers.len();
        let link = |(number, address): (usize, &String)| Link {
            shard: Shard { number, of },
            addresses: Mutex::new(Addresses::of(address)),
            epoch: AtomicU64::new(0),
            idle: Mutex::default(),
            limit: AtomicU64::new(0),
            version: AtomicU64::new(0),
        };
        Self {
            process: std::process::id(),
            client: new_client(),
            config: config.clone(),
            links: config.servers.iter().enumerate().map(link).collect(),
            tables: Mutex::new(tables),
            changes: Mutex::default(),
            agreed: Mutex::default(),
        }
    }

    /// Makes calls, at most one a server, until each is over or `patience` is.
    pub(super) fn call_all(
        &self,
        operation: &'static str,
        calls: &[Call<'_>],
        patience: Duration,
    ) -> Vec<Outcome> {
        let unexpected = |rows: &[f32]| match rows.len() {
            0 => Ok(()),
            _ => Err(FrameError::Malformed("rows that nobody asked for".to_owned())),
        };
        self.call_all_for_rows(operation, calls, patience, &mut |_, _, rows| unexpected(rows))
    }

    /// The same for answers with many rows, which `take` gets as they come, but for those in the reply at the end.
    pub(super) fn call_all_for_rows(
        &self,
        operation: &'static str,
        calls: &[Call<'_>],
        patience: Duration,
        take: &mut TakeRows<'_>,
    ) -> Vec<Outcome> {
        let deadline = Instant::now() + patience;
        let mut attempts: Vec<Attempt> =
            calls.iter().map(|_| Attempt::Failed("no connection in time".to_owned())).collect();
        let mut pause = FIRST_PAUSE;
        loop {
            self.attempt(operation, calls, &mut attempts, deadline, take);
            let is_over = attempts.iter().all(|attempt| matches!(attempt, Attempt::Over(_)));
            if is_over || Instant::now() + pause >= deadline {
                break;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        let over = |(attempt, call): (Attempt, &Call<'_>)| match attempt {
            Attempt::Over(outcome) => outcome,
            Attempt::Failed(message) => Outcome::Unknown(self.unavailable(operation, call.shard, message)),
        };
        attempts.into_iter().zip(calls).map(over).collect()
    }

    /// Makes each call that is not over once more.
    fn attempt(
        &self,
        operation: &'static str,
        calls: &[Call<'_>],
        attempts: &mut [Attempt],
        deadline: Instant,
        take: &mut TakeRows<'_>,
    ) {
        // All requests are sent before the first answer is read: the servers work side by side, without
        // threads here.
        let mut sent = Vec::new();
        for (number, (call, attempt)) in calls.iter().zip(&mut *attempts).enumerate() {
            if matches!(attempt, Attempt::Over(_)) {
                continue;
            }
            match self.send(operation, call, deadline) {
                Ok((connection, request)) => sent.push((number, connection, request)),
                Err(failed) => *attempt = failed,
            }
        }
        for (number, mut connection, request) in sent {
            let call = &calls[number];
            let take = |place, rows: &[f32]| take(number, place, rows);
            let received = connection.receive(request, deadline, take);
            attempts[number] = match received {
                Ok(Ok(reply)) => Attempt::Over(Outcome::Answered(reply, connection.incarnation())),
                Ok(Err(error)) => Attempt::Over(Outcome::Refused(error)),
                Err(failure) => {
                    // Those that lie idle lead to the same server, and have probably ended with this one.
                    self.links[call.shard].lock_idle().clear();
                    self.failed(operation, call.shard, failure, call.is_repeatable())
                }
            };
            // After any other outcome it is unknown what the stream still holds.
            if matches!(attempts[number], Attempt::Over(Outcome::Answered(..) | Outcome::Refused(_))) {
                self.links[call.shard].put_back(connection);
            }
        }
    }

    fn send(
        &self,
        operation: &'static str,
        call: &Call<'_>,
        deadline: Instant,
    ) -> Result<(Connection, u64), Attempt> {
        let link = &self.links[call.shard];
        // Any call may be made again here: a frame that was not written to its end is never carried out.
        let again = |failure| self.failed(operation, call.shard, failure, true);
        let mut connection = self.connection(link, deadline).map_err(again)?;
        // The server lost the rows of these tables: training on would go on with fresh ones.
        if call.incarnations.iter().any(|&incarnation| incarnation != connection.incarnation()) {
            link.put_back(connection);
            let message =
                "it was restarted since its tables were opened: load a checkpoint, or restart the program";
            return Err(self.failed(operation, call.shard, Failure::Final(message.to_owned()), true));
        }
        let limit = largest_request(&call.request, connection.limit(), connection.version());
        if let Err(error) = check_size(operation, call, limit) {
            link.put_back(connection);
            return Err(Attempt::Over(Outcome::Refused(error)));
        }
        let request = connection.send(&call.request, call.sequence, deadline).map_err(|failure| {
            link.lock_idle().clear();
            again(failure)
        })?;
        Ok((connection, request))
    }

    fn connection(&self, link: &Link, deadline: Instant) -> Result<Connection, Failure> {
        let idle = link.lock_idle().pop();
        match idle {
            Some(connection) => Ok(connection),
            None => self.connect_to_leader(link, deadline),
        }
    }

    /// Returns a connection to the one of a shard's servers that leads it.
    fn connect_to_leader(&self, link: &Link, deadline: Instant) -> Result<Connection, Failure> {
        let candidates = link.lock_addresses().in_turn();
        let of_several = candidates.len() > 1;
        let mut failures = Vec::new();
        for address in candidates {
            let soon = Instant::now() + SHORT_CONNECT_TIMEOUT;
            let deadline = if of_several { deadline.min(soon) } else { deadline };
            match self.connect_to(link, &address, deadline) {
                Ok(opened) => {
                    link.lock_addresses().choose(&address);
                    link.limit.store(opened.limit(), Ordering::Relaxed);
                    link.version.store(opened.version().into(), Ordering::Relaxed);
                    return Ok(opened);
                }
                Err(Failure::Passing(message)) if of_several => {
                    failures.push(format!("{address}: {message}"));
                }
                Err(failure) => return Err(failure),
            }
        }
        Err(Failure::Passing(failures.join("; ")))
    }

    fn connect_to(&self, link: &Link, address: &str, deadline: Instant) -> Result<Connection, Failure> {
        let mut opened = Connection::open(address, link.shard, self.client, &self.config, deadline)?;
        link.check_standing(&mut opened, deadline)?;
        check_facts(&opened, self.config.hash_method, self.agreed().as_ref())?;
        Ok(opened)
    }

    /// Returns the most bytes that each server takes at a time.
    pub(super) fn limits(&self, operation: &'static str) -> Result<Vec<u64>, Error> {
        self.connect_once(operation)?;
        Ok(self.links.iter().map(|link| link.limit.load(Ordering::Relaxed)).collect())
    }

    /// Returns the version of the protocol that is spoken with each server.
    pub(super) fn versions(&self, operation: &'static str) -> Result<Vec<u16>, Error> {
        self.connect_once(operation)?;
        Ok(self.links.iter().map(|link| link.version.load(Ordering::Relaxed) as u16).collect())
    }

    /// Sees that every server has been connected to since it is where it is.
    fn connect_once(&self, operation: &'static str) -> Result<(), Error> {
        let deadline = Instant::now() + self.config.timeout;
        for link in self.links.iter().filter(|link| link.limit.load(Ordering::Relaxed) == 0) {
            link.put_back(self.connect_patiently(operation, link, deadline)?);
        }
        Ok(())
    }

    fn failed(
        &self,
        operation: &'static str,
        shard: usize,
        failure: Failure,
        is_repeatable: bool,
    ) -> Attempt {
        match failure {
            Failure::Passing(message) if is_repeatable => Attempt::Failed(message),
            Failure::Passing(message) | Failure::Final(message) => {
                Attempt::Over(Outcome::Unknown(self.unavailable(operation, shard, message)))
            }
        }
    }

    pub(super) fn unavailable(&self, operation: &'static str, shard: usize, message: String) -> Error {
        Error::Unavailable { operation, shard, address: self.links[shard].address(), message }
    }

    /// Returns where the servers are, in the order of the shards; those of one shard with a bar between them.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.links.iter().map(|link| link.lock_addresses().joined()).collect()
    }

    /// Calls the servers at other addresses, one a shard.
    pub(super) fn move_links(&self, addresses: &[String]) {
        self.links.iter().zip(addresses).for_each(|(link, address)| link.move_to(address));
    }

    /// Returns what all servers said of the store.
    pub(super) fn agreed(&self) -> Option<StoreMetadata> {
        self.agreed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_agreed(&self, facts: Option<StoreMetadata>) {
        *self.agreed.lock().unwrap_or_else(PoisonError::into_inner) = facts;
    }

    pub(super) fn hash_method(&self) -> HashMethod {
        self.config.hash_method
    }

    /// Returns what each server told of the store when a connection was opened, which is done anew if `is_anew`; nothing
    /// if one is of an older release, which does not tell it.
    pub(super) fn ask_for_facts(
        &self,
        operation: &'static str,
        is_anew: bool,
    ) -> Result<Option<Vec<Option<StoreMetadata>>>, Error> {
        let deadline = Instant::now() + self.config.timeout;
        let told = |link: &Link| {
            if is_anew {
                // A server says it with its greeting: a connection that is open says what it was then.
                link.lock_idle().clear();
            }
            let connection = self.connect_patiently(operation, link, deadline)?;
            let told = connection.tells_facts().then(|| connection.facts().cloned());
            link.put_back(connection);
            Ok(told)
        };
        self.links.iter().map(told).collect()
    }

    /// Returns a connection, which a server that is just starting may take a while to take.
    fn connect_patiently(
        &self,
        operation: &'static str,
        link: &Link,
        deadline: Instant,
    ) -> Result<Connection, Error> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.connection(link, deadline) {
                Ok(connection) => return Ok(connection),
                Err(Failure::Passing(_)) if Instant::now() + pause < deadline => thread::sleep(pause),
                Err(Failure::Passing(message) | Failure::Final(message)) => {
                    return Err(self.unavailable(operation, link.shard.number, message));
                }
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    pub(super) fn lock_tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn lock_idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_addresses(&self) -> MutexGuard<'_, Addresses> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns where the server is that is called.
    fn address(&self) -> String {
        self.lock_addresses().current().to_owned()
    }

    /// Checks that a server leads the shard, as far as this client knows. One that does not know of another is told.
    fn check_standing(&self, opened: &mut Connection, deadline: Instant) -> Result<(), Failure> {
        let standing = opened.standing().clone();
        if !standing.leads() {
            return Err(Failure::Passing(standing.to_string()));
        }
        let epoch = self.epoch.fetch_max(standing.epoch, Ordering::Relaxed);
        if standing.epoch < epoch {
            _ = opened.manage(&Management::StandDown { epoch }, deadline);
            let message = format!("another server leads its shard since epoch {epoch}");
            return Err(Failure::Passing(message));
        }
        Ok(())
    }

    fn move_to(&self, address: &str) {
        // This lock before that of the addresses, as in `put_back`.
        let mut idle = self.lock_idle();
        let mut known = self.lock_addresses();
        if known.joined() != address {
            *known = Addresses::of(address);
            idle.clear();
            self.limit.store(0, Ordering::Relaxed);
        }
    }

    fn put_back(&self, connection: Connection) {
        let mut idle = self.lock_idle();
        // The link may have been moved to another server while the connection was out.
        if idle.len() < MAX_IDLE && connection.address() == self.address() {
            idle.push(connection);
        }
    }
}

/// Checks what a server says of the store against what this client, and all servers before, say.
fn check_facts(
    connection: &Connection,
    own: HashMethod,
    agreed: Option<&StoreMetadata>,
) -> Result<(), Failure> {
    if !connection.tells_facts() {
        return Ok(());
    }
    let found = connection.facts();
    if let Some(StoreMetadata { hash_method, .. }) = found.filter(|found| found.hash_method != own) {
        return Err(Failure::Final(format!(
            "its store spreads ids by hash_method \"{hash_method}\", and this client by \"{own}\": it would look for rows where they are not"
        )));
    }
    match (agreed, found) {
        (Some(agreed), Some(found)) if found.store != agreed.store => Err(Failure::Final(format!(
            "it has rows of the store {}, and the other servers of the store {}",
            found.store, agreed.store
        ))),
        (Some(_), None) => Err(Failure::Final(LOST.to_owned())),
        _ => Ok(()),
    }
}

/// What is said of a server that has forgotten the store.
pub(super) const LOST: &str =
    "it was started without the rows that it had: load a checkpoint, or start all servers anew";

/// Refuses a request that the server would refuse unread.
pub(super) fn check_size(operation: &'static str, call: &Call<'_>, limit: u64) -> Result<(), Error> {
    let bytes = call.request.with_frame(0, 0, |frame| frame.body_len() as u64).unwrap_or(0);
    match bytes <= limit {
        true => Ok(()),
        false => Err(Error::RequestTooLarge { operation, shard: call.shard, bytes, limit }),
    }
}

/// Draws a client's number.
pub(crate) fn new_client() -> ClientId {
    let draw = || u128::from(RandomState::new().hash_one((SystemTime::now(), std::process::id())));
    ClientId(draw() << 64 | draw())
}
