//! One optimizer step of one or several tables, duplicates summed on the way.
//!
//! Everything is checked before anything changes. Then every table is locked; the rows of all ids are found, or taken
//! from the places that a lookup kept; new rows are seen to fit, and rows on disk brought into memory; ids without a row
//! get one; and each thread walks the rows of its part, a group of some dozens at a time: it sums the gradients of those
//! that have several in a small buffer and takes the steps, the next rows already on their way. There is no matrix of
//! merged gradients.

mod applying;
mod finding;
mod locked;
mod request;
mod sharing;
mod stepped_rows;
mod stepping;
mod widened;

pub(crate) use applying::apply;
pub(crate) use request::{StepRequest, check};
