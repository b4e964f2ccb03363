//! Rules of a program's own: registered under a name, which tables and checkpoints know them by.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use super::OptimizerConfig;
use crate::{Error, Result};

/// A rule of a program's own: what turns a row's gradient into its new values.
///
/// It is given to a store by [`LocalStore::register_rule`](crate::LocalStore::register_rule) and chosen by
/// [`OptimizerConfig::Rule`]. Duplicate gradients are summed before, so a rule sees each row once a step; threads call it
/// for different rows at the same time. Equal inputs must give equal results, or a table depends on the number of
/// threads, and a log of changes does not bring it back.
pub trait UpdateRule: Send + Sync {
    /// Returns the names and the widths, in elements, of what is kept beside each row of `dim` elements: always the same
    /// for one `dim`. It starts at zeros, and checkpoints have it under these names.
    fn slots(&self, dim: usize) -> Vec<(String, usize)>;

    /// Takes step `step` of the table, from 1, at one row.
    ///
    /// `row` and `gradient` have the table's dim; `slots` are those of the row, one behind another. A gradient may be
    /// -0.0 where other ways of summing give 0.0: a rule that tells them apart adds it to zero first. After a panic the
    /// table is refused until it is cleared or loaded.
    fn apply(&self, row: &mut [f32], slots: &mut [f32], gradient: &[f32], step: u64, learning_rate: f64);

    /// Brings `slots` in agreement with a row that was just made, or overwritten. Most rules have nothing to do here.
    fn adopt(&self, row: &[f32], slots: &mut [f32], learning_rate: f64) {
        _ = (row, slots, learning_rate);
    }
}

/// The rule that a table's configuration names.
pub(crate) enum NamedRule {
    /// It is registered here.
    Registered(Arc<dyn UpdateRule>),
    /// Its table's rows lie elsewhere or are only read: what stands for it names all that is kept beside a row.
    Elsewhere(Arc<dyn UpdateRule>),
}

/// The rules of a store, by name.
#[derive(Default)]
pub(crate) struct UpdateRules {
    by_name: RwLock<BTreeMap<String, Arc<dyn UpdateRule>>>,
    /// The rule of all other names, where rows lie elsewhere.
    elsewhere: Option<Arc<dyn UpdateRule>>,
}

impl fmt::Debug for UpdateRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl UpdateRules {
    /// Returns what stands for any rule of tables whose rows lie elsewhere; they have these slots.
    pub(crate) fn elsewhere(slots: Vec<(String, usize)>) -> Self {
        Self { by_name: RwLock::default(), elsewhere: Some(Arc::new(Elsewhere(slots))) }
    }

    /// Adds a rule.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an empty name, or one that another rule has.
    pub(crate) fn register(&self, name: &str, rule: Arc<dyn UpdateRule>) -> Result<()> {
        let refused = |message: String| Err(Error::InvalidConfig { message });
        if name.is_empty() {
            return refused("the name of an update rule must not be empty".to_owned());
        }
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        if by_name.contains_key(name) {
            return refused(format!("an update rule \"{name}\" is registered already"));
        }
        by_name.insert(name.to_owned(), rule);
        Ok(())
    }

    /// Returns the rule that a table's configuration names; none where it is one of the store's.
    ///
    /// # Errors
    /// [`Error::UnknownRule`].
    pub(crate) fn of(&self, table: &str, config: &OptimizerConfig) -> Result<Option<NamedRule>> {
        let OptimizerConfig::Rule { name, .. } = config else { return Ok(None) };
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        let registered = by_name.get(name).cloned().map(NamedRule::Registered);
        let found = registered.or_else(|| self.elsewhere.clone().map(NamedRule::Elsewhere));
        found.map(Some).ok_or_else(|| Error::UnknownRule {
            table: table.to_owned(),
            rule: name.clone(),
            registered: by_name.keys().cloned().collect(),
        })
    }

    fn names(&self) -> Vec<String> {
        self.by_name.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}

/// Stands for a rule where there are no rows to apply it to, or rows that are only read.
struct Elsewhere(Vec<(String, usize)>);

impl UpdateRule for Elsewhere {
    fn slots(&self, _: usize) -> Vec<(String, usize)> {
        self.0.clone()
    }

    #[expect(clippy::panic, reason = "a panicking rule is how a table refuses its steps")]
    fn apply(&self, _: &mut [f32], _: &mut [f32], _: &[f32], _: u64, _: f64) {
        panic!("the table was loaded without its rule, to be read");
    }
}

/// Returns what a panic said.
pub(crate) fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it gave no text".to_owned())
}
