//! What a rule does with one row.

use std::fmt;

use crate::kernel::squares::Squared;

/// One optimizer step of one row, its scalars already computed.
pub(crate) trait RowRule: Sync {
    /// Updates `weights` and `state` from `gradient`; `weights` and `gradient` have the table's dim.
    ///
    /// A gradient counts as a sum that began at zero, so that -0.0 is 0.0: rules add it to zero first.
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]);

    /// Brings the slots in agreement with weights that were just created or overwritten.
    fn adopt_weights(&self, _weights: &[f32], _state: &mut [f32]) {}
}

/// What a rule's options come to in one step: a row rule, or one of several.
pub(crate) trait Prepared: fmt::Debug {
    /// Does `work` with the row rule.
    fn run(&self, work: impl WithRule);

    /// Brings the slots in agreement with weights that were just created or overwritten.
    fn adopt_weights(&self, _weights: &[f32], _state: &mut [f32]) {}
}

impl<R: RowRule + fmt::Debug> Prepared for R {
    fn run(&self, work: impl WithRule) {
        work.run(self);
    }

    fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        RowRule::adopt_weights(self, weights, state);
    }
}

/// A gradient's element with the decay of its weight, by this factor.
pub(super) struct Decayed(pub(super) f32);

impl Squared<2> for Decayed {
    #[inline(always)]
    fn of(&self, [g, w]: [f32; 2]) -> f32 {
        0.0 + g + self.0 * w
    }
}

/// Work that is done with a rule, compiled for each.
pub(crate) trait WithRule {
    /// Does the work.
    fn run(self, rule: &impl RowRule);
}

/// Returns `base` to the power of `exponent` by repeated squaring: multiplications only, the same on every machine.
pub(super) fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}
