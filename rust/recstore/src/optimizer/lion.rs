//! Lion, lazily: every element moves by the learning rate, up or down.

use super::options::{is_false, options};
use super::registry::{IdleRule, Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

options! {
    /// Lion on the rows that have a gradient.
    ///
    /// `c = beta1 * m + (1 - beta1) * g; w = w * (1 - lr * weight_decay) - lr * sign(c); m = beta2 * m + (1 - beta2) * g`.
    ///
    /// Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2.
    LionConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the moment, as the direction is taken and as it is kept.
        betas: [f64; 2] = [0.9, 0.99], Share;
        /// The share of `lr * w` that a step takes away.
        weight_decay: f64 = 0.0, NotNegative;
        /// Whether rows that a step leaves alone decay too: they are caught up with when they are next read or stepped.
        #[serde(skip_serializing_if = "is_false")]
        catch_up: bool = false;
    }
}

impl Rule for LionConfig {
    type Prepared = Lion;

    const TRAINING: Training = Training { lr: 5e-4, weight_decay: true, dense: "adam" };
    const FORMS: &'static [&'static str] = &[r#"{"weight_decay": 0.1}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        vec![Slot::signed("exp_avg", dim)]
    }

    fn prepare(&self, lr: f64, _: u64) -> Lion {
        Lion {
            lr: lr as f32,
            betas: self.betas.map(|beta| beta as f32),
            shares: self.betas.map(|beta| (1.0 - beta) as f32),
            keep: (1.0 - lr * self.weight_decay) as f32,
        }
    }

    fn idle(&self) -> Option<IdleRule> {
        self.catch_up.then_some(IdleRule::Decay(self.weight_decay))
    }
}

/// [`LionConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lion {
    lr: f32,
    betas: [f32; 2],
    shares: [f32; 2],
    keep: f32,
}

impl RowRule for Lion {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        for_each_element_briefly(self, weights, [state], gradient);
    }
}

impl ElementRule<1> for Lion {
    #[inline(always)]
    fn step(&self, w: f32, [m]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let g = 0.0 + g;
        let c = self.betas[0] * m + self.shares[0] * g;
        let sign = f32::from(i8::from(c > 0.0) - i8::from(c < 0.0));
        (w * self.keep - self.lr * sign, [self.betas[1] * m + self.shares[1] * g])
    }
}
