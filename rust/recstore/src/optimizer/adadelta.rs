//! Adadelta: steps as long as those before, by the averages of squared gradients and squared steps.

use super::options::options;
use super::registry::{Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

options! {
    /// Adadelta on the rows that have a gradient.
    ///
    /// `g += weight_decay * w; s = rho * s + (1 - rho) * g^2; x = sqrt(d + eps) / sqrt(s + eps) * g`, then
    /// `d = rho * d + (1 - rho) * x^2; w -= lr * x`.
    ///
    /// Source: Zeiler 2012, algorithm 1; `torch.optim.Adadelta`.
    AdadeltaConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the averages.
        rho: f64 = 0.9, Share;
        /// Keeps the divisor from zero, and lets the first steps begin.
        eps: f64 = 1e-6, Positive;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
    }
}

impl Rule for AdadeltaConfig {
    type Prepared = Adadelta;

    const TRAINING: Training = Training { lr: 1.0, weight_decay: true, dense: "adadelta" };
    const FORMS: &'static [&'static str] = &["{}"];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        vec![Slot::squares("square_avg", dim), Slot::squares("acc_delta", dim)]
    }

    fn prepare(&self, lr: f64, _: u64) -> Adadelta {
        let [lr, rho, eps, weight_decay] =
            [lr, self.rho, self.eps, self.weight_decay].map(|value| value as f32);
        Adadelta { lr, rho, share: (1.0 - self.rho) as f32, eps, weight_decay }
    }
}

/// [`AdadeltaConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adadelta {
    lr: f32,
    rho: f32,
    share: f32,
    eps: f32,
    weight_decay: f32,
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
