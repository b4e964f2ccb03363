//! Parameter servers for `recstore`: tables on other machines behind the same trait.
//!
//! [`Server`] serves any [`recstore::EmbeddingStore`] as one shard, over a bulk TCP port and gRPC; [`RemoteStore`] is the
//! store whose rows lie on such servers. Results are those of a store in this process, to the bit. [`AsyncStore`] pushes
//! to either and pulls from it while the caller goes on.
//!
//! ```
//! use recstore::{EmbeddingStore, LocalStore, Serial, TableConfig};
//! use recstore_ps::{RemoteConfig, RemoteStore, Server, ServerConfig};
//! use std::{sync::Arc, time::Duration};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::start(Arc::new(LocalStore::default()), ServerConfig::default())?;
//! let servers = RemoteConfig::new(vec![server.address().to_string()]);
//! let store = RemoteStore::connect(servers, Box::new(Serial))?;
//! let table = store.open_table("user", &TableConfig::new(2))?;
//! table.write(&[7], &[1.0, 2.0])?;
//! let mut row = [0.0; 2];
//! table.read(&[7], &mut row)?;
//! assert_eq!(row, [1.0, 2.0]);
//! server.stop(Duration::from_secs(1));
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod asynchronous;
mod client;
mod config;
mod durable;
mod following;
mod forgetting;
pub mod front;
pub mod grpc;
mod handler;
mod metrics;
mod ports;
mod resharding;
pub mod router;
mod server;
mod wire;
mod workers;
pub use asynchronous::{AsyncConfig, AsyncError, AsyncStore, AsyncTarget, Callback, Timestamp};
pub use client::{RemoteConfig, RemoteStore, WireDtype};
pub use config::{ServerConfig, ServerError};
pub use durable::left_out::{LeftOut, left_out_of_log};
pub use durable::state_directory::{
    Durability, FollowedServer, KeptState, is_server_directory, shard_counts,
};
pub use following::{Promoted, promote};
pub use forgetting::{TablesFound, forget, ids_in, tables_in};
pub use handler::Handler;
pub use ports::raise_descriptor_limit;
pub use resharding::{Resharded, reshard};
pub use server::Server;
pub use wire::address::BulkAddress;
pub use wire::codec::{self, ClientId, WorkerState};
pub use wire::replica_role::{Position, ReplicaRole, Role, Run};
pub use wire::store_metadata::StoreMetadata;
pub use wire::tls::{ClientTls, IdentityFiles, ServerTls, TlsError};
pub use workers::{Combine, Consistency, WorkerSync};
