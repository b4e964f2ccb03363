//! Adam, lazily: only rows with a gradient move.

use super::row_rule::{RowRule, Slot, power};
use crate::config::BiasCorrection;
use crate::kernel::elements::{ElementRule, for_each_element};

/// `g += weight_decay * w; m += (1 - beta1) * (g - m); v += (1 - beta2) * (g^2 - v)`, then
/// `w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)`, t being the table's step or the row's.
///
/// Source: Kingma and Ba 2015, end of section 2; `torch.optim.SparseAdam`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adam {
    lr: f64,
    moments: Moments,
    eps: f32,
    weight_decay: f32,
    table_scale: Option<f32>,
}

/// The two moments and the correction of their bias, as Adam and AdamW share them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moments {
    betas: [f64; 2],
    weights: [f32; 2],
}

pub(super) fn slots(dim: usize, bias_correction: BiasCorrection) -> Vec<Slot> {
    let mut slots = vec![Slot::new("exp_avg", dim), Slot::new("exp_avg_sq", dim)];
    if bias_correction == BiasCorrection::Row {
        slots.push(Slot::new("step", 1));
    }
    slots
}

impl Moments {
    pub(super) fn new(betas: [f64; 2]) -> Self {
        Self { betas, weights: betas.map(|beta| (1.0 - beta) as f32) }
    }

    /// Returns `1 - beta1^t` and `sqrt(1 - beta2^t)`.
    pub(super) fn bias_corrections(&self, step: u64) -> (f64, f64) {
        let [first, second] = self.betas.map(|beta| 1.0 - power(beta, step));
        (first, second.sqrt())
    }

    /// Returns the moments of one element moved towards `g` and its square.
    #[inline(always)]
    pub(super) fn moved(&self, [m, v]: [f32; 2], g: f32) -> [f32; 2] {
        [m + self.weights[0] * (g - m), v + self.weights[1] * (g * g - v)]
    }
}

/// Splits a record's state into both moments and, where the row counts them, its steps; counts this one.
#[inline(always)]
pub(super) fn split_state(state: &mut [f32], dim: usize) -> (&mut [f32], &mut [f32], Option<u64>) {
    let (m, rest) = state.split_at_mut(dim);
    let (v, rest) = rest.split_at_mut(dim);
    let step = rest.first_mut().map(|step| {
        *step += 1.0;
        *step as u64
    });
    (m, v, step)
}

impl Adam {
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
            weight_decay: weight_decay as f32,
            table_scale: None,
        };
        if bias_correction == BiasCorrection::Table {
            rule.table_scale = Some(rule.scale(step));
        }
        rule
    }

    fn scale(&self, step: u64) -> f32 {
        let (first, second_root) = self.moments.bias_corrections(step);
        (self.lr * second_root / first) as f32
    }
}

impl RowRule for Adam {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (m, v, row_step) = split_state(state, gradient.len());
        let scale = self.table_scale.unwrap_or_else(|| self.scale(row_step.unwrap_or(1)));
        for_each_element(&RowStep { rule: self, scale }, weights, [m, v], gradient);
    }
}

/// The step of a row whose scale is known.
struct RowStep<'a> {
    rule: &'a Adam,
    scale: f32,
}

impl ElementRule<2> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, moments: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let [m, v] = self.rule.moments.moved(moments, 0.0 + g + self.rule.weight_decay * w);
        (w - self.scale * m / (v.sqrt() + self.rule.eps), [m, v])
    }
}
