//! Row-wise AdaGrad: one accumulator a row, and so one float of state.

use super::adagrad::{Convention, decayed, place_eps};
use super::options::{is_zero, options};
use super::registry::{Rule, Training};
use super::row_rule::{Decayed, RowRule};
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element};
use crate::kernel::squares::{Squared, sum_of_squares};

options! {
    /// `AdaGrad` with one accumulator a row.
    ///
    /// `g += weight_decay * w`; in the `recstore` convention `s += sum_j g_j^2; w -= lr * g / sqrt(s + eps)`, in the
    /// `torch` convention `s += mean_j g_j^2; w -= lr * g / (sqrt(s) + eps)`. The rate falls as AdaGrad's.
    ///
    /// Source: RecStore's `RowWiseAdaGrad`; FBGEMM's `EXACT_ROWWISE_ADAGRAD`.
    RowwiseAdagradConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-10, Positive;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
        /// How the learning rate falls with the table's steps: by `1 + (t - 1) * lr_decay`.
        #[serde(skip_serializing_if = "is_zero")]
        lr_decay: f64 = 0.0, NotNegative;
        /// Where `eps` stands, and whether squares are summed or averaged over the row.
        convention: Convention = Convention::Recstore => Convention::ALL;
    }
}

impl Rule for RowwiseAdagradConfig {
    type Prepared = RowWiseAdaGrad;

    const TRAINING: Training = Training { lr: 0.05, weight_decay: false, dense: "adagrad" };
    const FORMS: &'static [&'static str] = &["{}", r#"{"convention": "torch", "weight_decay": 0.01}"#];

    fn slots(&self, _: usize) -> Vec<Slot> {
        vec![Slot::exact("state_sum", 1)]
    }

    fn prepare(&self, lr: f64, step: u64) -> RowWiseAdaGrad {
        let lr = decayed(lr, self.lr_decay, step);
        let (eps_within, eps_beside) = place_eps(self.eps, self.convention);
        RowWiseAdaGrad {
            lr: lr as f32,
            eps_within,
            eps_beside,
            weight_decay: self.weight_decay as f32,
            averages: self.convention == Convention::Torch,
        }
    }
}

/// [`RowwiseAdagradConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowWiseAdaGrad {
    lr: f32,
    eps_within: f32,
    eps_beside: f32,
    weight_decay: f32,
    averages: bool,
}

impl RowRule for RowWiseAdaGrad {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let squares = sum_of_squares([gradient, weights], &Decayed(self.weight_decay));
        let divisor = if self.averages { gradient.len() as f32 } else { 1.0 };
        state[0] += squares / divisor;
        let root = (state[0] + self.eps_within).sqrt() + self.eps_beside;
        for_each_element(&RowStep { rule: self, root }, weights, [], gradient);
    }
}

/// The step of a row whose root is known.
struct RowStep<'a> {
    rule: &'a RowWiseAdaGrad,
    root: f32,
}

impl ElementRule<0> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, _: [f32; 0], g: f32) -> (f32, [f32; 0]) {
        (w - self.rule.lr * Decayed(self.rule.weight_decay).of([g, w]) / self.root, [])
    }
}
