//! The store's errors as values that travel: what the server refused is refused by the client with the same words.

use recstore::Error;
use serde::{Deserialize, Serialize};

use super::tagged::tagged;

/// The calls that errors name; an error's operation must be one of a program's own words.
const OPERATIONS: [&str; 27] = [
    "accept_grad",
    "apply_grads",
    "barrier",
    "connect",
    "describe",
    "dim",
    "drop_table",
    "emb_bag",
    "emb_prefetch",
    "emb_read",
    "emb_update",
    "emb_write",
    "find_table",
    "heartbeat",
    "hashtable_clear",
    "hashtable_delete",
    "hashtable_ids",
    "hashtable_lookup",
    "hashtable_size",
    "hashtable_slot",
    "load",
    "open_table",
    "publish",
    "read_slot",
    "save",
    "set_learning_rate",
    "statistics",
];

/// What an error is about; see [`Error::NonFinite`].
const VALUES: [&str; 3] = ["row", "gradient", "summed gradient"];

/// A word that errors keep as `&'static str`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Word(String);

impl From<&'static str> for Word {
    fn from(word: &'static str) -> Self {
        Self(word.to_owned())
    }
}

impl From<Word> for &'static str {
    fn from(word: Word) -> Self {
        let mut known = OPERATIONS.into_iter().chain(VALUES);
        known.find(|known| *known == word.0).unwrap_or("a call on a server")
    }
}

/// A float that JSON cannot write: its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bits(u64);

impl From<f32> for Bits {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

impl From<Bits> for f32 {
    fn from(bits: Bits) -> Self {
        Self::from_bits(bits.0 as u32)
    }
}

impl From<f64> for Bits {
    fn from(value: f64) -> Self {
        Self(value.to_bits())
    }
}

impl From<Bits> for f64 {
    fn from(bits: Bits) -> Self {
        Self::from_bits(bits.0)
    }
}

/// Declares the errors that travel: the variants of [`Error`] with types that JSON can hold.
macro_rules! wire_errors {
    ($($variant:ident { $($field:ident: $kind:ty),* })*) => {
        /// An error of the store, as it travels.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(remote = "Self", rename_all_fields = "snake_case")]
        pub enum WireError {
            $(
                #[doc = concat!("[`Error::", stringify!($variant), "`]")]
                $variant {
                    $(#[doc = "As there."] $field: $kind),*
                },
            )*
            /// An error of a store that is newer than this program.
            Other {
                /// Its text.
                message: String,
            },
        }

        tagged!(WireError, "error");

        impl From<&Error> for WireError {
            fn from(error: &Error) -> Self {
                match error.clone() {
                    Error::StepCutShort(error) => Self::from(&*error),
                    $(Error::$variant { $($field),* } => Self::$variant { $($field: $field.into()),* },)*
                    other => Self::Other { message: other.to_string() },
                }
            }
        }

        impl From<WireError> for Error {
            fn from(error: WireError) -> Self {
                match error {
                    $(WireError::$variant { $($field),* } => Self::$variant { $($field: $field.into()),* },)*
                    WireError::Other { message } => {
                        Self::Unsupported { operation: "a call on a server", message }
                    }
                }
            }
        }
    };
}

wire_errors! {
    UnknownTable { operation: Word, table: String }
    UnknownHandle { operation: Word, handle: i64 }
    ConfigMismatch { table: String, existing: String, requested: String }
    InvalidConfig { message: String }
    IdOutOfRange { operation: Word, table: String, id: i64, position: usize, num_embeddings: u64 }
    DimMismatch { operation: Word, table: String, expected: usize, actual: String }
    LengthMismatch { operation: Word, what: String, expected: usize, actual: usize }
    NotPublished { table: String }
    Published { table: String }
    NonFinite { operation: Word, what: Word, table: String, id: i64, position: usize, value: Bits }
    InvalidBag { message: String }
    TableFull { operation: Word, table: String, rows: usize, requested: usize, limit: usize }
    InvalidLearningRate { table: String, value: Bits }
    InvalidStep { table: String }
    UnknownRule { table: String, rule: String, registered: Vec<String> }
    RuleFailed { table: String, rule: String, message: String }
    ForkedChild { operation: Word, table: String }
    Checkpoint { path: String, message: String }
    Unavailable { operation: Word, shard: usize, address: String, message: String }
    RequestTooLarge { operation: Word, shard: usize, bytes: u64, limit: u64 }
    Unsupported { operation: Word, message: String }
    Workers { operation: Word, shard: usize, message: String }
}
