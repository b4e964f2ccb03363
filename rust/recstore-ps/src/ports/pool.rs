//! Seats of connections: how many there may be, of each port and of all together, and who gives way to a newcomer.
//!
//! A full port closes a connection without a request under way before it refuses a newcomer. Peers that have not identified
//! themselves give way first, the oldest first, while they are more than an eighth of the connections; so a flood of them
//! closes no connection of a client, and a newcomer still finds the time to say who it is. Then the longest idle one goes.

use std::collections::HashMap;
use std::fmt::{self, Debug, Formatter};
use std::net::{Shutdown, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection_state::{ConnectionState, Limits, Silence};
use crate::metrics::{Connections, OpenConnection, Refusal};

/// The connections that a port may have whatever the others have, so that none is shut by another one.
pub(super) const MIN_SEATS: usize = 8;

/// Connections that were told to end and have not: they still have their descriptors.
pub(super) const MAX_LEAVING: usize = 32;

/// The part of the connections that may be of peers that have not identified themselves, before they alone give way.
const UNIDENTIFIED_SHARE: usize = 8;

/// Why a peer is closed that says nothing.
pub(crate) const SILENT: &str = "it did not identify itself in time";

/// The connections of all ports of a process.
#[derive(Debug)]
pub(crate) struct Pool {
    limit: usize,
    open: Mutex<Open>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct Open {
    last: u64,
    connections: HashMap<u64, Connection>,
}

/// What ends a connection: its own thread or task sees the end of its stream.
type End = Box<dyn Fn(Shutdown) + Send>;

struct Connection {
    number: u64,
    port: Arc<Connections>,
    standing: Arc<ConnectionState>,
    peer: SocketAddr,
    end: End,
}

impl Debug for Connection {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Connection").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Whether a newcomer finds a place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Free,
    /// Others were told to end and have not yet.
    Soon,
    /// All have requests under way: why the newcomer is turned away.
    Full(String),
}

/// A port: its limits, and the pool whose connections it shares.
#[derive(Debug, Clone)]
pub(crate) struct Port {
    pool: Arc<Pool>,
    limits: Limits,
    connections: Arc<Connections>,
}

impl Pool {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, open: Mutex::default(), left: Condvar::new() }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, number: u64) {
        // Dropped after the lock is given back: its descriptor goes with it.
        let left = self.lock().connections.remove(&number);
        drop(left);
        self.left.notify_all();
    }
}

impl Port {
    pub(crate) fn new(pool: Arc<Pool>, limits: Limits, connections: Arc<Connections>) -> Self {
        Self { pool, limits, connections }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// Makes room for a newcomer, at the cost of a connection that has no request under way.
    pub(crate) fn make_room(&self) -> Admission {
        let open = self.pool.lock();
        let Some((crowd, limit)) = self.crowd(&open) else { return Admission::Free };
        if open.connections.values().filter(|each| each.standing.is_closed()).count() >= MAX_LEAVING {
            return Admission::Soon;
        }
        let Some(closed) = evict(crowd) else {
            return Admission::Full(format!(
                "the server has {limit} connections, which is its limit, all with requests under way"
            ));
        };
        let (port, peer) = (Arc::clone(&closed.port), closed.peer);
        (closed.end)(Shutdown::Both);
        drop(open);
        port.refused(Refusal::Evicted, peer, "it was idle, and another peer needs its place");
        Admission::Free
    }

    /// Returns the connections of which one must go before another comes, and how many there may be of them.
    fn crowd<'a>(&self, open: &'a Open) -> Option<(Vec<&'a Connection>, usize)> {
        let stays = |each: &&Connection| !each.standing.is_closed();
        let all: Vec<_> = open.connections.values().filter(stays).collect();
        let own: Vec<_> = all.iter().copied().filter(|each| self.has(each)).collect();
        match (own.len(), all.len()) {
            (own_count, _) if own_count >= self.limits.connections => Some((own, self.limits.connections)),
            (MIN_SEATS.., all_count) if all_count >= self.pool.limit => Some((all, self.pool.limit)),
            _ => None,
        }
    }

    fn has(&self, connection: &Connection) -> bool {
        Arc::ptr_eq(&connection.port, &self.connections)
    }

    /// Seats a connection, which `end` ends.
    pub(crate) fn seat(&self, peer: SocketAddr, end: impl Fn(Shutdown) + Send + 'static) -> Seat {
        let (standing, port) = (Arc::new(ConnectionState::new()), Arc::clone(&self.connections));
        let mut open = self.pool.lock();
        open.last += 1;
        let number = open.last;
        let connection =
            Connection { number, port, standing: Arc::clone(&standing), peer, end: Box::new(end) };
        open.connections.insert(number, connection);
        drop(open);
        let pool = Arc::clone(&self.pool);
        Seat { number, pool, standing, open: self.connections.opened(peer) }
    }

