//! The rows of ids from all servers: each id asked for once, of the server that has its row.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use recstore::{Executor, Result, unique};

use super::session::{Call, Session};
use super::tables::RemoteTable;
use crate::codec::{FrameError, Reply, Request, TableIds};
use crate::router::{Router, Split};

/// Room for headers in a frame.
const FRAME_MARGIN: u64 = 1 << 14;

/// The rows of the ids of several lookups, in the answers they came in.
pub(super) struct Fetched {
    lookups: Vec<Lookup>,
    answers: Vec<Reply>,
}

/// The ids of one lookup.
struct Lookup {
    dim: usize,
    /// The place of each id among the distinct ones.
    inverse: Vec<i64>,
    /// The shard of each distinct id and its place among that shard's.
    places: Vec<(u32, u32)>,
    /// Of each shard, where its rows are: the first row, the answer and the matrix in it.
    pieces: Vec<Vec<Piece>>,
}

#[derive(Clone, Copy)]
struct Piece {
    first: usize,
    answer: usize,
    matrix: usize,
}

/// Some ids of a lookup that go to one shard in one request.
struct Wanted {
    lookup: usize,
    range: Range<usize>,
}

impl Fetched {
    /// Returns matrices of all answers, checked.
    pub(super) fn rows(&self) -> std::result::Result<Vec<Vec<&[f32]>>, FrameError> {
        self.answers.iter().map(Reply::matrices).collect()
    }

    /// Returns the row of the id at `position` of a lookup, out of [`Fetched::rows`].
    pub(super) fn row<'r>(&self, rows: &[Vec<&'r [f32]>], lookup: usize, position: usize) -> &'r [f32] {
        let Lookup { dim, inverse, places, pieces } = &self.lookups[lookup];
        let (shard, row) = places[inverse[position] as usize];
        let (pieces, row) = (&pieces[shard as usize], row as usize);
        let piece = pieces[pieces.partition_point(|piece| piece.first <= row) - 1];
        &rows[piece.answer][piece.matrix][(row - piece.first) * dim..][..*dim]
    }
}

/// Fetches the rows of the ids of tables; one request a server, or several where an answer would be too large.
pub(super) fn fetch(
    session: &Session,
    (router, executor): (Router, &dyn Executor),
    operation: &'static str,
    wanted: &[(Arc<RemoteTable>, &[i64])],
    patience: Duration,
) -> Result<Fetched> {
    let (lookups, splits): (Vec<Lookup>, Vec<Split>) =
        wanted.iter().map(|(table, ids)| prepare(router, executor, table.checks.dim(), ids)).unzip();
    let mut fetched = Fetched { lookups, answers: Vec::new() };
    let mut requests = rounds(session, operation, &fetched.lookups, &splits)?;
    while requests.iter().any(|rounds| !rounds.is_empty()) {
        let round: Vec<(usize, Vec<Wanted>)> = requests
            .iter_mut()
            .enumerate()
            .filter_map(|(shard, rounds)| rounds.pop().map(|round| (shard, round)))
            .collect();
        let calls: Vec<Call<'_>> = round.iter().map(|round| call(round, wanted, &splits)).collect();
        let outcomes = session.call_all(operation, &calls, patience);
        for ((shard, round), outcome) in round.into_iter().zip(outcomes) {
            let (reply, _) = outcome.answer()?;
            let counts: Vec<usize> =
                round.iter().map(|wanted| wanted.range.len() * fetched.lookups[wanted.lookup].dim).collect();
            reply.rows(&counts).map_err(|error| session.unavailable(operation, shard, error.to_string()))?;
            let answer = fetched.answers.len();
            for (matrix, wanted) in round.into_iter().enumerate() {
                let piece = Piece { first: wanted.range.start, answer, matrix };
                fetched.lookups[wanted.lookup].pieces[shard].push(piece);
            }
            fetched.answers.push(reply);
        }
    }
    Ok(fetched)
}

fn prepare(router: Router, executor: &dyn Executor, dim: usize, ids: &[i64]) -> (Lookup, Split) {
    let (mut distinct, mut inverse) = (vec![0; ids.len()], vec![0; ids.len()]);
    let count = unique(executor, ids, &mut distinct, &mut inverse);
    distinct.truncate(count);
    let split = router.split(&distinct);
    let mut places = vec![(0, 0); count];
    for (shard, positions) in split.positions.iter().enumerate() {
        for (row, &position) in positions.iter().enumerate() {
            places[position] = (shard as u32, row as u32);
        }
    }
    (Lookup { dim, inverse, places, pieces: vec![Vec::new(); router.shards()] }, split)
}

/// Returns for each shard its requests, the last one first.
fn rounds(
    session: &Session,
    operation: &'static str,
    lookups: &[Lookup],
    splits: &[Split],
) -> Result<Vec<Vec<Vec<Wanted>>>> {
    let limits = session.limits(operation)?;
    let of_shard = |(shard, limit): (usize, u64)| {
        let mut rounds: Vec<Vec<Wanted>> = Vec::new();
        let mut room = 0;
        for (lookup, (Lookup { dim, .. }, split)) in lookups.iter().zip(splits).enumerate() {
            // A row in the answer, or an id in the request.
            let size = (dim * size_of::<f32>()).max(size_of::<i64>()) as u64;
            let (count, mut start) = (split.ids[shard].len(), 0);
            while start < count {
                if room < size || rounds.is_empty() {
                    rounds.push(Vec::new());
                    room = limit.saturating_sub(FRAME_MARGIN).max(size);
                }
                let end = count.min(start + (room / size) as usize);
                room = room.saturating_sub((end - start) as u64 * size + 64);
                if let Some(round) = rounds.last_mut() {
                    round.push(Wanted { lookup, range: start..end });
                }
                start = end;
            }
        }
        rounds.reverse();
        rounds
    };
    Ok(limits.into_iter().enumerate().map(of_shard).collect())
}

fn call<'a>(
    (shard, round): &(usize, Vec<Wanted>),
    wanted: &[(Arc<RemoteTable>, &[i64])],
    splits: &'a [Split],
) -> Call<'a> {
    let place = |part: &Wanted| wanted[part.lookup].0.on(*shard);
    let reads = round.iter().map(|part| TableIds {
        table: place(part).number,
        ids: &splits[part.lookup].ids[*shard][part.range.clone()],
    });
    let incarnations = round.iter().map(|part| place(part).incarnation).collect();
    Call { shard: *shard, incarnations, sequence: 0, request: Request::Read(reads.collect()) }
}
