//! Stochastic gradient descent.

use super::row_rule::RowRule;
use crate::kernel::elements::{ElementRule, for_each_element};

/// `g += weight_decay * w; w -= lr * g`.
///
/// Source: `torch.optim.SGD` without momentum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sgd {
    lr: f32,
    weight_decay: f32,
}

impl Sgd {
    pub(super) fn new(lr: f64, weight_decay: f64) -> Self {
        Self { lr: lr as f32, weight_decay: weight_decay as f32 }
    }
}

impl RowRule for Sgd {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], _state: &mut [f32], gradient: &[f32]) {
        for_each_element(self, weights, [], gradient);
    }
}

impl ElementRule<0> for Sgd {
    #[inline(always)]
    fn step(&self, w: f32, _: [f32; 0], g: f32) -> (f32, [f32; 0]) {
        (w - self.lr * (0.0 + g + self.weight_decay * w), [])
    }
}
