//! Memory of large results, for tensors that give it back at their end.

use recstore::ResultMemory;

/// Results from this size on take it.
pub(crate) fn large_result_bytes() -> usize {
    ResultMemory::LARGE_BYTES
}

pub(crate) struct LargeResult(Option<ResultMemory>);

/// Returns memory of at least `bytes`.
pub(crate) fn large_result(bytes: usize) -> Box<LargeResult> {
    Box::new(LargeResult(ResultMemory::new(bytes)))
}

impl LargeResult {
    /// Where the memory lies; null where the system refused it.
    pub(crate) fn start(&mut self) -> *mut u8 {
        self.0.as_mut().map_or(std::ptr::null_mut(), ResultMemory::start)
    }
}
