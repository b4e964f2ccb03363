//! What can be wrong with tensors, beside what the store refuses.

use tch::Kind;

/// What a call on a table returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused. A refused call has changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store refused the call.
    #[error(transparent)]
    Store(#[from] recstore::Error),

    /// A tensor's elements are of another type than the table takes.
    #[error("{operation}: table \"{table}\" takes {expected}, got {actual:?}")]
    Kind {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
        /// What is taken, such as `float32 rows`.
        expected: String,
        /// The type that came.
        actual: Kind,
    },

    /// Rows or gradients are not shaped as their ids, with the dim after them.
    #[error(
        "{operation}: table \"{table}\" expects {what} of shape {expected:?} for these ids, got {actual:?}"
    )]
    Shape {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
        /// `rows` or `gradient rows`.
        what: &'static str,
        /// The shape of the ids, with the dim after it.
        expected: Vec<i64>,
        /// The shape that came.
        actual: Vec<i64>,
    },

    /// libtorch refused a tensor: it is undefined or sparse, or memory ran out.
    #[error(transparent)]
    Torch(#[from] tch::TchError),
}
