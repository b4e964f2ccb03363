//! Where the store's loops run: on the threads of whoever hosts it.
//!
//! Results never depend on the executor: a loop's bodies touch disjoint data, and every sum is taken within one body.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;

/// Runs the bodies of a loop, in any order, on any threads, and returns when all have run.
///
/// The caller may hold a table's lock: while it waits, it must not be given other work that calls the store.
pub trait Executor: Send + Sync {
    /// Calls `body` once with every number below `count`.
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync));

    /// Returns how many bodies may run at a time.
    fn num_threads(&self) -> usize;
}

/// The floats worth waking a thread for. Less runs on the calling thread.
const FLOATS_PER_THREAD: usize = 32_768;

/// Runs every body on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Executor for Serial {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(body);
    }

    fn num_threads(&self) -> usize {
        1
    }
}

/// Runs the bodies on a rayon pool of the store's own.
///
/// A caller that is a rayon thread itself runs them alone: it holds a table's lock, and while it waited for others it
/// would steal another task, which may call for the same lock. So does a forked child, where the pool is gone.
#[cfg(feature = "rayon")]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rayon;

#[cfg(feature = "rayon")]
impl Executor for Rayon {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        use rayon::prelude::*;
        match rayon_pool() {
            Some(pool) => pool.install(|| (0..count).into_par_iter().for_each(body)),
            None => Serial.for_each(count, body),
        }
    }

    fn num_threads(&self) -> usize {
        rayon_pool().map_or(1, rayon::ThreadPool::current_num_threads)
    }
}

/// Returns the store's pool, unless the caller had better not wait for it or it cannot be started.
///
/// It is not rayon's global pool: threads of that one may all be waiting for the lock that the caller holds.
#[cfg(feature = "rayon")]
fn rayon_pool() -> Option<&'static rayon::ThreadPool> {
    static POOL: std::sync::OnceLock<Option<rayon::ThreadPool>> = std::sync::OnceLock::new();
    if crate::fork::is_child() || rayon::current_thread_index().is_some() {
        return None;
    }
    let start = || rayon::ThreadPoolBuilder::new().thread_name(|index| format!("recstore-{index}")).build();
    POOL.get_or_init(|| start().ok()).as_ref()
}

/// Runs loops on another executor's threads, but leaves a core to each that works besides.
///
/// Threads of a loop wait for each other: were one more busy than there are cores, each loop would last until the
/// scheduler had come round to its last thread, a score of milliseconds and more.
pub(crate) struct ReservedCores {
    inner: Box<dyn Executor>,
    others: AtomicUsize,
}

/// Says that somebody works besides the loops, as long as it lives.
pub(crate) struct Besides<'a>(&'a AtomicUsize);

impl Drop for Besides<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ReservedCores {
    pub(crate) fn new(inner: Box<dyn Executor>) -> Self {
        Self { inner, others: AtomicUsize::new(0) }
    }

    /// Leaves a core to the caller until what is returned is dropped.
    pub(crate) fn besides(&self) -> Besides<'_> {
        self.others.fetch_add(1, Ordering::Relaxed);
        Besides(&self.others)
    }

    /// Returns how many threads there are for a loop beside others.
    fn spared(&self, others: usize) -> usize {
        static CORES: LazyLock<usize> =
            LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));
        self.inner.num_threads().min(CORES.saturating_sub(others)).max(1)
    }
}

impl Executor for ReservedCores {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        let others = self.others.load(Ordering::Relaxed);
        if others == 0 {
            return self.inner.for_each(count, body);
        }
        let threads = self.spared(others);
        if threads == 1 {
            return Serial.for_each(count, body);
        }
        self.inner.for_each(threads.min(count), &|first| (first..count).step_by(threads).for_each(body));
    }

    fn num_threads(&self) -> usize {
        match self.others.load(Ordering::Relaxed) {
            0 => self.inner.num_threads(),
            others => self.spared(others),
        }
    }
}

/// Into how many parts a batch of `floats` is cut: one a thread, or one for what is small.
pub(crate) fn parts_for(executor: &dyn Executor, floats: usize) -> usize {
    if floats < FLOATS_PER_THREAD { 1 } else { executor.num_threads().max(1) }
}

