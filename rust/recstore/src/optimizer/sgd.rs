//! Stochastic gradient descent.

use super::momentum::{self, Momentum};
use super::options::{is_false, is_zero, options};
use super::ranges::require;
use super::registry::{IdleRule, Rule, Training};
use super::row_rule::{Prepared, RowRule, WithRule};
use super::slot::Slot;
use super::velocity::{self, Velocity};
use crate::Result;
use crate::kernel::elements::{ElementRule, for_each_element};

options! {
    /// Stochastic gradient descent.
    ///
    /// `g += weight_decay * w; w -= lr * g`.
    ///
    /// Source: `torch.optim.SGD`. With momentum the rule is another: Sutskever et al. 2013, "On the importance of
    /// initialization and momentum in deep learning".
    SgdConfig {
        /// The learning rate.
        lr: f64 = 0.01, NotNegative;
        /// The factor of `w` that is added to the gradient.
        weight_decay: f64 = 0.0, NotNegative;
        /// The share of the movement before that goes on.
        #[serde(skip_serializing_if = "is_zero")]
        momentum: f64 = 0.0, Share;
        /// Whether the gradient is taken ahead of the movement: Nesterov.
        #[serde(skip_serializing_if = "is_false")]
        nesterov: bool = false;
        /// Whether rows that a step leaves alone decay, or move on, too: they are caught up with when they are next read
        /// or stepped.
        #[serde(skip_serializing_if = "is_false")]
        catch_up: bool = false;
    }
}

impl Rule for SgdConfig {
    type Prepared = SgdStep;

    const TRAINING: Training = Training { lr: 0.1, weight_decay: true, dense: "sgd" };
    const FORMS: &'static [&'static str] = &[
        r#"{"weight_decay": 0.01}"#,
        r#"{"momentum": 0.9, "nesterov": true}"#,
        r#"{"weight_decay": 0.1, "catch_up": true}"#,
        r#"{"momentum": 0.9, "catch_up": true}"#,
    ];

    fn slots(&self, dim: usize) -> Vec<Slot> {
        match (self.momentum > 0.0, self.catch_up) {
            (false, _) => vec![],
            (true, false) => momentum::slots(dim),
            (true, true) => velocity::slots(dim),
        }
    }

    fn prepare(&self, lr: f64, _: u64) -> SgdStep {
        let Self { weight_decay, momentum, nesterov, .. } = *self;
        match (momentum > 0.0, self.catch_up) {
            (false, _) => SgdStep::Plain(Sgd { lr: lr as f32, weight_decay: weight_decay as f32 }),
            (true, false) => SgdStep::Momentum(Momentum::new(lr, weight_decay, momentum, nesterov)),
            (true, true) => SgdStep::Velocity(Velocity::new(lr, momentum, nesterov)),
        }
    }

    fn check(&self) -> Result<()> {
        let Self { momentum, weight_decay, .. } = *self;
        require(momentum == 0.0 || weight_decay == 0.0 || !self.catch_up, || {
            format!(
                "optimizer.catch_up goes with momentum or with weight_decay: both are not caught up with, got {momentum} and {weight_decay}"
            )
        })?;
        require(momentum > 0.0 || !self.nesterov, || "optimizer.nesterov needs a momentum above 0".to_owned())
    }

    fn idle(&self) -> Option<IdleRule> {
        let Self { momentum, weight_decay, nesterov: is_nesterov, catch_up, .. } = *self;
        let moves = IdleRule::Momentum { momentum, is_nesterov };
        catch_up.then_some(if momentum > 0.0 { moves } else { IdleRule::Decay(weight_decay) })
    }
}

/// [`SgdConfig`] in one step: with momentum the rule is another.
#[derive(Debug)]
pub(crate) enum SgdStep {
    Plain(Sgd),
    Momentum(Momentum),
    Velocity(Velocity),
}

impl Prepared for SgdStep {
    fn run(&self, work: impl WithRule) {
        match self {
            Self::Plain(rule) => work.run(rule),
            Self::Momentum(rule) => work.run(rule),
            Self::Velocity(rule) => work.run(rule),
        }
    }
}

/// [`SgdConfig`] without momentum, in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sgd {
    lr: f32,
    weight_decay: f32,
}

impl RowRule for Sgd {
    #[inline(always)]
    fn step(&self, weights: &mut [f32], _state: &mut [f32], gradient: &[f32]) {
        for_each_element(self, weights, [], gradient);
    }
}

impl ElementRule<0> for Sgd {
    #[inline(always)]
    fn step(&self, w: f32, _: [f32; 0], g: f32) -> (f32, [f32; 0]) {
        (w - self.lr * (0.0 + g + self.weight_decay * w), [])
    }
}
