//! The types in which a table may keep its rows.

use serde::{Deserialize, Serialize};

/// The type in which a table keeps its rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// IEEE 754 single precision.
    #[default]
    Float32,
    /// The upper half of a float32: its range, 8 bits of precision.
    Bfloat16,
    /// IEEE 754 half precision: 11 bits of precision, up to 65,504.
    Float16,
    /// Whole numbers from -127 to 127 times a power of two, one a row.
    Int8,
    /// Floats with an exponent of 4 bits and a mantissa of 3, times a power of two, one a row.
    #[serde(rename = "float8_e4m3fn")]
    Float8E4m3fn,
}

impl Dtype {
    /// The name in a configuration.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Int8 => "int8",
            Self::Float8E4m3fn => "float8_e4m3fn",
        }
    }
}
