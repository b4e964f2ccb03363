//! Row-wise Adam: one second moment a row, and so half of Adam's state.

use super::adam::{BiasCorrection, Moments, counted};
use super::options::options;
use super::registry::{Rule, Training};
use super::row_rule::{Decayed, RowRule};
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};
use crate::kernel::squares::{Squared, sum_of_squares};

options! {
    /// Adam with one second moment a row.
    ///
    /// `g += weight_decay * w; m += (1 - beta1) * (g - m); v += (1 - beta2) * (mean_j g_j^2 - v)`, then
    /// `w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)`, t being the table's step or the row's.
    ///
    /// Source: Adam as in [`super::adam`], its second moment averaged over the row as in FBGEMM's `PARTIAL_ROWWISE_ADAM`.
    RowwiseAdamConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the two moments.
        betas: [f64; 2] = [0.9, 0.999], Share;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-8, Positive;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
        /// Whose steps correct the bias of the moments.
        bias_correction: BiasCorrection = BiasCorrection::Table => BiasCorrection::ALL;
    }
}

impl Rule for RowwiseAdamConfig {
    type Prepared = RowWiseAdam;

    const TRAINING: Training = Training { lr: 2e-3, weight_decay: true, dense: "adam" };
    const FORMS: &'static [&'static str] = &[r#"{"bias_correction": "row"}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        let steps = (self.bias_correction == BiasCorrection::Row).then(|| Slot::exact("step", 1));
        [Slot::signed("exp_avg", dim), Slot::exact("exp_avg_sq", 1)].into_iter().chain(steps).collect()
    }

    fn prepare(&self, lr: f64, step: u64) -> RowWiseAdam {
        let RowwiseAdamConfig { betas, eps, weight_decay, bias_correction, .. } = *self;
        let moments = Moments::new(betas);
        let table_scale = (bias_correction == BiasCorrection::Table).then(|| moments.scale(lr, step));
        RowWiseAdam { lr, moments, eps: eps as f32, weight_decay: weight_decay as f32, table_scale }
    }
}

/// [`RowwiseAdamConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowWiseAdam {
    lr: f64,
    moments: Moments,
    eps: f32,
    weight_decay: f32,
    table_scale: Option<f32>,
}

impl RowRule for RowWiseAdam {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (m, rest) = state.split_at_mut(gradient.len());
        let (v, row_step) = rest.split_at_mut(1);
        let squares = sum_of_squares([gradient, weights], &Decayed(self.weight_decay));
        v[0] = self.moments.second(v[0], squares / gradient.len() as f32);
        let scale =
            self.table_scale.unwrap_or_else(|| self.moments.scale(self.lr, counted(row_step).unwrap_or(1)));
        for_each_element_briefly(
            &RowStep { rule: self, scale, root: v[0].sqrt() + self.eps },
            weights,
            [m],
            gradient,
        );
    }
}

/// The step of a row whose scale and root are known.
struct RowStep<'a> {
    rule: &'a RowWiseAdam,
    scale: f32,
    root: f32,
}

impl ElementRule<1> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [m]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let m = self.rule.moments.first(m, Decayed(self.rule.weight_decay).of([g, w]));
        (w - self.scale * m / self.root, [m])
    }
}
