//! A client that is one of several workers.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use recstore::{Error, Result, fork};

use super::RemoteStore;
use super::call::Call;
use super::changes::change;
use super::session::{Outcome, Session};
use crate::wire::codec::{Managed, Management, WorkerState};

/// What errors of calls about workers name.
const OPERATION: &str = "workers";

/// Says once that a worker lives, after a pause. False when the session is gone, or another client is that worker.
fn beat(session: &Weak<Session>, worker: u32, every: Duration, shards: usize) -> bool {
    thread::sleep(every);
    // No fork while a connection is in use.
    let _gate = fork::enter();
    let Some(session) = session.upgrade() else { return false };
    let calls: Vec<_> = (0..shards).map(|shard| Call::manage(shard, Management::Beat { worker })).collect();
    // Who does not answer is down; calls of the worker itself say so.
    let outcomes = session.call_all(OPERATION, &calls, every);
    !outcomes.iter().any(|outcome| matches!(outcome, Outcome::Refused(Error::Workers { .. })))
}

impl RemoteStore {
    /// Becomes a worker on all servers, and says at intervals that it lives as long as there is the session. Returns how
    /// long servers may let it wait for others.
    ///
    /// # Errors
    /// The first server's; a thread that cannot be started.
    pub(super) fn join(&self, session: &Arc<Session>, worker: u32) -> Result<Duration> {
        let mut longest = Duration::ZERO;
        for (shard, answer) in self.ask_workers(session, Management::Join { worker })?.into_iter().enumerate()
        {
            let Managed::Joined { patience_ms } = answer else {
                return Err(unexpected(session, shard, &answer));
            };
            longest = longest.max(Duration::from_millis(patience_ms));
        }
        let (living, every, shards) = (Arc::downgrade(session), self.config.heartbeat, self.shards().len());
        let beats = move || while beat(&living, worker, every, shards) {};
        let started = thread::Builder::new().name("recstore-heartbeat".to_owned()).spawn(beats);
        let failed = |error| session.unavailable(OPERATION, 0, format!("no thread for heartbeats: {error}"));
        started.map(|_| longest).map_err(failed)
    }

    /// Waits until all workers have come to the barrier `name`.
    ///
    /// # Errors
    /// [`Error::Workers`] names those who have not come when `patience` is over, or that are dead: the worker may come
    /// again then; [`Error::Unavailable`].
    pub fn barrier(&self, name: &str, patience: Duration) -> Result<()> {
        let patience_ms = patience.as_millis() as u64;
        let request = Management::Barrier { name: name.to_owned(), patience_ms };
        self.with_session(|session| {
            change(session, "barrier", vec![Call::manage(0, request)], self.config.timeout + patience)
        })?;
        Ok(())
    }

    /// Says that this worker has finished: the others no longer wait for it. Nothing happens if it is none.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn leave(&self) -> Result<()> {
        self.with_session(|session| self.ask_workers(session, Management::Leave {}).map(drop))
    }

    /// Returns what each server knows of the workers, and the most steps that one was ahead of another there.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn workers(&self) -> Result<Vec<(Vec<WorkerState>, u64)>> {
        let known = |session: &Session, (shard, answer)| match answer {
            Managed::Workers { workers, most_ahead } => Ok((workers, most_ahead)),
            other => Err(unexpected(session, shard, &other)),
        };
        self.with_session(|session| {
            let answers = self.ask_workers(session, Management::Workers {})?;
            answers.into_iter().enumerate().map(|answer| known(session, answer)).collect()
        })
    }

    /// Asks all servers the same.
    fn ask_workers(&self, session: &Session, request: Management) -> Result<Vec<Managed>> {
        let calls = self.shards().map(|shard| Call::manage(shard, request.clone())).collect();
        let answers = self.ask_all(session, OPERATION, calls, self.patience())?;
        Ok(answers.into_iter().map(|(answer, _)| answer).collect())
    }
}

fn unexpected(session: &Session, shard: usize, answer: &Managed) -> Error {
    session.unavailable(OPERATION, shard, format!("an answer that does not fit, {}", answer.form()))
}
