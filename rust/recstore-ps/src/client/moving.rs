//! Servers that are started again elsewhere: the same shards at other addresses.

use recstore::{Error, Result};

use super::RemoteStore;

impl RemoteStore {
    /// Returns where the servers are, `host:port` each in the order of the shards.
    ///
    /// # Errors
    /// As other calls, in a forked child.
    pub fn addresses(&self) -> Result<Vec<String>> {
        self.with_session(|session| Ok(session.addresses()))
    }

    /// Calls the servers at other addresses from now on, in the order of the shards. Calls under way go on there too;
    /// who the client is stays, so that a change under way is still made once. Tables are good where a server is the one
    /// that it was, which takes one with a log; elsewhere calls say that it has lost its rows.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: another number of servers.
    pub fn move_servers(&self, servers: &[String]) -> Result<()> {
        self.with_session(|session| {
            let shards = self.router.shards();
            if servers.len() != shards {
                let message = format!("the store has {shards} shards, got {} addresses", servers.len());
                return Err(Error::InvalidConfig { message });
            }
            session.move_links(servers);
            Ok(())
        })
    }
}
