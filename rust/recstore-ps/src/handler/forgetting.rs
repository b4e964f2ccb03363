//! Ids of which nothing is to stay in the directory of a server that does not run.

use std::collections::BTreeSet;

use recstore::{Result, SaveReport};

use super::Handler;
use crate::durable::state_directory::StateDirectory;
use crate::wire::codec::Answer;

impl Handler {
    /// Puts a checkpoint of the tables, from which somebody took `ids` away, in the place of the one in the directory and of
    /// the log behind it. Followers copy it, as after a load.
    ///
    /// # Errors
    /// [`recstore::Error::Checkpoint`] names the file that cannot be written.
    pub(crate) fn keep_without(
        &self,
        state: &StateDirectory,
        ids: &BTreeSet<i64>,
    ) -> Result<Option<SaveReport>> {
        let Some(journal) = &self.journal else { return Ok(None) };
        journal.forget(ids);
        let begin = |first| state.begin_run(first, true);
        journal
            .replace(&*self.store, &self.workers, begin, || Ok(Answer::Done))
            .map(|(_, report)| Some(report))
    }
}
