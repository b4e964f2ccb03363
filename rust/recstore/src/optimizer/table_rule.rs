//! The rule of one table.

use std::sync::Arc;

use super::any_rule::{AnyRule, prepare, slots};
use super::average::{self, Average};
use super::idle_decay::{self, IdleDecay, Kept};
use super::own::OwnRule;
use super::prepared_rule::PreparedRule;
use super::row_rule::Slot;
use super::update_rule::{NamedRule, UpdateRule, UpdateRules, checked_slots};
use crate::config::{OptimizerConfig, TableConfig};
use crate::{Error, Result};

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
        let averages = config.ema_decay.map_or(vec![], |_| average::slots(config.dim).to_vec());
        let (own, mut slots) = match rules.of(name, &config.optimizer)? {
            None => (None, slots(&config.optimizer, config.dim)),
            Some(NamedRule::Registered(rule)) => {
                let slots = checked_slots(name, config, &*rule)?;
                refuse_names_of(&averages, &slots, name)?;
                (Some(rule), slots)
            }
            Some(NamedRule::Elsewhere(rule)) => {
                let mut slots = checked_slots(name, config, &*rule)?;
                slots.truncate(slots.len().saturating_sub(averages.len()));
                (Some(rule), slots)
            }
        };
        let width = slots.iter().map(|slot| slot.width).sum();
        slots.extend(averages);
        slots.extend(config.optimizer.idle_decay().map(|_| idle_decay::slot()));
        Ok(Self { config: config.optimizer.clone(), own, width, ema_decay: config.ema_decay, slots })
    }

    /// Returns what is kept beside each row, in order.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Computes the scalars of step `step` (from 1) at learning rate `lr`, the last of `steps` after `kept`.
    pub(crate) fn prepare(&self, lr: f64, step: u64, kept: Kept, steps: u64) -> PreparedRule {
        let rule = match &self.own {
            None => prepare(&self.config, lr, step),
            Some(rule) => AnyRule::Own(OwnRule::new(Arc::clone(rule), lr, step)),
        };
        let average = self.ema_decay.map(|decay| Average::new(decay, step));
        let idle_decay = self.config.idle_decay().map(|decay| IdleDecay::new(kept, lr, decay, steps));
        PreparedRule { rule, width: self.width, average, idle_decay }
    }
}

/// # Errors
/// [`Error::InvalidConfig`]: a rule of the program's own has a slot that is called as one of the average's.
fn refuse_names_of(averages: &[Slot], slots: &[Slot], table: &str) -> Result<()> {
    let taken = slots.iter().find(|slot| averages.iter().any(|average| average.name == slot.name));
    taken.map_or(Ok(()), |slot| {
        let message = format!(
            "the update rule of table \"{table}\" has a slot \"{}\", which is where ema_decay keeps the average",
            slot.name
        );
        Err(Error::InvalidConfig { message })
    })
}
