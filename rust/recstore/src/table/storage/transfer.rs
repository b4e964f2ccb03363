//! Records on their way between memory and the slot file, on the threads of whoever hosts the store.
//!
//! Rows go in the order of the file, and neighbours in one call.

#![expect(unsafe_code, reason = "threads fill different frames of one table")]

use std::io;
use std::sync::OnceLock;

use super::records::SharedRecords;
use super::slot_group::SlotGroup;
use crate::disk::{Reads, Resident, Slot, SlotFile};
use crate::kernel::parallel::{Executor, Serial, for_each_mut};
use crate::table::ids::row_index::RowIndex;

/// The bytes written in one call at most.
const CALL_BYTES: usize = 256 << 10;

/// The records worth waking a thread for.
const RECORDS_PER_PIECE: usize = 64;

/// A row and where its record lies in the file.
type Move = (Slot, Resident);

/// Returns rows in the order of the file.
fn in_order(rows: &[Resident]) -> Vec<Move> {
    let mut moves: Vec<Move> = rows.iter().map(|row| (Slot::of(row.index), *row)).collect();
    moves.sort_unstable();
    moves
}

/// Calls `transfer` with each of `pieces`.
///
/// # Errors
/// That of a transfer; others may have been done or not.
fn each_piece<'a>(
    executor: &dyn Executor,
    pieces: impl Iterator<Item = &'a [Move]>,
    transfer: impl Fn(&[Move]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let failure = OnceLock::new();
    for_each_mut(executor, pieces, |piece| {
        if let Err(error) = transfer(piece) {
            _ = failure.set(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Writes the records of rows to the file: a thread a stripe, since two would wait for each other there.
pub(crate) fn write_back(
    executor: &dyn Executor,
    file: &SlotFile,
    storage: &SlotGroup,
    rows: &[Resident],
) -> io::Result<()> {
    let moves = in_order(rows);
    let record = |of: &Move| storage.record(RowIndex(of.1.frame));
    let a_call = (CALL_BYTES / (file.record_floats() * size_of::<f32>())).max(1);
    let stripes = moves.chunk_by(|(one, _), (next, _)| one.stripe == next.stripe);
    let executor: &dyn Executor = if moves.len() < RECORDS_PER_PIECE { &Serial } else { executor };
    each_piece(executor, stripes, |stripe| {
        let mut buffer = Vec::new();
        let runs = stripe.chunk_by(|(one, _), (next, _)| one.is_before(*next));
        runs.flat_map(|run| run.chunks(a_call)).try_for_each(|run| {
            if let [single] = run {
                return file.write(single.0, record(single));
            }
            buffer.clear();
            run.iter().for_each(|one| buffer.extend_from_slice(record(one)));
            file.write(run[0].0, &buffer)
        })
    })
}

/// Reads the records of rows, each of another frame, from the file.
pub(crate) fn read_in(
    executor: &dyn Executor,
    file: &SlotFile,
    storage: &mut SlotGroup,
    rows: &[Resident],
) -> io::Result<()> {
    let moves = in_order(rows);
    let records: SharedRecords<'_> = storage.shared();
    let piece = moves.len().div_ceil(executor.num_threads()).max(RECORDS_PER_PIECE);
    each_piece(executor, moves.chunks(piece), |piece| {
        let mut reads = Reads::default();
        for (slot, row) in piece {
            // SAFETY:
            // 1. Located here.
            // 2. Each frame is of one of `rows`, which are walked by one thread each, and nothing else uses this record
            //    while it is filled.
            let record = unsafe { records.record_mut(records.locate(RowIndex(row.frame))) };
            reads.push(*slot, record);
        }
        file.read_all(reads)
    })
}
