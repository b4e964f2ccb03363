//! Numbers for what may leave its process: no other process has them, and so none takes one for something of its own.

use std::hash::{BuildHasher, RandomState};
use std::process;
use std::time::SystemTime;

/// Draws a number that neither this process nor another has drawn. The system's randomness tells processes apart; a
/// forked child has its parent's, but another process id.
pub fn drawn_number() -> u64 {
    RandomState::new().hash_one((SystemTime::now(), process::id()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_number_is_drawn_twice() {
        let numbers: HashSet<u64> = (0..10_000).map(|_| drawn_number()).collect();
        assert_eq!(numbers.len(), 10_000);
    }
}
