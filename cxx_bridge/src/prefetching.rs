//! Reads that are issued ahead, and changes of what they read.

use recstore::{PrefetchId, PrefetchRequest, Prefetches};

use crate::guard::Failure;
use crate::registry::{MAX_PREFETCHES, Registry};
use crate::stores::{Placed, TableLocation};

impl Registry {
    /// Returns the prefetches of all tables.
    pub(crate) fn prefetches(&self) -> &Prefetches<TableLocation> {
        &self.prefetches
    }

    /// Notes that the rows of `ids`, or all rows of a table, have changed.
    pub(crate) fn note(&self, place: TableLocation, ids: Option<&[i64]>) {
        match ids {
            Some(ids) => self.prefetches.note(&place, Some(&mut ids.iter().copied())),
            None => self.prefetches.note(&place, None),
        }
    }

    /// Returns a read of the table behind a handle.
    pub(crate) fn request(
        &self,
        handle: i64,
        ids: &[i64],
    ) -> Result<PrefetchRequest<TableLocation>, Failure> {
        Ok(self.request_of(self.table("emb_prefetch", handle)?, ids))
    }

    fn request_of(&self, placed: Placed, ids: &[i64]) -> PrefetchRequest<TableLocation> {
        let store = self.store_numbered(placed.place.store);
        PrefetchRequest { key: placed.place, table: placed.table, store, ids: ids.to_vec() }
    }

    /// Issues a read of the table `default/<dim>`; where it is missing the ids are kept until they are asked for.
    pub(crate) fn prefetch_default(&self, dim: usize, ids: &[i64]) -> Result<PrefetchId, Failure> {
        if let Some(placed) = self.default_table("emb_prefetch", dim)? {
            return Ok(self.prefetches.issue(vec![self.request_of(placed, ids)])?);
        }
        let id = self.prefetches.issue(vec![])?;
        // As many are kept as of those that read: the older have been dropped.
        self.change_state(|state| state.handles.defer(id, ids, dim, MAX_PREFETCHES));
        Ok(id)
    }

    /// Returns the dims of the tables of a prefetch, and refuses it where a job began since of which each process has a
    /// copy of one.
    pub(crate) fn issued_dims(&self, id: PrefetchId) -> Result<Vec<usize>, Failure> {
        let tables = self.prefetches.tables(id)?;
        self.check_replicas("emb_wait_result", tables.iter().map(|(place, _)| *place))?;
        let issued = tables.into_iter().map(|(_, dim)| dim).collect();
        let deferred = self.read_state(|state| state.handles.deferred_dim(id));
        Ok(deferred.map_or(issued, |dim| vec![dim]))
    }

    /// Takes the ids of a prefetch whose table did not exist when it was issued.
    pub(crate) fn take_deferred(&self, id: PrefetchId) -> Option<(Vec<i64>, usize)> {
        self.change_state(|state| state.handles.take_deferred(id))
    }
}
