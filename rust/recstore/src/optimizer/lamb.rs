//! LAMB, lazily: Adam's direction, as long as the row is.

use super::adam::{self, BiasCorrection, Moments, State};
use super::options::options;
use super::registry::{Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};
use crate::kernel::squares::{Plain, Squared, sum_of_squares};

options! {
    /// LAMB on the rows that have a gradient, each a layer of its own.
    ///
    /// `m += (1 - beta1) * (g - m); v += (1 - beta2) * (g^2 - v)`,
    /// `r = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * w`, then `w -= lr * |w| / |r| * r`, t
    /// being the table's step or the row's. The norms are over the row, and their ratio is 1 where one of them is zero.
    ///
    /// Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2, its layers being rows.
    LambConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the two moments.
        betas: [f64; 2] = [0.9, 0.999], Share;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-6, Positive;
        /// The factor of `w` that is added to the direction.
        weight_decay: f64 = 0.0, NotNegative;
        /// Whose steps correct the bias of the moments.
        bias_correction: BiasCorrection = BiasCorrection::Table => BiasCorrection::ALL;
    }
}

impl Rule for LambConfig {
    type Prepared = Lamb;

    const TRAINING: Training = Training { lr: 1e-2, weight_decay: true, dense: "adam" };
    const FORMS: &'static [&'static str] = &["{}", r#"{"bias_correction": "row", "weight_decay": 0.01}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        adam::slots(dim, self.bias_correction, false)
    }

    fn prepare(&self, lr: f64, step: u64) -> Lamb {
        let LambConfig { betas, eps, weight_decay, bias_correction, .. } = *self;
        let moments = Moments::new(betas);
        let table_scales = (bias_correction == BiasCorrection::Table).then(|| scales(&moments, step));
        Lamb { lr: lr as f32, moments, eps: eps as f32, weight_decay: weight_decay as f32, table_scales }
    }
}

/// [`LambConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lamb {
    lr: f32,
    moments: Moments,
    eps: f32,
    weight_decay: f32,
    table_scales: Option<(f32, f32)>,
}

/// One over the correction of the first moment, and over the root of that of the second.
fn scales(moments: &Moments, step: u64) -> (f32, f32) {
    let (first, second_root) = moments.bias_corrections(step);
    ((1.0 / first) as f32, (1.0 / second_root) as f32)
}

impl RowRule for Lamb {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let State { m, v, step, .. } = State::of(state, gradient.len(), false);
        let scales = self.table_scales.unwrap_or_else(|| scales(&self.moments, step.unwrap_or(1)));
        for_each_element_briefly(&Moved(&self.moments), m, [&mut *v], gradient);
        // Computed twice, for its norm and for the step, so that it needs no room beside the row.
        let direction = Direction { rule: self, scales };
        let norm = sum_of_squares([weights, m, v], &direction).sqrt();
        let length = sum_of_squares([weights], &Plain).sqrt();
        let ratio = if norm > 0.0 && length > 0.0 { length / norm } else { 1.0 };
        let step = Along { direction: &direction, rate: self.lr * ratio };
        for_each_element_briefly(&step, weights, [&mut *v], m);
    }
}

/// Moves the first moment, and the second one beside it.
struct Moved<'a>(&'a Moments);

impl ElementRule<1> for Moved<'_> {
    #[inline(always)]
    fn step(&self, m: f32, [v]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let [m, v] = self.0.moved([m, v], 0.0 + g);
        (m, [v])
    }
}

struct Direction<'a> {
    rule: &'a Lamb,
    scales: (f32, f32),
}

impl Squared<3> for Direction<'_> {
    #[inline(always)]
    fn of(&self, [w, m, v]: [f32; 3]) -> f32 {
        let (scale, root_scale) = self.scales;
        scale * m / (root_scale * v.sqrt() + self.rule.eps) + self.rule.weight_decay * w
    }
}

/// Moves weights along the direction, whose inputs are the first moments.
struct Along<'a> {
    direction: &'a Direction<'a>,
    rate: f32,
}

impl ElementRule<1> for Along<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [v]: [f32; 1], m: f32) -> (f32, [f32; 1]) {
        (w - self.rate * self.direction.of([w, m, v]), [v])
    }
}
