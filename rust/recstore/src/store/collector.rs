//! Gradients collected between a backward pass and the optimizer's step.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use super::embedding_store::EmbeddingStore;
use super::embedding_table::EmbeddingTable;
use crate::calls::{Step, TableId, TableUpdate};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::Simd;
use crate::rows::gradient::{GradientChunk, GradientPart, Gradients, MergedGradients};
use crate::{Error, Result, fork};

/// The gradients that one model collected, by table, in the order in which they came.
///
/// `K` is how its owner tells tables apart: a [`TableId`](crate::TableId), if all are of one store.
#[derive(Debug)]
pub struct GradientCollector<K> {
    chunks: Mutex<Vec<CollectedGradients<K>>>,
    pub(super) has_warned: AtomicBool,
}

impl<K> Default for GradientCollector<K> {
    fn default() -> Self {
        Self { chunks: Mutex::default(), has_warned: AtomicBool::default() }
    }
}

/// All that collectors have for one table, for one optimizer step.
#[derive(Debug)]
pub struct CollectedStep<'a, K> {
    /// The table.
    pub table: K,
    /// What each backward pass gave.
    pub chunks: Vec<GradientChunk<'a>>,
}

/// A step that not all tables have taken.
#[derive(Debug)]
pub struct PartialStep<K, E> {
    /// Why.
    pub error: E,
    /// The tables that have.
    pub stepped: Vec<K>,
}

/// Gradients that stay where they are until they are applied.
pub trait KeptGradients: Send + Sync {
    /// Returns them: what one lookup of a backward pass gave.
    fn part(&self) -> GradientPart<'_>;

    /// What keeps them; of several lookups that one keeps together, one is asked whether they were changed.
    fn source(&self) -> *const () {
        std::ptr::from_ref(self).cast()
    }

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

/// The gradients of one backward pass through one table, as they came, or of several, merged.
pub(super) struct CollectedGradients<K> {
    pub(super) table: K,
    pub(super) name: String,
    pub(super) dim: usize,
    pub(super) parts: Vec<Box<dyn KeptGradients>>,
    /// How many backward passes they are of.
    pub(super) passes: u64,
    /// What they keep in use.
    pub(super) bytes: usize,
    /// Whether they must stay as they came, because a step will refuse them.
    pub(super) will_be_refused: bool,
}

impl<K> fmt::Debug for CollectedGradients<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectedGradients").field("table", &self.name).finish_non_exhaustive()
    }
}

impl<K: Clone + PartialEq> GradientCollector<K> {
    /// Keeps what the lookups of one backward pass gave for `table`, which is called `key` here. Duplicates are summed when
    /// they are applied.
    ///
    /// # Errors
    /// [`Error::DimMismatch`] or [`Error::LengthMismatch`] if they do not fit; [`Error::UnknownHandle`].
    pub fn accept(
        &self,
        key: K,
        table: &dyn EmbeddingTable,
        parts: Vec<Box<dyn KeptGradients>>,
    ) -> Result<()> {
        table.check_open("accept_grad")?;
        let (name, dim) = (table.name().to_owned(), table.dim());
        let collected = CollectedGradients::new(key, name, dim, parts);
        collected.validate()?;
        self.with_chunks(|chunks| chunks.push(collected));
        Ok(())
    }

    /// Keeps a copy of gradients that hold a row of `dim` elements for each id.
    ///
    /// # Errors
    /// As [`GradientCollector::accept`].
    pub fn accept_copy(
        &self,
        key: K,
        table: &dyn EmbeddingTable,
        ids: &[i64],
        gradients: &[f32],
        dim: usize,
    ) -> Result<()> {
        if table.dim() != dim {
            return Err(Error::DimMismatch {
                operation: "accept_grad",
                table: table.name().to_owned(),
                expected: table.dim(),
                actual: format!("gradient rows of {dim}"),
            });
        }
        let owned = OwnedGradients { ids: ids.to_vec(), gradients: gradients.to_vec(), dim };
        self.accept(key, table, vec![Box::new(owned)])
    }

    /// Returns the tables that gradients were collected for, in the order in which they first came.
    pub fn tables(&self) -> Vec<K> {
        self.with_chunks(|chunks| {
            let mut tables: Vec<K> = Vec::new();
            for chunk in chunks.iter() {
                if !tables.contains(&chunk.table) {
                    tables.push(chunk.table.clone());
                }
            }
            tables
        })
    }

