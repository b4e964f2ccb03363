//! Records on their way between memory and the slot file, on the threads of whoever hosts the store.
//!
//! Rows go in the order of the file, and neighbours in one call.

#![expect(unsafe_code, reason = "threads fill different frames of one table")]

use std::io;
use std::sync::OnceLock;

use super::records::SharedRecords;
use super::slot_group::SlotGroup;
use crate::disk::{Resident, SlotFile};
use crate::kernel::parallel::{Executor, for_each_mut};
use crate::table::ids::row_index::RowIndex;

/// The bytes read or written in one call at most.
const CALL_BYTES: usize = 256 << 10;

/// The records worth waking a thread for.
const RECORDS_A_PIECE: usize = 16;

/// Pieces a thread, so that all end at about the same time.
const PIECES_A_THREAD: usize = 4;

/// Calls `transfer` with runs of rows that are neighbours in the file, and a buffer that is kept between them.
///
/// # Errors
/// That of a transfer; others may have been done or not.
fn each_run(
    executor: &dyn Executor,
    record_floats: usize,
    moves: &[Resident],
    transfer: impl Fn(&[Resident], &mut Vec<f32>) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let failure = OnceLock::new();
    let piece = moves.len().div_ceil(executor.num_threads() * PIECES_A_THREAD).max(RECORDS_A_PIECE);
    let a_call = (CALL_BYTES / (record_floats * size_of::<f32>())).max(1);
    for_each_mut(executor, moves.chunks(piece), |moves| {
        let mut buffer = Vec::new();
        let runs = moves.chunk_by(|one, next| one.index + 1 == next.index);
        let done = runs.flat_map(|run| run.chunks(a_call)).try_for_each(|run| transfer(run, &mut buffer));
        if let Err(error) = done {
            _ = failure.set(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Writes the records of `moves`, in the order of their indices, to the file.
pub(crate) fn write_back(
    executor: &dyn Executor,
    file: &SlotFile,
    storage: &SlotGroup,
    moves: &[Resident],
) -> io::Result<()> {
    let record = |of: &Resident| storage.record(RowIndex(of.frame));
    each_run(executor, file.record_floats(), moves, |run, buffer| {
        if let [single] = run {
            return file.write(single.index, record(single));
        }
        buffer.clear();
        run.iter().for_each(|one| buffer.extend_from_slice(record(one)));
        file.write(run[0].index, buffer)
    })
}

/// Reads the records of `moves`, each of another frame and in the order of their indices, from the file.
pub(crate) fn read_in(
    executor: &dyn Executor,
    file: &SlotFile,
    storage: &mut SlotGroup,
    moves: &[Resident],
) -> io::Result<()> {
    let records: SharedRecords<'_> = storage.shared();
    each_run(executor, file.record_floats(), moves, |run, buffer| {
        if let [single] = run {
            // SAFETY:
            // 1. Located here.
            // 2. Each frame is of one of `moves`, which are walked by one thread each, and nothing else uses this record
            //    while it is filled.
            return file
                .read(single.index, unsafe { records.record_mut(records.locate(RowIndex(single.frame))) });
        }
        buffer.resize(run.len() * file.record_floats(), 0.0);
        file.read(run[0].index, buffer)?;
        for (one, record) in run.iter().zip(buffer.chunks_exact(file.record_floats())) {
            // SAFETY: 1. and 2. as above.
            unsafe { records.record_mut(records.locate(RowIndex(one.frame))) }.copy_from_slice(record);
        }
        Ok(())
    })
}
