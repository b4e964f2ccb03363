//! Tables whose rows are elsewhere: what a store needs to know of them to refuse what they would refuse.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::bags;
use super::engine::Engine;
use super::table::Table;
use super::update::{StepRequest, check};
use crate::calls::{TableDescription, TableUpdate};
use crate::config::{NanPolicy, TableConfig};
use crate::kernel::parallel::{Executor, Serial, for_each_mut, parts_for};
use crate::kernel::simd::{Kernel, Lanes, Simd};
use crate::optimizer::UpdateRules;
use crate::rows::gradient::{DistinctGradients, Gradients};
use crate::rows::pooling::{BagInput, Piece, Pooling, for_each_piece};
use crate::{Error, Result};

/// A table without its rows, for stores that keep these on other machines.
///
/// It refuses what the table itself would refuse, with the same errors, before anything is sent.
pub struct TableValidator(Arc<Table>);

impl fmt::Debug for TableValidator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableValidator").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl TableValidator {
    /// Describes the table `name`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    pub fn new(name: &str, config: &TableConfig) -> Result<Self> {
        Self::with_slots(name, config, Vec::new())
    }

    /// Describes the table `name`, which keeps `slots` if its rule is one of the program's own where its rows are: names
    /// and widths, as [`TableDescription::slots`] has them. Of other rules they are known.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    pub fn with_slots(name: &str, config: &TableConfig, slots: Vec<(String, usize)>) -> Result<Self> {
        if name.is_empty() {
            return Err(Error::InvalidConfig { message: "the table's name must not be empty".to_owned() });
        }
        config.validate()?;
        let rules = UpdateRules::elsewhere(slots);
        let table = Table::new(name, &config.without_memory(), &rules, &Arc::default())?;
        Ok(Self(Arc::new(table)))
    }

    /// Returns the table's name.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the elements of its rows.
    pub fn dim(&self) -> usize {
        self.0.config.dim
    }

    /// Returns name, configuration and slots.
    pub fn description(&self) -> TableDescription {
        self.0.description()
    }

    /// Returns how many calls the checks below have refused for values that are not finite.
    pub fn refusals(&self) -> u64 {
        self.0.refusals.load(Ordering::Relaxed)
    }

    /// Checks the ids of a call.
    ///
    /// # Errors
    /// [`Error::IdOutOfRange`].
    pub fn check_ids(&self, operation: &'static str, ids: &[i64]) -> Result<()> {
        self.0.check_ids(operation, ids)
    }

    /// Checks ids and that `values` floats are a row for each.
    ///
    /// # Errors
    /// [`Error::IdOutOfRange`]; [`Error::DimMismatch`].
    pub fn check_rows(&self, operation: &'static str, ids: &[i64], values: usize) -> Result<()> {
        self.0.check_ids(operation, ids)?;
        self.0.check_width(operation, "rows", ids.len(), values)
    }

    /// Checks that there are `expected` of what a call wants for its ids, such as `places`.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`].
    pub fn check_length(
        &self,
        operation: &'static str,
        what: &str,
        expected: usize,
        actual: usize,
    ) -> Result<()> {
        self.0.check_length(operation, what, expected, actual)
    }

    /// Checks rows that are to be written; under [`NanPolicy::Skip`] those that are not finite pass.
    ///
    /// # Errors
    /// As [`TableValidator::check_rows`]; [`Error::NonFinite`].
    pub fn check_write(&self, ids: &[i64], values: &[f32]) -> Result<()> {
        self.check_rows("emb_write", ids, values.len())?;
        if self.0.config.nan_policy == NanPolicy::Error {
            self.0.check_finite("emb_write", "row", ids, values)?;
        }
        Ok(())
    }

    /// Checks a learning rate.
    ///
    /// # Errors
    /// [`Error::InvalidLearningRate`].
    pub fn check_learning_rate(&self, lr: f64) -> Result<()> {
        self.0.check_learning_rate(lr)
    }

    /// Checks updates as [`crate::EmbeddingStore::update`] does, and merges the gradients of each. A table that gets them
    /// merged changes as from the chunks, to the bit.
    ///
    /// # Errors
    /// As [`crate::EmbeddingStore::update`].
    pub fn merge<'a>(
        executor: &dyn Executor,
        updates: &[(&Self, &TableUpdate<'a>)],
    ) -> Result<Vec<DistinctGradients<'a>>> {
        let engine = Engine { executor, simd: Simd::detect() };
        let requests = requests(updates)?;
        check(engine, &requests)?;
        // Threads share the tables where there are enough for all; else they share each.
        let floats = requests.iter().map(|request| request.gradients.len() * request.gradients.dim).sum();
        // One table alone always has all threads.
        if requests.len() < parts_for(executor, floats).max(2) {
            return Ok(requests.iter().map(|one| one.gradients.distinct(executor, engine.simd)).collect());
        }
        let mut merged: Vec<Option<DistinctGradients<'_>>> = requests.iter().map(|_| None).collect();
        for_each_mut(executor, requests.iter().zip(&mut merged), |(one, merged)| {
            *merged = Some(one.gradients.distinct(&Serial, engine.simd));
        });
        Ok(merged.into_iter().flatten().collect())
    }

    /// Returns the gradients of updates where they lie, if each has those of distinct ids, a row each; or `in_order`, with
    /// those of equal ids side by side, if each is of one backward pass. They are checked as by [`TableValidator::merge`],
    /// but for their values, which are left to the table that gets them.
    ///
    /// # Errors
    /// As [`TableValidator::merge`], but for [`Error::NonFinite`].
    pub fn unmerged<'a>(
        updates: &[(&Self, &TableUpdate<'a>)],
        in_order: bool,
    ) -> Result<Option<Vec<DistinctGradients<'a>>>> {
        let requests = requests(updates)?;
        let gradients = requests.iter().map(|request| &request.gradients);
        Ok(match in_order {
            true => gradients.map(Gradients::in_order).collect(),
            false => gradients.map(Gradients::as_they_lie).collect(),
        })
    }

    /// Checks a lookup of bags as [`crate::EmbeddingStore::bag`] does; `lengths` are those of the pooled values, the
    /// positions of maxima and the places.
    ///
    /// # Errors
    /// As [`crate::EmbeddingStore::bag`].
    pub fn check_bags(tables: &[&Self], input: &BagInput<'_>, lengths: [usize; 3]) -> Result<()> {
        let tables: Vec<_> = tables.iter().map(|table| Arc::clone(&table.0)).collect();
        input.validate(tables.len())?;
        let elements = input.bags_a_table(tables.len()) * stride_of(&tables);
        bags::check_outputs(&tables, input, elements, lengths)
    }

    /// Pools bags that [`TableValidator::check_bags`] found good, of the rows of each table's ids.
    pub fn pool(
        executor: &dyn Executor,
        tables: &[&Self],
        input: BagInput<'_>,
        rows: &[PlacedRows<'_>],
        pooled: &mut [f32],
        max_positions: &mut [i64],
    ) {
        let (simd, dims) = (Simd::detect(), tables.iter().map(|table| table.dim()).collect::<Vec<_>>());
        for_each_piece(executor, &dims, &input, pooled, max_positions, |piece| {
            pool_piece(simd, &dims, input, rows, piece);
        });
    }
}

