//! What a step does with a row: its rule, and the average beside it.

use super::any_rule::AnyRule;
use super::average::Average;
use super::idle_decay::IdleDecay;
use super::row_rule::WithRule;
use crate::Result;
use crate::config::OptimizerConfig;

/// A table's rule made ready for one step, and what follows each row's weights.
#[derive(Debug)]
pub(crate) struct PreparedRule {
    pub(super) rule: AnyRule,
    /// The floats that the rule keeps of a row. What follows them belongs to the average or to the decay of idle rows: no
    /// table has both.
    pub(super) width: usize,
    pub(super) average: Option<Average>,
    pub(super) idle_decay: Option<IdleDecay>,
}

impl PreparedRule {
    /// Does `work` with the rule.
    pub(crate) fn run(&self, work: impl WithRule) {
        self.rule.run(work);
    }

    /// Returns what follows the weights of rows.
    #[inline(always)]
    pub(crate) fn average(&self) -> Option<Average> {
        self.average
    }

    /// Returns what rows decay by that a step leaves alone.
    #[inline(always)]
    pub(crate) fn idle_decay(&self) -> Option<IdleDecay> {
        self.idle_decay
    }

    /// Splits the state of a row into what the rule keeps and what is kept besides.
    #[inline(always)]
    pub(crate) fn split<'a>(&self, state: &'a mut [f32]) -> (&'a mut [f32], &'a mut [f32]) {
        state.split_at_mut(self.width)
    }

    /// Brings the slots in agreement with weights that were just created or overwritten.
    pub(crate) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        let (state, besides) = self.split(state);
        self.rule.adopt_weights(weights, state);
        if let Some(average) = self.average {
            average.start(weights, besides);
        }
        if let Some(decay) = self.idle_decay {
            decay.start(besides);
        }
    }

    /// Checks that a rule of the program's own did not panic on the rows of `table`.
    ///
    /// # Errors
    /// [`crate::Error::RuleFailed`].
    pub(crate) fn check(&self, table: &str, config: &OptimizerConfig) -> Result<()> {
        self.rule.check(table, config)
    }
}
