//! Adadelta: steps as long as those before, by the averages of squared gradients and squared steps.

use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

/// `g += weight_decay * w; s = rho * s + (1 - rho) * g^2; x = sqrt(d + eps) / sqrt(s + eps) * g`, then
/// `d = rho * d + (1 - rho) * x^2; w -= lr * x`.
///
/// Source: Zeiler 2012, algorithm 1; `torch.optim.Adadelta`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adadelta {
    lr: f32,
    rho: f32,
    share: f32,
    eps: f32,
    weight_decay: f32,
}

pub(super) fn slots(dim: usize) -> Vec<Slot> {
    vec![Slot::squares("square_avg", dim), Slot::squares("acc_delta", dim)]
}

impl Adadelta {
    pub(super) fn new(lr: f64, rho: f64, eps: f64, weight_decay: f64) -> Self {
        let (lr, eps, weight_decay) = (lr as f32, eps as f32, weight_decay as f32);
        Self { lr, rho: rho as f32, share: (1.0 - rho) as f32, eps, weight_decay }
    }
}

impl RowRule for Adadelta {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (s, d) = state.split_at_mut(gradient.len());
        for_each_element_briefly(self, weights, [s, d], gradient);
    }
}

impl ElementRule<2> for Adadelta {
    #[inline(always)]
    fn step(&self, w: f32, [s, d]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let g = 0.0 + g + self.weight_decay * w;
        let s = self.rho * s + self.share * (g * g);
        let x = (d + self.eps).sqrt() / (s + self.eps).sqrt() * g;
        let d = self.rho * d + self.share * (x * x);
        (w - self.lr * x, [s, d])
    }
}
