//! The rules that turn a row's gradient into its new values, one a file: pure functions on slices.
//!
//! A record is a row of `dim` weights followed by the rule's slots. Kernels use `+ - * / sqrt` in single precision,
//! element by element, so that every thread count and every SIMD level gives the same bits. `lr` and the other
//! scalars of a step are computed once, in double precision, before the first row.

mod adagrad;
mod adam;
mod adamw;
mod ftrl;
mod rowwise_adagrad;
mod sgd;

use crate::config::OptimizerConfig;
use adagrad::AdaGrad;
use adam::Adam;
use adamw::AdamW;
use ftrl::Ftrl;
use rowwise_adagrad::RowWiseAdaGrad;
use sgd::Sgd;

/// A named part of the state beside each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The name of the field.
    pub(crate) name: &'static str,
    /// The number of elements a row.
    pub(crate) width: usize,
}

/// One optimizer step of one row, its scalars already computed.
pub(crate) trait RowRule: Sync {
    /// Updates `weights` and `state` from `gradient`; `weights` and `gradient` have the table's dim.
    ///
    /// A gradient counts as a sum that began at zero, so that -0.0 is 0.0: rules add it to zero first.
    fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]);
}

/// A rule made ready for one step of a table: learning rate and step count are in its scalars.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PreparedRule {
    Sgd(Sgd),
    AdaGrad(AdaGrad),
    RowWiseAdaGrad(RowWiseAdaGrad),
    Adam(Adam),
    AdamW(AdamW),
    Ftrl(Ftrl),
}

/// Work that is done with a rule, compiled for each.
pub(crate) trait WithRule {
    /// Does the work.
    fn run(self, rule: &impl RowRule);
}

/// Returns the slots that `config`'s rule keeps for rows of `dim`.
pub(crate) fn slots(config: &OptimizerConfig, dim: usize) -> Vec<Slot> {
    match *config {
        OptimizerConfig::Sgd { .. } => vec![],
        OptimizerConfig::Adagrad { .. } => adagrad::slots(dim),
        OptimizerConfig::RowwiseAdagrad { .. } => rowwise_adagrad::slots(),
        OptimizerConfig::Adam { bias_correction, .. } | OptimizerConfig::Adamw { bias_correction, .. } => {
            adam::slots(dim, bias_correction)
        }
        OptimizerConfig::Ftrl { .. } => ftrl::slots(dim),
    }
}

/// Computes the scalars of step `step` (from 1) at learning rate `lr`.
pub(crate) fn prepare(config: &OptimizerConfig, lr: f64, step: u64) -> PreparedRule {
    match *config {
        OptimizerConfig::Sgd { weight_decay, .. } => PreparedRule::Sgd(Sgd::new(lr, weight_decay)),
        OptimizerConfig::Adagrad { eps, weight_decay, convention, .. } => {
            PreparedRule::AdaGrad(AdaGrad::new(lr, eps, weight_decay, convention))
        }
        OptimizerConfig::RowwiseAdagrad { eps, weight_decay, convention, .. } => {
            PreparedRule::RowWiseAdaGrad(RowWiseAdaGrad::new(lr, eps, weight_decay, convention))
        }
        OptimizerConfig::Adam { betas, eps, weight_decay, bias_correction, .. } => {
            PreparedRule::Adam(Adam::new(lr, betas, eps, weight_decay, bias_correction, step))
        }
        OptimizerConfig::Adamw { betas, eps, weight_decay, bias_correction, .. } => {
            PreparedRule::AdamW(AdamW::new(lr, betas, eps, weight_decay, bias_correction, step))
        }
        OptimizerConfig::Ftrl { beta, l1, l2, .. } => PreparedRule::Ftrl(Ftrl::new(lr, beta, l1, l2)),
    }
}

impl PreparedRule {
    /// Does `work` with the rule.
    pub(crate) fn run(&self, work: impl WithRule) {
        match self {
            Self::Sgd(rule) => work.run(rule),
            Self::AdaGrad(rule) => work.run(rule),
            Self::RowWiseAdaGrad(rule) => work.run(rule),
            Self::Adam(rule) => work.run(rule),
            Self::AdamW(rule) => work.run(rule),
            Self::Ftrl(rule) => work.run(rule),
        }
    }

    /// Brings the slots in agreement with weights that were just created or overwritten.
    pub(crate) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        if let Self::Ftrl(rule) = self {
            rule.adopt_weights(weights, state);
        }
    }
}

/// Returns `base` to the power of `exponent` by repeated squaring: multiplications only, the same on every machine.
fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests;
