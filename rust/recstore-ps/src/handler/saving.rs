//! Saving a server's part of a snapshot and loading its share of one, and what the server knows of them later.

use recstore::{KnownSaves, LoadOptions, LoadReport, Result, SaveOptions, SaveReport, commit_snapshot};

use super::Handler;
use crate::durable::state_directory::{StateDirectory, seconds_now};
use crate::router::Router;
use crate::wire::codec::{LoadShard, SavePart};

impl Handler {
    /// Saves this server's part of a snapshot.
    pub(super) fn save_part(&self, part: &SavePart) -> Result<SaveReport> {
        let mut options = save_options(part);
        // With a log it comes back with all rows.
        options.writer = self.journal.as_ref().and_then(|_| self.facts()).map(|facts| facts.store);
        let report = self
            .store
            .needs_process("save", "the servers are the shards of a snapshot: save all of them together")?
            .save_part(&part.directory, &part.snapshot, part.shard, &options)?;
        // Before the client hears of it, and so before the snapshot counts: whenever this server ends, it knows the snapshot
        // as its own.
        self.state.as_ref().map_or(Ok(()), |state| self.keep_saves(state)).map(|()| report)
    }

    /// Writes down which snapshots the store has saved and loaded, if it comes back with all rows.
    pub(super) fn keep_saves(&self, state: &StateDirectory) -> Result<()> {
        match (self.store.in_process(), &self.journal) {
            (Some(own), Some(_)) => state.keep_saves(|| own.known_saves()),
            _ => Ok(()),
        }
    }

    /// Takes the saves of the server that this one has followed until now for its own.
    pub(super) fn take_over_saves(&self, state: &StateDirectory) -> Result<()> {
        let Some(own) = self.store.in_process() else { return Ok(()) };
        own.remember_saves(own.known_saves()?.counting_until(seconds_now()))?;
        self.keep_saves(state)
    }

    /// Takes what came with the rows of another server that are here now.
    pub(super) fn take_copied_saves(&self, state: &StateDirectory) -> Result<()> {
        let Some(own) = self.store.in_process() else { return Ok(()) };
        own.remember_saves(KnownSaves::new(self.shard, 0))?;
        self.keep_saves(state)
    }

    /// Several servers share the rows; the first one has the tables' counts.
    pub(super) fn load(&self, load: &LoadShard) -> Result<LoadReport> {
        let router = Router::new(load.hash_method, load.shard.of);
        let keeps = |id| router.shard_of(id) == load.shard.number;
        let mut options = LoadOptions::default();
        if load.shard.of > 1 {
            options.keeps = Some(&keeps);
        }
        options.shard = Some(load.shard);
        options.without_counts = load.shard.number > 0;
        options.tables = load.tables.as_ref();
        options.snapshot = load.snapshot.as_deref();
        self.store.load(&load.directory, &options)
    }
}

/// Makes the parts of all servers the newest snapshot of their directory.
pub(super) fn commit(part: &SavePart) -> Result<()> {
    commit_snapshot(&part.directory, &part.snapshot, part.shard.of, &save_options(part)).map(drop)
}

fn save_options(part: &SavePart) -> SaveOptions<'static> {
    let mut options = SaveOptions::default();
    options.kind = part.kind;
    options.keep = part.keep;
    options.metadata = part.metadata.clone();
    options.compression = part.compression.into();
    options.replace = part.replace;
    options
}
