//! The rule of one table.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::config::{MAX_FLOATS_PER_BLOCK, OptimizerConfig, TableConfig};
use crate::optimizer::{
    AnyRule, Average, DecayFactor, Idle, IdleSteps, NamedRule, OwnRule, PreparedRule, Slot, Slots,
    UpdateRule, UpdateRules, average_slots, idle_slot, text_of,
};
use crate::{Error, Result};

/// The rule of a table: one of the store's by its configuration, or one of the program's own.
pub(super) struct TableRule {
    config: OptimizerConfig,
    own: Option<Arc<dyn UpdateRule>>,
    /// What the rule keeps of a row.
    rule_slots: Arc<[Slot]>,
    ema_decay: Option<f64>,
    /// With what is kept besides.
    slots: Vec<Slot>,
}

impl TableRule {
    /// Returns the rule of the table `name`.
    ///
    /// # Errors
    /// [`crate::Error::UnknownRule`]; [`crate::Error::InvalidConfig`] for slots that cannot be kept;
    /// [`crate::Error::RuleFailed`].
    pub(super) fn new(name: &str, config: &TableConfig, rules: &UpdateRules) -> Result<Self> {
        let averages = config.ema_decay.map_or(vec![], |_| average_slots(config.dim).to_vec());
        let (own, slots) = match rules.of(name, &config.optimizer)? {
            None => (None, config.optimizer.slots(config.dim)),
            Some(NamedRule::Registered(rule)) => {
                let slots = checked_slots(name, config, &*rule)?;
                refuse_names_of(&averages, &slots, name)?;
                (Some(rule), slots)
            }
            Some(NamedRule::Elsewhere(rule)) => {
                let mut slots = checked_slots(name, config, &*rule)?;
                // The names from elsewhere are of all that is kept: the averages, which come last, are added
                // again below.
                slots.truncate(slots.len().saturating_sub(averages.len()));
                (Some(rule), slots)
            }
        };
        let rule_slots = slots.iter().cloned().map(|slot| slot.kept_as(config.state_dtype));
        let rule_slots: Arc<[Slot]> = rule_slots.collect();
        // The rule's own come first in a record, where `PreparedRule` splits it.
        let mut slots = rule_slots.to_vec();
        slots.extend(averages);
        slots.extend(idle_slot(&config.optimizer));
        Ok(Self { config: config.optimizer.clone(), own, rule_slots, ema_decay: config.ema_decay, slots })
    }

    /// Returns what is kept beside each row, in order.
    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Computes the scalars of step `step` (from 1) at learning rate `lr`, the last of `steps` after `kept`; of none for
    /// rows that are changed between steps.
    pub(super) fn prepare(&self, lr: f64, step: u64, kept: DecayFactor, steps: u64) -> PreparedRule {
        let rule = match &self.own {
            None => self.config.prepare(lr, step),
            Some(rule) => AnyRule::Own(OwnRule::new(Arc::clone(rule), lr, step)),
        };
        let average = self.ema_decay.map(|decay| Average::new(decay, step));
        let besides = &self.slots[self.rule_slots.len()..];
        PreparedRule::new(rule, &self.rule_slots, besides, average, self.idle_steps(lr, step, kept, steps))
    }

    /// Returns what the steps before the last of `steps` after `kept` do to rows that they leave alone, and with it. The
    /// others, that this table was told nothing of, had the same learning rate.
    fn idle_steps(&self, lr: f64, step: u64, kept: DecayFactor, steps: u64) -> Option<IdleSteps> {
        if !self.config.catches_up() {
            return None;
        }
        let decay = self.config.idle_decay().unwrap_or_default();
        let kept_before = kept.after_steps(lr, decay, steps.saturating_sub(1));
        let kept_after = kept_before.after_steps(lr, decay, 1);
        // Without a step under way, `step` is the last one that was taken and counts too.
        let before = self.idle(kept_before, step.saturating_sub(steps.min(1)))?;
        Some(IdleSteps { before, after: self.idle(kept_after, step)?, kept_after })
    }

    /// Returns what the steps up to `step` do to rows that they leave alone, if anything: `kept` is what they left.
    pub(super) fn idle(&self, kept: DecayFactor, step: u64) -> Option<Idle> {
        Idle::up_to(&self.config, kept, step)
    }

    /// Brings what is kept of a row to where its weights are, those of now. `state` are the words behind the weights.
    pub(super) fn settle(&self, idle: Idle, state: &mut [f32]) {
        let (own, all) = (Slots(&self.rule_slots).words(), Slots(&self.slots).words());
        let (own, besides) = state[..all].split_at_mut(own);
        idle.settle(own, besides);
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

/// Returns the slots of a table's own rule.
///
/// # Errors
/// [`Error::InvalidConfig`] for slots that cannot be kept; [`Error::RuleFailed`].
fn checked_slots(table: &str, config: &TableConfig, rule: &dyn UpdateRule) -> Result<Vec<Slot>> {
    let OptimizerConfig::Rule { name, .. } = &config.optimizer else { return Ok(Vec::new()) };
    // Code of the program: its panic refuses this table and nothing else.
    let slots = catch_unwind(AssertUnwindSafe(|| rule.slots(config.dim)));
    let slots = slots.map_err(|panic| Error::RuleFailed {
        table: table.to_owned(),
        rule: name.clone(),
        message: text_of(&*panic),
    })?;
    let refused = |message: String| {
        let message = format!("the update rule \"{name}\" of table \"{table}\" {message}");
        Err(Error::InvalidConfig { message })
    };
    for (number, (slot, width)) in slots.iter().enumerate() {
        if slot.is_empty() || slots[..number].iter().any(|(other, _)| other == slot) {
            return refused(format!("has a slot \"{slot}\" that is empty or comes twice"));
        }
        if *width == 0 {
            return refused(format!("has a slot \"{slot}\" of width 0"));
        }
    }
    let widths = slots.iter().fold(config.dim, |sum, (_, width)| sum.saturating_add(*width));
    if widths.saturating_mul(config.block_size) > MAX_FLOATS_PER_BLOCK {
        return refused(format!(
            "has {widths} elements a row with its slots: a block of {} rows exceeds 1 GiB; lower block_size",
            config.block_size
        ));
    }
    Ok(slots.into_iter().map(|(name, width)| Slot::exact(name, width)).collect())
}
