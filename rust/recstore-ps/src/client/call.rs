//! A request of a client to one server.

use crate::wire::codec::{Management, Request};

/// A request to one server.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) shard: usize,
    /// The runs of the server that the tables in the request are of.
    pub(super) incarnations: Vec<u64>,
    /// The number of a change, or 0.
    pub(super) sequence: u64,
    pub(super) request: Request<'a>,
}

impl<'a> Call<'a> {
    /// Asks about no table that was opened before.
    pub(super) fn manage(shard: usize, management: Management) -> Call<'a> {
        Call { shard, incarnations: Vec::new(), sequence: 0, request: Request::Manage(management) }
    }

    /// Returns the same call, to be made once more.
    pub(super) fn again(&self) -> Self {
        let (request, incarnations) = (self.request.clone(), self.incarnations.clone());
        Self { request, incarnations, ..*self }
    }

    /// Whether the server may get it twice.
    pub(super) fn is_repeatable(&self) -> bool {
        let once = |management: &Management| {
            matches!(management, Management::SavePart(_) | Management::Commit(_) | Management::Load(_))
        };
        !matches!(&self.request, Request::Manage(management) if once(management))
    }
}
