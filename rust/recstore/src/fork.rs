//! Keeps the store whole across `fork`.
//!
//! A child gets a copy of the memory and of the locks, but not of the threads that hold them. Every public call
//! passes one gate for reading; `before` closes it, so that no call is half done when the process forks. A child
//! may read its copy of the tables; a change to a table that its parent opened is refused, for it would be lost.
//!
//! The host registers the three functions with `pthread_atfork`, or calls them around its own `fork`.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static GATE: RwLock<()> = RwLock::new(());
static GENERATION: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static CLOSED: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Waits for the calls under way and holds new ones back. Called in the parent before `fork`.
pub fn before() {
    let closed = GATE.write().unwrap_or_else(PoisonError::into_inner);
    CLOSED.set(Some(closed));
}

/// Lets calls pass again. Called in the parent after `fork`.
pub fn in_parent() {
    CLOSED.set(None);
}

/// Lets calls pass again and marks the tables as a parent's. Called in the child after `fork`.
pub fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    CLOSED.set(None);
}

/// Whether this process was forked from one that had loaded the store: its threads are gone.
pub fn is_child() -> bool {
    generation() != 0
}

/// How many forks lie between this process and the one that loaded the store.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Passes the gate; a fork waits until the guard is gone. Taken once a call, at its outermost point.
pub fn enter() -> RwLockReadGuard<'static, ()> {
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_waits_for_the_call_under_way() {
        let call = enter();
        let forking = std::thread::spawn(|| {
            before();
            in_parent();
        });
        assert!(!forking.is_finished());
        drop(call);
        forking.join().unwrap();
        drop(enter());
    }
}
