//! Gradients collected between a backward pass and the optimizer's step.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use crate::gradient::{GradientChunk, MergedGradients, merge_checked, merge_in_input_order};
use crate::store::{EmbeddingStore, Step, TableId, TableUpdate};
use crate::{Error, Result, fork};

/// The gradients that one model collected, by table, in the order in which they came.
#[derive(Debug, Default)]
pub struct GradientCollector {
    chunks: Mutex<Vec<CollectedGradients>>,
}

/// The gradients of one backward pass through one table, merged: a row of the table's dim for each distinct id.
#[derive(Debug, Clone, PartialEq)]
struct CollectedGradients {
    table: TableId,
    dim: usize,
    ids: Vec<i64>,
    gradients: Vec<f32>,
}

impl GradientCollector {
    /// Keeps the gradients of `ids` of `table`, rows of `dim`, leaving out those of `padding_idx`.
    ///
    /// They are merged right away: what is kept grows with the distinct ids only.
    ///
    /// # Errors
    /// [`Error::DimMismatch`] or [`Error::LengthMismatch`] if they do not fit; [`Error::UnknownHandle`].
    pub fn accept(
        &self,
        store: &dyn EmbeddingStore,
        table: TableId,
        chunk: GradientChunk<'_>,
        dim: usize,
        padding_idx: Option<i64>,
    ) -> Result<()> {
        let description = store.describe(table)?;
        check_chunk(&description.name, description.config.dim, dim, chunk)?;
        let MergedGradients { mut ids, sums: mut gradients } = merge_in_input_order(dim, &[chunk]);
        if let Some(place) = ids.iter().position(|&id| Some(id) == padding_idx) {
            ids.remove(place);
            gradients.drain(place * dim..(place + 1) * dim);
        }
        self.with_chunks(|chunks| chunks.push(CollectedGradients { table, dim, ids, gradients }));
        Ok(())
    }

    /// Returns the tables that gradients were collected for, in the order in which they first came.
    pub fn tables(&self) -> Vec<TableId> {
        let mut tables: Vec<_> = self.with_chunks(|chunks| chunks.iter().map(|chunk| chunk.table).collect());
        let mut seen = HashSet::new();
        tables.retain(|table| seen.insert(*table));
        tables
    }

    /// Returns the gradients collected for `table`, merged.
    pub fn merged(&self, table: TableId) -> MergedGradients {
        self.with_chunks(|chunks| {
            let of_table = || chunks.iter().filter(|chunk| chunk.table == table);
            let dim = of_table().next().map_or(1, |chunk| chunk.dim);
            merge_checked(dim, &of_table().map(CollectedGradients::as_chunk).collect::<Vec<_>>())
        })
    }

    /// Forgets all gradients.
    pub fn clear(&self) {
        self.with_chunks(Vec::clear);
    }

    /// Takes one optimizer step in every table that any of `collectors` has gradients for, and empties them.
    ///
    /// # Errors
    /// As [`EmbeddingStore::update`]; then no table has changed and the collectors keep their gradients.
    pub fn apply(store: &dyn EmbeddingStore, collectors: &[&Self]) -> Result<()> {
        let taken: Vec<_> =
            collectors.iter().map(|collector| collector.with_chunks(std::mem::take)).collect();
        let result = store.update(&updates(&taken));
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
        GradientChunk { ids: &self.ids, gradients: &self.gradients }
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

fn check_chunk(table: &str, expected: usize, dim: usize, chunk: GradientChunk<'_>) -> Result<()> {
    if dim != expected {
        return Err(Error::DimMismatch {
            operation: "accept_grad",
            table: table.to_owned(),
            expected,
            actual: format!("gradient rows of {dim}"),
        });
    }
    if chunk.gradients.len() != chunk.ids.len() * dim {
        return Err(Error::LengthMismatch {
            operation: "accept_grad",
            what: format!("gradient values for the ids of table \"{table}\""),
            expected: chunk.ids.len() * dim,
            actual: chunk.gradients.len(),
        });
    }
    Ok(())
}