/// The rows of a table's ids in a lookup, which may hold those of equal ids once.
#[derive(Debug, Clone, Copy)]
pub struct PlacedRows<'a> {
    /// The rows, one behind the other.
    pub rows: &'a [f32],
    /// For each id the place of its row; none if the rows are as the ids are.
    pub places: &'a [i64],
}

fn requests<'a>(updates: &[(&TableValidator, &TableUpdate<'a>)]) -> Result<Vec<StepRequest<'a>>> {
    let request = |(table, update): &(&TableValidator, &TableUpdate<'a>)| {
        StepRequest::new(Arc::clone(&table.0), &update.chunks, update.step)
    };
    updates.iter().map(request).collect()
}

fn pool_piece(
    simd: Simd,
    dims: &[usize],
    input: BagInput<'_>,
    rows: &[PlacedRows<'_>],
    mut piece: Piece<'_>,
) {
    let (bags, mut first) = (input.bags_a_table(dims.len()), 0);
    for (table, (&dim, rows)) in dims.iter().zip(rows).enumerate() {
        let (range, columns) = piece.of_table(table, first, dim);
        simd.run(PoolPlaced {
            rows: *rows,
            dim,
            before: input.offsets[table * bags] as usize,
            positions: input.offsets[range.start] as usize..input.offsets[range.end] as usize,
            pooling: Pooling::new(input, range, columns),
        });
        first += dim;
    }
}

/// Pools the bags of one table in one piece.
struct PoolPlaced<'a> {
    rows: PlacedRows<'a>,
    dim: usize,
    /// How many ids of other tables come before those of this one.
    before: usize,
    /// Those of the ids, among all.
    positions: Range<usize>,
    pooling: Pooling<'a>,
}

impl Kernel for PoolPlaced<'_> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        const GROUP: usize = 64;
        let Self { rows: PlacedRows { rows, places }, dim, before, positions, mut pooling } = self;
        let mut group = [&[][..]; GROUP];
        for start in positions.clone().step_by(GROUP) {
            let own = &mut group[..GROUP.min(positions.end - start)];
            for (position, row) in (start - before..).zip(&mut *own) {
                let place = places.get(position).map_or(position, |&place| place as usize);
                *row = &rows[place * dim..][..dim];
            }
            pooling.take_each(start, own, own);
        }
        pooling.finish();
    }
}

fn stride_of(tables: &[Arc<Table>]) -> usize {
    tables.iter().map(|table| table.config.dim).sum()
}
