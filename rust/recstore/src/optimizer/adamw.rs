//! AdamW, lazily: only rows with a gradient move and decay.

use super::adam::{self, BiasCorrection, Moments, State};
use super::options::{is_false, options};
use super::registry::{IdleRule, Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element, for_each_element_briefly};

options! {
    /// AdamW on the rows that have a gradient.
    ///
    /// `w *= 1 - lr * weight_decay; m += (1 - beta1) * (g - m); v += (1 - beta2) * (g^2 - v)`, then
    /// `w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`, t being the table's step or the row's. With
    /// `amsgrad` the greatest `v` so far takes its place in the root.
    ///
    /// Source: Loshchilov and Hutter 2019, algorithm 2; `torch.optim.AdamW`; Reddi, Kale and Kumar 2018, algorithm 2.
    AdamwConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the two moments.
        betas: [f64; 2] = [0.9, 0.999], Share;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-8, Positive;
        /// The share of `lr * w` that a step takes away.
        weight_decay: f64 = 0.01, NotNegative;
        /// Whose steps correct the bias of the moments.
        bias_correction: BiasCorrection = BiasCorrection::Table => BiasCorrection::ALL;
        /// Whether the greatest second moment so far counts: AMSGrad.
        #[serde(skip_serializing_if = "is_false")]
        amsgrad: bool = false;
        /// Whether rows that a step leaves alone decay too: they are caught up with when they are next read or stepped.
        #[serde(skip_serializing_if = "is_false")]
        catch_up: bool = false;
    }
}

impl Rule for AdamwConfig {
    type Prepared = AdamW;

    const TRAINING: Training = Training { lr: 2e-3, weight_decay: true, dense: "adam" };
    const FORMS: &'static [&'static str] = &[r#"{"weight_decay": 0.1}"#, r#"{"bias_correction": "row"}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        adam::slots(dim, self.bias_correction, self.amsgrad)
    }

    fn prepare(&self, lr: f64, step: u64) -> AdamW {
        let AdamwConfig { betas, eps, weight_decay, bias_correction, amsgrad: keeps_maximum, .. } = *self;
        // Rounded once, at the end: near 1 a float32 has no room for the low bits of a small product.
        let keep = (1.0 - lr * weight_decay) as f32;
        let moments = Moments::new(betas);
        let mut rule = AdamW { lr, moments, eps: eps as f32, keep, keeps_maximum, table_scales: None };
        if bias_correction == BiasCorrection::Table {
            rule.table_scales = Some(rule.scales(step));
        }
        rule
    }

    fn idle(&self) -> Option<IdleRule> {
        self.catch_up.then_some(IdleRule::Decay(self.weight_decay))
    }
}

/// [`AdamwConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamW {
    lr: f64,
    moments: Moments,
    eps: f32,
    keep: f32,
    keeps_maximum: bool,
    table_scales: Option<(f32, f32)>,
}

impl AdamW {
    fn scales(&self, step: u64) -> (f32, f32) {
        let (first, second_root) = self.moments.bias_corrections(step);
        ((self.lr / first) as f32, second_root as f32)
    }
}

impl RowRule for AdamW {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let State { m, v, maximum, step } = State::of(state, gradient.len(), self.keeps_maximum);
        let (scale, root) = self.table_scales.unwrap_or_else(|| self.scales(step.unwrap_or(1)));
        let step = RowStep { rule: self, scale, root };
        if self.keeps_maximum {
            return for_each_element_briefly(&step, weights, [m, v, maximum], gradient);
        }
        for_each_element(&step, weights, [m, v], gradient);
    }
}

/// The step of a row whose scales are known.
struct RowStep<'a> {
    rule: &'a AdamW,
    scale: f32,
    root: f32,
}

impl RowStep<'_> {
    #[inline(always)]
    fn stepped(&self, w: f32, m: f32, v: f32) -> f32 {
        w * self.rule.keep - self.scale * m / (v.sqrt() / self.root + self.rule.eps)
    }
}

impl ElementRule<2> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, moments: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let [m, v] = self.rule.moments.moved(moments, 0.0 + g);
        (self.stepped(w, m, v), [m, v])
    }
}

impl ElementRule<3> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [m, v, maximum]: [f32; 3], g: f32) -> (f32, [f32; 3]) {
        let [m, v] = self.rule.moments.moved([m, v], 0.0 + g);
        let maximum = maximum.max(v);
        (self.stepped(w, m, maximum), [m, v, maximum])
    }
}
