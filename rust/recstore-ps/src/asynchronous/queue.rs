//! Which request comes next, and what came of those that are finished.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use recstore::TableId;

use super::request::{Callback, Request};
use super::{AsyncConfig, AsyncError, Timestamp};

/// Higher priorities first, and of one priority what was issued first.
type QueueKey = (Reverse<i32>, Timestamp);

/// A request that has not begun.
pub(super) struct Queued {
    pub(super) timestamp: Timestamp,
    pub(super) request: Request,
    pub(super) callback: Option<Callback>,
}

/// What a request failed with, and whether somebody was told.
struct Failure {
    error: AsyncError,
    is_told: bool,
}

/// The requests that wait, and what came of the others.
#[derive(Default)]
pub(super) struct Queue {
    /// The timestamp of the next request.
    next: u64,
    waiting: BTreeMap<QueueKey, Queued>,
    /// The pushes that wait, of each table as they were issued.
    pushes: HashMap<TableId, VecDeque<QueueKey>>,
    unfinished: BTreeSet<Timestamp>,
    /// The bytes of requests that are not finished, and of rows that were not taken.
    bytes: u64,
    rows: HashMap<Timestamp, Vec<f32>>,
    /// Kept, so that a wait gives the same answer whenever it comes.
    failures: BTreeMap<Timestamp, Failure>,
    /// Whether no more requests come.
    pub(super) is_closed: bool,
    /// Whether nobody is left who could be told of failures.
    pub(super) is_dropped: bool,
}

impl Queue {
    /// Returns the limit that leaves no room for `bytes` more: its name, its value, and what is in use.
    pub(super) fn lacks(&self, bytes: u64, config: &AsyncConfig) -> Option<(&'static str, u64, u64)> {
        let pending = self.unfinished.len();
        if pending >= config.max_pending {
            return Some(("max_pending", config.max_pending as u64, pending as u64));
        }
        let limit = config.max_pending_bytes;
        (self.bytes.saturating_add(bytes) > limit).then_some(("max_pending_bytes", limit, self.bytes))
    }

    /// Adds a request.
    pub(super) fn add(&mut self, request: Request, priority: i32, callback: Option<Callback>) -> Timestamp {
        let timestamp = Timestamp(self.next);
        self.next += 1;
        // The first key is the highest priority, and of equal ones the earliest.
        let place = (Reverse(priority), timestamp);
        if request.changes() {
            self.pushes.entry(request.table).or_default().push_back(place);
        }
        self.bytes += request.bytes();
        self.unfinished.insert(timestamp);
        self.waiting.insert(place, Queued { timestamp, request, callback });
        timestamp
    }

    /// Takes the request that comes next. Pushes of a table keep their order: one of a higher priority takes those before
    /// it along.
    pub(super) fn take_next(&mut self) -> Option<Queued> {
        let (&place, first) = self.waiting.first_key_value()?;
        if !first.request.changes() {
            return self.waiting.remove(&place);
        }
        let table = first.request.table;
        let pushes = self.pushes.get_mut(&table)?;
        // Perhaps of a lower priority: the push that was chosen stays, and is chosen again next.
        let earliest = pushes.pop_front().unwrap_or(place);
        if pushes.is_empty() {
            self.pushes.remove(&table);
        }
        self.waiting.remove(&earliest)
    }

    /// Takes all requests that have not begun, in the order in which they were issued.
    pub(super) fn take_all(&mut self) -> Vec<Queued> {
        self.pushes.clear();
        let mut all: Vec<Queued> = std::mem::take(&mut self.waiting).into_values().collect();
        all.sort_by_key(|queued| queued.timestamp);
        all
    }

    /// Notes what came of a request of so many bytes; rows that no callback got wait to be taken.
    pub(super) fn finish(
        &mut self,
        timestamp: Timestamp,
        bytes: u64,
        outcome: Result<Option<Vec<f32>>, AsyncError>,
        is_told: bool,
    ) {
        self.unfinished.remove(&timestamp);
        self.bytes -= bytes;
        match outcome {
            Ok(None) => {}
            Ok(Some(rows)) => {
                // Rows count until they are taken, or a caller that never takes them would fill memory.
                self.bytes += size_of_val(&rows[..]) as u64;
                self.rows.insert(timestamp, rows);
            }
            Err(error) => _ = self.failures.insert(timestamp, Failure { error, is_told }),
        }
    }

    /// Returns what a request that is finished came to; `None` while it is pending.
    pub(super) fn outcome(&mut self, timestamp: Timestamp) -> Option<Result<(), AsyncError>> {
        if timestamp.0 >= self.next {
            return Some(Err(AsyncError::Unknown { timestamp }));
        }
        if self.unfinished.contains(&timestamp) {
            return None;
        }
        Some(self.failures.get_mut(&timestamp).map_or(Ok(()), |failure| {
            failure.is_told = true;
            Err(failure.error.clone())
        }))
    }

    /// Takes the rows of a request that is finished.
    pub(super) fn take_rows(&mut self, timestamp: Timestamp) -> Result<Vec<f32>, AsyncError> {
        let rows = self.rows.remove(&timestamp).ok_or(AsyncError::NoRows { timestamp })?;
        self.bytes -= size_of_val(&rows[..]) as u64;
        Ok(rows)
    }

    /// Returns the failures that nobody was told of, and counts them as told.
    pub(super) fn untold(&mut self) -> Vec<AsyncError> {
        let untold = self.failures.values_mut().filter(|failure| !failure.is_told);
        untold
            .map(|failure| {
                failure.is_told = true;
                failure.error.clone()
            })
            .collect()
    }

    /// Returns how many requests are pending, and the first of them.
    pub(super) fn pending(&self) -> (usize, Option<Timestamp>) {
        (self.unfinished.len(), self.unfinished.first().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(table: i64, is_push: bool) -> Request {
        let gradients = is_push.then(Vec::new);
        Request { table: TableId(table), dim: 1, ids: vec![], gradients, gives_rows: !is_push }
    }

    proptest! {
        #[test]
        fn requests_come_by_priority_then_in_order_and_pushes_of_a_table_in_order(
            issued in prop::collection::vec((0..3i64, any::<bool>(), -2..3i32, any::<bool>()), 0..40)
        ) {
            let mut queue = Queue::default();
            // What waits, as it was issued: timestamp, table, whether a push, priority.
            let mut model: Vec<(u64, i64, bool, i32)> = vec![];
            for (number, &(table, is_push, priority, takes)) in issued.iter().enumerate() {
                let timestamp = queue.add(request(table, is_push), priority, None);
                prop_assert_eq!(timestamp.0, number as u64);
                model.push((timestamp.0, table, is_push, priority));
                if takes {
                    let taken = queue.take_next().map(|queued| queued.timestamp.0);
                    prop_assert_eq!(taken, next_of(&mut model));
                }
            }
            while let Some(queued) = queue.take_next() {
                prop_assert_eq!(Some(queued.timestamp.0), next_of(&mut model));
            }
            prop_assert!(model.is_empty());
        }
    }

    fn next_of(model: &mut Vec<(u64, i64, bool, i32)>) -> Option<u64> {
        let highest = model.iter().map(|&(.., priority)| priority).max()?;
        let first = *model.iter().find(|&&(.., priority)| priority == highest)?;
        let is_before = |other: &&(u64, i64, bool, i32)| first.2 && other.2 && other.1 == first.1;
        let next = model.iter().find(is_before).copied().unwrap_or(first);
        model.retain(|other| other.0 != next.0);
        Some(next.0)
    }
}
