//! Puts what was loaded in the place of what tables held.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::locks::lock_order;
use super::table::Table;

/// Gives each table the rows, state and counts of another of its name and configuration, all at one moment.
pub(crate) fn replace_rows(mut pairs: Vec<(Arc<Table>, Table)>) {
    pairs.sort_by_key(|(table, _)| lock_order(table));
    let mut locked: Vec<_> = pairs.iter_mut().map(|(table, loaded)| (table.exclusive(), loaded)).collect();
    for (rows, loaded) in &mut locked {
        mem::swap(&mut **rows, loaded.own_rows());
    }
    drop(locked);
    for (table, loaded) in &pairs {
        table.refusals.store(loaded.refusals.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
