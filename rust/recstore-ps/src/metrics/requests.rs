//! Requests by what they ask and what came of them.

use std::thread;
use std::time::Instant;

use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts};
use prometheus::{Registry, Result};
use recstore::Result as StoreResult;

use super::registered;
use super::verb::{VERBS, Verb, rows_of};
use crate::wire::codec::Request;

/// The upper bounds of the classes of times, in seconds.
const SECONDS: [f64; 18] = [
    5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    60.0,
];

/// What can come of a request.
#[derive(Debug, Clone, Copy)]
enum Outcome {
    Ok,
    Refused,
    Panicked,
}

const OUTCOMES: [&str; 3] = ["ok", "refused", "panicked"];

/// The requests of a server.
#[derive(Debug)]
pub(crate) struct Requests {
    shard: usize,
    /// In the order of [`VERBS`].
    verbs: Vec<OfVerb>,
    in_flight: IntGauge,
}

#[derive(Debug)]
struct OfVerb {
    outcomes: [IntCounter; OUTCOMES.len()],
    seconds: Histogram,
    /// None of a verb that names no rows.
    rows: Option<IntCounter>,
}

impl Requests {
    pub(super) fn new(registry: &Registry, shard: usize) -> Result<Self> {
        let total = Opts::new(
            "recstore_requests_total",
            "Requests answered, by what they asked and what came of it.",
        );
        let total = registered(registry, IntCounterVec::new(total, &["verb", "outcome"])?)?;
        let seconds = HistogramOpts::new(
            "recstore_request_seconds",
            "Seconds from a request that was read to its answer, the wait for locks and disk included.",
        );
        let seconds = HistogramVec::new(seconds.buckets(SECONDS.to_vec()), &["verb"])?;
        let seconds = registered(registry, seconds)?;
        let rows = Opts::new("recstore_rows_total", "Rows named by requests that were carried out.");
        let rows = registered(registry, IntCounterVec::new(rows, &["verb"])?)?;
        let in_flight =
            IntGauge::new("recstore_requests_in_flight", "Requests that were read and not yet answered.")?;
        let of_verb = |&(verb, name): &(Verb, &str)| OfVerb {
            outcomes: OUTCOMES.map(|outcome| total.with_label_values(&[name, outcome])),
            seconds: seconds.with_label_values(&[name]),
            rows: verb.has_rows().then(|| rows.with_label_values(&[name])),
        };
        let verbs = VERBS.iter().map(of_verb).collect();
        Ok(Self { shard, verbs, in_flight: registered(registry, in_flight)? })
    }

    /// Carries a request out and counts it, also where that panics.
    pub(crate) fn observe<T>(
        &self,
        request: &Request<'_>,
        carry_out: impl FnOnce() -> StoreResult<T>,
    ) -> StoreResult<T> {
        self.in_flight.inc();
        let (verb, rows, began) = (Verb::of(request), rows_of(request), Instant::now());
        // `Panicked` until there is an answer: a `carry_out` that unwinds leaves it at that.
        let mut underway = UnderWay { requests: self, verb, rows, began, outcome: Outcome::Panicked };
        let answer = carry_out();
        underway.outcome = if answer.is_ok() { Outcome::Ok } else { Outcome::Refused };
        answer
    }
}

/// A request that is being carried out; it is counted when it is dropped.
struct UnderWay<'a> {
    requests: &'a Requests,
    verb: Verb,
    rows: usize,
    began: Instant,
    outcome: Outcome,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let Self { requests, verb, rows, began, outcome } = *self;
        let (of_verb, seconds) = (&requests.verbs[verb as usize], began.elapsed().as_secs_f64());
        of_verb.outcomes[outcome as usize].inc();
        of_verb.seconds.observe(seconds);
        if let (Outcome::Ok, Some(counter)) = (outcome, &of_verb.rows) {
            counter.inc_by(rows as u64);
        }
        requests.in_flight.dec();
        let (shard, verb) = (requests.shard, verb.name());
        if thread::panicking() {
            tracing::error!(shard, verb, rows, "a request met an internal panic");
        } else {
            tracing::trace!(shard, verb, rows, seconds, outcome = OUTCOMES[outcome as usize], "request");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use recstore::{Error, Shard, TableId};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use crate::metrics::Metrics;

    #[test]
    fn a_request_is_counted_whatever_comes_of_it() {
        let metrics = Metrics::new(Shard { number: 3, of: 4 });
        let (requests, write) =
            (&metrics.requests, Request::Write { table: TableId(1), ids: &[1, 2, 3], rows: &[0.0; 3] });
        assert_eq!(requests.observe(&write, || Ok(requests.in_flight.get())), Ok(1));
        let refusal = || Err::<(), _>(Error::InvalidStep { table: "t".to_owned() });
        assert!(requests.observe(&write, refusal).is_err());
        let panics = || requests.observe(&write, || -> StoreResult<()> { panic!("on purpose") });
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        let of_verb = &requests.verbs[Verb::Write as usize];
        assert_eq!(of_verb.outcomes.each_ref().map(IntCounter::get), [1, 1, 1]);
        assert_eq!(of_verb.rows.as_ref().map(IntCounter::get), Some(3));
        assert_eq!((of_verb.seconds.get_sample_count(), requests.in_flight.get()), (3, 0));
    }
}
