//! What decides which ids have a row: counts of ids without one, and which rows are the least.

mod least;
mod sketch;
mod usage;

pub(crate) use least::Least;
pub(crate) use sketch::{Sketch, halved};
pub(crate) use usage::Usage;
