//! When a row was last updated, and in how many steps.

/// The bits of a count; those above are the step's.
const COUNT_BITS: u32 = 24;
const MAX_COUNT: u64 = (1 << COUNT_BITS) - 1;
const MAX_STEP: u64 = u64::MAX >> COUNT_BITS;

/// The step of a row's last update and the number of steps that updated it, in one word: up to 2^40 and 2^24, where
/// both stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Usage(pub(crate) u64);

impl Usage {
    pub(crate) fn new(step: u64, count: u64) -> Self {
        Self(step.min(MAX_STEP) << COUNT_BITS | count.min(MAX_COUNT))
    }

    pub(crate) fn step(self) -> u64 {
        self.0 >> COUNT_BITS
    }

    pub(crate) fn count(self) -> u64 {
        self.0 & MAX_COUNT
    }

    /// Returns the usage after an update at `step`.
    #[inline(always)]
    pub(crate) fn updated(self, step: u64) -> Self {
        Self::new(step, self.count() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_and_count_stay_at_their_greatest() {
        let usage = Usage::new(7, 3).updated(9);
        assert_eq!((usage.step(), usage.count()), (9, 4));
        let most = Usage::new(u64::MAX, u64::MAX).updated(u64::MAX);
        assert_eq!((most.step(), most.count()), ((1 << 40) - 1, (1 << 24) - 1));
    }
}
