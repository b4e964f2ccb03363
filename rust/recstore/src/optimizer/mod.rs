//! The rules that turn a row's gradient into its new values, one a file: pure functions on slices.
//!
//! A record is a row of `dim` weights followed by the rule's slots, which narrow types keep in fewer words. Kernels use `+ - * / sqrt` in single precision,
//! element by element, so that every thread count and every SIMD level gives the same bits. `lr` and the other
//! scalars of a step are computed once, in double precision, before the first row.

mod adadelta;
mod adagrad;
mod adam;
mod adamw;
mod average;
mod ftrl;
mod idle;
mod idle_decay;
mod lamb;
mod lion;
mod momentum;
mod options;
mod own;
mod prepared_rule;
pub(crate) mod ranges;
mod registry;
mod rmsprop;
mod row_rule;
mod rowwise_adagrad;
mod rowwise_adam;
mod sgd;
mod slot;
#[cfg(test)]
mod tests;
mod update_rule;
mod velocity;

pub use adagrad::Convention;
pub use adam::BiasCorrection;
pub(crate) use average::{Average, slots as average_slots};
pub(crate) use idle::{Idle, slot as idle_slot};
pub(crate) use idle_decay::DecayFactor;
use options::Options;
pub(crate) use own::OwnRule;
pub(crate) use prepared_rule::{IdleSteps, PreparedRule};
use ranges::{Range, require};
use registry::{IdleRule, Rule, registry};
use row_rule::Prepared;
pub(crate) use row_rule::{RowRule, WithRule};
pub use slot::StateDtype;
pub(crate) use slot::{Slot, SlotType, Slots};
pub use update_rule::UpdateRule;
pub(crate) use update_rule::{NamedRule, UpdateRules, text_of};

use serde_json::{Value, json};

use crate::Result;

registry! {
    "sgd" => Sgd(sgd::SgdConfig),
    "adagrad" => Adagrad(adagrad::AdagradConfig),
    "rowwise_adagrad" => RowwiseAdagrad(rowwise_adagrad::RowwiseAdagradConfig),
    "rmsprop" => Rmsprop(rmsprop::RmspropConfig),
    "adadelta" => Adadelta(adadelta::AdadeltaConfig),
    "adam" => Adam(adam::AdamConfig),
    "adamw" => Adamw(adamw::AdamwConfig),
    "rowwise_adam" => RowwiseAdam(rowwise_adam::RowwiseAdamConfig),
    "lamb" => Lamb(lamb::LambConfig),
    "lion" => Lion(lion::LionConfig),
    "ftrl" => Ftrl(ftrl::FtrlConfig),
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::Sgd(sgd::SgdConfig::default())
    }
}

impl OptimizerConfig {
    /// Returns the learning rate (FTRL: `alpha`).
    pub fn learning_rate(&self) -> f64 {
        with_options!(self, options => options.learning_rate(), own lr => *lr)
    }

    /// Whether a learning rate of zero is out of the rule's range: FTRL divides by it.
    pub(crate) fn needs_positive_learning_rate(&self) -> bool {
        with_options!(self, options => rate_range(options) == Range::Positive, own _lr => false)
    }

    /// Returns what must be the same in two openings of one table, in JSON: all but the learning rate and the weight decay.
    pub(crate) fn identity(&self) -> Value {
        let rate = with_options!(self, options => names(options)[0], own _lr => "lr");
        let mut identity = json!(self);
        if let Some(options) = identity.as_object_mut() {
            options.retain(|name, _| name != rate && name != "weight_decay");
        }
        identity
    }

    /// Returns what one of the store's rules keeps for rows of `dim`.
    pub(crate) fn slots(&self, dim: usize) -> Vec<Slot> {
        with_options!(self, options => options.slots(dim), own _lr => vec![])
    }

    fn idle_rule(&self) -> Option<IdleRule> {
        with_options!(self, options => options.idle(), own _lr => None)
    }

    /// The weight decay of rows that a step leaves alone, if they decay.
    pub(crate) fn idle_decay(&self) -> Option<f64> {
        match self.idle_rule() {
            Some(IdleRule::Decay(weight_decay)) => Some(weight_decay),
            _ => None,
        }
    }

    /// Whether steps change rows that they leave alone.
    pub(crate) fn catches_up(&self) -> bool {
        self.idle_rule().is_some()
    }

    /// Returns why no narrow type goes with what the rule keeps, where that is so.
    pub(crate) fn refuses_narrow_state(&self) -> Option<&'static str> {
        const OWN: Option<&str> = Some("does not go with an update rule of the program's own");
        with_options!(self, options => options.refuses_narrow_state(), own _lr => OWN)
    }

    /// Checks the options against their ranges, and against each other.
    pub(crate) fn validate(&self) -> Result<()> {
        match self {
            Self::Rule { name, lr } => {
                Range::NotNegative.check("optimizer.lr", *lr)?;
                require(!name.is_empty(), || {
                    "optimizer.name, the name of the update rule, must not be empty".to_owned()
                })
            }
            config => {
                with_options!(config, options => options.check_ranges().and_then(|()| options.check()), own _lr => Ok(()))
            }
        }
    }
}

fn names<R: Options>(_: &R) -> &'static [&'static str] {
    R::NAMES
}

fn rate_range<R: Options>(_: &R) -> Range {
    R::RATE
}
