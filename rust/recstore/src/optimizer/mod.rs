//! The rules that turn a row's gradient into its new values, one a file: pure functions on slices.
//!
//! A record is a row of `dim` weights followed by the rule's slots. Kernels use `+ - * / sqrt` in single precision,
//! element by element, so that every thread count and every SIMD level gives the same bits. `lr` and the other
//! scalars of a step are computed once, in double precision, before the first row.

mod adagrad;
mod adam;
mod adamw;
mod ftrl;
mod own;
mod rowwise_adagrad;
mod sgd;
mod update_rule;

use std::borrow::Cow;
use std::sync::Arc;

use crate::config::{OptimizerConfig, TableConfig};
use crate::{Error, Result};
use adagrad::AdaGrad;
use adam::Adam;
use adamw::AdamW;
use ftrl::Ftrl;
use own::OwnRule;
use rowwise_adagrad::RowWiseAdaGrad;
use sgd::Sgd;
pub use update_rule::UpdateRule;
pub(crate) use update_rule::UpdateRules;

/// A named part of the state beside each row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The name of the field.
    pub(crate) name: Cow<'static, str>,
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

/// Work that is done with a rule, compiled for each.
pub(crate) trait WithRule {
    /// Does the work.
    fn run(self, rule: &impl RowRule);
}

impl Slot {
    fn new(name: &'static str, width: usize) -> Self {
        Self { name: Cow::Borrowed(name), width }
    }
}

/// The rule of a table: one of the store's by its configuration, or one of the program's own.
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    own: Option<Arc<dyn UpdateRule>>,
    slots: Vec<Slot>,
}

impl Optimizer {
    /// Returns the rule of the table `name`.
    ///
    /// # Errors
    /// [`Error::UnknownRule`]; [`Error::InvalidConfig`] for slots that cannot be kept; [`Error::RuleFailed`].
    pub(crate) fn new(name: &str, config: &TableConfig, rules: &UpdateRules) -> Result<Self> {
        let own = rules.of(name, &config.optimizer)?;
        let slots = match &own {
            None => slots(&config.optimizer, config.dim),
            Some(rule) => update_rule::checked_slots(name, config, &**rule)?,
        };
        Ok(Self { config: config.optimizer.clone(), own, slots })
    }

    /// Returns what is kept beside each row, in order.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Computes the scalars of step `step` (from 1) at learning rate `lr`.
    pub(crate) fn prepare(&self, lr: f64, step: u64) -> PreparedRule {
        match &self.own {
            None => prepare(&self.config, lr, step),
            Some(rule) => {
                let width = self.slots.iter().map(|slot| slot.width).sum();
                PreparedRule::Own(OwnRule::new(Arc::clone(rule), width, lr, step))
            }
        }
    }
}

/// Returns the slots that one of the store's rules keeps for rows of `dim`.
fn slots(config: &OptimizerConfig, dim: usize) -> Vec<Slot> {
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
fn prepare(config: &OptimizerConfig, lr: f64, step: u64) -> PreparedRule {
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
