//! Says of gradients that no step comes for.

use std::fmt;
use std::sync::atomic::Ordering;

use super::collector::GradientCollector;

/// So many backward passes without a step are no accumulation any more.
const PASSES: u64 = 1024;

/// So many are none if their gradients take more than [`BYTES`].
const PASSES_OF_MANY_BYTES: u64 = 64;

const BYTES: usize = 1 << 30;

/// Gradients of many backward passes that no step was taken with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnappliedGradients {
    /// The table's name.
    pub table: String,
    /// The backward passes since the last step.
    pub passes: u64,
    /// What their gradients take of memory.
    pub bytes: usize,
}

impl fmt::Display for UnappliedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, passes, bytes } = self;
        write!(
            f,
            "the module over table \"{table}\" has collected the gradients of {passes} backward passes, {bytes} bytes, \
             that no step was taken with: give the module to a SparseOptimizer and call its step, drop them with \
             zero_grad, or freeze the module with requires_grad_(False)"
        )
    }
}

impl<K: Clone + PartialEq> GradientCollector<K> {
    /// Returns what it has of a table if that is of very many backward passes, 1,024 or, from 1 GiB on, 64. It tells once.
    pub fn overdue(&self, table: &K) -> Option<UnappliedGradients> {
        let found = self.with_chunks(|chunks| {
            let of_table = || chunks.iter().filter(|chunk| chunk.table == *table);
            let passes = of_table().map(|chunk| chunk.passes).sum();
            if passes < PASSES_OF_MANY_BYTES {
                return None;
            }
            let bytes = of_table().map(|chunk| chunk.bytes).sum();
            let is_overdue = passes >= PASSES || bytes > BYTES;
            of_table().next().filter(|_| is_overdue).map(|chunk| (chunk.name.clone(), passes, bytes))
        });
        let (table, passes, bytes) = found?;
        let is_told = self.has_warned.swap(true, Ordering::Relaxed);
        (!is_told).then_some(UnappliedGradients { table, passes, bytes })
    }
}
