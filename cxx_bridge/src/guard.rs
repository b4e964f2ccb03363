//! Turns what goes wrong in Rust into what C++ can raise: an error keeps its text, a panic becomes an error.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a kernel failed, as `ops.cpp` reads it.
#[derive(Debug)]
pub enum Failure {
    /// A `RuntimeError` in Python.
    Runtime(String),
    /// An `IndexError` in Python.
    Index(String),
}

impl From<recstore::Error> for Failure {
    fn from(error: recstore::Error) -> Self {
        match error {
            recstore::Error::IdOutOfRange { .. } => Self::Index(error.to_string()),
            error => Self::Runtime(error.to_string()),
        }
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
            Self::Runtime(message) => formatter.write_str(message),
            // cxx carries one string across; `call` in ops.cpp looks for this prefix and takes it off.
            Self::Index(message) => write!(formatter, "IndexError: {message}"),
        }
    }
}

/// Runs the body of a function that C++ calls. Without it a panic would end the process at the bridge.
pub(crate) fn guard<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // A panic leaves no lock of the store poisoned for good: the store takes them with `PoisonError::into_inner`
    // and changes a table only after everything that can fail.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let message = panic_message(payload.as_ref());
        Err(Failure::Runtime(format!("recstore: internal panic: {message}")))
    })
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
    fn an_index_error_is_marked() {
        let refused = guard(|| Err::<(), _>(Failure::Index("id 7".into())));
        assert_eq!(refused.unwrap_err().to_string(), "IndexError: id 7");
    }
}
