//! Agreeing with all servers on what counts of the store, before its first table is opened.

use std::time::{Duration, Instant};

use recstore::Result;

use super::RemoteStore;
use super::call::Call;
use super::session::{LOST, Session};
use crate::wire::codec::{Managed, Management};
use crate::wire::store_metadata::StoreMetadata;

/// How long another client, which has begun to tell servers what counts, may take for all of them.
const TIMEOUT: Duration = Duration::from_secs(2);
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
        let until = Instant::now() + TIMEOUT;
        // What connections told when they were opened does at first.
        let mut is_anew = false;
        loop {
            let Some(told) = session.ask_for_facts(OPERATION, is_anew)? else { return Ok(()) };
            let agreed = match told.iter().flatten().next() {
                None => self.tell_all(session)?,
                Some(facts) => told.iter().all(|own| own.as_ref() == Some(facts)).then(|| facts.clone()),
            };
            if let Some(facts) = agreed {
                session.set_agreed(Some(facts));
                return Ok(());
            }
            // Another client may be about to tell all.
            if Instant::now() > until {
                return Err(disagreeing(session, &told));
            }
            std::thread::sleep(PAUSE);
            is_anew = true;
        }
    }

    /// Tells all servers what counts, and returns it if they take it.
    fn tell_all(&self, session: &Session) -> Result<Option<StoreMetadata>> {
        let own = StoreMetadata::new(session.hash_method());
        let facts = self.tell(session, [0], &own, false)?.pop().unwrap_or(own);
        let others = self.tell(session, 1..self.router.shards(), &facts, false)?;
        let is_agreed =
            facts.hash_method == session.hash_method() && others.iter().all(|other| *other == facts);
        Ok(is_agreed.then_some(facts))
    }

    fn tell(
        &self,
        session: &Session,
        shards: impl IntoIterator<Item = usize>,
        facts: &StoreMetadata,
        replaces: bool,
    ) -> Result<Vec<StoreMetadata>> {
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
        let Some(told) = session.ask_for_facts("load", true)? else { return Ok(()) };
        let known = told.iter().flatten().next().cloned();
        let facts = known.unwrap_or_else(|| StoreMetadata::new(session.hash_method()));
        self.tell(session, self.shards(), &facts, true)?;
        session.set_agreed(Some(facts));
        Ok(())
    }
}

/// Names the first server that does not say what the first one that says something does.
fn disagreeing(session: &Session, told: &[Option<StoreMetadata>]) -> recstore::Error {
    let known = told.iter().enumerate().find_map(|(shard, facts)| Some((shard, facts.as_ref()?)));
    let other = told.iter().position(|own| own.as_ref() != known.map(|(_, facts)| facts)).unwrap_or(0);
    let message = match (&told[other], known) {
        (Some(own), Some((shard, facts))) => {
            format!("it has rows of the store {}, and shard {shard} of the store {}", own.store, facts.store)
        }
        _ => LOST.to_owned(),
    };
    session.unavailable(OPERATION, other, message)
}
