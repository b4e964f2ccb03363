//! Whether a server leads its shard, and what it does while it does not.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{MutexGuard, PoisonError};

use recstore::{Error, Result};

use super::Handler;
use crate::durable::followers::{FollowerSlot, FollowerState};
use crate::durable::journal::Journal;
use crate::durable::log::{Logged, Reader};
use crate::durable::state_directory::{FollowedServer, StateDirectory};
use crate::durable::unusable;
use crate::wire::codec::{ClientId, Follow, Management, Request};
use crate::wire::replica_role::{Position, ReplicaRole, Role, Run};
use crate::wire::store_metadata::StoreMetadata;

/// An epoch is a count of promotions, so a server hears of one that is ahead by those that it has missed.
const MAX_MISSED_PROMOTIONS: u64 = 1 << 16;

/// The highest epoch that a server takes from one that it follows, which may have missed any number.
const MAX_EPOCH: u64 = 1 << 53;

/// How far a server that follows another one is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Whether changes come.
    pub(crate) is_connected: AtomicBool,
    /// The last change of the other one, as far as it has said.
    pub(crate) leader_last: AtomicU64,
}

/// What a follower is sent.
pub(crate) struct Stream<'a> {
    pub(crate) place: FollowerSlot<'a>,
    pub(crate) runs: Vec<Run>,
    /// The files that it copies first.
    pub(crate) files: Option<Vec<(String, File)>>,
    pub(crate) reader: Reader,
}

impl Handler {
    /// Takes the standing that the directory tells, or that of a server that follows.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: the directory is that of a follower, or of a server that was demoted, and it is not asked to
    /// follow; or it is, and keeps no log.
    pub(super) fn take_standing(
        &mut self,
        state: &StateDirectory,
        follows: Option<&FollowedServer>,
    ) -> Result<()> {
        let before = state.standing();
        let role = match (follows, &before.role) {
            (Some(followed), _) => Role::Follower { leader: followed.address.clone() },
            (None, Role::Leader) => Role::Leader,
            (None, Role::Follower { leader }) => {
                let message = format!(
                    "it is a copy of the shard at {leader}: serve it with --follow {leader}, and `recstore promote` makes it lead"
                );
                return Err(unusable(state.path(), message));
            }
            (None, Role::Demoted) => return Err(unusable(state.path(), before)),
        };
        let standing = ReplicaRole { role, ..before };
        match (&self.journal, standing.leads()) {
            (Some(journal), true) => state.begin_run(journal.last() + 1, false)?,
            (Some(journal), false) => _ = journal.close(&standing.to_string())?,
            (None, true) => {}
            (None, false) => return Err(unusable(state.path(), WITHOUT_LOG)),
        }
        state.set_standing(&standing)?;
        self.standing = standing.into();
        Ok(())
    }

    /// Returns what the server is to its shard.
    pub(crate) fn standing(&self) -> ReplicaRole {
        self.lock_standing().clone()
    }

    pub(crate) fn leads(&self) -> bool {
        self.lock_standing().leads()
    }

    /// Checks that the server answers what clients ask.
    pub(super) fn check_leads(&self, request: &Request<'_>) -> Result<()> {
        let is_of_servers =
            matches!(request, Request::Manage(Management::Confirm { .. } | Management::StandDown { .. }));
        let standing = self.lock_standing();
        match standing.leads() || is_of_servers {
            true => Ok(()),
            false => {
                Err(Error::Unsupported { operation: "a call on a server", message: standing.to_string() })
            }
        }
    }

    /// Answers clients no more: another server leads since `epoch`. Returns the number of the last change.
    pub(super) fn stand_down(&self, epoch: u64) -> Result<u64> {
        let (state, journal) = self.kept_with_log("stand_down")?;
        let mut standing = self.lock_standing();
        check_epoch(epoch, &standing)?;
        let role = match &standing.role {
            Role::Leader => Role::Demoted,
            role => role.clone(),
        };
        let demoted = ReplicaRole { role, epoch };
        // On the disk before the log closes: a crash in between must not leave a server that leads again.
        state.set_standing(&demoted)?;
        let last = journal.close(&demoted.to_string())?;
        tracing::warn!(shard = self.shard.number, epoch, last, "demoted: another server leads the shard");
        *standing = demoted;
        Ok(last)
    }

