//! `RMSprop`: a learning rate for every element, by the average of its squared gradients.

use super::row_rule::RowRule;
use super::slot::Slot;
use crate::kernel::elements::{ElementRule, for_each_element_briefly};

/// `g += weight_decay * w; s = alpha * s + (1 - alpha) * g^2`, then `w -= lr * g / (sqrt(s) + eps)`.
///
/// Centered, `a = alpha * a + (1 - alpha) * g` and the root is that of `s - a^2`, which is not taken below zero. With
/// momentum, `b = momentum * b + g / (root + eps)` and `w -= lr * b`.
///
/// Source: Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 41; `torch.optim.RMSprop`.
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

pub(super) fn slots(dim: usize, has_momentum: bool, is_centered: bool) -> Vec<Slot> {
    let mut slots = vec![Slot::squares("square_avg", dim)];
    if is_centered {
        slots.push(Slot::signed("grad_avg", dim));
    }
    if has_momentum {
        slots.push(Slot::signed("momentum_buffer", dim));
    }
    slots
}

impl RmsProp {
    pub(super) fn new(
        lr: f64,
        alpha: f64,
        eps: f64,
        weight_decay: f64,
        momentum: f64,
        is_centered: bool,
    ) -> Self {
        Self {
            lr: lr as f32,
            alpha: alpha as f32,
            share: (1.0 - alpha) as f32,
            eps: eps as f32,
            weight_decay: weight_decay as f32,
            momentum: (momentum > 0.0).then_some(momentum as f32),
            is_centered,
        }
    }

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
