//! How the updates of several workers go together.

use std::time::Duration;

use recstore::{Error, Result};

/// How the updates of several workers go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Consistency {
    /// Each is made as it comes. Clients need not be workers.
    #[default]
    Asynchronous,
    /// A step is made when every worker has sent its part of it, and is one step of the optimizer.
    Synchronous {
        /// What becomes of the gradients that they send for one id.
        combine: Combine,
    },
    /// Each is made as it comes; a worker more than so many steps ahead of another waits before it reads or updates.
    Bounded {
        /// The steps that one may be ahead.
        staleness: u64,
    },
}

/// What becomes of the gradients that workers send for one id in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Combine {
    /// They are added.
    #[default]
    Sum,
    /// They are added and divided by the number of workers.
    Mean,
}

/// How workers train together, and how long one waits for others.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct WorkerSync {
    /// How many workers there are. Where none waits for others nobody has to say.
    pub workers: Option<u32>,
    /// How their updates go together.
    pub consistency: Consistency,
    /// How long a worker waits for others before it is told whom it waits for.
    pub patience: Duration,
    /// A worker that was not heard of for so long is taken for dead.
    pub silence: Duration,
}

impl Default for WorkerSync {
    fn default() -> Self {
        Self {
            workers: None,
            consistency: Consistency::default(),
            patience: Duration::from_secs(60),
            silence: Duration::from_secs(10),
        }
    }
}

impl WorkerSync {
    /// # Errors
    /// [`Error::InvalidConfig`] where workers wait for each other and nobody said how many there are.
    pub(crate) fn check(&self) -> Result<()> {
        let message = match (self.consistency, self.workers) {
            (Consistency::Asynchronous, None) | (_, Some(1..)) => return Ok(()),
            (_, Some(0)) => "workers must be at least 1, got 0",
            (Consistency::Synchronous { .. }, None) => "synchronous consistency needs the number of workers",
            (Consistency::Bounded { .. }, None) => "bounded staleness needs the number of workers",
        };
        Err(Error::InvalidConfig { message: message.to_owned() })
    }
}
