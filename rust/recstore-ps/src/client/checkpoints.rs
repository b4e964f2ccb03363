//! Asking servers to save to their own directories.

use recstore::{Result, SaveReport};

use super::RemoteStore;
use super::call::Call;
use super::management::unexpected;
use super::session::Session;
use crate::wire::codec::{Managed, Management};

impl RemoteStore {
    /// Makes every server save its tables to its own directory and drop the log before. Returns what each saved, in the order
    /// of the shards; none for a server that has no directory.
    ///
    /// # Errors
    /// [`recstore::Error::Unavailable`] names the server that does not answer; as a save.
    pub fn checkpoint(&self) -> Result<Vec<Option<SaveReport>>> {
        self.with_session(|session| self.checkpoint_all(session))
    }

    fn checkpoint_all(&self, session: &Session) -> Result<Vec<Option<SaveReport>>> {
        const OPERATION: &str = "checkpoint";
        let calls = self.shards().map(|shard| Call::manage(shard, Management::Checkpoint {})).collect();
        let answers = self.ask_all(session, OPERATION, calls, self.config().save_timeout)?;
        let report = |(shard, (answer, _)): (usize, (Managed, u64))| match answer {
            Managed::Saved { report } => Ok(Some(report)),
            Managed::Done {} => Ok(None),
            other => Err(unexpected(session, OPERATION, shard, &other)),
        };
        answers.into_iter().enumerate().map(report).collect()
    }
}
