//! `RMSprop`: a learning rate for every element, by the average of its squared gradients.

use super::options::options;
use super::registry::{Rule, Training};
use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

options! {
    /// `RMSprop` on the rows that have a gradient.
    ///
    /// `g += weight_decay * w; s = alpha * s + (1 - alpha) * g^2`, then `w -= lr * g / (sqrt(s) + eps)`.
    ///
    /// Centered, `a = alpha * a + (1 - alpha) * g` and the root is that of `s - a^2`, which is not taken below zero. With
    /// momentum, `b = momentum * b + g / (root + eps)` and `w -= lr * b`.
    ///
    /// Source: Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 41; `torch.optim.RMSprop`.
    RmspropConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The decay of the averages.
        alpha: f64 = 0.99, Share;
        /// Keeps the divisor from zero.
        eps: f64 = 1e-8, Positive;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
        /// The share of the movement before that goes on.
        momentum: f64 = 0.0, Share;
        /// Whether the average gradient is taken off the average square.
        centered: bool = false;
    }
}

impl Rule for RmspropConfig {
    type Prepared = RmsProp;

    const TRAINING: Training = Training { lr: 2e-3, weight_decay: true, dense: "rmsprop" };
    const FORMS: &'static [&'static str] =
        &[r#"{"weight_decay": 0.01}"#, r#"{"momentum": 0.9, "centered": true}"#];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        let centered = self.centered.then(|| Slot::signed("grad_avg", dim));
        let moving = (self.momentum > 0.0).then(|| Slot::signed("momentum_buffer", dim));
        [Some(Slot::squares("square_avg", dim)), centered, moving].into_iter().flatten().collect()
    }

    fn prepare(&self, lr: f64, _: u64) -> RmsProp {
        RmsProp {
            lr: lr as f32,
            alpha: self.alpha as f32,
            // From the double: 1 - 0.99 in single precision is 0.0099999905, not 0.01.
            share: (1.0 - self.alpha) as f32,
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
            momentum: (self.momentum > 0.0).then_some(self.momentum as f32),
            is_centered: self.centered,
        }
    }

    fn refuses_narrow_state(&self) -> Option<&'static str> {
        self.centered.then_some(
            "does not go with optimizer.centered, which subtracts a square from an average that is close to it",
        )
    }
}

/// [`RmspropConfig`] in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RmsProp {
    lr: f32,
    alpha: f32,
    share: f32,
    eps: f32,
    weight_decay: f32,
    momentum: Option<f32>,
    is_centered: bool,
}

impl RmsProp {
    #[inline(always)]
    fn gradient(&self, w: f32, g: f32) -> f32 {
        0.0 + g + self.weight_decay * w
    }

    #[inline(always)]
    fn averaged(&self, average: f32, value: f32) -> f32 {
        self.alpha * average + self.share * value
    }

    /// The gradient over the root, that of the centered average where there is one.
    #[inline(always)]
    fn scaled(&self, g: f32, s: f32, average: f32) -> f32 {
        // Rounding can bring `s` below the square, and the root of that is NaN.
        g / ((s - average * average).max(0.0).sqrt() + self.eps)
    }
}

impl RowRule for RmsProp {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (s, rest) = state.split_at_mut(gradient.len());
        match (self.is_centered, self.momentum) {
            (false, None) => for_each_element_briefly(&Plain(self), weights, [s], gradient),
            (true, None) => for_each_element_briefly(&Centered(self), weights, [s, rest], gradient),
            (false, Some(momentum)) => {
                for_each_element_briefly(&Moving(self, momentum), weights, [s, rest], gradient)
            }
            (true, Some(momentum)) => {
                let (a, b) = rest.split_at_mut(gradient.len());
                for_each_element_briefly(&CenteredMoving(self, momentum), weights, [s, a, b], gradient);
            }
        }
    }
}

struct Plain<'a>(&'a RmsProp);

impl ElementRule<1> for Plain<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [s]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let g = self.0.gradient(w, g);
        let s = self.0.averaged(s, g * g);
        (w - self.0.lr * self.0.scaled(g, s, 0.0), [s])
    }
}

struct Centered<'a>(&'a RmsProp);

impl ElementRule<2> for Centered<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [s, a]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let g = self.0.gradient(w, g);
        let (s, a) = (self.0.averaged(s, g * g), self.0.averaged(a, g));
        (w - self.0.lr * self.0.scaled(g, s, a), [s, a])
    }
}

struct Moving<'a>(&'a RmsProp, f32);

impl ElementRule<2> for Moving<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [s, b]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let g = self.0.gradient(w, g);
        let s = self.0.averaged(s, g * g);
        let b = self.1 * b + self.0.scaled(g, s, 0.0);
        (w - self.0.lr * b, [s, b])
    }
}

struct CenteredMoving<'a>(&'a RmsProp, f32);

impl ElementRule<3> for CenteredMoving<'_> {
    #[inline(always)]
    fn step(&self, w: f32, [s, a, b]: [f32; 3], g: f32) -> (f32, [f32; 3]) {
        let g = self.0.gradient(w, g);
        let (s, a) = (self.0.averaged(s, g * g), self.0.averaged(a, g));
        let b = self.1 * b + self.0.scaled(g, s, a);
        (w - self.0.lr * b, [s, a, b])
    }
}
