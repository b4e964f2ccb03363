//! Memory for requests under way, which is bounded however many clients send.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A number of bytes that requests share.
#[derive(Debug)]
pub(super) struct MemoryBudget(AtomicUsize);

/// Bytes that a request has, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    room: Arc<MemoryBudget>,
    bytes: usize,
}

impl MemoryBudget {
    pub(super) fn new(bytes: usize) -> Self {
        Self(AtomicUsize::new(bytes))
    }
}

impl Reservation {
    pub(super) fn new(room: &Arc<MemoryBudget>) -> Self {
        Self { room: Arc::clone(room), bytes: 0 }
    }

    /// Takes more bytes, and returns whether there were as many.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        let left = |free: usize| free.checked_sub(bytes);
        let taken = self.room.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok();
        self.bytes += if taken { bytes } else { 0 };
        taken
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.room.0.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back() {
        let room = Arc::new(MemoryBudget::new(10));
        let (mut first, mut second) = (Reservation::new(&room), Reservation::new(&room));
        assert!(first.take(5) && first.take(3) && !second.take(3) && second.take(2));
        drop(first);
        assert!(second.take(8) && !second.take(1));
        drop(second);
        assert_eq!(room.0.load(Ordering::Relaxed), 10);
    }
}
