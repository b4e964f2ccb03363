//! What makes an optimizer of a rule's options, and the registry's macro.

use serde::Serialize;
use serde_json::{Value, json};

use super::options::Options;
use super::row_rule::Prepared;
use super::slot::Slot;
use crate::Result;

/// A rule by its options: what it keeps of a row, and how a step changes that.
pub(crate) trait Rule: Options {
    /// What the options come to in one step.
    type Prepared: Prepared;

    /// How `recstore train` uses it.
    const TRAINING: Training;

    /// Options, as JSON objects, that tests go through: one for each way to keep something of a row, or to step.
    const FORMS: &'static [&'static str];

    /// Returns what is kept beside each row of `dim`.
    fn slots(&self, dim: usize) -> Vec<Slot>;

    /// Computes the scalars of a step of the table, from 1.
    fn prepare(&self, lr: f64, step: u64) -> Self::Prepared;

    /// Checks options against each other, each of which is in its range.
    ///
    /// # Errors
    /// [`crate::Error::InvalidConfig`].
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns what steps do to rows that they leave alone, if anything.
    fn idle(&self) -> Option<IdleRule> {
        None
    }

    /// Returns why what is kept for each element must not be rounded, where that is so.
    fn refuses_narrow_state(&self) -> Option<&'static str> {
        const DIM: usize = 2;
        let keeps = self.slots(DIM).iter().any(Slot::is_of_elements);
        (!keeps).then_some("goes with rules that keep something for each element of a row: this one does not")
    }
}

/// What steps do to rows that they leave alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum IdleRule {
    /// They decay, by this factor of the learning rate.
    Decay(f64),
    /// Their momentum carries them on.
    Momentum { momentum: f64, is_nesterov: bool },
}

/// How `recstore train` uses an optimizer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Training {
    /// The learning rate, unless another is chosen.
    pub(super) lr: f64,
    /// Whether `--weight-decay` goes with it.
    pub(super) weight_decay: bool,
    /// The optimizer of `torch.optim` for the parameters outside the tables, unless another is chosen.
    pub(super) dense: &'static str,
}

pub(super) fn describe<R: Rule>(kind: &str) -> Value {
    let with_kind = |form: &&str| {
        let mut form: Value = serde_json::from_str(form).unwrap_or_default();
        form["kind"] = kind.into();
        form
    };
    json!({
        "kind": kind,
        "about": R::ABOUT.trim(),
        "options": R::describe(),
        "slots": describe_slots::<R>(),
        "training": R::TRAINING,
        "forms": R::FORMS.iter().map(with_kind).collect::<Vec<_>>(),
    })
}

/// Returns what is kept beside each row, in order, whatever the options: the name of each slot, how many elements it has a
/// row (none: one beside each weight), and the option with which it is kept, if not always.
fn describe_slots<R: Rule>() -> Vec<Value> {
    const DIM: usize = 2;
    // What is caught up with lies besides, in slots that are not the rule's.
    let options: Vec<Value> =
        R::describe().into_iter().filter(|option| option["name"] != "catch_up").collect();
    let (plain, all) = (R::default().slots(DIM), varied::<R>(&options));
    let describe = |(slot, wider): (Slot, Slot)| {
        let keeps = |option: &&Value| varied::<R>(&[(*option).clone()]).slots(DIM).contains(&slot);
        let with = options.iter().find(keeps).filter(|_| !plain.contains(&slot));
        let width = (slot.width == wider.width).then_some(slot.width);
        json!({"name": slot.name, "width": width, "with": with.map(|option| &option["name"])})
    };
    // At two widths: a slot that is as wide at both does not depend on that of the row.
    all.slots(DIM).into_iter().zip(all.slots(DIM + 1)).map(describe).collect()
}

/// Returns a rule some of whose options have another value than their default.
fn varied<R: Rule>(options: &[Value]) -> R {
    const SHARE: f64 = 0.5;
    let other = |option: &Value| match &option["default"] {
        Value::Bool(default) => json!(!default),
        Value::String(_) => option["choices"][1].clone(),
        Value::Array(_) => option["default"].clone(),
        _ => json!(SHARE),
    };
    let values =
        options.iter().filter_map(|option| Some((option["name"].as_str()?.to_owned(), other(option))));
    serde_json::from_value(values.collect::<serde_json::Map<_, _>>().into()).unwrap_or_default()
}

/// Makes the optimizers of a line each: `"name" => Variant(module::Options)`.
macro_rules! registry {
    ($($kind:literal => $variant:ident($module:ident::$options:ident),)*) => {
        /// The options of each optimizer.
        pub mod optimizer_options {
            $(pub use super::$module::$options;)*
        }

        /// An optimizer and its hyper-parameters, named as in `torch.optim`. The equations stand in the options' own
        /// documents.
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(tag = "kind", deny_unknown_fields)]
        pub enum OptimizerConfig {
            $(
                #[doc = concat!("`", $kind, "`.")]
                #[serde(rename = $kind)]
                $variant($module::$options),
            )*
            /// A rule of the program's own, which the store that keeps the rows must know: see [`crate::UpdateRule`].
            #[serde(rename = "rule")]
            Rule {
                /// The name it is registered under.
                name: String,
                /// The learning rate.
                #[serde(default = "own::default_lr")]
                lr: f64,
            },
        }

        /// Describes all optimizers of the store, each in JSON: `kind`, `about`, `options`, the learning rate first, `slots`,
        /// `training`, and `forms`: configurations for tests, one for each way to keep something of a row, or to step.
        pub fn optimizers() -> Vec<serde_json::Value> {
            vec![$(registry::describe::<$module::$options>($kind),)*]
        }

        /// One of the store's rules or of the program's own, made ready for one step: learning rate and step count are in
        /// its scalars.
        #[derive(Debug)]
        pub(crate) enum AnyRule {
            $($variant(<$module::$options as registry::Rule>::Prepared),)*
            Own(own::OwnRule),
        }

        impl AnyRule {
            /// Does `work` with the rule.
            pub(crate) fn run(&self, work: impl WithRule) {
                match self {
                    $(Self::$variant(rule) => rule.run(work),)*
                    Self::Own(rule) => rule.run(work),
                }
            }

            /// Brings the slots in agreement with weights that were just created or overwritten.
            pub(crate) fn adopt_weights(&self, weights: &[f32], state: &mut [f32]) {
                match self {
                    $(Self::$variant(rule) => Prepared::adopt_weights(rule, weights, state),)*
                    Self::Own(rule) => Prepared::adopt_weights(rule, weights, state),
                }
            }
        }

        /// Evaluates an expression with the options of one of the store's rules, and another with the learning rate of a
        /// rule of the program's own.
        macro_rules! with_options {
            ($config:expr, $name:ident => $of_store:expr, own $lr:ident => $of_own:expr) => {
                match $config {
                    $(OptimizerConfig::$variant($name) => $of_store,)*
                    OptimizerConfig::Rule { lr: $lr, .. } => $of_own,
                }
            };
        }

        impl OptimizerConfig {
            /// Computes the scalars of one of the store's rules.
            pub(crate) fn prepare(&self, lr: f64, step: u64) -> AnyRule {
                match self {
                    $(Self::$variant(options) => AnyRule::$variant(registry::Rule::prepare(options, lr, step)),)*
                    Self::Rule { .. } => unreachable!("a table has the rule that it names"),
                }
            }
        }
    };
}
pub(super) use registry;
