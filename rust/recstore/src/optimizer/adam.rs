//! Adam, lazily: only rows with a gradient move.

use serde::{Deserialize, Serialize};

use super::options::{is_false, options};
use super::registry::{Rule, Training};
use super::row_rule::{RowRule, power};
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element, for_each_element_briefly};

/// Whose count of steps corrects the bias of Adam's moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasCorrection {
    /// The table's, as `torch.optim.SparseAdam`.
    #[default]
    Table,
    /// The row's own, kept beside it: a row first seen late starts as corrected as the first ones did.
    Row,
}

impl BiasCorrection {
    pub(super) const ALL: [Self; 2] = [Self::Table, Self::Row];
}

options! {
    /// Adam on the rows that have a gradient.
    ///
    /// `g += weight_decay * w; m += (1 - beta1) * (g - m); v += (1 - beta2) * (g^2 - v)`, then
    /// `w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)`, t being the table's step or the row's. With
    /// `amsgrad` the greatest `v` so far takes its place in the root.
    ///
    /// Source: Kingma and Ba 2015, end of section 2; `torch.optim.SparseAdam`; Reddi, Kale and Kumar 2018, algorithm 2.
    AdamConfig {
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
        /// Whether the greatest second moment so far counts: AMSGrad.
        #[serde(skip_serializing_if = "is_false")]
        amsgrad: bool = false;
    }
}

impl Rule for AdamConfig {
    type Prepared = Adam;

    const TRAINING: Training = Training { lr: 2e-3, weight_decay: true, dense: "adam" };
    const FORMS: &'static [&'static str] =
        &[r#"{"weight_decay": 0.01}"#, r#"{"bias_correction": "row"}"#, r#"{"amsgrad": true}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        slots(dim, self.bias_correction, self.amsgrad)
    }

    fn prepare(&self, lr: f64, step: u64) -> Adam {
        let AdamConfig { betas, eps, weight_decay, bias_correction, amsgrad: keeps_maximum, .. } = *self;
        let moments = Moments::new(betas);
        let table_scale = (bias_correction == BiasCorrection::Table).then(|| moments.scale(lr, step));
        Adam { lr, moments, eps: eps as f32, weight_decay: weight_decay as f32, keeps_maximum, table_scale }
    }
}

/// [`AdamConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adam {
    lr: f64,
    moments: Moments,
    eps: f32,
    weight_decay: f32,
    keeps_maximum: bool,
    table_scale: Option<f32>,
}

/// The two moments and the correction of their bias, as the rules of Adam's kind share them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moments {
    betas: [f64; 2],
    weights: [f32; 2],
}

pub(super) fn slots(dim: usize, bias_correction: BiasCorrection, keeps_maximum: bool) -> Vec<Slot> {
    let mut slots = vec![Slot::signed("exp_avg", dim), Slot::squares("exp_avg_sq", dim)];
    if keeps_maximum {
        slots.push(Slot::squares("max_exp_avg_sq", dim));
    }
    if bias_correction == BiasCorrection::Row {
        slots.push(Slot::exact("step", 1));
    }
    slots
}

impl Moments {
    pub(super) fn new(betas: [f64; 2]) -> Self {
        Self { betas, weights: betas.map(|beta| (1.0 - beta) as f32) }
    }

    /// Returns `1 - beta1^t` and `sqrt(1 - beta2^t)`.
    pub(super) fn bias_corrections(&self, step: u64) -> (f64, f64) {
        // By repeated squaring in double precision: the C library's `pow` differs between machines.
        let [first, second] = self.betas.map(|beta| 1.0 - power(beta, step));
        (first, second.sqrt())
    }

    /// Returns `lr * sqrt(1 - beta2^t) / (1 - beta1^t)`.
    pub(super) fn scale(&self, lr: f64, step: u64) -> f32 {
        let (first, second_root) = self.bias_corrections(step);
        (lr * second_root / first) as f32
    }

    /// Returns the first moment of one element moved towards `g`.
    #[inline(always)]
    pub(super) fn first(&self, m: f32, g: f32) -> f32 {
        m + self.weights[0] * (g - m)
    }

    /// Returns the second moment moved towards a square.
    #[inline(always)]
    pub(super) fn second(&self, v: f32, square: f32) -> f32 {
        v + self.weights[1] * (square - v)
    }

    /// Returns the moments of one element moved towards `g` and its square.
    #[inline(always)]
    pub(super) fn moved(&self, [m, v]: [f32; 2], g: f32) -> [f32; 2] {
        [self.first(m, g), self.second(v, g * g)]
    }
}

/// A record's state: both moments, the greatest second moment where it is kept, and which step of the row this is, where
/// rows count their steps.
pub(super) struct State<'a> {
    pub(super) m: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    pub(super) maximum: &'a mut [f32],
    pub(super) step: Option<u64>,
}

impl<'a> State<'a> {
    /// Splits a record's state, and counts this step.
    #[inline(always)]
    pub(super) fn of(state: &'a mut [f32], dim: usize, keeps_maximum: bool) -> Self {
        let (m, rest) = state.split_at_mut(dim);
        let (v, rest) = rest.split_at_mut(dim);
        let (maximum, steps) = rest.split_at_mut(if keeps_maximum { dim } else { 0 });
        Self { m, v, maximum, step: counted(steps) }
    }
}

/// Counts a step of a row and returns which it is, from 1, where rows count them.
#[inline(always)]
pub(super) fn counted(steps: &mut [f32]) -> Option<u64> {
    steps.first_mut().map(|steps| {
        *steps += 1.0;
        *steps as u64
    })
}

impl RowRule for Adam {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let State { m, v, maximum, step } = State::of(state, gradient.len(), self.keeps_maximum);
        let scale = self.table_scale.unwrap_or_else(|| self.moments.scale(self.lr, step.unwrap_or(1)));
        let step = RowStep { rule: self, scale };
        if self.keeps_maximum {
            return for_each_element_briefly(&step, weights, [m, v, maximum], gradient);
        }
        for_each_element(&step, weights, [m, v], gradient);
    }
}

/// The step of a row whose scale is known.
struct RowStep<'a> {
    rule: &'a Adam,
    scale: f32,
}

impl RowStep<'_> {
    #[inline(always)]
    fn moved(&self, w: f32, moments: [f32; 2], g: f32) -> [f32; 2] {
        // A single gradient comes as it is and sums begin at zero: -0.0 must step as 0.0 in both ways.
        self.rule.moments.moved(moments, 0.0 + g + self.rule.weight_decay * w)
    }

    #[inline(always)]
    fn stepped(&self, w: f32, m: f32, v: f32) -> f32 {
        w - self.scale * m / (v.sqrt() + self.rule.eps)
    }
}

impl ElementRule<2> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, moments: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let [m, v] = self.moved(w, moments, g);
        (self.stepped(w, m, v), [m, v])
    }
}

impl ElementRule<3> for RowStep<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [m, v, maximum]: [f32; 3], g: f32) -> (f32, [f32; 3]) {
        let [m, v] = self.moved(w, [m, v], g);
        let maximum = maximum.max(v);
        (self.stepped(w, m, maximum), [m, v, maximum])
    }
}
