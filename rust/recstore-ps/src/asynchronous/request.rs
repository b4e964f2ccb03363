//! What a request does when its turn comes.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use recstore::{EmbeddingStore, GradientChunk, Step, TableId, TableUpdate};

use super::{AsyncError, Timestamp};

/// What is called with the rows of a request, none of a push, or with why it failed.
pub type Callback = Box<dyn FnOnce(Result<Vec<f32>, AsyncError>) + Send>;

/// What requests are carried out on: a store, or what stands before one.
pub trait AsyncTarget: Send + Sync + 'static {
    /// Returns the elements of a table's row.
    ///
    /// # Errors
    /// [`recstore::Error::UnknownHandle`].
    fn dim(&self, table: TableId) -> recstore::Result<usize>;

    /// Takes an optimizer step with the gradients of `ids`.
    ///
    /// # Errors
    /// As [`EmbeddingStore::update`].
    fn push(&self, table: TableId, ids: &[i64], gradients: &[f32], dim: usize) -> recstore::Result<()>;

    /// Reads the rows of `ids`.
    ///
    /// # Errors
    /// As [`recstore::EmbeddingTable::read`].
    fn pull(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> recstore::Result<()>;
}

impl<T: EmbeddingStore + ?Sized + 'static> AsyncTarget for Arc<T> {
    fn dim(&self, table: TableId) -> recstore::Result<usize> {
        Ok(self.table("dim", table)?.dim())
    }

    fn push(&self, table: TableId, ids: &[i64], gradients: &[f32], dim: usize) -> recstore::Result<()> {
        let chunks = vec![GradientChunk::new(ids, gradients, dim)];
        self.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
    }

    fn pull(&self, table: TableId, ids: &[i64], rows: &mut [f32]) -> recstore::Result<()> {
        self.table("emb_read", table)?.read(ids, rows)
    }
}

/// A push, a pull, or one after the other.
pub(super) struct Request {
    pub(super) table: TableId,
    pub(super) dim: usize,
    pub(super) ids: Vec<i64>,
    pub(super) gradients: Option<Vec<f32>>,
    pub(super) gives_rows: bool,
}

impl Request {
    pub(super) fn changes(&self) -> bool {
        self.gradients.is_some()
    }

    /// Returns the bytes of the rows that it gives.
    pub(super) fn row_bytes(&self) -> u64 {
        let floats = if self.gives_rows { self.ids.len() * self.dim } else { 0 };
        (floats * size_of::<f32>()) as u64
    }

    /// Returns the bytes that it takes until it is finished.
    pub(super) fn bytes(&self) -> u64 {
        let gradients = self.gradients.as_ref().map_or(0, |gradients| size_of_val(&gradients[..]));
        (size_of_val(&self.ids[..]) + gradients) as u64 + self.row_bytes()
    }

    /// Does it and returns the rows.
    pub(super) fn carry_out(
        &self,
        target: &impl AsyncTarget,
        timestamp: Timestamp,
    ) -> Result<Vec<f32>, AsyncError> {
        // A panic fails this request alone: the thread goes on with the others.
        match catch_unwind(AssertUnwindSafe(|| self.call(target))) {
            Ok(done) => done.map_err(|error| AsyncError::Failed { timestamp, error }),
            Err(panic) => Err(panicked(timestamp, "the store", &*panic)),
        }
    }

    fn call(&self, target: &impl AsyncTarget) -> recstore::Result<Vec<f32>> {
        if let Some(gradients) = &self.gradients {
            target.push(self.table, &self.ids, gradients, self.dim)?;
        }
        let mut rows = Vec::new();
        if self.gives_rows {
            rows.resize(self.ids.len() * self.dim, 0.0);
            target.pull(self.table, &self.ids, &mut rows)?;
        }
        Ok(rows)
    }
}

/// Calls a callback and returns how it ended.
pub(super) fn call_back(
    timestamp: Timestamp,
    callback: Callback,
    outcome: Result<Vec<f32>, AsyncError>,
) -> Result<(), AsyncError> {
    catch_unwind(AssertUnwindSafe(|| callback(outcome)))
        .map_err(|panic| panicked(timestamp, "its callback", &*panic))
}

fn panicked(timestamp: Timestamp, what: &'static str, panic: &(dyn Any + Send)) -> AsyncError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    AsyncError::Panicked { timestamp, what, message: text.unwrap_or_else(|| "it gave no text".to_owned()) }
}
