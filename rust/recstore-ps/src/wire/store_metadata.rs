//! What all servers and clients of a store must agree on.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::router::HashMethod;

/// What the servers of a store remember of it, from the first client that opened a table on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreMetadata {
    /// Tells the store from others: sixteen hexadecimal digits, drawn by that client.
    pub store: String,
    /// How ids are spread over the shards.
    pub hash_method: HashMethod,
}

impl StoreMetadata {
    /// Draws the facts of a new store.
    pub(crate) fn new(hash_method: HashMethod) -> Self {
        let drawn = RandomState::new().hash_one((SystemTime::now(), std::process::id()));
        Self { store: format!("{drawn:016x}"), hash_method }
    }
}

impl fmt::Display for StoreMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {}, ids spread by {}", self.store, self.hash_method)
    }
}
