//! The values of rows that were never written.

pub(super) mod initializer;
mod philox;
