//! A rule of a program's own in a step: called through its trait, and stopped at its first panic.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use super::row_rule::RowRule;
use super::update_rule::{UpdateRule, text_of};

/// A rule of a program's own, made ready for a step.
pub(crate) struct OwnRule {
    rule: Arc<dyn UpdateRule>,
    learning_rate: f64,
    step: u64,
    panic: OnceLock<String>,
}

impl fmt::Debug for OwnRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnRule").field("step", &self.step).finish_non_exhaustive()
    }
}

impl OwnRule {
    pub(crate) fn new(rule: Arc<dyn UpdateRule>, learning_rate: f64, step: u64) -> Self {
        Self { rule, learning_rate, step, panic: OnceLock::new() }
    }

    /// Returns what the rule's first panic said.
    pub(super) fn panic(&self) -> Option<&str> {
        self.panic.get().map(String::as_str)
    }

    /// Calls the rule, unless it has panicked: a panic must not end a thread of the host, nor leave a lock behind.
    #[inline(never)]
    fn unless_panicked(&self, call: impl FnOnce()) {
        if self.panic.get().is_some() {
            return;
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
            _ = self.panic.set(text_of(&*panic));
        }
    }
}

impl RowRule for OwnRule {
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        self.unless_panicked(|| self.rule.apply(weights, state, gradient, self.step, self.learning_rate));
    }

    fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        self.unless_panicked(|| self.rule.adopt(weights, state, self.learning_rate));
    }
}

/// The learning rate where a configuration has none.
pub(super) fn default_lr() -> f64 {
    0.01
}
