//! The operators that a graph may call.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The same file that the Python package reads.
const LIST: &str = include_str!("../../../python/recstore_ops/serving/graph_operators.txt");

/// The operators of the list, and those that the caller of this library allows.
#[derive(Default)]
pub(crate) struct Operators {
    allowed: Vec<String>,
}

impl Operators {
    /// Returns those of the list and these: `NAMESPACE::NAME.OVERLOAD`, or without the overload `default`.
    ///
    /// # Errors
    /// [`Error::Input`]: a name is not exact.
    pub(crate) fn with(allowed: &[&str]) -> Result<Self> {
        let whole = |&name: &&str| {
            whole_name(name).ok_or_else(|| {
                let expected = "expected NAMESPACE::NAME or NAMESPACE::NAME.OVERLOAD";
                Error::Input(format!("{name:?} names no operator: {expected}"))
            })
        };
        Ok(Self { allowed: allowed.iter().map(whole).collect::<Result<_>>()? })
    }

    /// Returns the schema that an operator must have, nothing for a function on sizes and for what the caller allows;
    /// None if graphs may not call it.
    pub(crate) fn schema(&self, name: &str) -> Option<&'static str> {
        let is_allowed = || self.allowed.iter().any(|each| each == name);
        listed().get(name).copied().or_else(|| is_allowed().then_some(""))
    }
}

/// A name with its overload, None if it is no name of an operator.
fn whole_name(name: &str) -> Option<String> {
    let is_word =
        |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let (namespace, rest) = name.split_once("::")?;
    let (packet, overload) = rest.split_once('.').unwrap_or((rest, "default"));
    [namespace, packet, overload]
        .into_iter()
        .all(is_word)
        .then(|| format!("{namespace}::{packet}.{overload}"))
}

/// Schemas by names, where an operator without overloads is that of `.default`.
fn listed() -> &'static HashMap<String, &'static str> {
    static LISTED: OnceLock<HashMap<String, &'static str>> = OnceLock::new();
    LISTED.get_or_init(|| {
        let lines = LIST.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let named = lines.map(|line| match line.split_once('(') {
            None => (line.to_owned(), ""),
            Some((name, _)) if name.contains('.') => (name.to_owned(), line),
            Some((name, _)) => (format!("{name}.default"), line),
        });
        named.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_has_its_schema() {
        let operators = Operators::default();
        assert_eq!(operators.schema("aten::relu.default"), Some("aten::relu(Tensor self) -> Tensor"));
        assert!(operators.schema("aten::add.Tensor").unwrap().starts_with("aten::add.Tensor(Tensor self, "));
        assert_eq!(operators.schema("operator.add"), Some(""));
        for name in ["aten::from_file.default", "aten::relu", "aten::relu_.default", "operator.pow", "", "#"]
        {
            assert_eq!(operators.schema(name), None, "{name}");
        }
    }

    #[test]
    fn a_caller_allows_exact_names_alone() {
        let operators = Operators::with(&["mine::op.default", "mine::other"]).unwrap();
        assert_eq!(operators.schema("mine::op.default"), Some(""));
        assert_eq!(operators.schema("mine::other.default"), Some(""));
        assert_eq!(operators.schema("mine::op.other"), None);
        for name in ["mine::", "mine::*.default", "op.default", "::op.default", "mine::op.a.b", ""] {
            assert!(Operators::with(&[name]).is_err(), "{name}");
        }
    }

    /// What else a schema could write to would reach the memory of a caller.
    #[test]
    fn no_listed_operator_writes_to_an_argument() {
        assert!(listed().values().all(|schema| !schema.contains('!')));
    }
}