    /// Closes the connections of peers that have been silent too long.
    pub(crate) fn close_silent(&self) {
        let open = self.pool.lock();
        let mut closed = Vec::new();
        for each in open.connections.values().filter(|each| self.has(each)) {
            if let Some(silence) = each.standing.close_if_silent(&self.limits) {
                (each.end)(Shutdown::Both);
                closed.push((each.peer, silence));
            }
        }
        drop(open);
        for (peer, silence) in closed {
            match silence {
                Silence::Idle => {}
                Silence::Unidentified => self.connections.refused(Refusal::Silent, peer, SILENT),
                Silence::Unread => {
                    self.connections.refused(Refusal::Slow, peer, "it does not accept an answer")
                }
            }
        }
    }

    /// Ends reading, or all, of the port's connections.
    pub(crate) fn shutdown(&self, how: Shutdown) {
        let open = self.pool.lock();
        open.connections.values().filter(|each| self.has(each)).for_each(|each| (each.end)(how));
    }

    /// Ends the port's connections whose peers have not said who they are.
    pub(crate) fn end_unidentified(&self) {
        let open = self.pool.lock();
        let unidentified = |each: &&Connection| self.has(each) && !each.standing.is_identified();
        open.connections.values().filter(unidentified).for_each(|each| (each.end)(Shutdown::Both));
    }

