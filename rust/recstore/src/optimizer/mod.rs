//! The rules that turn a row's gradient into its new values, one a file: pure functions on slices.
//!
//! A record is a row of `dim` weights followed by the rule's slots, which narrow types keep in fewer words. Kernels use `+ - * / sqrt` in single precision,
//! element by element, so that every thread count and every SIMD level gives the same bits. `lr` and the other
//! scalars of a step are computed once, in double precision, before the first row.

mod adadelta;
mod adagrad;
mod adam;
mod adamw;
mod any_rule;
mod average;
mod ftrl;
mod idle;
mod idle_decay;
mod lamb;
mod lion;
mod momentum;
mod own;
mod prepared_rule;
mod rmsprop;
mod row_rule;
mod rowwise_adagrad;
mod rowwise_adam;
mod sgd;
mod slot;
mod table_rule;
#[cfg(test)]
mod tests;
mod update_rule;
mod velocity;

pub(crate) use idle::Idle;
pub(crate) use idle_decay::Kept;
pub(crate) use prepared_rule::PreparedRule;
pub(crate) use row_rule::{RowRule, WithRule};
pub(crate) use slot::{Slot, SlotType, Slots};
pub(crate) use table_rule::Optimizer;
pub use update_rule::UpdateRule;
pub(crate) use update_rule::UpdateRules;
