//! Rows that take part in a loss.

use recstore::{EmbeddingStore, GradientChunk, GradientCollector, Step, TableHandle, TableId, TableUpdate};
use tch::Tensor;

use crate::Result;
use crate::convert::to_vec;

/// Rows looked up for one step of training.
///
/// After `backward` their gradients go to the table at once by [`Lookup::step`], or by [`Lookup::collect`] together
/// with those of other lookups, so that an id that several of them have takes one optimizer step.
#[derive(Debug)]
#[must_use = "the table learns nothing from rows whose gradients are not applied"]
pub struct Lookup<S: ?Sized> {
    handle: TableHandle<S>,
    ids: Vec<i64>,
    rows: Tensor,
}

impl<S: EmbeddingStore + ?Sized> Lookup<S> {
    pub(crate) fn new(handle: TableHandle<S>, ids: Vec<i64>, rows: Tensor) -> Self {
        Self { handle, ids, rows }
    }

    /// Returns the rows, `[.., dim]`: a leaf tensor that takes gradients.
    pub fn rows(&self) -> &Tensor {
        &self.rows
    }

    /// Takes one optimizer step with the gradients of the rows; none if no loss reached them.
    ///
    /// # Errors
    /// As [`EmbeddingStore::update`].
    pub fn step(self) -> Result<()> {
        let Some(gradients) = self.gradients()? else {
            return Ok(());
        };
        let chunks = vec![GradientChunk::new(&self.ids, &gradients, self.handle.dim())];
        let update = TableUpdate { table: self.handle.id(), chunks, step: Step::Next };
        self.handle.store().update(&[update])?;
        Ok(())
    }

    /// Returns the gradients of the rows, row-major; `None` if no loss reached them.
    fn gradients(&self) -> Result<Option<Vec<f32>>> {
        let gradients = self.rows.f_grad()?;
        Ok(if gradients.defined() { Some(to_vec(&gradients)?) } else { None })
    }
}

impl<S: EmbeddingStore> Lookup<S> {
    /// Keeps the gradients of the rows in `collector`, for [`GradientCollector::apply_to`] on the same store; none if no
    /// loss reached the rows.
    ///
    /// # Errors
    /// As [`GradientCollector::accept`].
    pub fn collect(self, collector: &GradientCollector<TableId>) -> Result<()> {
        let Some(gradients) = self.gradients()? else {
            return Ok(());
        };
        let table = &**self.handle.table();
        Ok(collector.accept_copy(table.id(), table, &self.ids, &gradients, table.dim())?)
    }
}
