//! AdamW, lazily: only rows with a gradient move and decay.

use super::RowRule;
use super::adam::{Moments, split_state};
use crate::config::BiasCorrection;

/// `w *= 1 - lr * weight_decay; m += (1 - beta1) * (g - m); v += (1 - beta2) * (g^2 - v)`, then
/// `w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`, t being the table's step or the row's.
///
/// Source: Loshchilov and Hutter 2019, algorithm 2; `torch.optim.AdamW`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamW {
    lr: f64,
    moments: Moments,
    eps: f32,
    keep: f32,
    table_scales: Option<(f32, f32)>,
}

impl AdamW {
    pub(super) fn new(
        lr: f64,
        betas: [f64; 2],
        eps: f64,
        weight_decay: f64,
        bias_correction: BiasCorrection,
        step: u64,
    ) -> Self {
        let mut rule = Self {
            lr,
            moments: Moments::new(betas),
            eps: eps as f32,
            keep: (1.0 - lr * weight_decay) as f32,
            table_scales: None,
        };
        if bias_correction == BiasCorrection::Table {
            rule.table_scales = Some(rule.scales(step));
        }
        rule
    }

    fn scales(&self, step: u64) -> (f32, f32) {
        let (first, second_root) = self.moments.bias_corrections(step);
        ((self.lr / first) as f32, second_root as f32)
    }
}

impl RowRule for AdamW {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (m, v, row_step) = split_state(state, gradient.len());
        let (scale, root) = self.table_scales.unwrap_or_else(|| self.scales(row_step.unwrap_or(1)));
        for (((w, m), v), g) in weights.iter_mut().zip(m).zip(v).zip(gradient) {
            self.moments.update(m, v, 0.0 + g);
            *w = *w * self.keep - scale * *m / (v.sqrt() / root + self.eps);
        }
    }
}
