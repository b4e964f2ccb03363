//! Following another server: its tables, and its changes as they come, so that this one can take its place.
//!
//! A thread copies the checkpoint of the other server where that is needed, makes its changes one after another, and tells
//! it which are on the disk here. It begins anew whenever the connection ends.

mod copying;
mod promotion;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use recstore::{Error, Result, Shard};

use crate::client::connection::{Connection, Failure};
use crate::client::{RemoteConfig, new_client};
use crate::durable::log::stream::{self, Coming};
use crate::durable::state_directory::FollowedServer;
use crate::handler::{Handler, not_following};
use crate::wire::channel::Channel;
use crate::wire::codec::{ClientId, Follow, FrameError, Managed, Management};

pub use promotion::{Promoted, promote};

/// How often a thread looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// How long the other server may take for an answer, or be silent: it says how far it is much more often.
const SILENCE: Duration = Duration::from_secs(3);
/// How long all of a change, or of a file, may take once it has begun to come.
const TRANSFER: Duration = Duration::from_secs(60);
/// How long the other server may take to greet when this one is promoted.
const HAND_OVER: Duration = Duration::from_secs(1);
/// How long the last changes of a server that has handed over may take.
const LAST_CHANGES: Duration = Duration::from_secs(10);
/// What comes no more for so long does not come: the other server is dead.
const DRAINED: Duration = Duration::from_millis(200);
/// How long to wait before another attempt.
const PAUSE: Duration = Duration::from_millis(200);

/// A server that follows another one.
#[derive(Debug)]
pub(crate) struct Following {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    promoting: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    handler: Arc<Handler>,
    shard: Shard,
    is_synchronous: bool,
    remote: RemoteConfig,
    client: ClientId,
    /// No changes are taken any more.
    is_over: AtomicBool,
    /// The server stops.
    is_stopping: AtomicBool,
    /// When something came last.
    heard: Mutex<Instant>,
}

impl Following {
    /// Begins to follow.
    pub(crate) fn start(
        handler: &Arc<Handler>,
        shard: Shard,
        followed: &FollowedServer,
        token: Option<String>,
    ) -> Self {
        let mut remote = RemoteConfig::new(vec![followed.address.clone()]);
        (remote.token, remote.tls, remote.connect_timeout) = (token, followed.tls.clone(), SILENCE);
        let shared = Arc::new(Shared {
            handler: Arc::clone(handler),
            shard,
            is_synchronous: followed.synchronous,
            remote,
            client: new_client(),
            is_over: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            heard: Mutex::new(Instant::now()),
        });
        let following = Self { shared, threads: Mutex::default(), promoting: Mutex::default() };
        following.spawn("recstore-follow", Shared::follow_on);
        following
    }

