//! Lookup and pooling in one pass, over one table or several.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::engine::Engine;
use super::ids::places::{Seal, TAG_WORDS};
use super::locks::Locks;
use super::lookup::{RowSource, TakeRows};
use super::table::Table;
use crate::kernel::cache::prefetch_group;
use crate::kernel::parallel::{for_each_mut, piece_size};
use crate::kernel::simd::{Kernel, Lanes};
use crate::rows::pooling::{BagInput, PooledColumns, Pooling, PoolingMode};
use crate::rows::row_type::RowType;
use crate::{Error, Result};

/// Pools the bags of all `tables`, the first bags of each into the first row of `pooled`, a table's columns behind
/// those of the one before. `places` is empty, or gets each table's places and their tag, one table after another.
pub(crate) fn pool(
    engine: Engine<'_>,
    tables: &[Arc<Table>],
    input: BagInput<'_>,
    pooled: &mut [f32],
    max_positions: &mut [i64],
    places: &mut [u32],
) -> Result<()> {
    input.validate(tables.len())?;
    let bags = input.bags_a_table(tables.len());
    let stride: usize = tables.iter().map(|table| table.config.dim).sum();
    check_outputs(tables, &input, bags * stride, [pooled.len(), max_positions.len(), places.len()])?;
    // Kept places announce a step, which needs its rows in memory; other reads bring nothing in.
    if !places.is_empty() {
        for (number, table) in tables.iter().enumerate() {
            table.bring_in(engine, input.ids_of(number * bags..(number + 1) * bags), false);
        }
    }
    // All tables before the first read: the bags belong to one moment.
    let locks = Locks::shared(tables);
    locks.check_whole()?;
    let failure = OnceLock::new();
    let floats_read = input.ids.len() * stride / tables.len();
    let size = piece_size(engine.executor, bags, stride + floats_read / bags.max(1));
    let mut places_of_pieces = cut_places(&input, tables.len(), size, places).into_iter();
    let mut positions = max_positions.chunks_mut(size * stride);
    let pieces = pooled.chunks_mut(size * stride).enumerate().map(|(piece, pooled)| Piece {
        bags: piece * size..bags.min((piece + 1) * size),
        pooled,
        max_positions: positions.next().unwrap_or_default(),
        places: places_of_pieces.next().unwrap_or_default(),
    });
    let call = Call { engine, tables, locks: &locks, input, stride, failure: &failure };
    for_each_mut(engine.executor, pieces, |piece| pool_piece(&call, piece));
    // Still under the locks: the tag has the table's epoch, which a deletion changes.
    seal_places(engine, tables, &locks, &input, places);
    failure.into_inner().map_or(Ok(()), Err)
}

/// What the pieces of a call share.
struct Call<'a> {
    engine: Engine<'a>,
    tables: &'a [Arc<Table>],
    locks: &'a Locks<'a>,
    input: BagInput<'a>,
    stride: usize,
    failure: &'a OnceLock<Error>,
}

/// Checks ids, and the lengths of pooled values, positions of maxima and places.
pub(super) fn check_outputs(
    tables: &[Arc<Table>],
    input: &BagInput<'_>,
    elements: usize,
    [pooled, max_positions, places]: [usize; 3],
) -> Result<()> {
    let bags = input.bags_a_table(tables.len());
    for (number, table) in tables.iter().enumerate() {
        let first = input.offsets[number * bags] as usize;
        let ids = input.ids_of(number * bags..(number + 1) * bags);
        table.check_ids("emb_bag", ids).map_err(|error| error.shifted(first))?;
    }
    let [table, ..] = tables else { return Ok(()) };
    if tables.len() == 1 {
        table.check_width("emb_bag", "pooled rows", bags, pooled)?;
    }
    table.check_length("emb_bag", "pooled values", elements, pooled)?;
    let positions = if input.mode == PoolingMode::Max { elements } else { 0 };
    table.check_length("emb_bag", "positions of maxima", positions, max_positions)?;
    let expected = if places == 0 { 0 } else { input.ids.len() + tables.len() * TAG_WORDS };
    table.check_length("emb_bag", "places", expected, places)
}

/// Some bags of every table, and where what is found of them goes.
struct Piece<'a> {
    bags: Range<usize>,
    pooled: &'a mut [f32],
    max_positions: &'a mut [i64],
    /// One slice a table; none where nobody asked.
    places: Vec<&'a mut [u32]>,
}

