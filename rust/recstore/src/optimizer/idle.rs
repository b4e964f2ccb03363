//! What steps do to the rows that they leave alone, which is caught up with when those are next read or stepped.

use super::OptimizerConfig;
use super::idle_decay::{self, DecayFactor};
use super::registry::IdleRule;
use super::slot::Slot;
use super::velocity::{self, Coasting};

/// What the steps of a table up to one of them do to rows that they leave alone.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Idle {
    Decay(DecayFactor),
    Coasting(Coasting),
}

/// Returns what is kept of a row to catch up with it, if anything is.
pub(crate) fn slot(config: &OptimizerConfig) -> Option<Slot> {
    config.idle_rule().map(|rule| match rule {
        IdleRule::Momentum { .. } => velocity::idle_slot(),
        IdleRule::Decay(_) => idle_decay::slot(),
    })
}

impl Idle {
    /// Returns what the steps of a table up to `step` do, of which `kept` is what they left of weights.
    pub(crate) fn up_to(config: &OptimizerConfig, kept: DecayFactor, step: u64) -> Option<Self> {
        config.idle_rule().map(|rule| match rule {
            IdleRule::Momentum { momentum, is_nesterov } => {
                Self::Coasting(Coasting::new(momentum, is_nesterov, step))
            }
            IdleRule::Decay(_) => Self::Decay(kept),
        })
    }

    /// Writes the weights of a record as they are now to `row`. `slot` is where the record keeps what it was caught up
    /// with last.
    #[inline(always)]
    pub(crate) fn read(self, record: &[f32], slot: &[f32], row: &mut [f32]) {
        row.copy_from_slice(&record[..row.len()]);
        self.move_weights(row, &record[row.len()..], slot);
    }

    /// Brings a row that is about to be stepped up to now. The rule keeps `state` of it.
    #[inline(always)]
    pub(crate) fn catch_up(self, weights: &mut [f32], state: &mut [f32], slot: &mut [f32]) {
        self.move_weights(weights, state, slot);
        self.settle(state, slot);
    }

    /// Notes that the weights of a row are those of now: what the rule keeps of it is brought there.
    #[inline(always)]
    pub(crate) fn settle(self, state: &mut [f32], slot: &mut [f32]) {
        match self {
            Self::Decay(kept) => kept.note(slot),
            Self::Coasting(coasting) => {
                let (left, _) = coasting.since(slot);
                state.iter_mut().for_each(|velocity| *velocity *= left);
                coasting.note(slot);
            }
        }
    }

    /// Notes that the rule has taken the step.
    #[inline(always)]
    pub(crate) fn note(self, slot: &mut [f32]) {
        match self {
            Self::Decay(kept) => kept.note(slot),
            Self::Coasting(coasting) => coasting.note(slot),
        }
    }

    #[inline(always)]
    fn move_weights(self, weights: &mut [f32], state: &[f32], slot: &[f32]) {
        match self {
            Self::Decay(kept) => {
                let left = kept.since(slot);
                if left != 1.0 {
                    weights.iter_mut().for_each(|weight| *weight *= left);
                }
            }
            Self::Coasting(coasting) => {
                let (_, moved) = coasting.since(slot);
                for (weight, velocity) in weights.iter_mut().zip(state) {
                    *weight -= moved * velocity;
                }
            }
        }
    }
}
