//! Who changed what last: a change that comes again, because its answer was lost, is answered and not made again.
//!
//! Who is connected may still send its last change to the other shards: [`Clients::last_steps`] says whose steps those are.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use recstore::{Error, Result, TableId};

use crate::durable::journal::MAX_CLIENTS;
use crate::wire::codec::{Answer, ClientId, LastStep};

/// The last change of each client.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    calls: u64,
    clients: HashMap<ClientId, Client>,
    /// The open connections of each client that has any.
    connections: HashMap<ClientId, usize>,
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
    /// The tables that took a step by it; none where that is not known, as of a change before the server was started.
    stepped: Option<Vec<TableId>>,
}

/// A connection of a client, until this is dropped.
#[derive(Debug)]
pub(crate) struct Connected<'a> {
    clients: &'a Clients,
    client: ClientId,
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        let connections = &mut self.clients.lock().connections;
        let open = connections.get_mut(&self.client).map_or(0, |open| {
            *open -= 1;
            *open
        });
        if open == 0 {
            connections.remove(&self.client);
        }
    }
}

impl Clients {
    /// Counts a connection of a client.
    pub(crate) fn connect(&self, client: ClientId) -> Connected<'_> {
        *self.lock().connections.entry(client).or_default() += 1;
        Connected { clients: self, client }
    }

    /// Returns the last changes of the connected clients but `asking` that are steps of a table, or may be.
    pub(crate) fn last_steps(&self, asking: ClientId, table: TableId) -> Vec<LastStep> {
        let remembered = self.lock();
        let others = remembered.connections.keys().filter(|client| **client != asking);
        let known = others.filter_map(|client| Some((client, remembered.clients.get(client)?)));
        known.filter_map(|(client, known)| known.last_step(*client, table)).collect()
    }

    /// Makes a change unless it was made before, and returns what came of it. Numbers rise from 1.
    ///
    /// It takes a step of the tables `stepped`, unless it is refused.
    ///
    /// # Errors
    /// As `change`; [`Error::Unsupported`] for a number below the client's latest.
    pub(crate) fn once(
        &self,
        client: ClientId,
        sequence: u64,
        stepped: Vec<TableId>,
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
        let stepped = if outcome.is_ok() { stepped } else { Vec::new() };
        *last = LastChange { sequence, outcome: Some(outcome.clone()), stepped: Some(stepped) };
        outcome
    }

    /// Notes what came of a client's last change before this server was started.
    pub(crate) fn remember(&self, client: ClientId, sequence: u64, outcome: Result<Answer>) {
        let last = self.last_of(client);
        *last.lock().unwrap_or_else(PoisonError::into_inner) =
            LastChange { sequence, outcome: Some(outcome), stepped: None };
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last_of(&self, client: ClientId) -> Arc<Mutex<LastChange>> {
        let mut remembered = self.lock();
        let Remembered { calls, clients, .. } = &mut *remembered;
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

impl LastChange {
    /// Returns its number, if it may be a step of the table.
    fn sequence_of_step(&self, table: TableId) -> Option<u64> {
        let may_be_one = self.stepped.as_ref().is_none_or(|stepped| stepped.contains(&table));
        may_be_one.then_some(self.sequence)
    }
}

impl Client {
    fn last_step(&self, client: ClientId, table: TableId) -> Option<LastStep> {
        let sequence = match self.last.try_lock() {
            // Held while a change is made, which may wait for other workers.
            Err(TryLockError::WouldBlock) => None,
            Ok(last) => Some(last.sequence_of_step(table)?),
            Err(TryLockError::Poisoned(last)) => Some(last.into_inner().sequence_of_step(table)?),
        };
        Some(LastStep { client: format!("{:032x}", client.0), sequence })
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
            clients.once(ClientId(client), sequence, Vec::new(), || {
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
        assert!(clients.once(ClientId(1), 8, Vec::new(), refusal).is_err());
        assert!(count(1, 8).is_err());
        assert_eq!(made.get(), 3);
    }

    #[test]
    fn steps_of_connected_clients_are_named_until_another_change_follows() {
        let (clients, [table, other]) = (Clients::default(), [TableId(1), TableId(2)]);
        let make = |client, sequence, stepped: &[TableId], outcome: Result<Answer>| {
            _ = clients.once(ClientId(client), sequence, stepped.to_vec(), || outcome);
        };
        let last = |asking, table| {
            let last = clients.last_steps(ClientId(asking), table).into_iter();
            last.map(|step| (step.client.trim_start_matches('0').to_owned(), step.sequence))
                .collect::<Vec<_>>()
        };
        make(1, 4, &[table], Ok(Answer::Done));
        assert_eq!(last(9, table), [], "it is not connected");
        let connections = [clients.connect(ClientId(1)), clients.connect(ClientId(1))];
        assert_eq!(last(9, table), [("1".to_owned(), Some(4))]);
        assert_eq!((last(1, table), last(9, other)), (vec![], vec![]));
        clients
            .once(ClientId(1), 5, vec![other], || {
                assert_eq!(last(9, table), [("1".to_owned(), None)], "a change is under way");
                Ok(Answer::Done)
            })
            .unwrap();
        assert_eq!((last(9, table), last(9, other)), (vec![], vec![("1".to_owned(), Some(5))]));
        make(1, 6, &[table], Err(Error::InvalidStep { table: "t".to_owned() }));
        assert_eq!((last(9, table), last(9, other)), (vec![], vec![]), "a refused step is none");
        clients.remember(ClientId(1), 7, Ok(Answer::Done));
        assert_eq!(
            last(9, table),
            [("1".to_owned(), Some(7))],
            "of a change before the start all is possible"
        );
        drop(connections);
        assert_eq!(last(9, table), []);
    }

    #[test]
    fn the_quietest_client_is_forgotten_first() {
        let clients = Clients::default();
        let call = |client| clients.once(ClientId(client), 1, Vec::new(), || Ok(Answer::Done)).map(drop);
        (0..MAX_CLIENTS as u128).try_for_each(call).unwrap();
        call(0).unwrap();
        call(MAX_CLIENTS as u128).unwrap();
        let known = &clients.0.lock().unwrap().clients;
        assert_eq!(known.len(), MAX_CLIENTS);
        assert!(known.contains_key(&ClientId(0)) && !known.contains_key(&ClientId(1)));
    }
}
