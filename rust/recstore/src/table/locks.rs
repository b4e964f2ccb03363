//! The locks of several tables.

use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};

use super::rows::Rows;
use super::table::Table;
use crate::{Error, Result};

/// Returns where a table stands in the order in which a call locks several, so that no two calls wait for each other.
///
/// It is the order of opening, not of addresses: tables are judged as they are locked, and the error of a call is that of
/// the first one.
pub(super) fn lock_order(table: &Table) -> u64 {
    table.age
}

/// Locks tables for one call alone, each with its place among them.
///
/// # Errors
/// [`Error::InvalidConfig`] for a table that is given twice.
pub(super) fn exclusive_each<'a>(
    operation: &str,
    tables: &'a [Arc<Table>],
) -> Result<Vec<(usize, RwLockWriteGuard<'a, Rows>)>> {
    let mut order: Vec<_> = tables.iter().enumerate().collect();
    order.sort_by_key(|(_, table)| lock_order(table));
    if let Some(pair) = order.windows(2).find(|pair| Arc::ptr_eq(pair[0].1, pair[1].1)) {
        let message = format!("{operation}: table \"{}\" is given twice", pair[0].1.name);
        return Err(Error::InvalidConfig { message });
    }
    Ok(order.into_iter().map(|(place, table)| (place, table.exclusive())).collect())
}

/// The shared locks of several tables.
pub(super) struct Locks<'a> {
    /// In lock order, each table once.
    guards: Vec<(u64, RwLockReadGuard<'a, Rows>)>,
}

impl<'a> Locks<'a> {
    pub(super) fn shared(tables: &'a [Arc<Table>]) -> Self {
        let mut order: Vec<&Table> = tables.iter().map(AsRef::as_ref).collect();
        order.sort_by_key(|table| lock_order(table));
        order.dedup_by_key(|table| lock_order(table));
        Self { guards: order.into_iter().map(|table| (lock_order(table), table.shared())).collect() }
    }

    /// Checks that the rows of each table are all of one step.
    pub(super) fn check_whole(&self) -> Result<()> {
        self.guards.iter().try_for_each(|(_, rows)| rows.check_whole())
    }

    /// Returns the rows of one of the tables that were locked.
    pub(super) fn of(&self, table: &Table) -> &Rows {
        let place = self.guards.partition_point(|(order, _)| *order < lock_order(table));
        &self.guards[place].1
    }
}
