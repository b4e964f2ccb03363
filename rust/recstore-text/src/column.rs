//! What a column of delimited text is.

use std::str::FromStr;

/// What the cells of a column are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnKind {
    /// The label, 0 or 1.
    Click,
    /// A finite number, whose label is 1 from a threshold on.
    Rating,
    /// An integer or nothing, a dense value.
    Count,
    /// At most eight hexadecimal digits, a field.
    Hex,
    /// An integer of 40 bits or nothing, a field.
    Category,
    /// An integer of 40 bits, a field.
    Key,
    /// A date and hour `YYMMDDHH`, whose hour is a field.
    Hour,
    /// An integer that is not used.
    Timestamp,
    /// Hexadecimal digits and dashes that are not used.
    Unread,
}

impl ColumnKind {
    const NAMES: [(&str, Self); 9] = [
        ("click", Self::Click),
        ("rating", Self::Rating),
        ("count", Self::Count),
        ("hex", Self::Hex),
        ("category", Self::Category),
        ("key", Self::Key),
        ("hour", Self::Hour),
        ("timestamp", Self::Timestamp),
        ("unread", Self::Unread),
    ];

    pub(crate) fn is_label(self) -> bool {
        matches!(self, Self::Click | Self::Rating)
    }

    pub(crate) fn is_field(self) -> bool {
        matches!(self, Self::Hex | Self::Category | Self::Key | Self::Hour)
    }
}

/// No kind of column has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown kind of column \"{0}\"")]
pub struct UnknownKind(String);

impl FromStr for ColumnKind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        let found = Self::NAMES.iter().find(|(own, _)| *own == name);
        found.map(|(_, kind)| *kind).ok_or_else(|| UnknownKind(name.to_owned()))
    }
}
