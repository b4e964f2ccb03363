//! Row-wise AdaGrad: one accumulator a row, and so one float of state.

use super::adagrad::place_eps;
use super::row_rule::{Decayed, RowRule};
use super::slot::Slot;
use crate::config::Convention;
use crate::kernel::elements::{ElementRule, for_each_element};
use crate::kernel::squares::{Squared, sum_of_squares};

/// `g += weight_decay * w`; in the `recstore` convention `s += sum_j g_j^2; w -= lr * g / sqrt(s + eps)`, in the
/// `torch` convention `s += mean_j g_j^2; w -= lr * g / (sqrt(s) + eps)`. The rate falls as AdaGrad's.
///
/// Source: RecStore's `RowWiseAdaGrad`; FBGEMM's `EXACT_ROWWISE_ADAGRAD`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowWiseAdaGrad {
    lr: f32,
    eps_within: f32,
    eps_beside: f32,
    weight_decay: f32,
    averages: bool,
}

pub(super) fn slots() -> Vec<Slot> {
    vec![Slot::exact("state_sum", 1)]
}

impl RowWiseAdaGrad {
    pub(super) fn new(lr: f64, eps: f64, weight_decay: f64, convention: Convention) -> Self {
        let (eps_within, eps_beside) = place_eps(eps, convention);
        Self {
            lr: lr as f32,
            eps_within,
            eps_beside,
            weight_decay: weight_decay as f32,
            averages: convention == Convention::Torch,
        }
    }
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
