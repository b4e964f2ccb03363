//! The locks of several tables.

use std::sync::{Arc, RwLockReadGuard};

use super::rows::Rows;
use super::table::Table;
use crate::Result;

/// Returns where a table stands in the order in which a call locks several, so that no two calls wait for each other.
///
/// It is the order of opening, not of addresses: tables are judged as they are locked, and the error of a call is that of
/// the first one.
pub(super) fn lock_order(table: &Table) -> u64 {
    table.age
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
