//! One table of a store, for programs that hold their rows in tensors.

use std::sync::Arc;

use recstore::{EmbeddingStore, GradientChunk, Step, TableConfig, TableHandle, TableUpdate};
use tch::Tensor;

use crate::convert::{Context, shape_of_rows};
use crate::{Lookup, Result};

/// A table of a store. Ids are int64 or int32 tensors of any shape, strides and device.
#[derive(Debug)]
pub struct TchTable<S: ?Sized> {
    handle: TableHandle<S>,
}

impl<S: ?Sized> Clone for TchTable<S> {
    fn clone(&self) -> Self {
        Self { handle: self.handle.clone() }
    }
}

impl<S: ?Sized> From<TableHandle<S>> for TchTable<S> {
    fn from(handle: TableHandle<S>) -> Self {
        Self { handle }
    }
}

impl<S: EmbeddingStore + ?Sized> TchTable<S> {
    /// Creates the table `name`, or opens it if its configuration agrees.
    ///
    /// # Errors
    /// As [`EmbeddingStore::open_table`].
    pub fn open(store: Arc<S>, name: &str, config: &TableConfig) -> Result<Self> {
        Ok(TableHandle::open(store, name, config)?.into())
    }

    /// Returns the table as the core knows it: for its learning rate, its statistics and its store.
    pub fn handle(&self) -> &TableHandle<S> {
        &self.handle
    }

    /// Returns the rows of `ids`, `[..]`, as `[.., dim]` on the device of `ids`.
    ///
    /// # Errors
    /// [`crate::Error::Kind`]; as [`recstore::EmbeddingTable::read`].
    pub fn read(&self, ids: &Tensor) -> Result<Tensor> {
        self.read_flat(ids, &self.context("emb_read").ids(ids)?)
    }

    /// Overwrites the rows of `ids`, `[..]`, with `rows`, `[.., dim]`; of duplicates the last one wins.
    ///
    /// # Errors
    /// [`crate::Error::Kind`], [`crate::Error::Shape`]; as [`recstore::EmbeddingTable::write`].
    pub fn write(&self, ids: &Tensor, rows: &Tensor) -> Result<()> {
        let context = self.context("emb_write");
        let flat = context.ids(ids)?;
        let rows = context.rows("rows", rows, ids, self.handle.dim())?;
        Ok(self.handle.table().write(&flat, &rows)?)
    }

    /// Takes one optimizer step with the gradients `[.., dim]` of `ids`, `[..]`, duplicates summed first.
    ///
    /// # Errors
    /// [`crate::Error::Kind`], [`crate::Error::Shape`]; as [`EmbeddingStore::update`].
    pub fn update(&self, ids: &Tensor, gradients: &Tensor) -> Result<()> {
        let context = self.context("emb_update");
        let flat = context.ids(ids)?;
        let gradients = context.rows("gradient rows", gradients, ids, self.handle.dim())?;
        let chunks = vec![GradientChunk::new(&flat, &gradients, self.handle.dim())];
        let update = TableUpdate { table: self.handle.id(), chunks, step: Step::Next };
        self.handle.store().update(&[update])?;
        Ok(())
    }

    /// Reads the rows of `ids`, `[..]`, as a leaf tensor `[.., dim]` that takes gradients.
    ///
    /// # Errors
    /// As [`TchTable::read`].
    pub fn lookup(&self, ids: &Tensor) -> Result<Lookup<S>> {
        let flat = self.context("emb_read").ids(ids)?;
        let rows = self.read_flat(ids, &flat)?.f_set_requires_grad(true)?;
        Ok(Lookup::new(self.handle.clone(), flat, rows))
    }

    /// Deletes the rows of `ids` and returns how many there were; an id without a row is no error.
    ///
    /// # Errors
    /// [`crate::Error::Kind`]; as [`recstore::EmbeddingTable::delete`].
    pub fn delete(&self, ids: &Tensor) -> Result<usize> {
        let flat = self.context("hashtable_delete").ids(ids)?;
        Ok(self.handle.table().delete(&flat)?)
    }

    /// Returns the rows of the ids `flat`, shaped and placed as `ids`.
    fn read_flat(&self, ids: &Tensor, flat: &[i64]) -> Result<Tensor> {
        let mut rows = vec![0.0f32; flat.len() * self.handle.dim()];
        self.handle.table().read(flat, &mut rows)?;
        let shape = shape_of_rows(ids, self.handle.dim());
        Ok(Tensor::f_from_slice(&rows)?.f_view(shape.as_slice())?.f_to_device(ids.device())?)
    }

    fn context(&self, operation: &'static str) -> Context<'_> {
        Context { operation, table: self.handle.name() }
    }
}
