//! The servers that follow this one: how far each is, and for whom changes wait.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::wire::codec::ClientId;

/// How long changes wait for a synchronous follower that does not answer before it is left behind.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Changes wait for a synchronous follower once no more than so many are on the way to it.
const MAX_ON_THE_WAY: u64 = 32;

/// The servers that follow this one.
#[derive(Debug, Default)]
pub(crate) struct Followers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    connected: u64,
    followers: BTreeMap<ClientId, Follower>,
}

#[derive(Debug)]
struct Follower {
    connection: u64,
    is_synchronous: bool,
    /// Whether changes wait for it.
    is_in_step: bool,
    /// The last change that was sent to it.
    sent: u64,
    /// The last change that is on its disk.
    confirmed: u64,
}

/// What is known of a follower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FollowerState {
    pub(crate) follower: ClientId,
    pub(crate) is_in_step: bool,
    pub(crate) confirmed: u64,
}

/// A follower's place among the others, as long as its stream lasts.
pub(crate) struct FollowerSlot<'a> {
    followers: &'a Followers,
    follower: ClientId,
    connection: u64,
}

impl Drop for FollowerSlot<'_> {
    fn drop(&mut self) {
        let mut state = self.followers.lock();
        // A follower that came back has a new connection, whose place the end of the old one must leave.
        let is_own = |other: &Follower| other.connection == self.connection;
        if state.followers.get(&self.follower).is_some_and(is_own)
            && let Some(gone) = state.followers.remove(&self.follower)
            && gone.is_in_step
        {
            tell_of(self.follower, gone.confirmed, "its connection ended: changes wait for it no more");
        }
        drop(state);
        self.followers.changed.notify_all();
    }
}

impl FollowerSlot<'_> {
    /// Notes the last change that was sent.
    pub(crate) fn sent(&self, number: u64) {
        if let Some(follower) = self.followers.lock().followers.get_mut(&self.follower) {
            follower.sent = number;
        }
    }

    /// Whether the stream is to end, because rows were loaded or another stream took its place.
    pub(crate) fn is_over(&self) -> bool {
        let state = self.followers.lock();
        state.followers.get(&self.follower).is_none_or(|other| other.connection != self.connection)
    }
}

impl Followers {
    /// Gives a follower a place; from now on the log keeps what is behind change `last`.
    pub(crate) fn enter(&self, follower: ClientId, last: u64, is_synchronous: bool) -> FollowerSlot<'_> {
        let mut state = self.lock();
        state.connected += 1;
        let connection = state.connected;
        // Out of step at first: changes must not wait while it still takes in what it lacks.
        let new = Follower { connection, is_synchronous, is_in_step: false, sent: last, confirmed: 0 };
        state.followers.insert(follower, new);
        FollowerSlot { followers: self, follower, connection }
    }

    /// Notes that a follower has all changes up to `number` on its disk; `last` is the last one there is.
    pub(crate) fn confirm(&self, follower: ClientId, number: u64, last: u64) {
        let mut state = self.lock();
        if let Some(follower) = state.followers.get_mut(&follower) {
            // One cannot have what was not made.
            let number = number.min(last);
            follower.confirmed = follower.confirmed.max(number);
            follower.is_in_step |= follower.is_synchronous && number + MAX_ON_THE_WAY >= last;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until change `number` is on the disks of all for whom changes wait.
    pub(crate) fn wait(&self, number: u64) {
        let until = Instant::now() + TIMEOUT;
        let mut state = self.lock();
        loop {
            let is_late = |follower: &Follower| follower.is_in_step && follower.confirmed < number;
            if !state.followers.values().any(is_late) {
                return;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                for (follower, known) in state.followers.iter_mut().filter(|(_, known)| is_late(known)) {
                    known.is_in_step = false;
                    tell_of(*follower, known.confirmed, "left behind: changes wait for it no more");
                }
                return;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the last change that all followers were sent; none without followers.
    pub(crate) fn sent_to_all(&self) -> Option<u64> {
        self.lock().followers.values().map(|follower| follower.sent).min()
    }

    /// Ends all streams: what they have sent is part of the tables no more.
    pub(crate) fn end(&self) {
        self.lock().followers.clear();
        self.changed.notify_all();
    }

    pub(crate) fn states(&self) -> Vec<FollowerState> {
        let state = |(&follower, known): (&ClientId, &Follower)| FollowerState {
            follower,
            is_in_step: known.is_in_step,
            confirmed: known.confirmed,
        };
        self.lock().followers.iter().map(state).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells that a follower, which has all changes up to `confirmed`, may lack those that are acknowledged from now on.
fn tell_of(follower: ClientId, confirmed: u64, what: &'static str) {
    let follower = format!("{:032x}", follower.0);
    tracing::warn!(follower, confirmed, what, "synchronous follower");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn changes_wait_for_synchronous_followers_that_have_caught_up() {
        let followers = Followers::default();
        let asynchronous = followers.enter(ClientId(1), 0, false);
        let place = followers.enter(ClientId(2), 0, true);
        followers.wait(500);
        followers.confirm(ClientId(1), 500, 500);
        followers.confirm(ClientId(2), 100, 500);
        followers.wait(500);
        followers.confirm(ClientId(2), 490, 500);
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                followers.confirm(ClientId(2), 500, 500);
            });
            followers.wait(500);
        });
        assert!(began.elapsed() >= Duration::from_millis(50));
        // One that went away is waited for no more.
        thread::scope(|scope| {
            scope.spawn(move || drop(place));
            followers.wait(501);
        });
        assert!(began.elapsed() < TIMEOUT);
        asynchronous.sent(77);
        assert_eq!(followers.sent_to_all(), Some(77));
        assert!(!asynchronous.is_over());
        followers.end();
        assert!(asynchronous.is_over());
    }

    #[test]
    fn a_new_stream_takes_the_place_of_the_one_before() {
        let followers = Followers::default();
        let before = followers.enter(ClientId(1), 5, false);
        let now = followers.enter(ClientId(1), 9, false);
        assert!(before.is_over() && !now.is_over());
        drop(before);
        assert_eq!(followers.sent_to_all(), Some(9));
        drop(now);
        assert_eq!(followers.sent_to_all(), None);
    }
}
