//! Text of click logs, parsed into the arrays that models are trained on.
//!
//! A row is a line, cut into columns by a separator. What a column is says what its cells may be, and whether they
//! become an id, a label or a dense value. The crate knows neither files nor Python: it is given whole lines and the
//! arrays to fill.

mod cells;
mod column;
mod delimited;

pub use column::{ColumnKind, UnknownKind};
pub use delimited::{Arrays, BadLayout, Delimited, ParseError};
