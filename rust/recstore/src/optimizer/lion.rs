//! Lion, lazily: every element moves by the learning rate, up or down.

use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

/// `c = beta1 * m + (1 - beta1) * g; w = w * (1 - lr * weight_decay) - lr * sign(c); m = beta2 * m + (1 - beta2) * g`.
///
/// Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lion {
    lr: f32,
    betas: [f32; 2],
    shares: [f32; 2],
    keep: f32,
}

pub(super) fn slots(dim: usize) -> Vec<Slot> {
    vec![Slot::signed("exp_avg", dim)]
}

impl Lion {
    pub(super) fn new(lr: f64, betas: [f64; 2], weight_decay: f64) -> Self {
        Self {
            lr: lr as f32,
            betas: betas.map(|beta| beta as f32),
            shares: betas.map(|beta| (1.0 - beta) as f32),
            keep: (1.0 - lr * weight_decay) as f32,
        }
    }
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
