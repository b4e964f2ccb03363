//! Why a request was not issued, or failed later.

use std::time::Duration;

use recstore::Error;

use super::Timestamp;

/// Why a request was not issued, or failed later.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AsyncError {
    /// The store refused the request when it was issued: nothing was.
    #[error(transparent)]
    Store(#[from] Error),

    /// The store refused the request when its turn came. Of a push to servers that are silent it is not known which of
    /// them have it; see [`RemoteStore`](crate::RemoteStore).
    #[error("request {timestamp}: {error}")]
    Failed {
        /// The request.
        timestamp: Timestamp,
        /// What the store says.
        error: Error,
    },

    /// The request, or its callback, panicked.
    #[error("request {timestamp}: {what} panicked: {message}")]
    Panicked {
        /// The request.
        timestamp: Timestamp,
        /// `the store` or `its callback`.
        what: &'static str,
        /// What the panic said.
        message: String,
    },

    /// The request was taken back before it began.
    #[error("request {timestamp}: cancelled before it began")]
    Cancelled {
        /// The request.
        timestamp: Timestamp,
    },

    /// There was no room for the request in time.
    #[error(
        "{operation}: {limit_name} is {limit}, of which {in_use} are pending: no room for {requested} more within {} s", waited.as_secs_f64()
    )]
    Full {
        /// The call that was refused.
        operation: &'static str,
        /// `max_pending` or `max_pending_bytes`.
        limit_name: &'static str,
        /// Its value.
        limit: u64,
        /// How much of it is in use.
        in_use: u64,
        /// What the request needs.
        requested: u64,
        /// How long the caller waited; not at all in a callback, which all others wait for.
        waited: Duration,
    },

    /// There will never be room for the request.
    #[error("{operation}: a request of {bytes} bytes exceeds max_pending_bytes, {limit}")]
    TooLarge {
        /// The call that was refused.
        operation: &'static str,
        /// The bytes of the request and of the rows it gives.
        bytes: u64,
        /// The limit.
        limit: u64,
    },

    /// The request did not finish in time; it goes on.
    #[error("request {timestamp} did not finish within {} s; {pending} requests are pending", waited.as_secs_f64())]
    TimedOut {
        /// The request; of a wait for all the first that is pending.
        timestamp: Timestamp,
        /// How long the caller waited.
        waited: Duration,
        /// How many requests were pending then.
        pending: usize,
    },

    /// No request has this timestamp.
    #[error("request {timestamp} was never issued")]
    Unknown {
        /// The timestamp given.
        timestamp: Timestamp,
    },

    /// The request gives no rows: it is a push, has a callback, which got them, or they were taken before.
    #[error(
        "request {timestamp} has no rows to give: it is a push, its callback got them, or they were taken"
    )]
    NoRows {
        /// The request.
        timestamp: Timestamp,
    },

    /// A callback waited for a request that comes after it.
    #[error("request {timestamp} cannot finish while a callback waits for it")]
    InCallback {
        /// The request.
        timestamp: Timestamp,
    },

    /// Several requests failed of which nobody was told.
    #[error("{first} (and {others} more requests failed)")]
    Several {
        /// What the first one gives.
        first: Box<AsyncError>,
        /// How many there are besides.
        others: usize,
    },

    /// The requests were closed before.
    #[error("{operation}: the requests were closed")]
    Closed {
        /// The call that was refused.
        operation: &'static str,
    },

    /// A forked child has not the thread that carries requests out.
    #[error("{operation}: the requests of a forked process are its parent's: make others in the child")]
    ForkedChild {
        /// The call that was refused.
        operation: &'static str,
    },

    /// The thread that carries requests out could not be started.
    #[error("the thread for asynchronous requests did not start: {message}")]
    NoThread {
        /// What the system says.
        message: String,
    },
}

impl AsyncError {
    /// Returns the request that failed, unless it is a call that did.
    pub fn failed_request(&self) -> Option<Timestamp> {
        match *self {
            Self::Failed { timestamp, .. }
            | Self::Panicked { timestamp, .. }
            | Self::Cancelled { timestamp } => Some(timestamp),
            _ => None,
        }
    }

    /// Returns failures in one.
    pub(super) fn together(failures: Vec<Self>) -> Result<(), Self> {
        let others = failures.len().saturating_sub(1);
        match failures.into_iter().next() {
            None => Ok(()),
            Some(first) if others == 0 => Err(first),
            Some(first) => Err(Self::Several { first: Box::new(first), others }),
        }
    }
}
