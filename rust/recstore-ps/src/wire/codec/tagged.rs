//! Enums that travel as one JSON object, whose tag among the other keys says which variant it is.
//!
//! What serde makes of such a tag keeps everything that stands before it, and all that a peer put behind it, as a tree
//! of values of many times the text's bytes. Here the tag is taken out of the text first; what is left is read straight
//! into the variant's fields.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Error, Result};

/// Returns `{"verb":"name","field":..}` for the `{"name":{"field":..}}` that serde makes of a variant.
pub(super) fn with_tag(tag: &str, value: &impl Serialize) -> Result<Box<RawValue>> {
    let text = serde_json::to_string(value)?;
    let named = text.strip_prefix("{\"").and_then(|rest| rest.strip_suffix("}}"));
    let (name, fields) = named
        .and_then(|named| named.split_once("\":{"))
        .ok_or_else(|| refused("a variant without named fields"))?;
    let comma = if fields.is_empty() { "" } else { "," };
    RawValue::from_string(format!("{{\"{tag}\":\"{name}\"{comma}{fields}}}"))
}

/// Reads a variant from a text as [`with_tag`] makes it, the tag in any place.
///
/// # Errors
/// There is no tag, or there are two; as the variant's own fields.
pub(super) fn without_tag<T: DeserializeOwned>(tag: &str, text: &RawValue) -> Result<T> {
    // Out of the text, not by serde: that keeps an object as a tree of values until it finds the tag, and 4
    // MiB of a peer's JSON took 708 MiB.
    let text = text.get();
    let (name, [begin, end]) = tag_of(tag, text)?;
    let (before, behind) = (text[1..begin].trim_ascii(), text[end..].trim_ascii_start());
    // One of the commas beside the tag goes with it.
    let (before, behind) = match (before.strip_suffix(','), behind.strip_prefix(',')) {
        (_, Some(behind)) => (before, behind),
        (Some(before), None) => (before, behind),
        (None, None) => (before, behind),
    };
    serde_json::from_str(&format!("{{{name}:{{{before}{behind}}}"))
}

/// Returns the variant's name, in quotes, and where key and name stand in an object.
fn tag_of<'a>(tag: &str, text: &'a str) -> Result<(&'a str, [usize; 2])> {
    if !text.starts_with('{') {
        return Err(refused(format!("expected an object with the key \"{tag}\"")));
    }
    let mut found = None;
    for Member { key, value, begin, end } in Members::of(text) {
        if key != tag {
            continue;
        }
        if !value.starts_with('"') {
            return Err(refused(format!("{tag} must be a string")));
        }
        if found.replace((value, [begin, end])).is_some() {
            return Err(refused(format!("duplicate field `{tag}`")));
        }
    }
    found.ok_or_else(|| refused(format!("missing field `{tag}`")))
}

fn refused(message: impl std::fmt::Display) -> Error {
    serde::de::Error::custom(message)
}

/// A key of an object with its value.
struct Member<'a> {
    key: &'a str,
    value: &'a str,
    begin: usize,
    end: usize,
}

/// The members of an object, whose text is valid.
struct Members<'a> {
    text: &'a str,
    place: usize,
}

impl<'a> Members<'a> {
    fn of(object: &'a str) -> Self {
        Self { text: object, place: 1 }
    }

    /// Passes white space and, up to the next value, commas and colons.
    fn pass_between(&mut self) {
        let is_between = |byte: &&u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t' | b',' | b':');
        self.place += self.text.as_bytes()[self.place..].iter().take_while(is_between).count();
    }

    /// Passes a value and returns its text.
    fn pass_value(&mut self) -> &'a str {
        let begin = self.place;
        let (mut depth, mut is_quoted, mut is_escaped) = (0usize, false, false);
        for &byte in &self.text.as_bytes()[begin..] {
            let is_quote = byte == b'"' && !is_escaped;
            is_escaped = is_quoted && byte == b'\\' && !is_escaped;
            is_quoted ^= is_quote;
            let is_end = match byte {
                _ if is_quoted || is_quote => false,
                b'{' | b'[' => {
                    depth += 1;
                    false
                }
                b'}' | b']' if depth > 0 => {
                    depth -= 1;
                    false
                }
                b'}' | b']' | b',' | b':' => depth == 0,
                _ => false,
            };
            if is_end {
                break;
            }
            self.place += 1;
        }
        self.text[begin..self.place].trim_ascii_end()
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = Member<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.pass_between();
        let begin = self.place;
        if self.text.as_bytes().get(begin) != Some(&b'"') {
            return None;
        }
        let key = self.pass_value().trim_matches('"');
        self.pass_between();
        let value = self.pass_value();
        Some(Member { key, value, begin, end: self.place })
    }
}

/// Gives an enum, whose own form serde derives with `remote = "Self"`, the form with a tag.
macro_rules! tagged {
    ($name:ident, $tag:literal) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                struct Plain<'a>(&'a $name);
                impl serde::Serialize for Plain<'_> {
                    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                        <$name>::serialize(self.0, to)
                    }
                }
                let text = $crate::wire::codec::tagged::with_tag($tag, &Plain(self));
                serde::Serialize::serialize(&text.map_err(serde::ser::Error::custom)?, to)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                struct Plain($name);
                impl<'de> serde::Deserialize<'de> for Plain {
                    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                        <$name>::deserialize(from).map(Self)
                    }
                }
                let text = <Box<serde_json::value::RawValue> as serde::Deserialize>::deserialize(from)?;
                let read = $crate::wire::codec::tagged::without_tag::<Plain>($tag, &text);
                read.map(|plain| plain.0).map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(super) use tagged;