    /// Answers clients from now on, in a new epoch, which is returned with the number of the last change.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a server that follows none.
    pub(crate) fn lead(&self) -> Result<(u64, u64)> {
        let (state, journal) = self.kept_with_log("promote")?;
        let mut standing = self.lock_standing();
        let Role::Follower { .. } = standing.role else {
            return Err(not_following(&standing));
        };
        let last = journal.last();
        journal.wait(last)?;
        let beyond = || Error::Unsupported {
            operation: "promote",
            message: format!("no epoch follows that of this server, {}", standing.epoch),
        };
        let leading =
            ReplicaRole { role: Role::Leader, epoch: standing.epoch.checked_add(1).ok_or_else(beyond)? };
        self.take_over_saves(state)?;
        state.begin_run(last + 1, false)?;
        state.set_standing(&leading)?;
        // Clients repeat changes that they sent to the old leader: those in its log are answered and not made
        // again.
        for (client, made) in journal.made() {
            self.clients.remember(client, made.sequence, made.outcome);
        }
        self.workers.hear_all();
        // Last: the epoch, the run and the last changes are noted before a client can change anything.
        journal.open();
        tracing::info!(shard = self.shard.number, epoch = leading.epoch, last, "promoted");
        let epoch = leading.epoch;
        *standing = leading;
        Ok((epoch, last))
    }

    /// Notes that a follower has all changes up to a number.
    pub(super) fn confirm(&self, follower: ClientId, number: u64) -> Result<()> {
        let (_, journal) = self.kept_with_log("confirm")?;
        journal.followers.confirm(follower, number, journal.last());
        Ok(())
    }

