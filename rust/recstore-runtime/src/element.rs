//! The types of the elements of tensors.

use bytemuck::{CheckedBitPattern, NoUninit};
use serde::Deserialize;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "their names are those of torch")]
pub enum DType {
    Float32,
    Float64,
    Float16,
    BFloat16,
    Int64,
    Int32,
    Int16,
    Int8,
    UInt8,
    Bool,
}

impl DType {
    /// All of them, in the order of their numbers in C.
    pub const ALL: [Self; 10] = [
        Self::Float32,
        Self::Float64,
        Self::Float16,
        Self::BFloat16,
        Self::Int64,
        Self::Int32,
        Self::Int16,
        Self::Int8,
        Self::UInt8,
        Self::Bool,
    ];

    /// Returns its name, that of torch.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Float16 => "float16",
            Self::BFloat16 => "bfloat16",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
            Self::UInt8 => "uint8",
            Self::Bool => "bool",
        }
    }

    /// Returns the bytes of an element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::BFloat16 | Self::Int16 => 2,
            Self::Int8 | Self::UInt8 | Self::Bool => 1,
        }
    }

    /// Whether bytes can be elements: those of bools are 0 and 1.
    pub(crate) fn has(self, bytes: &[u8]) -> bool {
        self != Self::Bool || bytes.iter().all(|&byte| byte <= 1)
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|each| each.name() == name)
    }
}

/// A type of Rust that tensors have.
pub trait Element: NoUninit + CheckedBitPattern {
    /// The tensors' name for it.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $name:ident),*) => {$(
        impl Element for $rust {
            const DTYPE: DType = DType::$name;
        }
    )*};
}

elements!(f32 => Float32, f64 => Float64, i64 => Int64, i32 => Int32, i16 => Int16, i8 => Int8, u8 => UInt8, bool => Bool);