    /// Returns the gradients collected for `table`, merged.
    ///
    /// # Errors
    /// [`Error::GradientsChanged`].
    pub fn merged(&self, executor: &dyn Executor, table: &K) -> Result<MergedGradients> {
        self.with_chunks(|chunks| {
            let of_table: Vec<_> = chunks.iter().filter(|chunk| chunk.table == *table).collect();
            check_unchanged(of_table.iter().copied())?;
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

    /// Has `take` one optimizer step in every table that any of `collectors` has gradients for, and empties them.
    ///
    /// # Errors
    /// [`Error::GradientsChanged`]; those of `take`; then the collectors keep their gradients, but for those of tables
    /// that have taken their steps.
    pub fn apply<R, E: From<Error>>(
        collectors: &[&Self],
        take: impl FnOnce(Vec<CollectedStep<'_, K>>) -> std::result::Result<R, PartialStep<K, E>>,
    ) -> std::result::Result<R, E> {
        // Taken out for the step, so that the locks are free and other threads may collect meanwhile.
        let taken: Vec<_> =
            collectors.iter().map(|collector| collector.with_chunks(std::mem::take)).collect();
        let unchanged = check_unchanged(taken.iter().flatten())
            .map_err(|error| PartialStep { error: E::from(error), stepped: Vec::new() });
        unchanged.and_then(|()| take(steps(&taken))).map_err(|PartialStep { error, stepped }| {
            for (collector, mut chunks) in collectors.iter().zip(taken) {
                // A step that was cut short has stepped some tables: put back, their gradients would count
                // twice.
                chunks.retain(|chunk| !stepped.contains(&chunk.table));
                collector.put_back(chunks);
            }
            error
        })
    }

    /// Puts chunks back before those that came since they were taken.
    fn put_back(&self, chunks: Vec<CollectedGradients<K>>) {
        self.with_chunks(|kept| {
            // Before what came meanwhile: sums take the passes in their order.
            let newer = std::mem::replace(kept, chunks);
            kept.extend(newer);
        });
    }

    pub(super) fn with_chunks<R>(&self, work: impl FnOnce(&mut Vec<CollectedGradients<K>>) -> R) -> R {
        let _gate = fork::enter();
        work(&mut self.chunks.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl GradientCollector<TableId> {
    /// Takes one optimizer step in every table of `store` that any of `collectors` has gradients for, and empties them.
    /// Returns how many rows left the tables by eviction.
    ///
    /// # Errors
    /// As [`GradientCollector::apply`] and [`EmbeddingStore::update`].
    pub fn apply_to(store: &dyn EmbeddingStore, collectors: &[&Self]) -> Result<u64> {
        Self::apply(collectors, |steps| {
            let updates = steps.into_iter().map(|CollectedStep { table, chunks }| TableUpdate {
                table,
                chunks,
                step: Step::Next,
            });
            let updates: Vec<_> = updates.collect();
            store.update(&updates).map_err(|error| {
                let has_stepped = matches!(error, Error::StepCutShort(_));
                let stepped = updates.iter().filter(|_| has_stepped).map(|update| update.table).collect();
                PartialStep { error, stepped }
            })
        })
    }
}

impl<K> CollectedGradients<K> {
    /// Returns those of one backward pass.
    pub(super) fn new(table: K, name: String, dim: usize, parts: Vec<Box<dyn KeptGradients>>) -> Self {
        // About what a part takes beside its values: of many small ones that is most.
        const BYTES_PER_PART: usize = 1024;
        let bytes = parts.iter().map(|part| part.part().bytes(dim) + BYTES_PER_PART).sum();
        Self { table, name, dim, parts, passes: 1, bytes, will_be_refused: false }
    }

    pub(super) fn were_changed(&self) -> bool {
        self.parts.iter().any(|part| part.were_changed())
    }

    pub(super) fn as_chunk(&self) -> GradientChunk<'_> {
        GradientChunk { parts: self.parts.iter().map(|part| part.part()).collect() }
    }

    /// Checks that ids and gradients fit together and are of the table's dim.
    fn validate(&self) -> Result<()> {
        let gradients = Gradients::new(self.dim, &[self.as_chunk()]);
        gradients.validate("accept_grad", || format!("table \"{}\"", self.name))
    }
}

fn check_unchanged<'a, K: 'a>(chunks: impl Iterator<Item = &'a CollectedGradients<K>>) -> Result<()> {
    let mut last = None;
    for chunk in chunks {
        for part in &chunk.parts {
            // A backward pass through many tables keeps all it gave in one place.
            if last.replace(part.source()) != Some(part.source()) && part.were_changed() {
                return Err(Error::GradientsChanged { table: chunk.name.clone() });
            }
        }
    }
    Ok(())
}

/// Returns one step a table, its chunks in the order of the collectors.
fn steps<K: Clone + PartialEq>(collected: &[Vec<CollectedGradients<K>>]) -> Vec<CollectedStep<'_, K>> {
    let mut steps: Vec<CollectedStep<'_, K>> = Vec::new();
    for collected in collected.iter().flatten() {
        let chunk = collected.as_chunk();
        match steps.iter_mut().find(|step| step.table == collected.table) {
            Some(step) => step.chunks.push(chunk),
            None => steps.push(CollectedStep { table: collected.table.clone(), chunks: vec![chunk] }),
        }
    }
    steps
}
