//! The rules, each made ready for a step by its configuration.

use super::adadelta::{self, Adadelta};
use super::adagrad::{self, AdaGrad};
use super::adam::{self, Adam, AdamOptions};
use super::adamw::AdamW;
use super::ftrl::{self, Ftrl};
use super::lamb::Lamb;
use super::lion::{self, Lion};
use super::momentum::{self, Momentum};
use super::own::OwnRule;
use super::rmsprop::{self, RmsProp};
use super::row_rule::WithRule;
use super::rowwise_adagrad::{self, RowWiseAdaGrad};
use super::rowwise_adam::{self, RowWiseAdam};
use super::sgd::Sgd;
use super::slot::Slot;
use super::velocity::{self, Velocity};
use crate::config::OptimizerConfig;
use crate::{Error, Result};

/// One of the store's rules or of the program's own, made ready for one step: learning rate and step count are in its
/// scalars.
#[derive(Debug)]
pub(super) enum AnyRule {
    Sgd(Sgd),
    Momentum(Momentum),
    Velocity(Velocity),
    AdaGrad(AdaGrad),
    RowWiseAdaGrad(RowWiseAdaGrad),
    RmsProp(RmsProp),
    Adadelta(Adadelta),
    Adam(Adam),
    AdamW(AdamW),
    RowWiseAdam(RowWiseAdam),
    Lamb(Lamb),
    Lion(Lion),
    Ftrl(Ftrl),
    Own(OwnRule),
}

impl AnyRule {
    /// Does `work` with the rule.
    pub(super) fn run(&self, work: impl WithRule) {
        match self {
            Self::Sgd(rule) => work.run(rule),
            Self::Momentum(rule) => work.run(rule),
            Self::Velocity(rule) => work.run(rule),
            Self::AdaGrad(rule) => work.run(rule),
            Self::RowWiseAdaGrad(rule) => work.run(rule),
            Self::RmsProp(rule) => work.run(rule),
            Self::Adadelta(rule) => work.run(rule),
            Self::Adam(rule) => work.run(rule),
            Self::AdamW(rule) => work.run(rule),
            Self::RowWiseAdam(rule) => work.run(rule),
            Self::Lamb(rule) => work.run(rule),
            Self::Lion(rule) => work.run(rule),
            Self::Ftrl(rule) => work.run(rule),
            Self::Own(rule) => work.run(rule),
        }
    }

    /// Brings the slots in agreement with weights that were just created or overwritten.
    pub(super) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
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
    pub(super) fn check(&self, table: &str, config: &OptimizerConfig) -> Result<()> {
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
        OptimizerConfig::Sgd { momentum, catch_up: true, .. } if momentum > 0.0 => velocity::slots(dim),
        OptimizerConfig::Sgd { momentum, .. } if momentum > 0.0 => momentum::slots(dim),
        OptimizerConfig::Sgd { .. } | OptimizerConfig::Rule { .. } => vec![],
        OptimizerConfig::Adagrad { .. } => adagrad::slots(dim),
        OptimizerConfig::RowwiseAdagrad { .. } => rowwise_adagrad::slots(),
        OptimizerConfig::Rmsprop { momentum, centered, .. } => rmsprop::slots(dim, momentum > 0.0, centered),
        OptimizerConfig::Adadelta { .. } => adadelta::slots(dim),
        OptimizerConfig::Adam { bias_correction, amsgrad, .. }
        | OptimizerConfig::Adamw { bias_correction, amsgrad, .. } => {
            adam::slots(dim, bias_correction, amsgrad)
        }
        OptimizerConfig::RowwiseAdam { bias_correction, .. } => rowwise_adam::slots(dim, bias_correction),
        OptimizerConfig::Lamb { bias_correction, .. } => adam::slots(dim, bias_correction, false),
        OptimizerConfig::Lion { .. } => lion::slots(dim),
        OptimizerConfig::Ftrl { .. } => ftrl::slots(dim),
    }
}

