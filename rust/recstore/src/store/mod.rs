//! Stores of tables: what all of them do, the one in this process, and what is built on any.

pub(crate) mod collector;
pub(crate) mod embedding_store;
pub(crate) mod embedding_table;
pub(crate) mod handle;
pub(crate) mod local_store;
mod local_table;
mod merging;
pub(crate) mod prefetch;
mod save_lock;
mod tables;
#[cfg(test)]
mod tests;
pub(crate) mod unapplied_gradients;
