//! What tables tell those who follow them: the rows that changed since they were last asked, as they are now, and the ids
//! whose rows went. Several tables are asked at one moment.

use std::sync::{Arc, RwLockWriteGuard};

use super::engine::Engine;
use super::ids::row_index::RowIndex;
use super::locks::exclusive_each;
use super::rows::Rows;
use super::table::Table;
use crate::calls::ChangedRows;
use crate::kernel::drawn::drawn_number;
use crate::{Error, Result};

const OPERATION: &str = "publish";

/// Notes the changes of tables from here on, and returns the number of this publication.
///
/// # Errors
/// [`Error::ForkedChild`]; [`Error::InvalidConfig`] for a table that is given twice; [`Error::Published`].
pub(crate) fn begin(tables: &[Arc<Table>]) -> Result<u64> {
    if let Some(table) = tables.iter().find(|table| table.config.optimizer.catches_up()) {
        let message = format!(
            "publish: rows of table \"{}\" change with every step (optimizer.catch_up): no list of changes has them",
            table.name
        );
        return Err(Error::InvalidConfig { message });
    }
    let (publication, locked) = (drawn_number(), lock(tables)?);
    if let Some((place, _)) = locked.iter().find(|(_, rows)| rows.changes.are_published()) {
        return Err(Error::Published { table: tables[*place].name.clone() });
    }
    for (_, mut rows) in locked {
        rows.changes.publish(publication);
        rows.settle();
    }
    Ok(publication)
}

/// Returns what changed in each table since this was asked last. Unless the last answer `was_told`, it is a part of this
/// one.
///
/// # Errors
/// [`Error::NotPublished`]: the table was loaded anew, or had no room to note what was deleted. [`Error::Disk`], [`Error::RuleFailed`]: rows cannot be read; then nothing was taken.
pub(crate) fn take(
    engine: Engine<'_>,
    tables: &[Arc<Table>],
    publication: u64,
    was_told: bool,
) -> Result<Vec<ChangedRows>> {
    let mut locked = lock(tables)?;
    for (place, rows) in &locked {
        rows.check_whole()?;
        if !rows.changes.are_published_by(publication) {
            return Err(Error::NotPublished { table: tables[*place].name.clone() });
        }
    }
    let mut taken = Vec::with_capacity(tables.len());
    let mut is_read = Ok(());
    for (place, rows) in &mut locked {
        // Also behind a table that failed: this answer never arrives, so the next call has all of it again.
        let mut changed = rows.take_changed(was_told);
        is_read = is_read.and(tables[*place].read_changed(rows, engine, &mut changed));
        rows.settle();
        taken.push((*place, changed));
    }
    is_read?;
    // Locked in the order of locks, answered in that of the call.
    taken.sort_by_key(|(place, _)| *place);
    Ok(taken.into_iter().map(|(_, changed)| changed).collect())
}

/// Notes nothing for a publication any more.
///
/// # Errors
/// As [`begin`].
pub(crate) fn end(tables: &[Arc<Table>], publication: u64) -> Result<()> {
    for (_, mut rows) in lock(tables)? {
        rows.changes.end_publication(publication);
        rows.settle();
    }
    Ok(())
}

/// Locks tables, each with its place among them.
fn lock(tables: &[Arc<Table>]) -> Result<Vec<(usize, RwLockWriteGuard<'_, Rows>)>> {
    tables.iter().try_for_each(|table| table.check_writable(OPERATION, 0))?;
    if let Some(table) = tables.iter().find(|table| table.config.shared_rows().is_some()) {
        let message = format!(
            "{OPERATION}: table \"{}\" has admission.shared_rows, which those who follow a table cannot have",
            table.name
        );
        return Err(Error::InvalidConfig { message });
    }
    exclusive_each(OPERATION, tables)
}

impl Rows {
    fn take_changed(&mut self, was_told: bool) -> ChangedRows {
        let (indices, deleted) = self.changes.take_published(self.row_ids.used(), was_told);
        let ids = indices.into_iter().map(|index| self.row_ids.of(RowIndex(index as u32))).collect();
        ChangedRows { ids, deleted, rows: Vec::new() }
    }
}

impl Table {
    fn read_changed(&self, rows: &Rows, engine: Engine<'_>, changed: &mut ChangedRows) -> Result<()> {
        changed.rows = vec![0.0; changed.ids.len() * self.config.dim];
        self.read_locked(rows, engine, &changed.ids, &mut changed.rows, &mut [])
    }
}
