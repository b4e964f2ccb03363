//! The store's rules, each made ready for a step by its configuration.

use super::adagrad::{self, AdaGrad};
use super::adam::{self, Adam};
use super::adamw::AdamW;
use super::ftrl::{self, Ftrl};
use super::own::OwnRule;
use super::row_rule::{Slot, WithRule};
use super::rowwise_adagrad::{self, RowWiseAdaGrad};
use super::sgd::Sgd;
use crate::config::OptimizerConfig;
use crate::{Error, Result};

/// A rule made ready for one step of a table: learning rate and step count are in its scalars.
#[derive(Debug)]
pub(crate) enum PreparedRule {
    Sgd(Sgd),
    AdaGrad(AdaGrad),
    RowWiseAdaGrad(RowWiseAdaGrad),
    Adam(Adam),
    AdamW(AdamW),
    Ftrl(Ftrl),
    Own(OwnRule),
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
            Self::Own(rule) => work.run(rule),
        }
    }

    /// Brings the slots in agreement with weights that were just created or overwritten.
    pub(crate) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
        match self {
            Self::Ftrl(rule) => rule.adopt_weights(weights, state),
            Self::Own(rule) => rule.adopt_weights(weights, state),
            _ => {}
        }
    }

    /// Checks that a rule of the program's own did not panic on the rows of `table`.
    ///
    /// # Errors
    /// [`Error::RuleFailed`].
    pub(crate) fn check(&self, table: &str, config: &OptimizerConfig) -> Result<()> {
        match (self, config) {
            (Self::Own(rule), OptimizerConfig::Rule { name, .. }) => rule.panic().map_or(Ok(()), |message| {
                let (table, rule) = (table.to_owned(), name.clone());
                Err(Error::RuleFailed { table, rule, message: message.to_owned() })
            }),
            _ => Ok(()),
        }
    }
}

/// Returns the slots that one of the store's rules keeps for rows of `dim`.
pub(super) fn slots(config: &OptimizerConfig, dim: usize) -> Vec<Slot> {
    match *config {
        OptimizerConfig::Sgd { .. } | OptimizerConfig::Rule { .. } => vec![],
        OptimizerConfig::Adagrad { .. } => adagrad::slots(dim),
        OptimizerConfig::RowwiseAdagrad { .. } => rowwise_adagrad::slots(),
        OptimizerConfig::Adam { bias_correction, .. } | OptimizerConfig::Adamw { bias_correction, .. } => {
            adam::slots(dim, bias_correction)
        }
        OptimizerConfig::Ftrl { .. } => ftrl::slots(dim),
    }
}

/// Computes the scalars of one of the store's rules.
pub(super) fn prepare(config: &OptimizerConfig, lr: f64, step: u64) -> PreparedRule {
    match *config {
        OptimizerConfig::Rule { .. } => unreachable!("a table has the rule that it names"),
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
