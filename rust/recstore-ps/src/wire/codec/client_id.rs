//! The number of a client.

/// The number of a client: drawn at random, so that no two have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u128);
