//! The options of a rule: declared once, each with its type, default, range and meaning.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ranges::Range;
use crate::Result;

/// The options of a rule, of which the first one is the learning rate.
pub(crate) trait Options: Clone + Default + Serialize + DeserializeOwned {
    /// What the rule is: its equation and its source, in Markdown.
    const ABOUT: &'static str;

    /// The names of the options, in the order of a configuration.
    const NAMES: &'static [&'static str];

    /// Where the learning rate must lie.
    const RATE: Range;

    /// Returns name, description, default, range and choices of each.
    fn describe() -> Vec<Value>;

    fn learning_rate(&self) -> f64;

    /// # Errors
    /// [`crate::Error::InvalidConfig`] names an option, its value and its range.
    fn check_ranges(&self) -> Result<()>;
}

/// A number of a configuration, or several.
pub(super) trait Ranged {
    /// # Errors
    /// [`crate::Error::InvalidConfig`].
    fn check(&self, key: &str, range: Range) -> Result<()>;
}

impl Ranged for f64 {
    fn check(&self, key: &str, range: Range) -> Result<()> {
        range.check(key, *self)
    }
}

impl Ranged for [f64; 2] {
    fn check(&self, key: &str, range: Range) -> Result<()> {
        self.iter().try_for_each(|value| range.check(key, *value))
    }
}

/// Declares the options of a rule: the structure that a table's configuration holds, and [`Options`] of it. The first line
/// is the learning rate. A number has a range behind its default, a name the others that it may be.
macro_rules! options {
    (
        $(#[doc = $about:literal])*
        $config:ident {
            $(#[doc = $rate_doc:literal])* $(#[serde($($rate_serde:tt)*)])?
            $rate:ident: f64 = $rate_default:expr, $rate_range:ident;
            $(
                $(#[doc = $doc:literal])* $(#[serde($($serde:tt)*)])?
                $name:ident: $value:ty = $default:expr $(, $range:ident)? $(=> $choices:expr)?;
            )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $config {
            $(#[doc = $rate_doc])* $(#[serde($($rate_serde)*)])?
            pub $rate: f64,
            $($(#[doc = $doc])* $(#[serde($($serde)*)])? pub $name: $value,)*
        }

        impl Default for $config {
            fn default() -> Self {
                Self { $rate: $rate_default, $($name: $default,)* }
            }
        }

        impl super::options::Options for $config {
            const ABOUT: &'static str = concat!($($about, "\n",)*);
            const NAMES: &'static [&'static str] = &[stringify!($rate), $(stringify!($name),)*];
            const RATE: super::ranges::Range = super::ranges::Range::$rate_range;

            fn describe() -> Vec<serde_json::Value> {
                vec![
                    serde_json::json!({
                        "name": stringify!($rate),
                        "description": concat!($($rate_doc,)*).trim(),
                        "default": $rate_default,
                        "range": Self::RATE,
                    }),
                    $(serde_json::json!({
                        "name": stringify!($name),
                        "description": concat!($($doc,)*).trim(),
                        "default": $default,
                        $("range": super::ranges::Range::$range,)?
                        $("choices": $choices,)?
                    }),)*
                ]
            }

            fn learning_rate(&self) -> f64 {
                self.$rate
            }

            fn check_ranges(&self) -> crate::Result<()> {
                Self::RATE.check(concat!("optimizer.", stringify!($rate)), self.$rate)?;
                $($(super::options::Ranged::check(
                    &self.$name,
                    concat!("optimizer.", stringify!($name)),
                    super::ranges::Range::$range,
                )?;)?)*
                Ok(())
            }
        }
    };
}
pub(super) use options;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
pub(super) fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
pub(super) fn is_false(value: &bool) -> bool {
    !value
}
