//! The steps of several tables, all or none.

use super::finding::{find_rows, take_kept_places};
use super::locked::Locked;
use super::request::CheckedStep;
use super::sharing::step_shared_rows;
use super::stepping::step_rows;
use crate::kernel::parallel::for_each_mut;
use crate::table::engine::Engine;
use crate::table::locks::lock_order;
use crate::{Error, Result};

/// Takes the steps, of different tables, and returns how many rows left these.
///
/// # Errors
/// [`Error::MemoryLimit`], [`Error::Disk`]; no row of any table has changed. [`Error::StepCutShort`], if a step of more rows
/// than memory holds met an error of the disk, or a rule of the program's own panicked: then no call uses that table's rows
/// any more, and the other tables have taken their steps.
pub(crate) fn apply(engine: Engine<'_>, mut steps: Vec<CheckedStep<'_>>) -> Result<u64> {
    // The order of every call on several tables: no two of them wait for each other.
    steps.sort_by_key(|step| lock_order(step.table));
    let merged: Vec<_> = steps.iter_mut().map(|step| step.merged.take()).collect();
    let merged: Vec<_> = merged
        .iter()
        .zip(&steps)
        .map(|(merged, step)| merged.as_ref().map(|merged| merged.as_gradients(step.table.config.dim)))
        .collect();
    let mut guards: Vec<_> = steps.iter().map(|step| step.table.exclusive()).collect();
    let locked = steps.iter().zip(&merged).zip(&mut guards);
    let mut locked: Vec<_> =
        locked.map(|((step, merged), rows)| Locked::new(step, merged.as_ref(), rows)).collect();
    take_kept_places(engine, &mut locked);
    find_rows(engine, &mut locked);
    // All tables before the first row changes: behind this only a disk or a rule of the program can fail.
    if let Err(error) = locked.iter_mut().try_for_each(|locked| locked.make_ready(engine)) {
        locked.into_iter().for_each(Locked::give_up);
        return Err(error);
    }
    for_each_mut(engine.executor, locked.iter_mut().filter(|locked| locked.misses()), Locked::insert_missing);
    step_rows(engine, &mut locked);
    step_shared_rows(engine, &mut locked);
    // All come to their end, whichever fails.
    let finished: Vec<_> = locked.into_iter().map(Locked::finish).collect();
    let left: Result<u64> = finished.into_iter().sum();
    left.map_err(|error| Error::StepCutShort(Box::new(error)))
}
