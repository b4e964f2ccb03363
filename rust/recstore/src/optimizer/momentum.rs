//! Stochastic gradient descent with momentum, lazily: the momentum of a row moves with its own steps only.

use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

/// `g += weight_decay * w; b = momentum * b + g`, then `w -= lr * b`, and with Nesterov `w -= lr * (g + momentum * b)`.
///
/// Source: Sutskever et al. 2013, section 2, as `torch.optim.SGD` has it, without dampening.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Momentum {
    lr: f32,
    weight_decay: f32,
    momentum: f32,
    is_nesterov: bool,
}

pub(super) fn slots(dim: usize) -> Vec<Slot> {
    vec![Slot::signed("momentum_buffer", dim)]
}

impl Momentum {
    pub(super) fn new(lr: f64, weight_decay: f64, momentum: f64, is_nesterov: bool) -> Self {
        Self { lr: lr as f32, weight_decay: weight_decay as f32, momentum: momentum as f32, is_nesterov }
    }
}

impl RowRule for Momentum {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        for_each_element_briefly(self, weights, [state], gradient);
    }
}

impl ElementRule<1> for Momentum {
    #[inline(always)]
    fn step(&self, w: f32, [b]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let g = 0.0 + g + self.weight_decay * w;
        let b = self.momentum * b + g;
        let moved = if self.is_nesterov { g + self.momentum * b } else { b };
        (w - self.lr * moved, [b])
    }
}
