//! One warning a peer and second, in memory that does not grow with the number of peers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a peer's further warnings are left out.
const INTERVAL: Duration = Duration::from_secs(1);

/// Peers that are remembered; warnings of more peers within one interval are left out.
const MAX_PEERS: usize = 1024;

/// When peers were warned of last.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    last: Mutex<HashMap<IpAddr, Instant>>,
}

impl Warnings {
    /// Whether `peer` is to be warned of now, which then counts as done.
    pub(crate) fn is_due(&self, peer: IpAddr) -> bool {
        self.is_due_at(peer, Instant::now())
    }

    fn is_due_at(&self, peer: IpAddr, now: Instant) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Old ones go only when there are too many: this walks over all.
        if last.len() >= MAX_PEERS {
            last.retain(|_, then| now.duration_since(*then) < INTERVAL);
        }
        let is_recent = last.get(&peer).is_some_and(|then| now.duration_since(*then) < INTERVAL);
        if is_recent || last.len() >= MAX_PEERS {
            return false;
        }
        last.insert(peer, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_peer_is_warned_of_once_a_second_and_peers_take_no_more_memory_than_they_may() {
        let (warnings, began) = (Warnings::default(), Instant::now());
        let peer = |number: u32| IpAddr::V4(Ipv4Addr::from_bits(number));
        let due =
            |number, seconds: f64| warnings.is_due_at(peer(number), began + Duration::from_secs_f64(seconds));
        assert!(due(1, 0.0) && due(2, 0.0) && !due(1, 0.9) && due(1, 1.0) && !due(1, 1.9));
        let first = (0..5000).filter(|&number| due(number + 10, 5.0)).count();
        assert_eq!((first, warnings.last.lock().unwrap().len()), (MAX_PEERS, MAX_PEERS));
        let due = |number, seconds| warnings.is_due_at(peer(number), began + Duration::from_secs(seconds));
        assert!(due(9999, 6) && !due(9999, 6));
        assert_eq!(warnings.last.lock().unwrap().len(), 1);
    }
}
