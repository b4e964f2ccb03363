//! One table: ids, rows, optimizer state and the calls on them.
//!
//! A call first checks everything it was given, then takes the lock, sees whether new rows fit and brings rows from the
//! disk where some lie there, and from there on cannot fail: a refused call has changed nothing. (Only a step of more
//! rows on disk than memory holds can: then no call uses the rows any more.) Reads share the lock; a write or an update
//! holds it alone, so each is atomic.

mod access_stats;
mod admission;
mod bags;
mod bounds;
mod budget;
mod changes;
mod checks;
mod copying;
mod cost;
mod cut_rows;
mod engine;
mod erasing;
mod evict_for_space;
mod growth;
mod ids;
mod initial_values;
mod locks;
mod lookup;
mod memory;
mod pending_evictions;
pub(crate) mod publishing;
mod reading;
mod replacing;
mod rows;
mod saving;
mod shared_rows;
mod state;
mod storage;
mod sweep;
mod sweeping;
mod table;
mod table_rule;
mod table_validator;
mod tiered_rows;
mod update;
mod writing;

pub(crate) use admission::AdmissionCounts;
pub(crate) use bags::pool;
pub(crate) use budget::MemoryBudget;
pub(crate) use changes::{CopiedRows, SaveId};
pub(crate) use cut_rows::cut_rows;
pub use cut_rows::{CutProgress, CutRows};
pub(crate) use engine::Engine;
#[cfg(feature = "internals")]
pub(crate) use ids::finding::FindRows;
pub(crate) use ids::id_lines::{BEHIND, IdLines};
#[cfg(feature = "internals")]
pub(crate) use ids::id_map::IdMap;
pub use ids::places::TAG_WORDS;
pub(crate) use ids::row_index::{NO_INDEX, RowIndex};
#[cfg(test)]
pub(crate) use ids::without_pages::without_pages;
pub(crate) use initial_values::initializer::Initializer;
pub(crate) use reading::read_each;
pub(crate) use replacing::replace_rows;
pub(crate) use saving::{CutTables, TableCut, TableProgress, cut};
pub(crate) use state::put_states;
pub(crate) use table::Table;
pub use table_validator::{PlacedRows, TableValidator};
pub(crate) use update::{StepRequest, apply, check};
