//! What a caller keeps along with its tables: a JSON text, which is never made a tree of values.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// JSON that a save is given along and a load gives back, without white space.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct Metadata(Box<RawValue>);

/// The deepest nesting: a manifest has three levels around it, and JSON of more than 127 is not read.
const MAX_DEPTH: usize = 124;

impl Metadata {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// Says why it is none, or that it is nested too deeply.
    pub fn parse(text: &str) -> Result<Self, String> {
        let metadata: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        metadata.check_depth().map(|()| metadata)
    }

    /// Returns the JSON text.
    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    /// Reads a value from the text.
    ///
    /// # Errors
    /// As `serde_json`.
    pub fn read<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_str(self.as_str())
    }

    /// Checks that what is written can be read again.
    pub(super) fn check_depth(&self) -> Result<(), String> {
        match depth_of(self.as_str()) {
            depth if depth > MAX_DEPTH => {
                Err(format!("metadata must be nested at most {MAX_DEPTH} deep, got {depth}"))
            }
            _ => Ok(()),
        }
    }
}

impl Default for Metadata {
    fn default() -> Self {
        Self(RawValue::NULL.to_owned())
    }
}

impl From<serde_json::Value> for Metadata {
    fn from(value: serde_json::Value) -> Self {
        // Values of this type are always JSON.
        RawValue::from_string(value.to_string()).map_or_else(|_| Self::default(), Self)
    }
}

impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text: Box<str> = Box::<RawValue>::deserialize(from)?.into();
        RawValue::from_string(without_white_space(text.into())).map(Self).map_err(D::Error::custom)
    }
}

/// Calls `take` with each character of a JSON text, and whether it lies within a string.
fn for_each_character(text: &str, mut take: impl FnMut(char, bool)) {
    let (mut is_quoted, mut is_escaped) = (false, false);
    for character in text.chars() {
        let is_quote = character == '"' && !is_escaped;
        take(character, is_quoted || is_quote);
        is_escaped = is_quoted && character == '\\' && !is_escaped;
        is_quoted ^= is_quote;
    }
}

fn without_white_space(text: String) -> String {
    if !text.contains([' ', '\n', '\r', '\t']) {
        return text;
    }
    let mut dense = String::with_capacity(text.len());
    for_each_character(&text, |character, is_quoted| {
        if is_quoted || !matches!(character, ' ' | '\n' | '\r' | '\t') {
            dense.push(character);
        }
    });
    dense
}

fn depth_of(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    for_each_character(text, |character, is_quoted| match character {
        '[' | '{' if !is_quoted => {
            depth += 1;
            deepest = deepest.max(depth);
        }
        ']' | '}' if !is_quoted => depth = depth.saturating_sub(1),
        _ => {}
    });
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_white_space_between_values_goes() {
        let text = "{ \"a b\" : [ 1 ,\n2 ], \"quote \\\" here\":\t\" \\\\\" }";
        let metadata = Metadata::parse(text).unwrap();
        assert_eq!(metadata.as_str(), r#"{"a b":[1,2],"quote \" here":" \\"}"#);
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        assert_eq!(Metadata::from(value), metadata);
        assert_eq!(Metadata::default(), Metadata::parse(" null ").unwrap());
    }

    #[test]
    fn what_is_nested_too_deeply_or_no_json_is_refused() {
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(Metadata::parse(&nested(MAX_DEPTH)).is_ok());
        for depth in [MAX_DEPTH + 1, 100_000] {
            let refused = Metadata::parse(&nested(depth)).unwrap_err();
            assert_eq!(refused, format!("metadata must be nested at most 124 deep, got {depth}"));
        }
        assert!(Metadata::parse(&format!("\"{}\"", "[".repeat(500))).is_ok());
        for text in ["", "{", "NaN", "[1,]", "{} {}"] {
            assert!(Metadata::parse(text).is_err(), "{text}");
        }
    }
}