/// Returns for each piece of `size` bags the places of its ids, one slice a table.
fn cut_places<'a>(
    input: &BagInput<'_>,
    tables: usize,
    size: usize,
    places: &'a mut [u32],
) -> Vec<Vec<&'a mut [u32]>> {
    let bags = input.bags_a_table(tables);
    let mut pieces: Vec<Vec<&mut [u32]>> = (0..bags.div_ceil(size)).map(|_| Vec::new()).collect();
    if places.is_empty() {
        return pieces;
    }
    let mut rest = places;
    for table in 0..tables {
        for (number, piece) in pieces.iter_mut().enumerate() {
            let range = table * bags + number * size..table * bags + bags.min((number + 1) * size);
            let (own, behind) = rest.split_at_mut(input.ids_of(range).len());
            piece.push(own);
            rest = behind;
        }
        rest = &mut rest[TAG_WORDS..];
    }
    pieces
}

fn seal_places(
    engine: Engine<'_>,
    tables: &[Arc<Table>],
    locks: &Locks<'_>,
    input: &BagInput<'_>,
    places: &mut [u32],
) {
    if places.is_empty() {
        return;
    }
    let bags = input.bags_a_table(tables.len());
    let mut rest = places;
    let of_tables = tables.iter().enumerate().map(|(number, table)| {
        let ids = input.ids_of(number * bags..(number + 1) * bags);
        let (own, behind) = std::mem::take(&mut rest).split_at_mut(ids.len() + TAG_WORDS);
        rest = behind;
        (own, locks.of(table).epoch, ids)
    });
    for_each_mut(engine.executor, of_tables, |(places, epoch, ids)| {
        engine.simd.run(Seal { places, epoch, ids });
    });
}

fn pool_piece(call: &Call<'_>, piece: Piece<'_>) {
    let Call { engine, tables, locks, input, stride, failure } = *call;
    let (bags, mut first) = (input.bags_a_table(tables.len()), 0);
    let mut places = piece.places.into_iter();
    for (number, table) in tables.iter().enumerate() {
        let dim = table.config.dim;
        let columns = PooledColumns {
            pooled: &mut *piece.pooled,
            max_positions: &mut *piece.max_positions,
            stride,
            first,
            dim,
        };
        let range = number * bags + piece.bags.start..number * bags + piece.bags.end;
        let kernel = PoolRows {
            source: locks.of(table).source(table, engine.simd, failure),
            ids: input.ids_of(range.clone()),
            first_position: input.offsets[range.start] as usize,
            pooling: Pooling::new(input, range, columns),
            places: places.next().unwrap_or_default(),
            widened: Vec::new(),
        };
        engine.simd.run(kernel);
        first += dim;
    }
}

/// Pools the bags of one table in one piece.
struct PoolRows<'a> {
    source: RowSource<'a>,
    ids: &'a [i64],
    first_position: usize,
    pooling: Pooling<'a>,
    places: &'a mut [u32],
    /// The rows of a group that do not lie in the table as they are read.
    widened: Vec<f32>,
}

impl Kernel for PoolRows<'_> {
    #[inline(always)]
    fn run(mut self, lanes: impl Lanes) {
        self.source.walk(lanes, self.source.row_type, self.ids, &mut self);
        self.pooling.finish();
    }
}

impl TakeRows for PoolRows<'_> {
    #[inline(always)]
    fn take(&mut self, first: usize, indices: &[u32], words: &[&[f32]], upcoming: &[&[f32]]) {
        if let Some(places) = self.places.get_mut(first..first + indices.len()) {
            places.copy_from_slice(indices);
        }
        let (position, RowSource { dim, row_type, .. }) = (self.first_position + first, self.source);
        let widened: Vec<&[f32]>;
        let (rows, upcoming) = if row_type.is_float32() {
            // A group at a time, since a bag does more with each long row: asked for one with each, rows took 31
            // against 27 ns (20 ids a bag, dim 64).
            if !self.pooling.asks_with_each() {
                prefetch_group(words, upcoming);
            }
            (words, upcoming)
        } else {
            self.widened.resize(words.len() * dim, 0.0);
            row_type.widen_each(words, upcoming, &mut self.widened, dim);
            widened = self.widened.chunks_exact(dim).collect();
            (&widened[..], &widened[..])
        };
        self.pooling.take_each(position, rows, upcoming);
    }
}
