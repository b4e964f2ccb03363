//! What a snapshot says of those before it: snapshots that follow one another, full ones too, are of one *lineage*.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::files::save_id;

/// How many other lineages a snapshot says what its store held of.
pub(super) const MAX_HELD: usize = 16;

/// Which snapshots one goes on with, and who saved it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lineage {
    /// The name of the snapshot with which the lineage began.
    pub(super) id: String,
    /// The name under which the snapshot was saved, which it keeps when ids are forgotten.
    pub(super) save: String,
    /// The stores that saved it, of those that outlive their processes.
    pub(super) writers: BTreeSet<String>,
    /// What they held of other lineages, such as those of other directories; what they held last comes last.
    pub(super) held: Vec<HeldSave>,
}

/// The last snapshot of a lineage that a store has saved or loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeldSave {
    pub(super) lineage: String,
    pub(super) save: String,
}

impl Lineage {
    /// Returns the beginning of a lineage, as of a manifest from before there were any.
    pub(super) fn beginning(id: &str, save: &str) -> Self {
        Self { id: id.to_owned(), save: save.to_owned(), ..Self::default() }
    }

    pub(super) fn validate(&self) -> std::result::Result<(), String> {
        let held = self.held.iter().flat_map(|held| [&held.lineage, &held.save]);
        [&self.id, &self.save].into_iter().chain(held).try_for_each(|name| save_id(name).map(drop))?;
        if let Some(writer) = self.writers.iter().find(|writer| save_id(writer).is_err()) {
            return Err(format!("the writer \"{writer}\" is not sixteen hexadecimal digits"));
        }
        match self.held.len() {
            0..=MAX_HELD => Ok(()),
            held => Err(format!("it holds {held} other lineages, expected at most {MAX_HELD}")),
        }
    }
}
