//! What a request does when its turn comes.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use recstore::{EmbeddingStore, GradientChunk, Step, TableId, TableUpdate};

use super::{AsyncError, Timestamp};

/// What is called with the rows of a request, none of a push, or with why it failed.
pub type Callback = Box<dyn FnOnce(Result<Vec<f32>, AsyncError>) + Send>;

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
        store: &dyn EmbeddingStore,
        timestamp: Timestamp,
    ) -> Result<Vec<f32>, AsyncError> {
        match catch_unwind(AssertUnwindSafe(|| self.call(store))) {
            Ok(done) => done.map_err(|error| AsyncError::Failed { timestamp, error }),
            Err(panic) => Err(panicked(timestamp, "the store", &*panic)),
        }
    }

    fn call(&self, store: &dyn EmbeddingStore) -> recstore::Result<Vec<f32>> {
        if let Some(gradients) = &self.gradients {
            let chunks = vec![GradientChunk::new(&self.ids, gradients, self.dim)];
            store.update(&[TableUpdate { table: self.table, chunks, step: Step::Next }])?;
        }
        let mut rows = Vec::new();
        if self.gives_rows {
            rows.resize(self.ids.len() * self.dim, 0.0);
            store.table("emb_read", self.table)?.read(&self.ids, &mut rows)?;
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
