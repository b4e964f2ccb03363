//! The rows of distinct ids from all servers, each asked of the one that has it.

use std::ops::Range;
use std::time::Duration;

use recstore::Result;

use super::call::Call;
use super::session::Session;
use super::tables::RemoteTable;
use crate::router::{Router, Split};
use crate::wire::codec::{FrameError, Request, TableIds};

/// Room for headers in a frame.
const FRAME_MARGIN: u64 = 1 << 14;

/// Rows that are wanted, and where they are to go.
pub(super) struct RowRequest<'a> {
    pub(super) table: &'a RemoteTable,
    /// Distinct ids.
    pub(super) ids: &'a [i64],
    /// The place of each id's row among `rows`; as the ids are, if there are none.
    pub(super) places: &'a [usize],
    pub(super) rows: &'a mut [f32],
}

/// Some ids of a lookup that go to one shard in one request.
struct Slice {
    lookup: usize,
    range: Range<usize>,
}

/// What one request asks of a shard.
struct Round {
    shard: usize,
    slices: Vec<Slice>,
    /// The floats of its answer that have come.
    arrived: usize,
}

/// Fetches rows; one request a server, or several where an answer would be too large.
pub(super) fn fetch(
    session: &Session,
    router: Router,
    operation: &'static str,
    wanted: &mut [RowRequest<'_>],
    patience: Duration,
) -> Result<()> {
    let splits: Vec<Split> = wanted.iter().map(|wanted| router.split(wanted.ids)).collect();
    let mut of_shards = rounds(session, operation, wanted, &splits)?;
    while of_shards.iter().any(|rounds| !rounds.is_empty()) {
        let mut round: Vec<Round> = of_shards.iter_mut().filter_map(Vec::pop).collect();
        let calls: Vec<Call<'_>> = round.iter().map(|round| call(round, wanted, &splits)).collect();
        let mut take = |call: usize, place, rows: &[f32]| round[call].take(wanted, &splits, place, rows);
        let outcomes = session.call_all_for_rows(operation, &calls, patience, &mut take);
        drop(calls);
        for (round, outcome) in round.iter_mut().zip(outcomes) {
            let (reply, _) = outcome.answer()?;
            let taken = reply.matrices().and_then(|matrices| round.take_last(wanted, &splits, &matrices));
            taken.map_err(|error| session.unavailable(operation, round.shard, error.to_string()))?;
        }
    }
    Ok(())
}

impl Round {
    /// Puts rows to where they are wanted; `place` floats of the answer came before them.
    fn take(
        &mut self,
        wanted: &mut [RowRequest<'_>],
        splits: &[Split],
        place: usize,
        rows: &[f32],
    ) -> std::result::Result<(), FrameError> {
        // A repeated attempt begins at place 0 again: only what came of the last one counts.
        self.arrived = place + rows.len();
        let mut place = place;
        for Slice { lookup, range } in &self.slices {
            let RowRequest { table, places, rows: target, .. } = &mut wanted[*lookup];
            let dim = table.checks.dim();
            let floats = range.len() * dim;
            if place >= floats {
                place -= floats;
                continue;
            }
            // A part has whole rows of one table: cut otherwise, it is refused below.
            if rows.len() > floats - place || !rows.len().is_multiple_of(dim) || !place.is_multiple_of(dim) {
                break;
            }
            let positions = &splits[*lookup].positions[self.shard][range.clone()][place / dim..];
            for (&position, row) in positions.iter().zip(rows.chunks_exact(dim)) {
                let place = places.get(position).copied().unwrap_or(position);
                target[place * dim..][..dim].copy_from_slice(row);
            }
            return Ok(());
        }
        match rows.len() {
            0 => Ok(()),
            floats => Err(FrameError::Malformed(format!("{floats} floats of rows that nobody asked for"))),
        }
    }

    /// Puts the rows of a reply to where they are wanted, and checks that there are none to come.
    fn take_last(
        &mut self,
        wanted: &mut [RowRequest<'_>],
        splits: &[Split],
        matrices: &[&[f32]],
    ) -> std::result::Result<(), FrameError> {
        matrices.iter().try_for_each(|rows| self.take(wanted, splits, self.arrived, rows))?;
        let floats = |slice: &Slice| slice.range.len() * wanted[slice.lookup].table.checks.dim();
        let expected: usize = self.slices.iter().map(floats).sum();
        match self.arrived == expected {
            true => Ok(()),
            false => {
                Err(FrameError::Malformed(format!("{} floats of rows, expected {expected}", self.arrived)))
            }
        }
    }
}

/// Returns for each shard its requests, the last one first.
fn rounds(
    session: &Session,
    operation: &'static str,
    wanted: &[RowRequest<'_>],
    splits: &[Split],
) -> Result<Vec<Vec<Round>>> {
    let limits = session.limits(operation)?;
    let of_shard = |(shard, limit): (usize, u64)| {
        let mut rounds: Vec<Round> = Vec::new();
        let mut room = 0;
        for (lookup, (wanted, split)) in wanted.iter().zip(splits).enumerate() {
            // A row in the answer, or an id in the request.
            let size = (wanted.table.checks.dim() * size_of::<f32>()).max(size_of::<i64>()) as u64;
            let (count, mut start) = (split.ids[shard].len(), 0);
            while start < count {
                if room < size || rounds.is_empty() {
                    rounds.push(Round { shard, slices: Vec::new(), arrived: 0 });
                    room = limit.saturating_sub(FRAME_MARGIN).max(size);
                }
                let end = count.min(start + (room / size) as usize);
                room = room.saturating_sub((end - start) as u64 * size + 64);
                if let Some(round) = rounds.last_mut() {
                    round.slices.push(Slice { lookup, range: start..end });
                }
                start = end;
            }
        }
        rounds.reverse();
        rounds
    };
    Ok(limits.into_iter().enumerate().map(of_shard).collect())
}

fn call<'a>(round: &Round, wanted: &[RowRequest<'_>], splits: &'a [Split]) -> Call<'a> {
    let shard = round.shard;
    let place = |slice: &Slice| wanted[slice.lookup].table.on(shard);
    let reads = round.slices.iter().map(|slice| TableIds {
        table: place(slice).number,
        ids: &splits[slice.lookup].ids[shard][slice.range.clone()],
    });
    let incarnations = round.slices.iter().map(|slice| place(slice).incarnation).collect();
    Call { shard, incarnations, sequence: 0, request: Request::Read(reads.collect()) }
}
