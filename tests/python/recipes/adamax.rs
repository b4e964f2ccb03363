//! Adamax, lazily: Adam by the greatest gradient instead of the average square.

use super::adam::Moments;
use super::options::options;
use super::registry::{Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

options! {
    /// Adamax on the rows that have a gradient.
    ///
    /// `g += weight_decay * w; m += (1 - beta1) * (g - m); u = max(beta2 * u, |g| + eps)`, then
    /// `w -= lr / (1 - beta1^t) * m / u`, t being the table's step.
    ///
    /// Source: Kingma and Ba 2015, algorithm 2; `torch.optim.Adamax`.
    AdamaxConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the moment, and of the greatest gradient.
        betas: [f64; 2] = [0.9, 0.999], Share;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-8, Positive;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
    }
}

impl Rule for AdamaxConfig {
    type Prepared = Adamax;

    const TRAINING: Training = Training { lr: 2e-3, weight_decay: true, dense: "adamax" };
    const FORMS: &'static [&'static str] = &["{}", r#"{"weight_decay": 0.01}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        vec![Slot::signed("exp_avg", dim), Slot::exact("exp_inf", dim)]
    }

    fn prepare(&self, lr: f64, step: u64) -> Adamax {
        let moments = Moments::new(self.betas);
        let (first, _) = moments.bias_corrections(step);
        let [beta2, eps, weight_decay] =
            [self.betas[1], self.eps, self.weight_decay].map(|value| value as f32);
        Adamax { moments, scale: (lr / first) as f32, beta2, eps, weight_decay }
    }
}

/// [`AdamaxConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Adamax {
    moments: Moments,
    scale: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
}

impl RowRule for Adamax {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (m, u) = state.split_at_mut(gradient.len());
        for_each_element_briefly(self, weights, [m, u], gradient);
    }
}

impl ElementRule<2> for Adamax {
    #[inline(always)]
    fn step(&self, w: f32, [m, u]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let g = 0.0 + g + self.weight_decay * w;
        let (m, u) = (self.moments.first(m, g), (self.beta2 * u).max(g.abs() + self.eps));
        (w - self.scale * m / u, [m, u])
    }
}

#[cfg(test)]
mod tests {
    use crate::optimizer::tests::check;

    #[test]
    fn adamax_follows_its_equation() {
        check(r#"{"kind": "adamax", "lr": 0.1, "eps": 0.01, "weight_decay": 0.1}"#, |w, s, g, step| {
            let g = g + 0.1 * *w;
            s[0] = 0.9 * s[0] + 0.1 * g;
            s[1] = (0.999 * s[1]).max(g.abs() + 0.01);
            *w -= 0.1 / (1.0 - 0.9f64.powi(step as i32)) * s[0] / s[1];
        });
    }
}
