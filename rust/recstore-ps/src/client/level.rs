//! Shards that stopped a step apart: of a step that was cut off, since its program was killed or a server was down, only
//! some of them know.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

use recstore::{Error, Result};

use super::management::unexpected;
use super::session::Session;
use super::tables::RemoteTable;
use super::{RemoteStore, table_management};
use crate::wire::codec::{LastStep, MAX_COUNTED_STEPS, Managed, Management};
use crate::wire::handshake::WITH_LEVEL;

const OPERATION: &str = "open_table";

/// How long shards must stay apart as they are. Those of a table that another program trains are apart too, for as long as
/// a step is on its way.
const STILL: Duration = Duration::from_millis(500);

/// How often it is looked again whether a program that could end the step has gone: servers hear of its end a moment later.
const MAX_LOOKS: usize = 2;

/// How far the shards of a table are.
struct Progress {
    steps: Vec<u64>,
    /// Whether a connected program has made its last step on some shards only: it is on its way, or will be repeated.
    is_under_way: bool,
}

impl Progress {
    fn new(answers: Vec<(u64, Vec<LastStep>)>) -> Self {
        let (steps, last): (Vec<_>, Vec<BTreeSet<_>>) =
            answers.into_iter().map(|(step, last)| (step, last.into_iter().collect())).unzip();
        let unknown = |last: &BTreeSet<LastStep>| last.iter().any(|step| step.sequence.is_none());
        let is_under_way = last.iter().any(|of_shard| unknown(of_shard) || *of_shard != last[0]);
        Self { steps, is_under_way }
    }

    fn ahead(&self) -> u64 {
        self.steps.iter().copied().max().unwrap_or_default()
    }

    fn is_apart(&self) -> bool {
        self.steps.iter().any(|&step| step != self.ahead())
    }
}

impl RemoteStore {
    /// Gives all shards the step of the one that is ahead, which no row takes any more. Nothing happens while another
    /// program trains the table, is connected and may take its step on the other shards, or while a change of this program's
    /// own may be repeated: the step would be counted twice.
    ///
    /// # Errors
    /// [`Error::Unavailable`] names the server that does not answer.
    pub(super) fn level_steps(&self, session: &Session, table: &RemoteTable) -> Result<()> {
        if self.router.shards() == 1 || !tells_steps(session)? {
            return Ok(());
        }
        let changes = session.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut progress = self.progress(session, table)?;
        for _ in 0..MAX_LOOKS {
            if changes.has_failed(&table.numbers()) || !progress.is_apart() {
                return Ok(());
            }
            thread::sleep(STILL);
            let before = std::mem::replace(&mut progress, self.progress(session, table)?);
            if progress.steps != before.steps {
                return Ok(());
            }
            if !progress.is_under_way {
                let mut steps = progress.steps.iter().enumerate();
                return steps.try_for_each(|(shard, &step)| {
                    self.count_steps(session, table, shard, step..progress.ahead())
                });
            }
        }
        Ok(())
    }

    /// Checks that no other program has taken a step on some shards only.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] names `directory`, the table and the step of each shard.
    pub(super) fn check_no_half_step(
        &self,
        session: &Session,
        table: &RemoteTable,
        directory: &Path,
    ) -> Result<()> {
        if self.router.shards() == 1 || !tells_steps(session)? {
            return Ok(());
        }
        // A server that cannot tell is found by the save itself.
        let Ok(progress) = self.progress(session, table) else { return Ok(()) };
        if !progress.is_apart() || !progress.is_under_way {
            return Ok(());
        }
        let steps: Vec<_> = progress.steps.iter().map(u64::to_string).collect();
        let message = format!(
            "the shards of table \"{}\" are at the steps [{}]: a step reached only some shards, and the program that takes it is still connected. Let it take the step again, or end it",
            table.checks.name(),
            steps.join(", ")
        );
        Err(Error::Checkpoint { path: directory.display().to_string(), message })
    }

    /// Asks each server how far the table is.
    fn progress(&self, session: &Session, table: &RemoteTable) -> Result<Progress> {
        let request = |number| Management::Steps { table: number };
        let answers = self.ask_about(session, OPERATION, table, request)?.into_iter().enumerate();
        let steps = |(shard, answer)| match answer {
            Managed::Steps { step, last } => Ok((step, last)),
            other => Err(unexpected(session, OPERATION, shard, &other)),
        };
        answers.map(steps).collect::<Result<_>>().map(Progress::new)
    }

    /// Has a server whose table is at the first of `steps` count them all. One that is not there any more counts none.
    fn count_steps(
        &self,
        session: &Session,
        table: &RemoteTable,
        shard: usize,
        steps: Range<u64>,
    ) -> Result<()> {
        for from in steps.clone().step_by(MAX_COUNTED_STEPS as usize) {
            let to = steps.end.min(from.saturating_add(MAX_COUNTED_STEPS));
            let call = table_management(table, shard, |table| Management::CountSteps { table, from, to });
            self.ask_all(session, OPERATION, vec![call], self.patience())?;
        }
        Ok(())
    }
}

/// Whether all servers say whose steps they made last.
fn tells_steps(session: &Session) -> Result<bool> {
    Ok(session.versions(OPERATION)?.into_iter().all(|version| version >= WITH_LEVEL))
}