    /// Returns what a follower is sent from now on.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a log; [`Error::Checkpoint`] names the file that cannot be read.
    pub(crate) fn stream_to(&self, follower: ClientId, follow: &Follow) -> Result<Stream<'_>> {
        let (state, journal) = self.kept_with_log("follow")?;
        let last = follow.position.last;
        // Before anything is read, so that no checkpoint lets it go.
        let place = journal.followers.enter(follower, 0, follow.synchronous);
        let runs = state.runs();
        let known = match follow.position.is_within(&runs) && last <= journal.last() {
            true => journal.reader(last)?,
            false => None,
        };
        if let Some(reader) = known {
            place.sent(last);
            return Ok(Stream { place, runs, files: None, reader });
        }
        let (last, files) = match journal.checkpoint_files()? {
            // The log has everything, but this follower has something else besides.
            (_, files) if files.is_empty() => {
                journal.checkpoint(&*self.store, &self.workers)?;
                journal.checkpoint_files()?
            }
            found => found,
        };
        let missing = || Error::Unsupported {
            operation: "follow",
            message: format!("the log behind the checkpoint's change {last} is not there"),
        };
        let reader = journal.reader(last)?.ok_or_else(missing)?;
        place.sent(last);
        Ok(Stream { place, runs, files: Some(files), reader })
    }

    /// Returns how far this server is as one that follows.
    pub(crate) fn position(&self) -> Result<Position> {
        let (state, journal) = self.kept_with_log("follow")?;
        Ok(Position::behind(&state.runs(), journal.last()))
    }

    /// Checks that the tables here may be replaced by those of another server, and takes over what tells it from others.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: they are those of another store.
    pub(crate) fn begin_following(
        &self,
        incarnation: u64,
        facts: Option<&StoreMetadata>,
        epoch: u64,
    ) -> Result<()> {
        let (state, journal) = self.kept_with_log("follow")?;
        let own = self.facts();
        let is_empty = journal.last() == 0 && self.store.table_names()?.is_empty();
        if !is_empty && own.as_ref().map(|own| &own.store) != facts.map(|facts| &facts.store) {
            let shown = |facts: Option<&StoreMetadata>| {
                facts.map_or("no store yet".to_owned(), StoreMetadata::to_string)
            };
            let message = format!(
                "{} has rows of {}, and the server to follow those of {}: an empty directory can follow it",
                state.path().display(),
                shown(own.as_ref()),
                shown(facts)
            );
            return Err(Error::Unsupported { operation: "follow", message });
        }
        if let Some(facts) = facts {
            self.agree(facts, true)?;
        }
        if self.incarnation.swap(incarnation, Ordering::Relaxed) != incarnation {
            Journal::set_incarnation(state.directory(), incarnation)?;
        }
        let mut standing = self.lock_standing();
        if epoch > MAX_EPOCH {
            let message = format!("the server to follow says epoch {epoch}, expected at most {MAX_EPOCH}");
            return Err(Error::Unsupported { operation: "follow", message });
        }
        if epoch > standing.epoch {
            let changed = ReplicaRole { epoch, ..standing.clone() };
            state.set_standing(&changed)?;
            *standing = changed;
        }
        Ok(())
    }

    /// Makes a change of the server that this one follows.
    pub(crate) fn follow(&self, logged: &Logged) -> Result<()> {
        let (_, journal) = self.kept_with_log("follow")?;
        journal.follow(logged, |request| self.carry_out(logged.client, request))
    }

    /// Notes that all changes up to a number of the server that this one follows have come.
    pub(crate) fn pass_to(&self, number: u64) -> Result<()> {
        self.kept_with_log("follow")?.1.pass_to(number)
    }

    /// Puts the copy that was made in the place of all tables here.
    pub(crate) fn take_copy(&self) -> Result<()> {
        let (state, journal) = self.kept_with_log("follow")?;
        journal.restart(&*self.store, &self.workers, || state.take_copy())?;
        self.take_copied_saves(state)
    }

    /// Returns what is known of the servers that follow this one, and the number of the last change that was acknowledged.
    pub(crate) fn followers(&self) -> Option<(Vec<FollowerState>, u64)> {
        self.journal.as_ref().map(|journal| (journal.followers.states(), journal.acknowledged.last()))
    }

    /// Returns the number of the last change, where there is a log.
    pub(crate) fn last_change(&self) -> Option<u64> {
        self.journal.as_ref().map(Journal::last)
    }

    /// Returns where the tables are kept, and the log of their changes.
    pub(crate) fn kept_with_log(&self, operation: &'static str) -> Result<(&StateDirectory, &Journal)> {
        let none = || Error::Unsupported { operation, message: WITHOUT_LOG.to_owned() };
        self.state.as_ref().zip(self.journal.as_ref()).ok_or_else(none)
    }

    fn lock_standing(&self) -> MutexGuard<'_, ReplicaRole> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks the epoch since when another server is said to lead: one that was promoted after this server, or the one that
/// demoted it.
fn check_epoch(epoch: u64, standing: &ReplicaRole) -> Result<()> {
    let is_known = epoch == standing.epoch && standing.role == Role::Demoted;
    let highest = standing.epoch.saturating_add(MAX_MISSED_PROMOTIONS);
    let message = match epoch {
        _ if epoch <= standing.epoch && !is_known => {
            format!("epoch {epoch} is not beyond this server's: {standing}")
        }
        _ if epoch > highest => format!("epoch {epoch} must be at most {highest}: {standing}"),
        _ => return Ok(()),
    };
    Err(Error::Unsupported { operation: "stand_down", message })
}

/// Returns the error about a server that is to be promoted and follows none.
pub(crate) fn not_following(standing: &ReplicaRole) -> Error {
    let message = format!("only a server that follows another one is promoted: {standing}");
    Error::Unsupported { operation: "promote", message }
}

/// Returns the error about changes that are asked for in the way of other requests.
pub(super) fn not_streamed() -> Error {
    let message = "changes go over a connection of the bulk port".to_owned();
    Error::Unsupported { operation: "follow", message }
}

const WITHOUT_LOG: &str = "the server keeps no log of changes, without which none follows another: serve with --data and --durability wal";
