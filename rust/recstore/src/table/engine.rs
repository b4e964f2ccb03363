//! What a table's loops run on.

use crate::kernel::parallel::Executor;
use crate::kernel::simd::Simd;

/// On whose threads and with which instructions a table's loops run.
#[derive(Clone, Copy)]
pub(crate) struct Engine<'a> {
    pub(crate) executor: &'a dyn Executor,
    pub(crate) simd: Simd,
}
