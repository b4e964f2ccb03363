//! The store's loops on libtorch's threads: they follow `torch.set_num_threads` and survive forked DataLoader workers.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use recstore::{Executor, fork};

/// Runs loops on the threads of libtorch's `parallel_for`.
#[derive(Debug, Clone, Copy, Default)]
pub struct TorchThreads;

impl Executor for TorchThreads {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        // A forked child has none of the threads its copy of OpenMP remembers, and would wait for them for ever.
        if count < 2 || fork::is_child() {
            return (0..count).for_each(body);
        }
        let task = Task { body, panicked: AtomicBool::new(false), panic: Mutex::new(None) };
        run_on_torch(count, &task);
        let panic = task.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    fn num_threads(&self) -> usize {
        crate::ffi::num_threads()
    }
}

/// The body of a loop, and the first panic in it.
pub(crate) struct Task<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Runs one piece. A panic must not unwind into C++, so it waits in the task until the loop is over; pieces not yet
/// begun are left out, as a panic would leave them out of a plain loop.
pub(crate) fn run_piece(task: &Task<'_>, index: usize) {
    if task.panicked.load(Ordering::Relaxed) {
        return;
    }
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (task.body)(index))) {
        task.panicked.store(true, Ordering::Relaxed);
        let mut panic = task.panic.lock().unwrap_or_else(PoisonError::into_inner);
        panic.get_or_insert(payload);
    }
}

#[expect(unsafe_code, reason = "calls into libtorch")]
fn run_on_torch(count: usize, task: &Task<'_>) {
    // SAFETY:
    // 1. `parallel_for` returns only when all pieces have run, so `task` outlives every use of it.
    // 2. `Task` is `Sync`: its body is, and the panic is behind a lock.
    let done = unsafe { crate::ffi::parallel_for(count, task) };
    if let Err(error) = done {
        panic!("libtorch's parallel_for failed: {error}");
    }
}
