//! Maps whose ids all lie in lines, for tests that hold a table beside the same one without pages.

use std::cell::Cell;

thread_local! {
    static IS_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Whether a map takes pages: said once, when it is made.
#[derive(Debug)]
pub(super) struct Switch {
    is_off: bool,
}

impl Default for Switch {
    fn default() -> Self {
        Self { is_off: IS_OFF.get() }
    }
}

impl Switch {
    pub(super) fn is_off(&self) -> bool {
        self.is_off
    }
}

/// Makes the maps that `make` makes on this thread without pages.
pub(crate) fn without_pages<T>(make: impl FnOnce() -> T) -> T {
    // Also where a failed test ends the call: the next one runs on the same thread.
    struct Restored(bool);
    impl Drop for Restored {
        fn drop(&mut self) {
            IS_OFF.set(self.0);
        }
    }
    let _restored = Restored(IS_OFF.replace(true));
    make()
}
