//! The rule of one table.

use std::sync::Arc;

use super::any_rule::{AnyRule, prepare, slots};
use super::average::{self, Average};
use super::own::OwnRule;
use super::prepared_rule::PreparedRule;
use super::row_rule::Slot;
use super::update_rule::{UpdateRule, UpdateRules, checked_slots};
use crate::Result;
use crate::config::{OptimizerConfig, TableConfig};

/// The rule of a table: one of the store's by its configuration, or one of the program's own.
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    own: Option<Arc<dyn UpdateRule>>,
    /// The floats that the rule keeps of a row.
    width: usize,
    ema_decay: Option<f64>,
    slots: Vec<Slot>,
}

impl Optimizer {
    /// Returns the rule of the table `name`.
    ///
    /// # Errors
    /// [`crate::Error::UnknownRule`]; [`crate::Error::InvalidConfig`] for slots that cannot be kept;
    /// [`crate::Error::RuleFailed`].
    pub(crate) fn new(name: &str, config: &TableConfig, rules: &UpdateRules) -> Result<Self> {
        let own = rules.of(name, &config.optimizer)?;
        let mut slots = match &own {
            None => slots(&config.optimizer, config.dim),
            Some(rule) => checked_slots(name, config, &**rule)?,
        };
        let width = slots.iter().map(|slot| slot.width).sum();
        if config.ema_decay.is_some() {
            slots.extend(average::slots(config.dim));
        }
        Ok(Self { config: config.optimizer.clone(), own, width, ema_decay: config.ema_decay, slots })
    }

    /// Returns what is kept beside each row, in order.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Computes the scalars of step `step` (from 1) at learning rate `lr`.
    pub(crate) fn prepare(&self, lr: f64, step: u64) -> PreparedRule {
        let rule = match &self.own {
            None => prepare(&self.config, lr, step),
            Some(rule) => AnyRule::Own(OwnRule::new(Arc::clone(rule), lr, step)),
        };
        let average = self.ema_decay.map(|decay| Average::new(decay, step));
        PreparedRule { rule, width: self.width, average }
    }
}
