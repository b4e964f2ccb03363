//! What a step does with a row: its rule, and the average beside it.

use std::sync::Arc;

use super::average::Average;
use super::idle::Idle;
use super::idle_decay::DecayFactor;
use super::row_rule::{RowRule, WithRule};
use super::slot::{Slot, SlotType, Slots};
use super::{AnyRule, OptimizerConfig};
use crate::{Error, Result};

/// A table's rule made ready for one step, and what follows each row's weights.
#[derive(Debug)]
pub(crate) struct PreparedRule {
    rule: AnyRule,
    /// The words of a record that hold what the rule keeps of a row, and those of what is kept besides: of the average, or
    /// of what steps do to rows that they leave alone. No table has both.
    words: [usize; 2],
    /// What the rule keeps, if not all of it in single precision.
    narrow: Option<Arc<[Slot]>>,
    average: Option<Average>,
    idle: Option<IdleSteps>,
}

/// What steps do to rows that they leave alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdleSteps {
    /// Those before the one that is prepared.
    pub(crate) before: Idle,
    /// With it.
    pub(crate) after: Idle,
    /// What all of them leave of weights.
    pub(crate) kept_after: DecayFactor,
}

impl PreparedRule {
    pub(crate) fn new(
        rule: AnyRule,
        slots: &Arc<[Slot]>,
        besides: &[Slot],
        average: Option<Average>,
        idle: Option<IdleSteps>,
    ) -> Self {
        let is_narrow = slots.iter().any(|slot| slot.slot_type != SlotType::Float32);
        let narrow = is_narrow.then(|| Arc::clone(slots));
        let words = [Slots(slots).words(), Slots(besides).words()];
        Self { rule, words, narrow, average, idle }
    }

    /// Does `work` with the rule.
    pub(crate) fn run(&self, work: impl WithRule) {
        self.rule.run(work);
    }

    /// Takes the step of a row by `rule`, which is this one's, with what that keeps and what is kept besides.
    #[inline(always)]
    pub(crate) fn step(
        &self,
        rule: &(impl RowRule + ?Sized),
        weights: &mut [f32],
        (kept, besides): (&mut [f32], &mut [f32]),
        gradient: &[f32],
    ) {
        // The steps that left the row alone come first: the rule goes on from what they made of it.
        if let Some(average) = self.average {
            average.catch_up(weights, besides);
        }
        if let Some(idle) = self.idle {
            idle.before.catch_up(weights, kept, besides);
        }
        rule.step(weights, kept, gradient);
        // After the rule: the average follows the weights that it left.
        if let Some(average) = self.average {
            average.follow(weights, besides);
        }
        if let Some(idle) = self.idle {
            idle.after.note(besides);
        }
    }

    /// Returns what steps do to rows that they leave alone.
    #[inline(always)]
    pub(crate) fn idle(&self) -> Option<IdleSteps> {
        self.idle
    }

    /// Splits the state of a row into what the rule keeps and what is kept besides.
    #[inline(always)]
    pub(crate) fn split<'a>(&self, state: &'a mut [f32]) -> (&'a mut [f32], &'a mut [f32]) {
        let [own, besides] = self.words;
        state[..own + besides].split_at_mut(own)
    }

    /// Returns what the rule keeps, if not all of it in single precision.
    #[inline(always)]
    pub(crate) fn narrow(&self) -> Option<Slots<'_>> {
        self.narrow.as_deref().map(Slots)
    }

    /// Brings the slots in agreement with weights that were just created or overwritten.
    pub(crate) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        let (state, besides) = self.split(state);
        match self.narrow() {
            None => self.rule.adopt_weights(weights, state),
            Some(slots) => {
                let mut values = vec![0.0; slots.width()];
                slots.widen(state, &mut values);
                self.rule.adopt_weights(weights, &mut values);
                slots.round(&values, state);
            }
        }
        if let Some(average) = self.average {
            average.start(weights, besides);
        }
        if let Some(idle) = self.idle {
            idle.before.settle(state, besides);
        }
    }

    /// Checks that a rule of the program's own did not panic on the rows of `table`.
    ///
    /// # Errors
    /// [`Error::RuleFailed`].
    pub(crate) fn check(&self, table: &str, config: &OptimizerConfig) -> Result<()> {
        let (AnyRule::Own(rule), OptimizerConfig::Rule { name, .. }) = (&self.rule, config) else {
            return Ok(());
        };
        rule.panic().map_or(Ok(()), |message| {
            let (table, rule) = (table.to_owned(), name.clone());
            Err(Error::RuleFailed { table, rule, message: message.to_owned() })
        })
    }
}
