//! Who changed what last: a change that comes again, because its answer was lost, is answered and not made again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use recstore::{Error, Result};

use crate::durable::journal::MAX_CLIENTS;
use crate::wire::codec::{Answer, ClientId};

/// The last change of each client.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    calls: u64,
    clients: HashMap<ClientId, Client>,
}

#[derive(Debug)]
struct Client {
    /// The number of its latest call among those of all clients.
    called: u64,
    last: Arc<Mutex<LastChange>>,
}

/// A client's latest change and what came of it.
#[derive(Debug, Default)]
struct LastChange {
    sequence: u64,
    outcome: Option<Result<Answer>>,
}

impl Clients {
    /// Makes a change unless it was made before, and returns what came of it. Numbers rise from 1.
    ///
    /// # Errors
    /// As `change`; [`Error::Unsupported`] for a number below the client's latest.
    pub(crate) fn once(
        &self,
        client: ClientId,
        sequence: u64,
        change: impl FnOnce() -> Result<Answer>,
    ) -> Result<Answer> {
        let last = self.last_of(client);
        // Held while the change is made: a repetition waits for its outcome.
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if sequence < last.sequence {
            return Err(Error::Unsupported {
                operation: "a call on a server",
                message: format!(
                    "change {sequence} of a client that has made change {} since: changes of a client come one by one",
                    last.sequence
                ),
            });
        }
        if let Some(outcome) = last.outcome.clone().filter(|_| sequence == last.sequence) {
            return outcome;
        }
        let outcome = change();
        *last = LastChange { sequence, outcome: Some(outcome.clone()) };
        outcome
    }

    /// Notes what came of a client's last change before this server was started.
    pub(crate) fn remember(&self, client: ClientId, sequence: u64, outcome: Result<Answer>) {
        let last = self.last_of(client);
        *last.lock().unwrap_or_else(PoisonError::into_inner) =
            LastChange { sequence, outcome: Some(outcome) };
    }

    fn last_of(&self, client: ClientId) -> Arc<Mutex<LastChange>> {
        let mut remembered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Remembered { calls, clients } = &mut *remembered;
        *calls += 1;
        if !clients.contains_key(&client) && clients.len() >= MAX_CLIENTS {
            let quietest = clients.iter().min_by_key(|(_, client)| client.called).map(|(client, _)| *client);
            quietest.and_then(|quietest| clients.remove(&quietest));
        }
        let known = clients.entry(client).or_insert_with(|| Client { called: 0, last: Arc::default() });
        known.called = *calls;
        Arc::clone(&known.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_change_is_made_once_whatever_came_of_it() {
        let (clients, made) = (Clients::default(), Cell::new(0));
        let count = |client, sequence| {
            clients.once(ClientId(client), sequence, || {
                made.set(made.get() + 1);
                Ok(Answer::Count(made.get()))
            })
        };
        assert_eq!(count(1, 1), Ok(Answer::Count(1)));
        assert_eq!(count(1, 1), Ok(Answer::Count(1)));
        assert_eq!(count(2, 1), Ok(Answer::Count(2)));
        assert_eq!(count(1, 7), Ok(Answer::Count(3)));
        let late = count(1, 6).unwrap_err().to_string();
        assert!(late.contains("change 6 of a client that has made change 7 since"), "{late}");
        let refusal = || Err(Error::InvalidStep { table: "t".to_owned() });
        assert!(clients.once(ClientId(1), 8, refusal).is_err());
        assert!(count(1, 8).is_err());
        assert_eq!(made.get(), 3);
    }

    #[test]
    fn the_quietest_client_is_forgotten_first() {
        let clients = Clients::default();
        let call = |client| clients.once(ClientId(client), 1, || Ok(Answer::Done)).map(drop);
        (0..MAX_CLIENTS as u128).try_for_each(call).unwrap();
        call(0).unwrap();
        call(MAX_CLIENTS as u128).unwrap();
        let known = &clients.0.lock().unwrap().clients;
        assert_eq!(known.len(), MAX_CLIENTS);
        assert!(known.contains_key(&ClientId(0)) && !known.contains_key(&ClientId(1)));
    }
}
