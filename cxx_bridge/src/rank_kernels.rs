//! What the operators of sharded lookups do, on slices: what ranks ask each other, and the way of rows and gradients.

use std::collections::BTreeMap;

use cxx::SharedPtr;
use recstore::{KeptGradients, PLACES_TAG, RANK_FLAGS, RankBags, RankPieces};

use crate::executor::TorchThreads;
use crate::ffi::KeptTensors;
use crate::guard::{Failure, guard};
use crate::kept::TensorPart;
use crate::kernels::{Ids, Outcome, accept, check_offsets, checked_dim};
use crate::registry::registry;

/// No memory holds more.
const MAX_ELEMENTS: u128 = 1 << 48;

/// The elements behind the rows for each rank.
pub(crate) fn rank_flags() -> usize {
    RANK_FLAGS
}

/// Returns the numbers of distinct ids by rank and table; `distinct` and `places` have room for all ids.
pub(crate) fn rank_requests(
    ids: &[i64],
    splits: &[i64],
    ranks: i64,
    distinct: &mut [i64],
    places: &mut [i64],
) -> Outcome<Box<Ids>> {
    const OPERATION: &str = "rank_requests";
    guard(|| {
        check_offsets(OPERATION, "splits", splits, ids.len())?;
        let ranks = usize::try_from(ranks).ok().filter(|&ranks| ranks > 0);
        let ranks = ranks.ok_or_else(|| failure(OPERATION, &"there must be ranks"))?;
        let splits: Vec<usize> = splits.iter().map(|&split| split as usize).collect();
        let counts = recstore::rank_requests(&TorchThreads, ids, &splits, ranks, distinct, places);
        Ok(Box::new(Ids(counts.into_iter().map(|count| count as i64).collect())))
    })
}

/// Reads the ids of each rank and table, as many as `counts` says, into the places of their rows.
pub(crate) fn read_for_ranks(
    tables: &[i64],
    ids: &[i64],
    counts: &[i64],
    dims: &[i64],
    rows: &mut [f32],
    places: &mut [u32],
) -> Outcome {
    const OPERATION: &str = "emb_read";
    guard(|| {
        let dims = checked_dims(dims)?;
        let pieces = pieces(OPERATION, counts, &dims)?;
        check_size(OPERATION, "ids", pieces.num_ids(), ids.len())?;
        let registry = registry()?;
        let mut places = places;
        for (piece, &table) in pieces.all().iter().zip(tables.iter().cycle()) {
            let (own, behind) = places.split_at_mut(piece.ids.len() + PLACES_TAG);
            let (ids, rows) = (&ids[piece.ids.clone()], &mut rows[piece.floats.clone()]);
            registry.with_table(OPERATION, table, |table| table.read_with_places(ids, rows, own))?;
            places = behind;
        }
        pieces.fill_flags(rows, 0.0);
        Ok(())
    })
}

pub(crate) fn pool_rank_rows(
    counts: &[i64],
    dims: &[i64],
    tables: &[i64],
    places: &[i64],
    offsets: &[i64],
    rows: &[f32],
    pooled: &mut [f32],
) -> Outcome {
    const OPERATION: &str = "pool_rank_rows";
    guard(|| {
        let (dims, tables) = (checked_dims(dims)?, numbers(OPERATION, tables)?);
        let pieces = pieces(OPERATION, counts, &dims)?;
        check_size(OPERATION, "elements", pieces.num_floats(), rows.len())?;
        let bags = RankBags { tables: &tables, places, offsets };
        Ok(recstore::pool_rank_rows(&TorchThreads, &pieces, bags, rows, pooled)?)
    })
}

pub(crate) fn spread_rank_grads(
    counts: &[i64],
    dims: &[i64],
    tables: &[i64],
    places: &[i64],
    offsets: &[i64],
    gradients: &[f32],
    rows: &mut [f32],
) -> Outcome {
    const OPERATION: &str = "spread_rank_grads";
    guard(|| {
        let (dims, tables) = (checked_dims(dims)?, numbers(OPERATION, tables)?);
        let pieces = pieces(OPERATION, counts, &dims)?;
        let bags = RankBags { tables: &tables, places, offsets };
        Ok(recstore::spread_rank_gradients(&TorchThreads, &pieces, bags, gradients, rows)?)
    })
}

/// `tensors` hold the gradients of each rank and table as [`read_for_ranks`] gave the rows. `padding_ids` are those of
/// the tables in `padded`.
pub(crate) fn accept_rank_grads(
    collectors: &[i64],
    tables: &[i64],
    counts: &[i64],
    dims: &[i64],
    padded: &[i64],
    padding_ids: &[i64],
    tensors: SharedPtr<KeptTensors>,
) -> Outcome<String> {
    const OPERATION: &str = "accept_grad";
    guard(|| {
        let dims = checked_dims(dims)?;
        let pieces = pieces(OPERATION, counts, &dims)?;
        check_size(OPERATION, "ids", pieces.num_ids(), tensors.ids().len())?;
        check_size(OPERATION, "elements", pieces.num_floats(), tensors.gradients().len())?;
        let paddings: BTreeMap<i64, i64> = padded.iter().copied().zip(padding_ids.iter().copied()).collect();
        let mut passes: Vec<_> =
            collectors.iter().zip(tables).map(|(&into, &table)| ((into, table), Vec::new())).collect();
        for (number, piece) in pieces.all().iter().enumerate() {
            let table = number % dims.len();
            let part = TensorPart {
                ids: piece.ids.clone(),
                floats: piece.floats.clone(),
                // Behind the places and the tag of each piece before.
                first_place: piece.ids.start + number * PLACES_TAG,
                stride: dims[table],
                first_column: 0,
                row_of: Vec::new(),
                padding_idx: paddings.get(&(table as i64)).copied(),
                tensors: tensors.clone(),
            };
            passes[table].1.push(Box::new(part) as Box<dyn KeptGradients>);
        }
        accept(passes)
    })
}

fn pieces<'a>(operation: &str, counts: &[i64], dims: &'a [usize]) -> Outcome<RankPieces<'a>> {
    let counts = numbers(operation, counts)?;
    if dims.is_empty() || !counts.len().is_multiple_of(dims.len()) {
        let message = format!("{} tables need a count each for every rank, got {}", dims.len(), counts.len());
        return Err(failure(operation, &message));
    }
    // In 128 bits, so that no product of numbers that a caller gives overflows.
    let elements = counts.iter().zip(dims.iter().cycle()).map(|(&count, &dim)| count as u128 * dim as u128);
    if elements.sum::<u128>() > MAX_ELEMENTS {
        return Err(failure(operation, &format!("more than {MAX_ELEMENTS} elements")));
    }
    Ok(RankPieces::new(&counts, dims))
}

fn checked_dims(dims: &[i64]) -> Outcome<Vec<usize>> {
    dims.iter().map(|&dim| checked_dim(dim)).collect()
}

/// Turns counts and numbers of tables, none of which is negative.
fn numbers(operation: &str, given: &[i64]) -> Outcome<Vec<usize>> {
    let turned = |&number: &i64| {
        usize::try_from(number).map_err(|_| failure(operation, &format!("{number} is not a count or number")))
    };
    given.iter().map(turned).collect()
}

fn check_size(operation: &str, what: &str, expected: usize, actual: usize) -> Outcome {
    if expected == actual {
        return Ok(());
    }
    Err(failure(operation, &format!("the ranks have {expected} {what}, got {actual}")))
}

fn failure(operation: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::of(operation, format!("{operation}: {error}"))
}
