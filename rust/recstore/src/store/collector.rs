//! Gradients collected between a backward pass and the optimizer's step.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::embedding_store::EmbeddingStore;
use crate::calls::{Step, TableId, TableUpdate};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::Simd;
use crate::rows::gradient::{GradientChunk, GradientPart, Gradients, MergedGradients};
use crate::{Error, Result, fork};

/// The gradients that one model collected, by table, in the order in which they came.
#[derive(Debug, Default)]
pub struct GradientCollector {
    chunks: Mutex<Vec<CollectedGradients>>,
}

/// Gradients that stay where they are until they are applied.
pub trait KeptGradients: Send + Sync {
    /// Returns them: what one lookup of a backward pass gave.
    fn part(&self) -> GradientPart<'_>;

    /// Whether ids or gradients were changed since they were handed over.
    fn were_changed(&self) -> bool;
}

/// Gradients that the collector owns, a row of the table's dim for each id.
#[derive(Debug, Clone, Default)]
pub struct OwnedGradients {
    /// The ids.
    pub ids: Vec<i64>,
    /// Their gradients, row-major.
    pub gradients: Vec<f32>,
    /// The elements of a row.
    pub dim: usize,
}

impl KeptGradients for OwnedGradients {
    fn part(&self) -> GradientPart<'_> {
        GradientPart::new(&self.ids, &self.gradients, self.dim)
    }

    fn were_changed(&self) -> bool {
        false
    }
}

/// The gradients of one backward pass through one table, as they came.
struct CollectedGradients {
    table: TableId,
    dim: usize,
    parts: Vec<Box<dyn KeptGradients>>,
}

impl fmt::Debug for CollectedGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectedGradients").field("table", &self.table).finish_non_exhaustive()
    }
}

impl GradientCollector {
    /// Keeps what the lookups of one backward pass gave for `table`. Duplicates are summed when they are applied.
    ///
    /// # Errors
    /// [`Error::DimMismatch`] or [`Error::LengthMismatch`] if they do not fit; [`Error::UnknownHandle`].
    pub fn accept(
        &self,
        store: &dyn EmbeddingStore,
        table: TableId,
        parts: Vec<Box<dyn KeptGradients>>,
    ) -> Result<()> {
        let dim = store.dim(table)?;
        let collected = CollectedGradients { table, dim, parts };
        // The name is for the message only.
        if collected.validate("").is_err() {
            collected.validate(&store.describe(table)?.name)?;
        }
        self.with_chunks(|chunks| chunks.push(collected));
        Ok(())
    }

    /// Keeps a copy of gradients that hold a row of `dim` elements for each id.
    ///
    /// # Errors
    /// As [`GradientCollector::accept`].
    pub fn accept_copy(
        &self,
        store: &dyn EmbeddingStore,
        table: TableId,
        ids: &[i64],
        gradients: &[f32],
        dim: usize,
    ) -> Result<()> {
        if store.dim(table)? != dim {
            return Err(Error::DimMismatch {
                operation: "accept_grad",
                table: store.describe(table)?.name,
                expected: store.dim(table)?,
                actual: format!("gradient rows of {dim}"),
            });
        }
        let owned = OwnedGradients { ids: ids.to_vec(), gradients: gradients.to_vec(), dim };
        self.accept(store, table, vec![Box::new(owned)])
    }

    /// Returns the tables that gradients were collected for, in the order in which they first came.
    pub fn tables(&self) -> Vec<TableId> {
        let mut tables: Vec<_> = self.with_chunks(|chunks| chunks.iter().map(|chunk| chunk.table).collect());
        let mut seen = HashSet::new();
        tables.retain(|table| seen.insert(*table));
        tables
    }

    /// Returns the gradients collected for `table`, merged.
    ///
    /// # Errors
    /// [`Error::GradientsChanged`].
    pub fn merged(
        &self,
        executor: &dyn Executor,
        store: &dyn EmbeddingStore,
        table: TableId,
    ) -> Result<MergedGradients> {
        self.with_chunks(|chunks| {
            let of_table: Vec<_> = chunks.iter().filter(|chunk| chunk.table == table).collect();
            check_unchanged(store, of_table.iter().copied())?;
            let dim = of_table.first().map_or(1, |chunk| chunk.dim);
            let chunks: Vec<_> = of_table.into_iter().map(CollectedGradients::as_chunk).collect();
            Ok(Gradients::new(dim, &chunks).merged(executor, Simd::detect()))
        })
    }

    /// Forgets all gradients.
    pub fn clear(&self) {
        let dropped = self.with_chunks(std::mem::take);
        // Outside the lock: what kept them may have a destructor of its own.
        drop(dropped);
    }

    /// Takes one optimizer step in every table that any of `collectors` has gradients for, and empties them.
    ///
    /// # Errors
    /// [`Error::GradientsChanged`]; as [`EmbeddingStore::update`]; then no table has changed and the collectors keep
    /// their gradients.
    pub fn apply(store: &dyn EmbeddingStore, collectors: &[&Self]) -> Result<()> {
        let taken: Vec<_> =
            collectors.iter().map(|collector| collector.with_chunks(std::mem::take)).collect();
        let result =
            check_unchanged(store, taken.iter().flatten()).and_then(|()| store.update(&updates(&taken)));
        if result.is_err() {
            for (collector, chunks) in collectors.iter().zip(taken) {
                collector.put_back(chunks);
            }
        }
        result
    }

    /// Puts chunks back before those that came since they were taken.
    fn put_back(&self, chunks: Vec<CollectedGradients>) {
        self.with_chunks(|kept| {
            let newer = std::mem::replace(kept, chunks);
            kept.extend(newer);
        });
    }

    fn with_chunks<R>(&self, work: impl FnOnce(&mut Vec<CollectedGradients>) -> R) -> R {
        let _gate = fork::enter();
        work(&mut self.chunks.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl CollectedGradients {
    fn as_chunk(&self) -> GradientChunk<'_> {
        GradientChunk { parts: self.parts.iter().map(|part| part.part()).collect() }
    }
}

impl CollectedGradients {
    /// Checks that ids and gradients fit together and are of the table's dim.
    fn validate(&self, table: &str) -> Result<()> {
        let gradients = Gradients::new(self.dim, &[self.as_chunk()]);
        gradients.validate("accept_grad", || format!("table \"{table}\""))
    }
}

fn check_unchanged<'a>(
    store: &dyn EmbeddingStore,
    mut chunks: impl Iterator<Item = &'a CollectedGradients>,
) -> Result<()> {
    match chunks.find(|chunk| chunk.parts.iter().any(|part| part.were_changed())) {
        None => Ok(()),
        Some(chunk) => Err(Error::GradientsChanged { table: store.describe(chunk.table)?.name }),
    }
}

/// Returns one update a table, its chunks in the order of the collectors.
fn updates(collected: &[Vec<CollectedGradients>]) -> Vec<TableUpdate<'_>> {
    let mut updates: Vec<TableUpdate<'_>> = Vec::new();
    for collected in collected.iter().flatten() {
        let chunk = collected.as_chunk();
        match updates.iter_mut().find(|update| update.table == collected.table) {
            Some(update) => update.chunks.push(chunk),
            None => {
                updates.push(TableUpdate { table: collected.table, chunks: vec![chunk], step: Step::Next })
            }
        }
    }
    updates
}
