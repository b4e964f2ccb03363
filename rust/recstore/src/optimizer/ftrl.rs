//! FTRL-proximal: AdaGrad's learning rates with an L1 term that makes weights exactly zero.

use super::options::options;
use super::ranges::require;
use super::registry::{Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::Result;
use crate::kernel::elements::{ElementRule, for_each_element};

options! {
    /// FTRL-proximal.
    ///
    /// `n' = n + g^2; z += g - (sqrt(n') - sqrt(n)) / alpha * w`, then `w = 0` where `|z| <= l1`, else
    /// `w = (sign(z) * l1 - z) / ((beta + sqrt(n')) / alpha + l2)`.
    ///
    /// z always agrees with w: of a row that is new or was overwritten it is set to
    /// `-w * ((beta + sqrt(n)) / alpha + l2) - sign(w) * l1`, and where alpha is another than in the row's last step, `z`
    /// beyond `l1` is first scaled so that it stands for the same w as before. Without that a learning-rate schedule would
    /// scale all weights.
    ///
    /// Source: McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1.
    FtrlConfig {
        /// The learning rate.
        #[serde(alias = "lr")]
        alpha: f64 = 0.01, Positive;
        /// Damps the first steps.
        beta: f64 = 1.0, NotNegative;
        /// The strength of the L1 term, which makes weights exactly zero.
        l1: f64 = 0.0, NotNegative;
        /// The strength of the L2 term.
        l2: f64 = 0.0, NotNegative;
    }
}

impl Rule for FtrlConfig {
    type Prepared = Ftrl;

    const TRAINING: Training = Training { lr: 0.1, weight_decay: false, dense: "adagrad" };
    const FORMS: &'static [&'static str] = &[r#"{"l1": 0.01, "l2": 0.1}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        vec![Slot::squares("n", dim), Slot::signed("z", dim), Slot::exact("alpha", 1)]
    }

    fn prepare(&self, lr: f64, _: u64) -> Ftrl {
        let alpha = lr as f32;
        Ftrl {
            alpha,
            inverse_alpha: 1.0 / alpha,
            beta: self.beta as f32,
            l1: self.l1 as f32,
            l2: self.l2 as f32,
        }
    }

    fn check(&self) -> Result<()> {
        require(self.beta as f32 + self.l2 as f32 > 0.0, || {
            "optimizer.beta and optimizer.l2 must not both be 0".to_owned()
        })
    }
}

/// [`FtrlConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ftrl {
    alpha: f32,
    inverse_alpha: f32,
    beta: f32,
    l1: f32,
    l2: f32,
}

/// The state of a row: n, z, and the alpha that both go with.
struct State<'a> {
    n: &'a mut [f32],
    z: &'a mut [f32],
    alpha: &'a mut f32,
}

impl<'a> State<'a> {
    #[inline(always)]
    fn of(state: &'a mut [f32], dim: usize) -> Self {
        let (n, rest) = state.split_at_mut(dim);
        let (z, alpha) = rest.split_at_mut(dim);
        Self { n, z, alpha: &mut alpha[0] }
    }
}

impl Ftrl {
    #[inline(always)]
    fn curvature(&self, root: f32, inverse_alpha: f32) -> f32 {
        (self.beta + root) * inverse_alpha + self.l2
    }

    /// Makes z stand for the same weights with this alpha as it did with the old one.
    #[cold]
    fn follow_alpha(&self, n: &[f32], z: &mut [f32], alpha: &mut f32) {
        let old_inverse = 1.0 / *alpha;
        *alpha = self.alpha;
        for (n, z) in n.iter().zip(z) {
            if z.abs() > self.l1 {
                let root = n.sqrt();
                let scale = self.curvature(root, self.inverse_alpha) / self.curvature(root, old_inverse);
                let sign_l1 = self.l1.copysign(*z);
                *z = sign_l1 + (*z - sign_l1) * scale;
            }
        }
    }
}

impl RowRule for Ftrl {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let State { n, z, alpha } = State::of(state, gradient.len());
        // Kept, not found from z and w: in 16-bit rows a small change of alpha looks like their rounding. The
        // line that it takes made no difference to a step.
        if *alpha != self.alpha {
            self.follow_alpha(n, z, alpha);
        }
        for_each_element(self, weights, [n, z], gradient);
    }

    /// Sets z from the weights of a row that was just created or overwritten.
    #[inline(always)]
    fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        let State { n, z, alpha } = State::of(state, weights.len());
        *alpha = self.alpha;
        for ((w, n), z) in weights.iter().zip(n).zip(z) {
            let sign_l1 = if *w == 0.0 { 0.0 } else { self.l1.copysign(*w) };
            *z = -w * self.curvature(n.sqrt(), self.inverse_alpha) - sign_l1;
        }
    }
}

impl ElementRule<2> for Ftrl {
    #[inline(always)]
    fn step(&self, w: f32, [old_n, old_z]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        // A single gradient comes as it is and sums begin at zero: -0.0 must step as 0.0 in both ways.
        let g = 0.0 + g;
        let n = old_n + g * g;
        let root = n.sqrt();
        let z = old_z + (g - (root - old_n.sqrt()) * self.inverse_alpha * w);
        let solved = (self.l1.copysign(z) - z) / self.curvature(root, self.inverse_alpha);
        (if z.abs() <= self.l1 { 0.0 } else { solved }, [n, z])
    }
}
