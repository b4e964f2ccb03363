//! Which snapshots a store has saved or loaded, and to which directories it may save.
//!
//! A store goes on with the lineage of the newest snapshot if it has held that one. It is refused if it was part of the
//! directory and another store has gone on since. A store that was no part of it begins a lineage of its own, beside which
//! the snapshots of the other stay.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::files::{name_of, refused};
use super::known_saves::{KnownLineage, KnownSaves, MAX_KNOWN};
use super::lineage::{HeldSave, Lineage, MAX_HELD};
use super::load::Loaded;
use super::manifest::{Manifest, Snapshot};
use super::options::{LoadOptions, SaveOptions, Shard, share_of};
use crate::Result;
use crate::disk::Directory;
use crate::table::SaveId;

/// What a store says of itself when it saves.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Claim {
    /// Whether it has held the newest snapshot.
    pub(super) follows: bool,
    /// The newest snapshot that it found.
    pub(super) newest: Option<String>,
    pub(super) writers: BTreeSet<String>,
    pub(super) held: Vec<HeldSave>,
}

impl Claim {
    /// Adds what another store says that saves with this one: together they have only what each has.
    pub(super) fn join(&mut self, other: Self) {
        self.follows &= other.follows;
        self.writers.extend(other.writers);
        self.held.retain(|held| other.held.contains(held));
    }

    /// Returns the lineage of a snapshot that is to be the newest of a directory.
    pub(super) fn lineage(self, manifest: &Manifest, snapshot: &str) -> Lineage {
        let newest = manifest.snapshots.last().filter(|_| self.follows);
        let id = newest.map_or(snapshot, |newest| &newest.lineage.id).to_owned();
        let mut held = self.held;
        held.retain(|held| held.lineage != id);
        held.drain(..held.len().saturating_sub(MAX_HELD));
        Lineage { id, save: snapshot.to_owned(), writers: self.writers, held }
    }

    /// Returns the newest of the snapshots that stay though another store saved them; none if the save goes on with them.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`]: somebody else has saved since the claim was made, or two lineages would stay.
    pub(super) fn check(
        &self,
        manifest: &Manifest,
        directory: &Directory,
        options: &SaveOptions<'_>,
    ) -> Result<Option<String>> {
        let Some(newest) = manifest.snapshots.last() else { return Ok(None) };
        if let Some(seen) = self.newest.as_ref().filter(|seen| **seen != newest.id) {
            let message = format!(
                "the newest snapshot here was {seen} when the shards were saved, and is {} now: another store saves here too",
                newest.id
            );
            return Err(refused(directory.path(), message));
        }
        if self.follows || options.replace {
            return Ok(None);
        }
        let other = manifest.snapshots.iter().rfind(|snapshot| snapshot.lineage.id != newest.lineage.id);
        match other {
            None => Ok(Some(newest.id.clone())),
            Some(other) => {
                let message = format!(
                    "it has snapshots of two other stores already, {} and the newest, {}: save elsewhere, load the newest one before training, or drop both (replace=True)",
                    other.id, newest.id
                );
                Err(refused(directory.path(), message))
            }
        }
    }
}

/// The saves that a store has made, or was loaded from.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    /// The share of the rows that the store has of them, beside the other stores that save with it; all without it.
    share: Option<Shard>,
    last: Option<SaveId>,
    /// All of them, and those that were held by the stores which saved what was loaded; the last one last.
    all: Vec<String>,
    /// The lineages that it was part of itself.
    lineages: BTreeSet<String>,
    /// The last save of each lineage, the last one last.
    held: Vec<HeldSave>,
    /// Until when, in seconds since 1970, a snapshot with the store's number counts as its own though it is not among these;
    /// always of a store that was given no [`KnownSaves`].
    number_counts_until: Option<u64>,
}

/// Those of a store that has none.
static NONE: Saves = Saves {
    share: None,
    last: None,
    all: Vec::new(),
    lineages: BTreeSet::new(),
    held: Vec::new(),
    number_counts_until: Some(0),
};

impl Saves {
    /// Returns what a store has of them that saves all rows, or as one of several stores its share: one that has another share
    /// has none of them.
    pub(super) fn of_share(&self, share: Option<Shard>) -> &Self {
        if self.share.is_none() || self.share == share { self } else { &NONE }
    }

    /// Returns the share that a save writes. The directory of a server is its own, whichever share that is.
    pub(super) fn share_of_save(&self, options: &SaveOptions<'_>) -> Option<Shard> {
        self.share.filter(|_| options.by_its_server)
    }

    /// The last save or load.
    pub(super) fn last(&self) -> Option<SaveId> {
        self.last
    }

    /// Notes what a load gave the store. One that has left tables out gives no part in the lineage: a save would drop them.
    pub(crate) fn note_load(&mut self, loaded: &Loaded, options: &LoadOptions<'_>) {
        let share = match (options.keeps, options.shard) {
            // Nobody can say who has the other rows.
            (Some(_), None) => return *self = self.emptied(None),
            (Some(_), Some(shard)) => share_of(shard),
            (None, _) => None,
        };
        self.take_share(share);
        if loaded.has_all_tables {
            self.note(loaded.save, &loaded.lineage, share);
        }
    }

    /// Has a share from now on. With another one than before the store has nothing of what it saved or loaded then.
    fn take_share(&mut self, share: Option<Shard>) {
        if self.share != share {
            *self = self.emptied(share);
        }
    }

