//! What a client knows of its changes that failed: which servers have made them, so that a repetition goes to the others
//! alone.
//!
//! An optimizer step is kept until it is repeated, whatever the program does meanwhile: made twice it would count twice.
//! Any other change is given up by the next one of other content: made anew, it comes to what its last call says.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use recstore::{Error, TableId};

use super::call::Call;
use crate::wire::codec::{Reply, Request};

/// The failed steps of which it is known who has made them.
const MAX_KEPT: usize = 256;

/// The failed steps that are recognized: of those beyond [`MAX_KEPT`] a repetition is refused.
const MAX_RECOGNIZED: usize = 1 << 12;

/// The numbers given out, and the changes that failed, the latest at the end.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) last: u64,
    failed: VecDeque<FailedChange>,
}

/// What is known of a change on one server.
#[derive(Debug, Clone)]
pub(super) enum State {
    /// It was made, and this was the answer.
    Made(Arc<Reply>),
    /// It was sent, perhaps, under this number.
    Sent(u64),
    /// It has no number that could be used.
    New,
}

/// A change that some servers may lack.
#[derive(Debug)]
struct FailedChange {
    outline: Vec<Outline>,
    content: u128,
    /// For each of the outline; none where too many others have failed since.
    states: Vec<State>,
}

/// What a call was about.
#[derive(Debug, PartialEq, Eq)]
struct Outline {
    shard: usize,
    bytes: usize,
    /// The tables that take a step; none of a change that is no step.
    tables: Vec<TableId>,
    incarnations: Vec<u64>,
}

impl Outline {
    fn of(call: &Call<'_>) -> Self {
        let tables = match &call.request {
            Request::Update(updates) => updates.iter().map(|update| update.table).collect(),
            _ => Vec::new(),
        };
        let bytes = call.request.with_frame(0, 0, |frame| frame.body_len()).unwrap_or(0);
        Self { shard: call.shard, bytes, tables, incarnations: call.incarnations.clone() }
    }
}

impl FailedChange {
    fn is_step(&self) -> bool {
        self.outline.iter().all(|outline| !outline.tables.is_empty())
    }

    /// Whether it is a change of a table, which is called so on each server.
    fn concerns(&self, places: &[TableId]) -> bool {
        self.outline.iter().any(|outline| outline.tables.contains(&places[outline.shard]))
    }

    /// Whether some server may have made it, so that a repetition is not a change like any other.
    fn may_be_made(&self) -> bool {
        self.states.is_empty() || self.states.iter().any(|state| !matches!(state, State::New))
    }
}

