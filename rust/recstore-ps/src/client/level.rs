//! Shards that stopped a step apart: of a step that was cut off, since its program was killed or a server was down, only
//! some of them know.

use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

use recstore::Result;

use super::management::unexpected;
use super::session::Session;
use super::tables::RemoteTable;
use super::{RemoteStore, table_management};
use crate::wire::codec::{MAX_COUNTED_STEPS, Managed, Management};
use crate::wire::handshake::WITH_LEVEL;

const OPERATION: &str = "open_table";

/// How long shards must stay apart as they are. Those of a table that another program trains are apart too, for as long as
/// a step is on its way.
const STILL: Duration = Duration::from_millis(500);

impl RemoteStore {
    /// Gives all shards the step of the one that is ahead, which no row takes any more. Nothing happens while somebody
    /// trains the table, or while a change of this program's own may be repeated.
    ///
    /// # Errors
    /// [`recstore::Error::Unavailable`] names the server that does not answer.
    pub(super) fn level_steps(&self, session: &Session, table: &RemoteTable) -> Result<()> {
        if self.router.shards() == 1 {
            return Ok(());
        }
        let changes = session.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let steps = self.steps(session, table)?;
        let ahead = steps.iter().copied().max().unwrap_or_default();
        if changes.has_failed(&table.numbers()) || steps.iter().all(|&step| step == ahead) {
            return Ok(());
        }
        if session.versions(OPERATION)?.into_iter().any(|version| version < WITH_LEVEL) {
            return Ok(());
        }
        thread::sleep(STILL);
        if self.steps(session, table)? != steps {
            return Ok(());
        }
        steps
            .iter()
            .enumerate()
            .try_for_each(|(shard, &step)| self.count_steps(session, table, shard, step..ahead))
    }

    /// Returns the step of the table on each server.
    fn steps(&self, session: &Session, table: &RemoteTable) -> Result<Vec<u64>> {
        let request = |number| Management::Statistics { table: number };
        let answers = self.ask_about(session, OPERATION, table, request)?.into_iter().enumerate();
        let step = |(shard, answer)| match answer {
            Managed::Statistics { statistics } => Ok(statistics.step),
            other => Err(unexpected(session, OPERATION, shard, &other)),
        };
        answers.map(step).collect()
    }

    /// Has a server whose table is at the first of `steps` count them all. One that is not there any more counts none.
    fn count_steps(
        &self,
        session: &Session,
        table: &RemoteTable,
        shard: usize,
        steps: std::ops::Range<u64>,
    ) -> Result<()> {
        for from in steps.clone().step_by(MAX_COUNTED_STEPS as usize) {
            let to = steps.end.min(from.saturating_add(MAX_COUNTED_STEPS));
            let call = table_management(table, shard, |table| Management::CountSteps { table, from, to });
            self.ask_all(session, OPERATION, vec![call], self.patience())?;
        }
        Ok(())
    }
}
