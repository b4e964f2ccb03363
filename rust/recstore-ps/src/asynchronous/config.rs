//! How much may be pending.

use std::time::Duration;

/// How much may be pending, and how long a caller waits for room.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AsyncConfig {
    /// The most requests that are issued and not finished.
    pub max_pending: usize,
    /// The most bytes of those requests and of the rows they give, rows that nobody has taken yet included.
    pub max_pending_bytes: u64,
    /// How long a request waits for room before it is refused.
    pub issue_timeout: Duration,
}

impl Default for AsyncConfig {
    fn default() -> Self {
        Self { max_pending: 1024, max_pending_bytes: 256 << 20, issue_timeout: Duration::from_secs(60) }
    }
}