impl Changes {
    /// Takes out what is known of a change that failed before; none of a new one.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: it has failed, and nobody knows any more on which servers.
    pub(super) fn take(
        &mut self,
        operation: &'static str,
        calls: &[Call<'_>],
    ) -> Result<Option<Vec<State>>, Error> {
        if self.failed.is_empty() {
            return Ok(None);
        }
        let outline: Vec<Outline> = calls.iter().map(Outline::of).collect();
        // The content only where all lengths are equal: it takes a while.
        let is_similar = |failed: &FailedChange| failed.outline == outline;
        if !self.failed.iter().any(is_similar) {
            return Ok(None);
        }
        let content = content_of(calls);
        let is_equal = |failed: &FailedChange| is_similar(failed) && failed.content == content;
        let Some(place) = self.failed.iter().position(is_equal) else { return Ok(None) };
        if self.failed[place].states.is_empty() {
            return Err(Error::Unsupported { operation, message: forgotten() });
        }
        Ok(self.failed.remove(place).map(|failed| failed.states))
    }

    /// Keeps what is known of a change that failed, if a server may have made it.
    pub(super) fn keep(&mut self, calls: &[Call<'_>], states: Vec<State>) {
        if states.iter().all(|state| matches!(state, State::New)) {
            return;
        }
        let outline = calls.iter().map(Outline::of).collect();
        self.failed.push_back(FailedChange { outline, content: content_of(calls), states });
        if let Some(place) = self.failed.len().checked_sub(MAX_KEPT + 1) {
            self.failed[place].states.clear();
        }
        if self.failed.len() > MAX_RECOGNIZED {
            self.failed.pop_front();
        }
    }

    /// Returns the steps that were sent to these servers, and may or may not be made there: what asks about each, and what
    /// is known of it.
    pub(super) fn doubts(&mut self, shards: &[usize]) -> Vec<(Call<'static>, &mut State)> {
        let steps = self.failed.iter_mut().filter(|failed| failed.is_step());
        let states = steps.flat_map(|failed| failed.outline.iter().zip(&mut failed.states));
        let doubt = |(outline, state): (&Outline, _)| match state {
            &mut State::Sent(number) if shards.contains(&outline.shard) => {
                Some((asking(outline, number), state))
            }
            _ => None,
        };
        states.filter_map(doubt).collect()
    }

    /// Forgets what another change gives up: changes that are no steps, and those that no server has made.
    pub(super) fn go_on(&mut self) {
        self.failed.retain(|failed| failed.is_step() && failed.may_be_made());
    }

    /// Whether a step of a table failed that may be repeated.
    pub(super) fn has_failed(&self, places: &[TableId]) -> bool {
        self.failed.iter().any(|failed| !failed.is_step() || failed.concerns(places))
    }

    /// Forgets the changes that failed, of these tables or, without them, of all: they can no more be repeated.
    pub(super) fn give_up(&mut self, tables: Option<&[Vec<TableId>]>) {
        let stays = |failed: &FailedChange| {
            tables.is_some_and(|tables| {
                failed.is_step() && !tables.iter().any(|places| failed.concerns(places))
            })
        };
        self.failed.retain(stays);
    }
}

/// Returns a change that does nothing, under the number of a step. A server that has made the step repeats its answer,
/// which is never a count of 0; any other counts no deleted row, and makes nothing under this number any more.
fn asking(outline: &Outline, number: u64) -> Call<'static> {
    let request = Request::Delete { table: outline.tables[0], ids: &[] };
    Call { shard: outline.shard, incarnations: outline.incarnations[..1].to_vec(), sequence: number, request }
}

fn forgotten() -> String {
    format!(
        "an equal step reached only some servers, and {MAX_KEPT} others have since: which servers lack it is not known any more. Load a checkpoint, or restart the program"
    )
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec::MergedUpdate;
    use recstore::Step;

    fn step(sum: &f32) -> [Call<'_>; 1] {
        let sums = std::slice::from_ref(sum);
        let update = MergedUpdate { table: TableId(3), step: Step::Next, ids: &[1], sums };
        [Call { shard: 0, incarnations: vec![7], sequence: 0, request: Request::Update(vec![update]) }]
    }

    #[test]
    fn of_too_many_failed_steps_the_first_ones_are_refused() {
        let sums: Vec<f32> = (0..=MAX_KEPT as u16).map(f32::from).collect();
        let mut changes = Changes::default();
        for (number, sum) in sums.iter().enumerate() {
            changes.keep(&step(sum), vec![State::Sent(number as u64)]);
        }
        let refused = changes.take("emb_update", &step(&sums[0])).unwrap_err().to_string();
        assert!(
            refused.contains("an equal step reached only some servers, and 256 others have since"),
            "{refused}"
        );
        // A further one does not make it another step.
        assert!(changes.take("emb_update", &step(&sums[0])).is_err());
        let known = changes.take("emb_update", &step(&sums[1])).unwrap();
        assert!(matches!(known.as_deref(), Some([State::Sent(1)])), "{known:?}");
        assert!(changes.take("emb_update", &step(&sums[1])).unwrap().is_none(), "it is not repeated twice");
        assert_eq!(changes.doubts(&[0]).len(), MAX_KEPT - 1);
        changes.give_up(Some(&[vec![TableId(4)]]));
        assert!(changes.has_failed(&[TableId(3)]) && !changes.has_failed(&[TableId(4)]));
        changes.give_up(Some(&[vec![TableId(3)]]));
        assert!(changes.take("emb_update", &step(&sums[0])).unwrap().is_none());
    }

    #[test]
    fn changes_that_are_no_steps_are_given_up_by_the_next_one() {
        let mut changes = Changes::default();
        let request = Request::Delete { table: TableId(3), ids: &[1] };
        let deletion = [Call { shard: 0, incarnations: vec![7], sequence: 0, request }];
        changes.keep(&deletion, vec![State::Sent(1)]);
        assert!(changes.doubts(&[0]).is_empty());
        changes.go_on();
        assert!(changes.take("hashtable_delete", &deletion).unwrap().is_none());
        changes.keep(&deletion, vec![State::New]);
        assert!(!changes.has_failed(&[TableId(3)]));
    }
}
