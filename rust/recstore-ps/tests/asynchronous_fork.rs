//! A process that forks while requests are pending: its child is refused and does not hang.

// tier: test

#![cfg(unix)]
#![expect(unsafe_code, reason = "fork, alarm and _exit are foreign functions")]

#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use numbered::Numbered;
use recstore::{LocalStore, Serial, TableConfig};
use recstore_ps::{AsyncConfig, AsyncError, AsyncStore, Timestamp};

const CHILD_SECONDS: u32 = 30;

/// Runs `work` in a forked child and returns whether it ended well.
fn ends_well_in_a_child(work: impl FnOnce()) -> bool {
    // SAFETY:
    // 1. The child runs `work` and leaves by `_exit`: it never returns into the test's threads, which it lacks.
    // 2. glibc keeps its allocator whole across fork; `work` takes no lock of the parent's.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: 3. no handler is set, so the alarm ends a child that hangs; 4. `_exit` ends the process.
        unsafe {
            libc::alarm(CHILD_SECONDS);
            libc::_exit(i32::from(catch_unwind(AssertUnwindSafe(work)).is_err()))
        }
    }
    let mut status = 0;
    // SAFETY: 5. `child` is a child of this process that was not waited for; 6. `status` lives through the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status == 0
}

#[test]
fn a_forked_child_is_refused_and_does_not_hang() {
    let store = Arc::new(LocalStore::new(Box::new(Serial)));
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    let mut config = AsyncConfig::default();
    config.max_pending = 4;
    let requests = AsyncStore::new(store, config).unwrap();
    for _ in 0..20 {
        for _ in 0..20 {
            requests.push(table, [1], [1.0], 0, None).unwrap();
        }
        let ended_well = ends_well_in_a_child(|| {
            let refused = |operation| AsyncError::ForkedChild { operation };
            assert_eq!(requests.push(table, [1], [1.0], 0, None), Err(refused("push")));
            assert_eq!(requests.wait(Timestamp(0), None), Err(refused("wait")));
            assert_eq!(requests.wait_all(None), Err(refused("wait_all")));
            assert_eq!(requests.cancel(), Err(refused("cancel")));
            assert_eq!(requests.num_pending(), Err(refused("num_pending")));
            assert!(
                refused("push").to_string().starts_with("push: the requests of a forked process are its")
            );
            // SAFETY: 7. the child's copy is read once, and the child never uses `requests` again.
            drop(unsafe { std::ptr::read(&raw const requests) });
        });
        assert!(ended_well);
    }
    requests.wait_all(None).unwrap();
    assert_eq!(requests.store().statistics(table).unwrap().step, 400);
}
