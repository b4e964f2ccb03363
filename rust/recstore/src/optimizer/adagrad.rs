//! AdaGrad: a learning rate for every element, by the sum of its squared gradients.

use super::row_rule::RowRule;
use super::slot::Slot;
use crate::config::Convention;
use crate::kernel::elements::{ElementRule, for_each_element};

/// `g += weight_decay * w; s += g^2`, then `w -= lr * g / sqrt(s + eps)` in the `recstore` convention and
/// `w -= lr * g / (sqrt(s) + eps)` in the `torch` convention. With `lr_decay` the rate is `lr / (1 + (t - 1) * lr_decay)`,
/// t being the table's step.
///
/// Source: Duchi, Hazan and Singer 2011, section 1; RecStore's `AdaGrad`; `torch.optim.Adagrad`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdaGrad {
    lr: f32,
    eps_within: f32,
    eps_beside: f32,
    weight_decay: f32,
}

/// Returns where `eps` goes: within the root or beside it; adding a zero to the other changes no bit.
pub(super) fn place_eps(eps: f64, convention: Convention) -> (f32, f32) {
    match convention {
        Convention::Recstore => (eps as f32, 0.0),
        Convention::Torch => (0.0, eps as f32),
    }
}

/// Returns the learning rate of the table's step.
pub(super) fn decayed(lr: f64, lr_decay: f64, step: u64) -> f64 {
    lr / (1.0 + step.saturating_sub(1) as f64 * lr_decay)
}

pub(super) fn slots(dim: usize) -> Vec<Slot> {
    vec![Slot::squares("state_sum", dim)]
}

impl AdaGrad {
    pub(super) fn new(lr: f64, eps: f64, weight_decay: f64, convention: Convention) -> Self {
        let (eps_within, eps_beside) = place_eps(eps, convention);
        Self { lr: lr as f32, eps_within, eps_beside, weight_decay: weight_decay as f32 }
    }
}

impl RowRule for AdaGrad {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        for_each_element(self, weights, [state], gradient);
    }
}

impl ElementRule<1> for AdaGrad {
    #[inline(always)]
    fn step(&self, w: f32, [s]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let g = 0.0 + g + self.weight_decay * w;
        let s = s + g * g;
        (w - self.lr * g / ((s + self.eps_within).sqrt() + self.eps_beside), [s])
    }
}
