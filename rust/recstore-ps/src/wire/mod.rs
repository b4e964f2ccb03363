//! What goes over connections, and the connections themselves.

pub(crate) mod address;
pub(crate) mod channel;
pub mod codec;
pub(crate) mod gathered;
pub(crate) mod handshake;
pub(crate) mod replica_role;
pub(crate) mod segment;
pub(crate) mod socket;
pub(crate) mod store_metadata;
pub(crate) mod tls;
pub(crate) mod token;
pub(crate) mod transport;