/// Returns how many of `count` items of `floats` floats each go into one piece of a loop: some pieces a thread, of which
/// those that wake first take more, or all together where waking a thread is not worth it.
pub(crate) fn piece_size(executor: &dyn Executor, count: usize, floats: usize) -> usize {
    // On two cores two pieces a thread were as fast (2.34 against 2.32 ms a lookup); more cores wait longer
    // for the last one.
    const PIECES_PER_THREAD: usize = 4;
    const FLOATS_PER_PIECE: usize = FLOATS_PER_THREAD / 2;
    let threads = executor.num_threads();
    if threads < 2 || count * floats < FLOATS_PER_THREAD {
        return count.max(1);
    }
    let pieces = (threads * PIECES_PER_THREAD).min(count * floats / FLOATS_PER_PIECE);
    count.div_ceil(pieces).max(1)
}

/// Calls `body` once with each item, which it may change. Every thread takes the next item as soon as it has done one, so
/// that one that wakes late, or is held up, does less and keeps nobody waiting.
pub(crate) fn for_each_mut<T: Send>(
    executor: &dyn Executor,
    items: impl Iterator<Item = T>,
    body: impl Fn(T) + Sync,
) {
    // `next` gives each item to one thread, so no lock is ever waited for: it takes the place of unsafe code.
    // It also publishes the item, so the counter itself may be relaxed.
    let items: Vec<Mutex<Option<T>>> = items.map(|item| Mutex::new(Some(item))).collect();
    let next = AtomicUsize::new(0);
    let take_items = |_: usize| {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(item) = item.lock().unwrap_or_else(PoisonError::into_inner).take() {
                body(item);
            }
        }
    };
    match items.len().min(executor.num_threads()) {
        0 | 1 => take_items(0),
        threads => executor.for_each(threads, &take_items),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_visited_once() {
        let mut values = vec![0; 100];
        for_each_mut(&Serial, values.iter_mut(), |value| *value += 1);
        assert!(values.iter().all(|&value| value == 1));
    }

    #[test]
    fn whoever_comes_first_takes_what_others_are_too_late_for() {
        /// Runs the bodies one after another, as threads would of which one wakes when all is done.
        struct Late;
        impl Executor for Late {
            fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
                assert_eq!(count, 4, "a body a thread");
                (0..count).rev().for_each(body);
            }
            fn num_threads(&self) -> usize {
                4
            }
        }
        let mut order = Vec::new();
        let taken = Mutex::new(&mut order);
        for_each_mut(&Late, 0..9, |item| taken.lock().unwrap().push(item));
        assert_eq!(order, (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn pieces_are_some_a_thread_and_not_too_small() {
        struct Two;
        impl Executor for Two {
            fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
                (0..count).for_each(body);
            }
            fn num_threads(&self) -> usize {
                2
            }
        }
        assert_eq!(piece_size(&Serial, 1 << 20, 64), 1 << 20);
        assert_eq!(piece_size(&Two, 511, 64), 511);
        assert_eq!(piece_size(&Two, 512, 64), 256);
        assert_eq!(piece_size(&Two, 65_536, 64), 8_192);
        assert_eq!(piece_size(&Two, 3, 1 << 20), 1);
    }

    #[test]
    fn a_core_is_left_to_who_works_besides() {
        struct Wide(AtomicUsize);
        impl Executor for Wide {
            fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
                self.0.fetch_max(count, Ordering::Relaxed);
                (0..count).for_each(body);
            }
            fn num_threads(&self) -> usize {
                1_000_000
            }
        }
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let sparing = ReservedCores::new(Box::new(Wide(AtomicUsize::new(0))));
        assert_eq!(sparing.num_threads(), 1_000_000);
        {
            let _one = sparing.besides();
            let _two = sparing.besides();
            assert_eq!(sparing.num_threads(), cores.saturating_sub(2).max(1));
            let mut values = vec![0; 100];
            for_each_mut(&sparing, values.iter_mut(), |value| *value += 1);
            assert!(values.iter().all(|&value| value == 1));
        }
        assert_eq!(sparing.num_threads(), 1_000_000);
    }

    #[cfg(feature = "rayon")]
    #[test]
    fn rayon_visits_every_item_once() {
        let mut values = vec![0; 1000];
        for_each_mut(&Rayon, values.iter_mut(), |value| *value += 1);
        assert!(values.iter().all(|&value| value == 1));
    }
}