    fn emptied(&self, share: Option<Shard>) -> Self {
        Self { share, number_counts_until: self.number_counts_until, ..Self::default() }
    }

    /// Notes that the store holds its share of what was saved or loaded as `save`, of this lineage.
    pub(super) fn note(&mut self, save: SaveId, lineage: &Lineage, share: Option<Shard>) {
        self.take_share(share);
        self.last = Some(save);
        self.know(name_of(save));
        self.lineages.insert(lineage.id.clone());
        for held in &lineage.held {
            self.hold(held.clone());
        }
        self.hold(HeldSave { lineage: lineage.id.clone(), save: lineage.save.clone() });
    }

    fn hold(&mut self, held: HeldSave) {
        self.know(held.save.clone());
        self.held.retain(|before| before.lineage != held.lineage);
        self.held.push(held);
    }

    fn know(&mut self, save: String) {
        if !self.all.contains(&save) {
            self.all.push(save);
        }
    }

    /// Returns what a store needs to be given when it comes back with its rows.
    pub(crate) fn known(&self) -> KnownSaves {
        let last = |count: usize| count.saturating_sub(MAX_KNOWN);
        let known = |held: &HeldSave| KnownLineage {
            lineage: held.lineage.clone(),
            save: held.save.clone(),
            is_own: self.lineages.contains(&held.lineage),
        };
        KnownSaves {
            share: self.share.map(|Shard { number, of }| (number, of)),
            saves: self.all[last(self.all.len())..].to_vec(),
            lineages: self.held[last(self.held.len())..].iter().map(known).collect(),
            number_counts_until: self.number_counts_until.unwrap_or(0),
        }
    }

    /// Takes back what the store knew, behind the load of the rows that it had.
    pub(crate) fn remember(&mut self, known: KnownSaves) {
        // What came with the rows and is not known came later: the process ended before it could tell, or did not tell.
        let is_known = |save: &String| {
            known.saves.contains(save) || known.lineages.iter().any(|last| last.save == *save)
        };
        self.held.retain(|held| !is_known(&held.save));
        let later = std::mem::take(&mut self.held);
        self.share = known.share.map(|(number, of)| Shard { number, of });
        self.number_counts_until = Some(known.number_counts_until);
        let with_rows = std::mem::replace(&mut self.all, known.saves);
        with_rows.into_iter().for_each(|save| self.know(save));
        for KnownLineage { lineage, save, is_own } in known.lineages {
            if is_own {
                self.lineages.insert(lineage.clone());
            }
            self.hold(HeldSave { lineage, save });
        }
        self.lineages.extend(later.iter().map(|held| held.lineage.clone()));
        later.into_iter().for_each(|held| self.hold(held));
    }

    /// Returns what the store says of itself when it saves to a directory.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`]: the store was part of the directory, and another one has saved there since; as
    /// [`Claim::check`].
    pub(super) fn claim(
        &self,
        manifest: &Manifest,
        directory: &Directory,
        options: &SaveOptions<'_>,
    ) -> Result<Claim> {
        let (newest, writer) = (manifest.snapshots.last(), options.writer.as_ref());
        // Nobody else saves to the directory of a server.
        let follows = newest.is_some_and(|newest| {
            options.by_its_server || self.has(&newest.lineage) || self.wrote(newest, writer)
        });
        if let Some(newest) = newest.filter(|_| !follows && !options.replace) {
            self.check_not_overtaken(manifest, directory, (newest, writer))?;
        }
        let claim = Claim {
            follows,
            newest: newest.map(|newest| newest.id.clone()),
            writers: writer.into_iter().cloned().collect(),
            held: self.held.clone(),
        };
        Ok(claim)
    }

    fn has(&self, lineage: &Lineage) -> bool {
        self.all.contains(&lineage.save)
    }

    /// Whether the store made a snapshot that it does not know, as of a time from which it knows none.
    fn wrote(&self, snapshot: &Snapshot, writer: Option<&String>) -> bool {
        has_number(snapshot, writer) && self.number_counts_until.is_none_or(|until| snapshot.created <= until)
    }

    fn check_not_overtaken(
        &self,
        manifest: &Manifest,
        directory: &Directory,
        (newest, writer): (&Snapshot, Option<&String>),
    ) -> Result<()> {
        let is_here =
            |held: &&HeldSave| self.lineages.contains(&held.lineage) && manifest.has_had(&held.lineage);
        let held = self.held.iter().rfind(is_here).map(|held| &held.save);
        let written = || manifest.snapshots.iter().rfind(|snapshot| self.wrote(snapshot, writer));
        let own = held.or_else(|| written().map(|snapshot| &snapshot.lineage.save));
        let (who, since) = match (has_number(newest, writer), own) {
            (false, None) => return Ok(()),
            (false, Some(own)) => {
                ("another store has saved", format!(", since this one saved or loaded {own}"))
            }
            (true, own) => (
                "a later state or a copy of this store has saved",
                own.map_or(String::new(), |own| format!(", since this one saved or loaded {own}")),
            ),
        };
        let message = format!(
            "{who} the newest snapshot here, {}{since}: save elsewhere, load the newest one before training, or drop what is here (replace=True)",
            newest.id
        );
        Err(refused(directory.path(), message))
    }
}

/// Whether a snapshot was saved under the number of a store, which copies of its rows have too.
fn has_number(snapshot: &Snapshot, writer: Option<&String>) -> bool {
    writer.is_some_and(|writer| snapshot.lineage.writers.contains(writer))
}
