//! Rings that reads of all tables share, and whether there are any.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::{env, io};

use super::ring::Ring;
use crate::fork;

/// Says whether rings are used: `on`, as without it, or `off`.
const VARIABLE: &str = "RECSTORE_IO_URING";

/// The rings that are not in use, and the generation of the process that made each: a child has no use for those of its
/// parent.
static RINGS: Mutex<Vec<(u32, Ring)>> = Mutex::new(Vec::new());

/// Why this process has no rings.
static REFUSAL: OnceLock<String> = OnceLock::new();

/// Returns whether the environment wants rings.
///
/// # Errors
/// It says neither yes nor no.
pub(super) fn are_wanted() -> io::Result<bool> {
    match env::var(VARIABLE).as_deref() {
        Ok("on") | Err(env::VarError::NotPresent) => Ok(true),
        Ok("off") => Ok(false),
        other => {
            let found = other.unwrap_or("no text");
            let message = format!("{VARIABLE} must be \"on\" or \"off\", got \"{found}\"");
            Err(io::Error::new(io::ErrorKind::InvalidInput, message))
        }
    }
}

/// Returns a ring that nobody uses, if this process may have any.
pub(super) fn take() -> Option<Ring> {
    if REFUSAL.get().is_some() {
        return None;
    }
    let mut rings = RINGS.lock().unwrap_or_else(PoisonError::into_inner);
    rings.retain(|(generation, _)| *generation == fork::generation());
    if let Some((_, ring)) = rings.pop() {
        return Some(ring);
    }
    drop(rings);
    Ring::new().inspect_err(|error| _ = REFUSAL.set(error.to_string())).ok()
}

/// Gives a ring back that has nothing under way.
pub(super) fn give_back(ring: Ring) {
    RINGS.lock().unwrap_or_else(PoisonError::into_inner).push((fork::generation(), ring));
}

/// Returns how rows on disk are read here, in words.
pub fn reading_way() -> String {
    match (are_wanted(), take()) {
        (Err(error), _) => error.to_string(),
        (Ok(false), _) => format!("pread: {VARIABLE} is off"),
        (Ok(true), Some(ring)) => {
            give_back(ring);
            "io_uring".to_owned()
        }
        (Ok(true), None) => {
            let reason = REFUSAL.get().map_or("", String::as_str);
            format!("pread: the system refuses io_uring: {reason}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_taken_given_back_and_told_of() {
        let has_ring = take().is_some_and(|ring| {
            give_back(ring);
            take().map(give_back).is_some()
        });
        assert_eq!(reading_way() == "io_uring", has_ring && are_wanted().unwrap());
    }
}
