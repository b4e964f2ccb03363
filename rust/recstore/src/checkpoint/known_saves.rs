//! What a store knows of its saves, for one that comes back with its rows after its process has ended.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::files::save_id;
use super::options::{Shard, share_of};

/// How many snapshots, and how many lineages, are remembered: the last ones.
pub(super) const MAX_KNOWN: usize = 1024;

/// Which snapshots a store has saved and loaded. Its owner keeps it where the rows are, and gives it back with them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownSaves {
    /// Number and count of the shards, for a store that has the rows of one.
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) share: Option<(usize, usize)>,
    /// The snapshots, the last one last.
    pub(super) saves: Vec<String>,
    pub(super) lineages: Vec<KnownLineage>,
    /// Snapshots with the store's number that were made until then, in seconds since 1970, count though they are not listed.
    pub(super) number_counts_until: u64,
}

/// The last snapshot that is known of a lineage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KnownLineage {
    pub(super) lineage: String,
    pub(super) save: String,
    /// Whether the store was part of the lineage, and not only one whose snapshot it loaded.
    pub(super) is_own: bool,
}

impl KnownSaves {
    /// Returns what a store that has a shard's rows knows and has saved nothing so far. With `number_counts_until`, in seconds
    /// since 1970, the snapshots that were made under its number until then are its own all the same.
    pub fn new(shard: Shard, number_counts_until: u64) -> Self {
        let share = share_of(shard).map(|Shard { number, of }| (number, of));
        Self { share, saves: Vec::new(), lineages: Vec::new(), number_counts_until }
    }

    /// The same with the snapshots that were made under the store's number until a time, in seconds since 1970.
    #[must_use]
    pub fn counting_until(self, seconds: u64) -> Self {
        Self { number_counts_until: seconds, ..self }
    }

    /// Takes what several stores know for a store that gets the rows of all of them, those of `shard`: what each knows.
    pub fn join(all: &[Self], shard: Shard) -> Self {
        let mut joined = Self::new(shard, all.iter().map(|each| each.number_counts_until).min().unwrap_or(0));
        if let Some((first, others)) = all.split_first() {
            let known = |save: &&String| others.iter().all(|other| other.saves.contains(save));
            joined.saves = first.saves.iter().filter(known).cloned().collect();
            let is_known =
                |lineage: &&KnownLineage| others.iter().all(|other| other.lineages.contains(lineage));
            joined.lineages = first.lineages.iter().filter(is_known).cloned().collect();
        }
        joined
    }

    /// Checks names and counts.
    ///
    /// # Errors
    /// A sentence that names what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let names = self.lineages.iter().flat_map(|known| [&known.lineage, &known.save]);
        self.saves.iter().chain(names).try_for_each(|name| save_id(name).map(drop))?;
        for (what, count) in [("snapshots", self.saves.len()), ("lineages", self.lineages.len())] {
            if count > MAX_KNOWN {
                return Err(format!("it has {count} {what}, expected at most {MAX_KNOWN}"));
            }
        }
        let mut ids = BTreeSet::new();
        if let Some(twice) = self.lineages.iter().find(|known| !ids.insert(&known.lineage)) {
            return Err(format!("it has the lineage {} twice", twice.lineage));
        }
        match self.share {
            Some((number, of)) if of < 2 || number >= of => {
                Err(format!("the share is of shard {number} of {of}, expected one of at least 2"))
            }
            _ => Ok(()),
        }
    }
}
