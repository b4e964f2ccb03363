//! AdamW, lazily: only rows with a gradient move and decay.

use super::adam::{Moments, split_state};
use super::row_rule::RowRule;
use crate::config::BiasCorrection;
use crate::kernel::elements::{ElementRule, for_each_element};

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
        for_each_element(&RowStep { rule: self, scale, root }, weights, [m, v], gradient);
    }
}

/// The step of a row whose scales are known.
struct RowStep<'a> {
    rule: &'a AdamW,
    scale: f32,
    root: f32,
}

impl ElementRule<2> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, moments: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let [m, v] = self.rule.moments.moved(moments, 0.0 + g);
        (w * self.rule.keep - self.scale * m / (v.sqrt() / self.root + self.rule.eps), [m, v])
    }
}
