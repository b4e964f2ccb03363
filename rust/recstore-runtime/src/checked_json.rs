//! JSON that says its format, its version and its own checksum, as the Python package writes it.

use std::io;
use std::path::Path;

use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Returns the fields of a text of a format, and its version: one of those that are read, the newest first.
pub(crate) fn parse(
    text: &str,
    path: &Path,
    format: &str,
    versions: &[u64],
) -> Result<(Map<String, Value>, u64)> {
    let damaged = |reason: &str| Error::damaged(path, reason);
    let mut fields: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| damaged(&error.to_string()))?;
    let expected = fields.remove("crc32").and_then(|sum| sum.as_u64());
    if expected != Some(u64::from(crc32fast::hash(&as_python_writes(&fields)))) {
        return Err(damaged("its checksum is another"));
    }
    let kind = format.rsplit(' ').next().unwrap_or(format);
    if fields.remove("format").as_ref().and_then(Value::as_str) != Some(format) {
        return Err(Error::unfit(path, format!("it is of no {kind}")));
    }
    let found = fields.remove("version").unwrap_or(Value::Null);
    let known = found.as_u64().filter(|number| versions.contains(number));
    let unknown = || {
        let newest = versions[0];
        Error::unfit(path, format!("it has version {found} of the format, this program reads {newest}"))
    };
    Ok((fields, known.ok_or_else(unknown)?))
}

/// What `json.dumps(fields, sort_keys=True)` gives; maps are sorted here.
fn as_python_writes(fields: &Map<String, Value>) -> Vec<u8> {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, PythonFormatter);
    fields.serialize(&mut serializer).expect("memory takes all bytes");
    text
}

/// Spaces behind commas and colons, and nothing but ASCII.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_string_fragment<W: io::Write + ?Sized>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        let mut units = [0; 2];
        for character in text.chars() {
            if matches!(character, ' '..='~') {
                writer.write_all(&[character as u8])?;
                continue;
            }
            for unit in character.encode_utf16(&mut units) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }

    fn write_char_escape<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        match escape {
            CharEscape::Quote => writer.write_all(b"\\\""),
            CharEscape::ReverseSolidus => writer.write_all(b"\\\\"),
            CharEscape::Solidus => writer.write_all(b"/"),
            CharEscape::Backspace => writer.write_all(b"\\b"),
            CharEscape::FormFeed => writer.write_all(b"\\f"),
            CharEscape::LineFeed => writer.write_all(b"\\n"),
            CharEscape::CarriageReturn => writer.write_all(b"\\r"),
            CharEscape::Tab => writer.write_all(b"\\t"),
            CharEscape::AsciiControl(byte) => write!(writer, "\\u{byte:04x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `json.dumps({"b": [1, None, "é\x7f😀\n\\"], "a": {}}, sort_keys=True)` of Python.
    const WRITTEN: &str = r#"{"a": {}, "b": [1, null, "\u00e9\u007f\ud83d\ude00\n\\"]}"#;

    fn text(version: u64, sum_of: &str) -> String {
        let sum = crc32fast::hash(sum_of.as_bytes());
        format!(r#"{{"format": "a box", "version": {version}, "crc32": {sum}}}"#)
    }

    #[test]
    fn text_is_that_of_python() {
        let fields = serde_json::from_str(WRITTEN).unwrap();
        assert_eq!(String::from_utf8(as_python_writes(&fields)).unwrap(), WRITTEN);
    }

    #[test]
    fn a_checked_text_is_read() {
        let whole = text(2, r#"{"format": "a box", "version": 2}"#);
        assert!(parse(&whole, Path::new("x"), "a box", &[3, 2]).unwrap().0.is_empty());
    }

    #[test]
    fn what_is_wrong_is_said() {
        let whole = text(2, r#"{"format": "a box", "version": 2}"#);
        let error = |text: &str, format| parse(text, Path::new("x"), format, &[3]).unwrap_err().to_string();
        assert_eq!(error(&text(2, "other"), "a box"), "x is damaged: its checksum is another");
        assert!(error("{", "a box").starts_with("x is damaged: EOF"));
        assert_eq!(error(&whole, "a tin"), "x: it is of no tin");
        assert_eq!(error(&whole, "a box"), "x: it has version 2 of the format, this program reads 3");
    }
}