/// Computes the scalars of one of the store's rules.
pub(super) fn prepare(config: &OptimizerConfig, lr: f64, step: u64) -> AnyRule {
    match *config {
        OptimizerConfig::Rule { .. } => unreachable!("a table has the rule that it names"),
        OptimizerConfig::Sgd { momentum, nesterov, catch_up: true, .. } if momentum > 0.0 => {
            AnyRule::Velocity(Velocity::new(lr, momentum, nesterov))
        }
        OptimizerConfig::Sgd { weight_decay, momentum, nesterov, .. } if momentum > 0.0 => {
            AnyRule::Momentum(Momentum::new(lr, weight_decay, momentum, nesterov))
        }
        OptimizerConfig::Sgd { weight_decay, .. } => AnyRule::Sgd(Sgd::new(lr, weight_decay)),
        OptimizerConfig::Adagrad { eps, weight_decay, lr_decay, convention, .. } => {
            let lr = adagrad::decayed(lr, lr_decay, step);
            AnyRule::AdaGrad(AdaGrad::new(lr, eps, weight_decay, convention))
        }
        OptimizerConfig::RowwiseAdagrad { eps, weight_decay, lr_decay, convention, .. } => {
            let lr = adagrad::decayed(lr, lr_decay, step);
            AnyRule::RowWiseAdaGrad(RowWiseAdaGrad::new(lr, eps, weight_decay, convention))
        }
        OptimizerConfig::Rmsprop { alpha, eps, weight_decay, momentum, centered, .. } => {
            AnyRule::RmsProp(RmsProp::new(lr, alpha, eps, weight_decay, momentum, centered))
        }
        OptimizerConfig::Adadelta { rho, eps, weight_decay, .. } => {
            AnyRule::Adadelta(Adadelta::new(lr, rho, eps, weight_decay))
        }
        OptimizerConfig::Lion { betas, weight_decay, .. } => {
            AnyRule::Lion(Lion::new(lr, betas, weight_decay))
        }
        OptimizerConfig::Ftrl { beta, l1, l2, .. } => AnyRule::Ftrl(Ftrl::new(lr, beta, l1, l2)),
        OptimizerConfig::Adam { .. }
        | OptimizerConfig::Adamw { .. }
        | OptimizerConfig::RowwiseAdam { .. }
        | OptimizerConfig::Lamb { .. } => prepare_of_adam_kind(config, lr, step),
    }
}

/// Computes the scalars of the rules that have Adam's moments.
fn prepare_of_adam_kind(config: &OptimizerConfig, lr: f64, step: u64) -> AnyRule {
    let options = |betas, eps, weight_decay, bias_correction, keeps_maximum| AdamOptions {
        betas,
        eps,
        weight_decay,
        bias_correction,
        keeps_maximum,
    };
    match *config {
        OptimizerConfig::Adam { betas, eps, weight_decay, bias_correction, amsgrad, .. } => {
            AnyRule::Adam(Adam::new(options(betas, eps, weight_decay, bias_correction, amsgrad), lr, step))
        }
        OptimizerConfig::Adamw { betas, eps, weight_decay, bias_correction, amsgrad, .. } => {
            AnyRule::AdamW(AdamW::new(options(betas, eps, weight_decay, bias_correction, amsgrad), lr, step))
        }
        OptimizerConfig::RowwiseAdam { betas, eps, weight_decay, bias_correction, .. } => {
            AnyRule::RowWiseAdam(RowWiseAdam::new(
                options(betas, eps, weight_decay, bias_correction, false),
                lr,
                step,
            ))
        }
        OptimizerConfig::Lamb { betas, eps, weight_decay, bias_correction, .. } => {
            AnyRule::Lamb(Lamb::new(options(betas, eps, weight_decay, bias_correction, false), lr, step))
        }
        _ => unreachable!("the rules that have Adam's moments"),
    }
}
