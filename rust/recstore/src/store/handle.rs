//! One table of a store, for programs that hold their rows in `ndarray`s.

use std::sync::Arc;

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::embedding_store::EmbeddingStore;
use super::embedding_table::EmbeddingTable;
use crate::calls::{Step, TableId, TableStatistics, TableUpdate};
use crate::config::TableConfig;
use crate::rows::gradient::GradientChunk;
use crate::{Error, Result};

/// A table of a store.
#[derive(Debug)]
pub struct TableHandle<S: ?Sized> {
    store: Arc<S>,
    table: Arc<dyn EmbeddingTable>,
}

impl<S: ?Sized> Clone for TableHandle<S> {
    fn clone(&self) -> Self {
        Self { store: Arc::clone(&self.store), table: Arc::clone(&self.table) }
    }
}

impl<S: EmbeddingStore + ?Sized> TableHandle<S> {
    /// Creates the table `name`, or opens it if its configuration agrees.
    ///
    /// # Errors
    /// As [`EmbeddingStore::open_table`].
    pub fn open(store: Arc<S>, name: &str, config: &TableConfig) -> Result<Self> {
        let table = store.open_table(name, config)?;
        Ok(Self { store, table })
    }

    /// Returns the store.
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }

    /// Returns the table.
    pub fn table(&self) -> &Arc<dyn EmbeddingTable> {
        &self.table
    }

    /// Returns the number of the table in its store.
    pub fn id(&self) -> TableId {
        self.table.id()
    }

    /// Returns the name of the table.
    pub fn name(&self) -> &str {
        self.table.name()
    }

    /// Returns the elements of a row.
    pub fn dim(&self) -> usize {
        self.table.dim()
    }

    /// Returns the rows of `ids`, `[n]`, as `[n, dim]`.
    ///
    /// # Errors
    /// As [`EmbeddingTable::read`].
    pub fn read(&self, ids: ArrayView1<'_, i64>) -> Result<Array2<f32>> {
        let mut rows = vec![0.0; ids.len() * self.dim()];
        self.table.read(&contiguous(ids), &mut rows)?;
        let shape = (ids.len(), self.dim());
        Array2::from_shape_vec(shape, rows).map_err(|_| self.mismatch("emb_read", "rows", shape))
    }

    /// Overwrites the rows of `ids`, `[n]`, with `rows`, `[n, dim]`; of duplicates the last one wins.
    ///
    /// # Errors
    /// As [`EmbeddingTable::write`].
    pub fn write(&self, ids: ArrayView1<'_, i64>, rows: ArrayView2<'_, f32>) -> Result<()> {
        self.check_shape("emb_write", "rows", ids.len(), rows)?;
        // Copies only rows that do not lie one behind the other.
        let rows = rows.as_standard_layout();
        self.table.write(&contiguous(ids), rows.as_slice().unwrap_or_default())
    }

    /// Takes one optimizer step with the gradients `[n, dim]` of `ids`, `[n]`, duplicates summed first.
    ///
    /// # Errors
    /// As [`EmbeddingStore::update`].
    pub fn update(&self, ids: ArrayView1<'_, i64>, gradients: ArrayView2<'_, f32>) -> Result<()> {
        self.check_shape("emb_update", "gradient rows", ids.len(), gradients)?;
        let gradients = gradients.as_standard_layout();
        let ids = contiguous(ids);
        let chunk = GradientChunk::new(&ids, gradients.as_slice().unwrap_or_default(), self.dim());
        self.store.update(&[TableUpdate { table: self.id(), chunks: vec![chunk], step: Step::Next }])?;
        Ok(())
    }

    /// Deletes the rows of `ids` and returns how many there were.
    ///
    /// # Errors
    /// As [`EmbeddingTable::delete`].
    pub fn delete(&self, ids: ArrayView1<'_, i64>) -> Result<usize> {
        self.table.delete(&contiguous(ids))
    }

    /// Sets the learning rate from the next step on.
    ///
    /// # Errors
    /// As [`EmbeddingTable::set_learning_rate`].
    pub fn set_learning_rate(&self, lr: f64) -> Result<()> {
        self.table.set_learning_rate(lr, true)
    }

    /// Returns what the table holds and what was done to it.
    ///
    /// # Errors
    /// As [`EmbeddingTable::statistics`].
    pub fn statistics(&self) -> Result<TableStatistics> {
        self.table.statistics()
    }

    fn check_shape(
        &self,
        operation: &'static str,
        what: &str,
        count: usize,
        rows: ArrayView2<'_, f32>,
    ) -> Result<()> {
        let shape = rows.dim();
        if shape.0 != count {
            return Err(Error::LengthMismatch {
                operation,
                what: format!("{what} for the ids of table \"{}\"", self.name()),
                expected: count,
                actual: shape.0,
            });
        }
        if shape.1 != self.dim() {
            return Err(self.mismatch(operation, what, shape));
        }
        Ok(())
    }

    fn mismatch(&self, operation: &'static str, what: &str, shape: (usize, usize)) -> Error {
        Error::DimMismatch {
            operation,
            table: self.name().to_owned(),
            expected: self.dim(),
            actual: format!("{what} of {}", shape.1),
        }
    }
}

fn contiguous(ids: ArrayView1<'_, i64>) -> Vec<i64> {
    ids.iter().copied().collect()
}
