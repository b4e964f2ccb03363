//! Changes that reach every server once.
//!
//! A change carries a number to each server that it touches, and goes out again with the same number until it is
//! answered. If a server stays silent the call fails, and what is known of it is kept: the caller repeats the call with
//! equal content, and it goes to the servers that have not made it, those in doubt under the old number.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use recstore::Error;

use super::call::Call;
use super::failed::{Changes, State};
use super::session::{Outcome, Session, check_size};
use crate::wire::codec::{Reply, largest_request};

/// Makes a change on all servers that it touches and returns their answers, in the order of the calls.
///
/// # Errors
/// The first server's; then the change may be repeated with equal content.
pub(super) fn change(
    session: &Session,
    operation: &'static str,
    mut calls: Vec<Call<'_>>,
    patience: Duration,
) -> Result<Vec<Arc<Reply>>, Error> {
    // Held until all servers have answered: the changes of a client are made one after another, as their
    // numbers say.
    let mut changes = session.changes.lock().unwrap_or_else(PoisonError::into_inner);
    // Before the change takes a number: one that is too large for a server goes to none.
    check_sizes(session, operation, &calls)?;
    let began = Instant::now();
    let states = changes.take(operation, &calls)?;
    let mut states = states.unwrap_or_else(|| vec![State::New; calls.len()]);
    let lacking = calls.iter().zip(&states).filter(|(_, state)| !matches!(state, State::Made(_)));
    let shards: Vec<usize> = lacking.map(|(call, _)| call.shard).collect();
    let result = settle(session, operation, &mut changes, &shards, patience).and_then(|()| {
        changes.go_on();
        changes.last += 1;
        number(&mut calls, &mut states, changes.last);
        make(session, operation, &calls, &mut states, patience.saturating_sub(began.elapsed()))
    });
    if let Err(error) = result {
        changes.keep(&calls, states);
        return Err(error);
    }
    let answer = |state| if let State::Made(answer) = state { Some(answer) } else { None };
    Ok(states.into_iter().filter_map(answer).collect())
}

/// Finds out what came of steps that were sent to these servers, before another change goes there: a server makes the
/// changes of a client in the order of their numbers, so none behind it could be made any more.
fn settle(
    session: &Session,
    operation: &'static str,
    changes: &mut Changes,
    shards: &[usize],
    patience: Duration,
) -> Result<(), Error> {
    let (asked, states): (Vec<_>, Vec<_>) = changes.doubts(shards).into_iter().unzip();
    if asked.is_empty() {
        return Ok(());
    }
    let mut first = None;
    for (outcome, state) in session.call_all(operation, &asked, patience).into_iter().zip(states) {
        match outcome {
            // Only now was anything made under the number: nothing.
            Outcome::Answered(reply, _) if reply.count().is_ok_and(|deleted| deleted == 0) => {
                *state = State::New
            }
            Outcome::Answered(reply, _) => *state = State::Made(Arc::new(reply)),
            // The step was refused, or the table is not there any more: it was not made.
            Outcome::Refused(_) => *state = State::New,
            Outcome::Unknown(error) => _ = first.get_or_insert(error),
        }
    }
    first.map_or(Ok(()), Err)
}

/// Gives the calls to the servers that have not made a change their numbers.
fn number(calls: &mut [Call<'_>], states: &mut [State], next: u64) {
    for (call, state) in calls.iter_mut().zip(states) {
        call.sequence = match state {
            // Its answer is kept from the attempt before.
            State::Made(_) => continue,
            // The server may have made it: by the same number it knows that, and repeats its answer.
            State::Sent(number) => *number,
            State::New => next,
        };
        *state = State::Sent(call.sequence);
    }
}

/// Nothing is sent to any server unless each will take what is sent to it.
fn check_sizes(session: &Session, operation: &'static str, calls: &[Call<'_>]) -> Result<(), Error> {
    const SURELY_TAKEN: u64 = 1 << 16;
    let is_small = |call: &Call<'_>| check_size(operation, call, SURELY_TAKEN).is_ok();
    if calls.iter().all(is_small) {
        return Ok(());
    }
    let (limits, versions) = (session.limits(operation)?, session.versions(operation)?);
    calls.iter().try_for_each(|call| {
        let limit = largest_request(&call.request, limits[call.shard], versions[call.shard]);
        check_size(operation, call, limit)
    })
}

/// Sends what is not made and notes what comes of it.
fn make(
    session: &Session,
    operation: &'static str,
    calls: &[Call<'_>],
    states: &mut [State],
    patience: Duration,
) -> Result<(), Error> {
    let open: Vec<usize> =
        (0..calls.len()).filter(|&number| !matches!(states[number], State::Made(_))).collect();
    let sent: Vec<Call<'_>> = open.iter().map(|&number| calls[number].again()).collect();
    let mut first = None;
    for (number, outcome) in open.into_iter().zip(session.call_all(operation, &sent, patience)) {
        match outcome {
            Outcome::Answered(reply, _) => states[number] = State::Made(Arc::new(reply)),
            Outcome::Refused(error) => {
                // A refusal changes nothing, so a repetition takes a new number.
                states[number] = State::New;
                first.get_or_insert(error);
            }
            Outcome::Unknown(error) => _ = first.get_or_insert(error),
        }
    }
    first.map_or(Ok(()), Err)
}
