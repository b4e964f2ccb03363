//! AdaGrad: a learning rate for every element, by the sum of its squared gradients.

use serde::{Deserialize, Serialize};

use super::options::{is_zero, options};
use super::registry::{Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element};

/// Which of two common definitions AdaGrad and row-wise AdaGrad follow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Convention {
    /// `sqrt(s + eps)`, and row-wise the sum of squares: `RecStore`.
    #[default]
    Recstore,
    /// `sqrt(s) + eps`, and row-wise the mean of squares: `torch.optim.Adagrad` and FBGEMM.
    Torch,
}

impl Convention {
    pub(super) const ALL: [Self; 2] = [Self::Recstore, Self::Torch];
}

options! {
    /// `AdaGrad`: a learning rate for every element.
    ///
    /// `g += weight_decay * w; s += g^2`, then `w -= lr * g / sqrt(s + eps)` in the `recstore` convention and
    /// `w -= lr * g / (sqrt(s) + eps)` in the `torch` convention. With `lr_decay` the rate is `lr / (1 + (t - 1) * lr_decay)`,
    /// t being the table's step.
    ///
    /// Source: Duchi, Hazan and Singer 2011, section 1; RecStore's `AdaGrad`; `torch.optim.Adagrad`.
    AdagradConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-10, Positive;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
        /// How the learning rate falls with the table's steps: by `1 + (t - 1) * lr_decay`.
        #[serde(skip_serializing_if = "is_zero")]
        lr_decay: f64 = 0.0, NotNegative;
        /// Where `eps` stands.
        convention: Convention = Convention::Recstore => Convention::ALL;
    }
}

impl Rule for AdagradConfig {
    type Prepared = AdaGrad;

    const TRAINING: Training = Training { lr: 0.05, weight_decay: false, dense: "adagrad" };
    const FORMS: &'static [&'static str] =
        &["{}", r#"{"lr_decay": 0.1, "convention": "torch", "weight_decay": 0.01}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        vec![Slot::squares("state_sum", dim)]
    }

    fn prepare(&self, lr: f64, step: u64) -> AdaGrad {
        let lr = decayed(lr, self.lr_decay, step);
        let (eps_within, eps_beside) = place_eps(self.eps, self.convention);
        AdaGrad { lr: lr as f32, eps_within, eps_beside, weight_decay: self.weight_decay as f32 }
    }
}

/// [`AdagradConfig`] in one step.
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