    fn spawn(&self, name: &str, work: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || work(&shared));
        match thread {
            Ok(thread) => self.lock().push(thread),
            Err(error) => tracing::error!(%error, name, "no thread"),
        }
    }

    /// Makes this server lead its shard: the other one hands over if it lives, and else what came from it counts.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: this server follows none any more, or has none of its tables yet.
    pub(crate) fn promote(&self) -> Result<Managed> {
        let shared = &*self.shared;
        let _one_at_a_time = self.promoting.lock().unwrap_or_else(PoisonError::into_inner);
        let standing = shared.handler.standing();
        if standing.leads() {
            return Err(not_following(&standing));
        }
        shared.wait_for_tables()?;
        // The other server closes first, so that all it acknowledged comes here before this one leads.
        match shared.stand_down(standing.epoch + 1) {
            Some(last) => shared.wait_for(last)?,
            None => shared.wait_for_silence(),
        }
        shared.is_over.store(true, Ordering::Relaxed);
        // No change of the old leader may come behind the first one of the new.
        self.join();
        let (epoch, last) = shared.handler.lead()?;
        self.spawn("recstore-demote", move |shared| shared.demote(epoch));
        Ok(Managed::Promoted { epoch, last })
    }

    /// Ends all threads.
    pub(crate) fn stop(&self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.is_stopping.store(true, Ordering::Relaxed);
        self.join();
    }

    fn join(&self) {
        let threads = std::mem::take(&mut *self.lock());
        threads.into_iter().for_each(|thread| _ = thread.join());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn connect(&self, deadline: Instant) -> std::result::Result<Connection, Failure> {
        Connection::open(&self.remote.servers[0], self.shard, self.client, &self.remote, deadline)
    }

    /// Follows until it is over, and tells of what stands in the way when that changes.
    fn follow_on(&self) {
        let mut told = String::new();
        while !self.is_over() {
            let ended = self.follow_once();
            self.handler.progress.is_connected.store(false, Ordering::Relaxed);
            let why = ended.map_or_else(|why| why, |()| "the connection ended".to_owned());
            if !self.is_over() && why != told {
                tracing::warn!(shard = self.shard.number, leader = %self.remote.servers[0], why, "not following");
                told = why;
            }
            rest(PAUSE, &self.is_over);
        }
    }

    /// Follows until the connection ends.
    fn follow_once(&self) -> std::result::Result<(), String> {
        let deadline = Instant::now() + SILENCE;
        let mut connection = self.connect(deadline).map_err(Failure::into_message)?;
        let standing = connection.standing().clone();
        let handler = &*self.handler;
        let known = handler.standing().epoch;
        if !standing.leads() || standing.epoch < known {
            return Err(format!("{standing}, and epoch {known} is known here"));
        }
        let said = |error: Error| error.to_string();
        handler
            .begin_following(connection.incarnation(), connection.facts(), standing.epoch)
            .map_err(said)?;
        let position = handler.position().map_err(said)?;
        let follow = Follow { position, synchronous: self.is_synchronous };
        let answer = connection.manage(&Management::Follow(follow), deadline)?;
        let Managed::Following { runs, files } = answer else {
            return Err(format!("an answer of another form, {}", answer.form()));
        };
        let mut stream = connection.into_stream();
        if let Some(files) = files {
            self.copy(&mut stream, &files)?;
        }
        let (state, journal) = handler.kept_with_log("follow").map_err(said)?;
        // Only with the tables here: runs without them would promise changes that this server lacks.
        state.set_runs(&runs).map_err(said)?;
        handler.progress.is_connected.store(true, Ordering::Relaxed);
        tracing::info!(shard = self.shard.number, leader = %self.remote.servers[0], last = journal.last(), "following");
        let is_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            // A thread of its own, as it waits for the disk while changes come.
            let confirming = scope.spawn(|| {
                let ended = self.confirm(&is_ended);
                is_ended.store(true, Ordering::Relaxed);
                ended
            });
            let ended = self.take_changes(&mut stream, &is_ended);
            is_ended.store(true, Ordering::Relaxed);
            let confirmed = confirming.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()));
            ended.and(confirmed)
        })
    }

    /// Makes changes as they come.
    fn take_changes(&self, stream: &mut Channel, is_ended: &AtomicBool) -> std::result::Result<(), String> {
        self.hear();
        while !self.is_over() && !is_ended.load(Ordering::Relaxed) {
            match stream::read(stream.waiting(LOOK, TRANSFER)) {
                Ok(None) => return Ok(()),
                Ok(Some(Coming::Tail(number))) => {
                    self.handler.pass_to(number).map_err(|error| error.to_string())?;
                    self.note_last(number);
                }
                Ok(Some(Coming::Change(logged))) => {
                    self.handler.follow(&logged).map_err(|error| error.to_string())?;
                    self.note_last(logged.number);
                }
                Err(FrameError::Io(error)) if error.kind() == std::io::ErrorKind::TimedOut => {
                    let silence = self.heard().elapsed();
                    if silence >= SILENCE {
                        return Err(format!("nothing came for {:.1} s", silence.as_secs_f64()));
                    }
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    fn note_last(&self, number: u64) {
        self.hear();
        self.handler.progress.leader_last.fetch_max(number, Ordering::Relaxed);
    }

    fn hear(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn heard(&self) -> Instant {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the other server, over a connection of its own, which changes are on the disk here.
    fn confirm(&self, is_ended: &AtomicBool) -> std::result::Result<(), String> {
        let (_, journal) = self.handler.kept_with_log("confirm").map_err(|error| error.to_string())?;
        let mut connection = self.connect(Instant::now() + SILENCE).map_err(Failure::into_message)?;
        let mut confirmed = None;
        while !self.is_over() && !is_ended.load(Ordering::Relaxed) {
            let number = journal.made.wait_beyond(confirmed.unwrap_or(0), LOOK);
            if confirmed == Some(number) {
                continue;
            }
            // Confirmed means on this disk: the leader's clients are answered by it.
            journal.wait(number).map_err(|error| error.to_string())?;
            connection.manage(&Management::Confirm { number }, Instant::now() + SILENCE)?;
            confirmed = Some(number);
        }
        Ok(())
    }

    /// Tells the other server that this one leads from `epoch` on, and returns the last change that it made; nothing if it
    /// does not answer.
    fn stand_down(&self, epoch: u64) -> Option<u64> {
        let mut connection = self.connect(Instant::now() + HAND_OVER).ok()?;
        // One that greets lives, and its disk may take a while.
        match connection.manage(&Management::StandDown { epoch }, Instant::now() + LAST_CHANGES) {
            Ok(Managed::StoodDown { last }) => Some(last),
            _ => None,
        }
    }

    /// Waits for the tables of the other server, which a server that has just begun to follow does not have.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: they do not come.
    fn wait_for_tables(&self) -> Result<()> {
        let (state, _) = self.handler.kept_with_log("promote")?;
        let until = Instant::now() + SILENCE;
        while state.awaits_leader() {
            if Instant::now() >= until {
                let message = "it has not copied the tables of the server that it follows yet".to_owned();
                return Err(Error::Unsupported { operation: "promote", message });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits for the last changes of a server that has handed over.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: they still come.
    fn wait_for(&self, last: u64) -> Result<()> {
        let until = Instant::now() + LAST_CHANGES;
        let has_all = || self.handler.position().is_ok_and(|position| position.last >= last);
        // What a connection that ended has not brought does not come any more.
        while !has_all() && self.handler.progress.is_connected.load(Ordering::Relaxed) {
            if Instant::now() >= until {
                let message =
                    format!("change {last}, the last one of the other server, still comes: promote again");
                return Err(Error::Unsupported { operation: "promote", message });
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until what a dead server had sent is taken.
    fn wait_for_silence(&self) {
        while self.handler.progress.is_connected.load(Ordering::Relaxed) && self.heard().elapsed() < DRAINED {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Tells the server that was followed, as soon as it answers, that it leads no more.
    fn demote(&self, epoch: u64) {
        while !self.is_stopping.load(Ordering::Relaxed) && self.stand_down(epoch).is_none() {
            rest(PAUSE * 5, &self.is_stopping);
        }
    }
}

/// Waits for a while, or until it is over.
fn rest(time: Duration, is_over: &AtomicBool) {
    let until = Instant::now() + time;
    while !is_over.load(Ordering::Relaxed) && Instant::now() < until {
        thread::sleep(LOOK);
    }
}