    /// Waits until the port has no connection, at most so long.
    pub(crate) fn wait_until_empty(&self, timeout: Duration) {
        let has_some = |open: &mut Open| open.connections.values().any(|each| self.has(each));
        let waited = self.pool.left.wait_timeout_while(self.pool.lock(), timeout, has_some);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until a connection has ended, at most so long.
    pub(crate) fn wait_for_end(&self, timeout: Duration) {
        let waited = self.pool.left.wait_timeout(self.pool.lock(), timeout);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// The seat of a connection, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    number: u64,
    pool: Arc<Pool>,
    standing: Arc<ConnectionState>,
    open: OpenConnection,
}

impl Seat {
    pub(crate) fn peer(&self) -> SocketAddr {
        self.open.peer()
    }

    pub(crate) fn is_identified(&self) -> bool {
        self.standing.is_identified()
    }

    /// Counts the peer as refused.
    pub(crate) fn refused(&self, reason: Refusal, why: &str) {
        self.connections().refused(reason, self.peer(), why);
    }

    fn connections(&self) -> &Connections {
        self.open.connections()
    }

    /// The peer has identified itself, and was heard now.
    pub(crate) fn heard(&self) {
        self.standing.heard();
    }

    /// The system takes bytes for the peer again, or no more.
    pub(crate) fn stalled(&self, is_stalled: bool) {
        self.standing.stalled(is_stalled);
    }

    /// A request has come: the connection stays until what is returned is dropped. None if it has been closed.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<UnderWay> {
        self.standing.begin().then(|| UnderWay { seat: Arc::clone(self), is_answered: false })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.pool.leave(self.number);
    }
}

/// A request that is under way until this is dropped.
#[derive(Debug)]
pub(crate) struct UnderWay {
    seat: Arc<Seat>,
    is_answered: bool,
}

impl UnderWay {
    /// From now on the peer is to take the answer.
    pub(crate) fn answered(mut self) -> Self {
        self.seat.standing.answered();
        self.is_answered = true;
        self
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.seat.standing.end(self.is_answered);
    }
}

/// Closes the connection that gives way, if there is one without a request under way.
fn evict(crowd: Vec<&Connection>) -> Option<&Connection> {
    let crowded = crowd.len();
    let mut idle: Vec<(Instant, bool, &Connection)> = crowd
        .into_iter()
        .filter_map(|each| each.standing.idle_since().map(|(since, known)| (since, known, each)))
        .collect();
    let unidentified = idle.iter().filter(|(_, is_identified, _)| !is_identified).count();
    let unidentified_go = unidentified * UNIDENTIFIED_SHARE > crowded || unidentified == idle.len();
    // False sorts first: the kind that gives way, and within it the one that is idle longest.
    idle.sort_by_key(|(since, is_identified, each)| (*is_identified == unidentified_go, *since, each.number));
    // One that began a request a moment ago stays.
    idle.into_iter().map(|(_, _, each)| each).find(|each| each.standing.close_if_idle())
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    fn ports(all: usize, each: usize) -> [Port; 2] {
        let pool = Arc::new(Pool::new(all));
        let (handshake, idle) = (Duration::from_secs(5), Duration::from_secs(600));
        let limits = Limits { connections: each, handshake, idle, transfer: idle };
        let connections = Connections::of_ports(&Registry::new(), None, ["first", "second"]).unwrap();
        connections.map(|of| Port::new(Arc::clone(&pool), limits.clone(), of))
    }

    /// Takes a seat, and notes in `ended` when it gives way.
    fn taken(port: &Port, name: u16, ended: &Arc<Mutex<Vec<u16>>>) -> Arc<Seat> {
        let ended = Arc::clone(ended);
        let end = move |_| ended.lock().unwrap().push(name);
        Arc::new(port.seat(SocketAddr::from(([127, 0, 0, 1], name)), end))
    }

    fn ended_now(ended: &Arc<Mutex<Vec<u16>>>) -> Vec<u16> {
        std::mem::take(&mut *ended.lock().unwrap())
    }

    #[test]
    fn the_longest_idle_gives_way_and_none_with_a_request_under_way() {
        let ([port, _], ended) = (ports(100, 3), Arc::default());
        let seats = [1, 2, 3].map(|name| taken(&port, name, &ended));
        seats.iter().for_each(|seat| seat.heard());
        let (first, _second) = (seats[0].begin().unwrap(), seats[1].begin().unwrap());
        assert_eq!((port.make_room(), ended_now(&ended)), (Admission::Free, vec![3]));
        assert!(seats[2].begin().is_none(), "it has been closed");
        let third = taken(&port, 4, &ended);
        drop(first);
        let busy = third.begin();
        assert_eq!((port.make_room(), ended_now(&ended)), (Admission::Free, vec![1]));
        let fourth = taken(&port, 5, &ended);
        let _also_busy = fourth.begin();
        let full = "the server has 3 connections, which is its limit, all with requests under way";
        assert_eq!((port.make_room(), ended_now(&ended)), (Admission::Full(full.to_owned()), vec![]));
        drop(busy);
        assert_eq!((port.make_room(), ended_now(&ended)), (Admission::Free, vec![4]));
    }

    #[test]
    fn a_flood_of_unknown_peers_closes_none_that_is_known() {
        let ([port, _], ended) = (ports(100, 16), Arc::default());
        let known: Vec<_> = (0..14).map(|name| taken(&port, name, &ended)).collect();
        known.iter().for_each(|seat| seat.heard());
        let mut unknown: Vec<_> = (100..102).map(|name| taken(&port, name, &ended)).collect();
        for name in 102..200 {
            assert_eq!(port.make_room(), Admission::Free);
            // Two of sixteen may be unknown: then the longest idle goes, and after it the oldest of the unknown ones.
            unknown.push(taken(&port, name, &ended));
            unknown.retain(|seat| !ended.lock().unwrap().contains(&seat.peer().port()));
        }
        let gone = ended_now(&ended);
        assert_eq!(gone.iter().filter(|name| **name < 100).count(), 1, "{gone:?}");
        assert_eq!((gone.len(), gone[0]), (98, 0));
        assert!(gone[1..].is_sorted());
    }

    #[test]
    fn a_port_is_not_shut_by_another_one() {
        let ([first, second], ended) = (ports(20, 100), Arc::default());
        let mut seats = Vec::new();
        for name in 0..20 {
            seats.push(taken(&first, name, &ended));
        }
        let under_way: Vec<_> = seats.iter().map(Seat::begin).collect();
        assert!(matches!(first.make_room(), Admission::Full(_)));
        for name in 0..MIN_SEATS as u16 {
            assert_eq!(second.make_room(), Admission::Free);
            seats.push(taken(&second, 100 + name, &ended));
        }
        assert_eq!((second.make_room(), ended_now(&ended)), (Admission::Free, vec![100]));
        drop(under_way);
        // All are idle now, and those that are known stay as long as they can.
        assert_eq!((first.make_room(), ended_now(&ended)), (Admission::Free, vec![101]));
    }

    #[test]
    fn connections_that_were_told_to_end_are_waited_for() {
        let ([port, _], ended) = (ports(1000, 1), Arc::default());
        let mut seats = vec![taken(&port, 0, &ended)];
        for name in 1..=MAX_LEAVING as u16 {
            assert_eq!(port.make_room(), Admission::Free);
            seats.push(taken(&port, name, &ended));
        }
        assert_eq!(port.make_room(), Admission::Soon);
        drop(seats.remove(0));
        assert_eq!(port.make_room(), Admission::Free);
    }

    #[test]
    fn silent_peers_are_closed() {
        let ([port, _], ended) = (ports(10, 10), Arc::default());
        let mut port = port;
        (port.limits.handshake, port.limits.idle) = (Duration::ZERO, Duration::from_secs(9));
        let seats = [1, 2, 3].map(|name| taken(&port, name, &ended));
        seats[1].heard();
        let under_way = seats[2].begin();
        port.close_silent();
        assert_eq!(ended_now(&ended), [1]);
        (port.limits.idle, port.limits.transfer) = (Duration::ZERO, Duration::from_secs(9));
        port.close_silent();
        assert_eq!(ended_now(&ended), [2], "a request may take as long as it needs");
        let _answered = under_way.map(super::super::pool::UnderWay::answered);
        port.limits.transfer = Duration::ZERO;
        port.close_silent();
        assert_eq!(ended_now(&ended), [3], "its answer is not taken");
        assert_eq!(
            port.connections().refusals().map(|(_, count)| count).collect::<Vec<_>>(),
            [0, 0, 1, 0, 0, 0, 1]
        );
    }
}
