//! What one connection is doing: whether its peer has identified itself, and whether it has requests under way.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The limits of a port.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) connections: usize,
    /// How long a peer may take to identify itself.
    pub(crate) handshake: Duration,
    /// How long a connection may have nothing to ask.
    pub(crate) idle: Duration,
    /// How long a request may take to come, and an answer to be accepted.
    pub(crate) transfer: Duration,
}

/// What a connection is doing.
#[derive(Debug)]
pub(super) struct ConnectionState(Mutex<Doing>);

#[derive(Debug)]
struct Doing {
    is_identified: bool,
    is_closed: bool,
    under_way: usize,
    /// Answers that the peer is to take, and since when it has taken none of them.
    answers: usize,
    answers_since: Instant,
    /// Since when the system takes no more bytes for the peer.
    stalled_since: Option<Instant>,
    /// When the peer was last heard, or its last request ended.
    since: Instant,
}

impl ConnectionState {
    pub(super) fn new() -> Self {
        let (is_identified, is_closed, under_way, answers, now) = (false, false, 0, 0, Instant::now());
        let (answers_since, stalled_since, since) = (now, None, now);
        Self(Mutex::new(Doing {
            is_identified,
            is_closed,
            under_way,
            answers,
            answers_since,
            stalled_since,
            since,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Doing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    pub(super) fn is_identified(&self) -> bool {
        self.lock().is_identified
    }

    /// Returns since when it is idle, and whether its peer has identified itself; none with a request under way.
    pub(super) fn idle_since(&self) -> Option<(Instant, bool)> {
        let doing = self.lock();
        (doing.under_way == 0 && !doing.is_closed).then_some((doing.since, doing.is_identified))
    }

    /// The peer has identified itself, and was heard now.
    pub(super) fn heard(&self) {
        let mut doing = self.lock();
        (doing.is_identified, doing.since) = (true, Instant::now());
    }

    /// The system takes bytes for the peer again, or no more.
    pub(super) fn stalled(&self, is_stalled: bool) {
        let mut doing = self.lock();
        // A stall that goes on keeps its beginning.
        doing.stalled_since = is_stalled.then(|| doing.stalled_since.unwrap_or_else(Instant::now));
    }

    /// A request has come. Returns whether the connection is open.
    pub(super) fn begin(&self) -> bool {
        // Under one lock with `close_if_idle`: a connection gives way or begins a request, never both.
        let mut doing = self.lock();
        if !doing.is_closed {
            doing.is_identified = true;
            doing.under_way += 1;
        }
        !doing.is_closed
    }

    /// From now on the peer is to take an answer.
    pub(super) fn answered(&self) {
        let mut doing = self.lock();
        // Only with the first: a peer that takes none must not get its time anew with each further answer.
        if doing.answers == 0 {
            doing.answers_since = Instant::now();
        }
        doing.answers += 1;
    }

    /// A request has ended, and its answer was taken if it was answered.
    pub(super) fn end(&self, is_answered: bool) {
        let mut doing = self.lock();
        doing.under_way -= 1;
        doing.since = Instant::now();
        if is_answered {
            doing.answers -= 1;
            doing.answers_since = doing.since;
        }
    }

    /// Closes it if it has no request under way, and returns whether it did.
    pub(super) fn close_if_idle(&self) -> bool {
        let mut doing = self.lock();
        let closes = doing.under_way == 0 && !doing.is_closed;
        doing.is_closed |= closes;
        closes
    }

    /// Closes it if its peer has been silent for longer than it may, and returns in which way.
    pub(super) fn close_if_silent(&self, limits: &Limits) -> Option<Silence> {
        let mut doing = self.lock();
        let silence = doing.silence(limits).filter(|_| !doing.is_closed);
        doing.is_closed |= silence.is_some();
        silence
    }
}

/// In which way a peer was silent for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    /// It did not say who it is.
    Unidentified,
    /// It had nothing to ask.
    Idle,
    /// It did not accept an answer.
    Unread,
}

impl Doing {
    fn silence(&self, limits: &Limits) -> Option<Silence> {
        let unread = (self.answers > 0).then_some(self.answers_since).or(self.stalled_since);
        if unread.is_some_and(|since| since.elapsed() >= limits.transfer) {
            return Some(Silence::Unread);
        }
        let (limit, silence) = match self.is_identified {
            true => (limits.idle, Silence::Idle),
            false => (limits.handshake, Silence::Unidentified),
        };
        (self.under_way == 0 && self.since.elapsed() >= limit).then_some(silence)
    }
}
