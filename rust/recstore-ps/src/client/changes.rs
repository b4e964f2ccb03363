//! Changes that reach every server once.
//!
//! A change carries a number to each server that it touches, and goes out again with the same number until it is
//! answered. If a server stays silent the call fails, and what is known of it is kept: the caller repeats the call with
//! equal content, and it goes to the servers that have not made it, those in doubt under the old number. Another change
//! in between gives the one that failed up.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use recstore::Error;

use super::session::{Call, Changes, FailedChange, Outcome, Session, State, check_size};
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
    let Changes { last, failed } = &mut *changes;
    let mut states = vec![State::New; calls.len()];
    if let Some(failed) = failed.as_ref().filter(|failed| failed.content == content_of(&calls)) {
        states.clone_from(&failed.states);
    }
    // Before the change takes a number: one that is too large for a server goes to none.
    check_sizes(session, operation, &calls)?;
    *last += 1;
    for (call, state) in calls.iter_mut().zip(&mut states) {
        call.sequence = match state {
            // Its answer is kept from the attempt before.
            State::Made(_) => continue,
            // The server may have made it: by the same number it knows that, and repeats its answer.
            State::Sent(number) => *number,
            State::New => *last,
        };
        *state = State::Sent(call.sequence);
    }
    let result = make(session, operation, &calls, &mut states, patience);
    // If no server can have it, a repetition is a change like any other, and nothing is kept.
    let is_partly_made = states.iter().any(|state| !matches!(state, State::New));
    *failed = result
        .is_err()
        .then(|| content_of(&calls))
        .filter(|_| is_partly_made)
        .map(|content| FailedChange { content, states: states.clone() });
    let answer = |state| if let State::Made(answer) = state { Some(answer) } else { None };
    result.map(|()| states.into_iter().filter_map(answer).collect())
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

/// Returns what tells changes apart: a hash of all that is sent, whatever its numbers.
fn content_of(calls: &[Call<'_>]) -> u128 {
    // 64 bits a hasher: one more byte at its start makes the second half differ from the first.
    let mut halves = [DefaultHasher::new(), DefaultHasher::new()];
    halves[1].write_u8(1);
    for call in calls {
        // With zeros for its numbers, which a repetition may not share.
        let bytes = call.request.with_frame(0, 0, |frame| frame.to_bytes().unwrap_or_default());
        let bytes = bytes.unwrap_or_default();
        halves.iter_mut().for_each(|half| (call.shard, &bytes).hash(half));
    }
    u128::from(halves[0].finish()) << 64 | u128::from(halves[1].finish())
}
