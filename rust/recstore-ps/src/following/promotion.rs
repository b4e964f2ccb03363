//! Telling a follower to lead its shard.

use std::time::Instant;

use recstore::{Error, Result, Shard};

use super::LAST_CHANGES;
use crate::client::connection::{Connection, Failure};
use crate::client::{RemoteConfig, new_client};
use crate::wire::codec::{Managed, Management};
use crate::wire::token::check_token;

/// A follower that leads its shard now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promoted {
    /// The shard.
    pub shard: Shard,
    /// The epoch that has begun.
    pub epoch: u64,
    /// The number of the last change that it has.
    pub last: u64,
}

/// Makes the follower at the one address of `config` lead its shard.
///
/// # Errors
/// [`Error::Unavailable`] names the address: nobody answers there, or no follower that has the tables of its leader.
pub fn promote(config: &RemoteConfig) -> Result<Promoted> {
    let [address] = &config.servers[..] else {
        let message = format!("one server is promoted, got {} addresses", config.servers.len());
        return Err(Error::InvalidConfig { message });
    };
    check_token(config.token.as_deref())?;
    let failed = |shard: usize| {
        move |message| Error::Unavailable { operation: "promote", shard, address: address.clone(), message }
    };
    let deadline = Instant::now() + config.timeout.max(LAST_CHANGES * 2);
    let opened = Connection::open_any(address, new_client(), config, deadline);
    let mut connection = opened.map_err(Failure::into_message).map_err(failed(0))?;
    let shard = connection.shard();
    match connection.manage(&Management::Promote {}, deadline).map_err(failed(shard.number))? {
        Managed::Promoted { epoch, last } => Ok(Promoted { shard, epoch, last }),
        other => Err(failed(shard.number)(format!("an answer of another form, {}", other.form()))),
    }
}
