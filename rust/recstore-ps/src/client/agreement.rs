//! Agreeing with all servers on what counts of the store, before its first table is opened.

use std::time::{Duration, Instant};

use recstore::Result;

use super::RemoteStore;
use super::session::{Call, LOST, Session};
use crate::wire::codec::{Managed, Management};
use crate::wire::facts::Facts;

/// How long another client, which has begun to tell servers what counts, may take for all of them.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

const OPERATION: &str = "open_table";

impl RemoteStore {
    /// Agrees with all servers on what counts of the store. The first client of all draws it, and the first server is
    /// told first, so that of two clients at once one counts.
    ///
    /// # Errors
    /// [`recstore::Error::Unavailable`] names a server that has rows of another store, or has lost its rows.
    pub(super) fn agree(&self, session: &Session) -> Result<()> {
        if session.agreed().is_some() {
            return Ok(());
        }
        let until = Instant::now() + PATIENCE;
        loop {
            // Servers of an older release do not say.
            let told: Option<Vec<Option<Facts>>> = session.ask_for_facts(OPERATION)?.into_iter().collect();
            let Some(told) = told else { return Ok(()) };
            match told.iter().flatten().next() {
                None => self.tell_all(session, &Facts::new(session.hash_method()))?,
                Some(facts) if told.iter().all(|own| own.as_ref() == Some(facts)) => {
                    session.set_agreed(Some(facts.clone()));
                    return Ok(());
                }
                Some(_) if Instant::now() < until => std::thread::sleep(PAUSE),
                Some(facts) => return Err(disagreeing(session, &told, facts)),
            }
        }
    }

    fn tell_all(&self, session: &Session, drawn: &Facts) -> Result<()> {
        let first = self.tell(session, [0], drawn, false)?.pop();
        let facts = first.unwrap_or_else(|| drawn.clone());
        self.tell(session, 1..self.router.shards(), &facts, false).map(drop)
    }

    fn tell(
        &self,
        session: &Session,
        shards: impl IntoIterator<Item = usize>,
        facts: &Facts,
        replaces: bool,
    ) -> Result<Vec<Facts>> {
        let request = Management::Agree { facts: facts.clone(), replaces };
        let calls = shards.into_iter().map(|shard| Call::manage(shard, request.clone())).collect();
        let answers = self.ask_all(session, OPERATION, calls, self.patience())?;
        let agreed = answers.into_iter().map(|(answer, _)| match answer {
            Managed::Agreed { facts } => facts,
            _ => facts.clone(),
        });
        Ok(agreed.collect())
    }

    /// Makes all servers agree again after a load, which gave each its rows.
    pub(super) fn agree_anew(&self, session: &Session) -> Result<()> {
        session.set_agreed(None);
        let told: Option<Vec<Option<Facts>>> = session.ask_for_facts("load")?.into_iter().collect();
        let Some(told) = told else { return Ok(()) };
        let known = told.iter().flatten().next().cloned();
        let facts = known.unwrap_or_else(|| Facts::new(session.hash_method()));
        self.tell(session, self.shards(), &facts, true)?;
        session.set_agreed(Some(facts));
        Ok(())
    }
}

/// Names the first server that does not say what another says.
fn disagreeing(session: &Session, told: &[Option<Facts>], facts: &Facts) -> recstore::Error {
    let other = told.iter().position(|own| own.as_ref() != Some(facts)).unwrap_or(0);
    match &told[other] {
        Some(own) => {
            let message =
                format!("it has rows of the store {}, and shard 0 of the store {}", own.store, facts.store);
            session.unavailable(OPERATION, other, message)
        }
        None => session.unavailable(OPERATION, other, LOST.to_owned()),
    }
}
