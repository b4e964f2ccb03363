//! Turns what goes wrong in Rust into what C++ can raise: an error keeps its text, a panic becomes an error.
//!
//! Texts are all of an error that passes libtorch, on whatever thread it arises and surfaces. So what is known of the last
//! errors besides is kept by their whole texts.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use recstore::fork;

/// The errors of which more is known than their texts.
const MAX_RECENT: usize = 64;

static RECENT: Mutex<VecDeque<Failure>> = Mutex::new(VecDeque::new());

/// Why a kernel failed.
#[derive(Debug, Clone, PartialEq)]
pub enum Failure {
    /// A `RuntimeError` in Python.
    Runtime(String),
    /// What the store refuses.
    Refused(recstore::Error),
    /// What an operator refuses by itself.
    Operator {
        /// Its name.
        operation: String,
        /// The text of the error.
        message: String,
    },
}

impl Failure {
    pub(crate) fn of(operation: &str, message: String) -> Self {
        Self::Operator { operation: operation.to_owned(), message }
    }

    /// Returns the last error of a text, if it is one of the last of the process.
    pub fn recent(message: &str) -> Option<Self> {
        let _gate = fork::enter();
        recent().iter().rev().find(|failure| failure.to_string() == message).cloned()
    }

    /// Returns the operator that refused, if one did.
    pub fn operation(&self) -> Option<&str> {
        match self {
            Self::Runtime(_) => None,
            Self::Refused(error) => error.operation(),
            Self::Operator { operation, .. } => Some(operation),
        }
    }

    fn note(&self) {
        // The gate: no process forks while one of its threads holds the lock.
        let _gate = fork::enter();
        let mut recent = recent();
        recent.retain(|other| other != self);
        if recent.len() == MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(self.clone());
    }
}

fn recent() -> MutexGuard<'static, VecDeque<Failure>> {
    RECENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that the checks of an operator's arguments refuse them.
pub(crate) fn note_refusal(operation: &str, message: &str) {
    Failure::of(operation, message.to_owned()).note();
}

/// Whether the last error of a text is an `IndexError` in Python.
pub(crate) fn is_index_error(message: &str) -> bool {
    matches!(Failure::recent(message), Some(Failure::Refused(recstore::Error::IdOutOfRange { .. })))
}

impl From<recstore::Error> for Failure {
    fn from(error: recstore::Error) -> Self {
        Self::Refused(error)
    }
}

impl From<recstore::IdInputError> for Failure {
    fn from(error: recstore::IdInputError) -> Self {
        Self::Runtime(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runtime(message) | Self::Operator { message, .. } => formatter.write_str(message),
            Self::Refused(error) => error.fmt(formatter),
        }
    }
}

/// Runs the body of a function that C++ calls. Without it a panic would end the process at the bridge.
pub(crate) fn guard<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // A panic leaves no lock of the store poisoned for good: the store takes them with `PoisonError::into_inner`
    // and changes a table only after everything that can fail.
    catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|payload| {
            let message = panic_message(payload.as_ref());
            Err(Failure::Runtime(format!("recstore: internal panic: {message}")))
        })
        .inspect_err(Failure::note)
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("of unknown kind")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        let text = |body: fn() -> Result<(), Failure>| guard(body).unwrap_err().to_string();
        assert_eq!(text(|| panic!("three")), "recstore: internal panic: three");
        assert_eq!(text(|| panic!("{}", 4)), "recstore: internal panic: 4");
        assert_eq!(text(|| std::panic::panic_any(5)), "recstore: internal panic: of unknown kind");
    }

    #[test]
    fn more_is_known_of_the_last_errors_on_every_thread() {
        let refusal = |id| recstore::Error::IdOutOfRange {
            operation: "emb_read",
            table: "guarded".to_owned(),
            id,
            position: 0,
            num_embeddings: 1,
        };
        let of_thread = |id| guard(|| Err::<(), _>(refusal(id).into())).unwrap_err().to_string();
        let texts: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|id| scope.spawn(move || of_thread(id))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for text in &texts {
            assert!(is_index_error(text), "{text}");
            assert_eq!(Failure::recent(text).unwrap().operation(), Some("emb_read"));
        }
        note_refusal("emb_write", "emb_write: ids");
        assert!(!is_index_error("emb_write: ids") && !is_index_error("id 7"));
        assert_eq!(Failure::recent("emb_write: ids").unwrap().operation(), Some("emb_write"));
        (0..2 * MAX_RECENT as i64).for_each(|id| _ = of_thread(id));
        assert!(recent().len() <= MAX_RECENT);
    }
}
