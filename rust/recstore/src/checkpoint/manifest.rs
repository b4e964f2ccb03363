//! The manifest of a checkpoint directory: which files make up which snapshot.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::compression::Compression;
use super::entries::{ShardEntry, TableEntry};
use super::files::{
    FILE_NAME, LOCK_NAME, MAX_TEXT_BYTES, NOTHING, at, found, inside, lock, refused, save_id,
};
use super::lineage::Lineage;
use super::metadata::Metadata;
use super::options::SaveOptions;
use super::unfinished::{Unfinished, check_no_rows, remove, remove_unneeded};
use crate::Result;
use crate::disk::Directory;
use crate::table::SaveId;

const FORMAT: &str = "recstore-checkpoint";
const VERSION: u32 = 2;

/// The version that has no lineages.
const WITHOUT_LINEAGES: u32 = 1;

/// The most lineages of which a directory has snapshots: those of another store stay beside the newest.
const MAX_LINEAGES: usize = 2;

/// How many lineages that ended a directory remembers.
const MAX_ENDED: usize = 64;

/// All snapshots of a directory, the oldest first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    version: u32,
    pub(super) snapshots: Vec<Snapshot>,
    /// The lineages of which there are no snapshots any more; the one that ended last comes last.
    ended: Vec<String>,
    /// Eight hexadecimal digits: the CRC-32 of the file with zeros in their place.
    checksum: String,
}

/// What stands before the checksum; the last of these in the file is meant.
const BEFORE_CHECKSUM: &[u8] = b"\"checksum\": \"";

const NO_CHECKSUM: &str = "00000000";

/// Returns the checksum that a manifest should have; none if there is no place for one.
fn checksum_of(mut text: Vec<u8>) -> Option<String> {
    // The last one: the caller's metadata, which stand before it, may hold the same bytes.
    let before = text.windows(BEFORE_CHECKSUM.len()).rposition(|part| part == BEFORE_CHECKSUM)?;
    let digits =
        text.get_mut(before + BEFORE_CHECKSUM.len()..)?.first_chunk_mut::<{ NO_CHECKSUM.len() }>()?;
    digits.copy_from_slice(NO_CHECKSUM.as_bytes());
    Some(format!("{:08x}", crc32fast::hash(&text)))
}

/// What every version begins with.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

impl Header {
    fn check(&self) -> std::result::Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("expected the format \"{FORMAT}\", got \"{}\"", self.format));
        }
        if !(WITHOUT_LINEAGES..=VERSION).contains(&self.version) {
            return Err(format!(
                "this release reads the versions {WITHOUT_LINEAGES} to {VERSION}, the checkpoint has {}",
                self.version
            ));
        }
        Ok(())
    }
}

/// The tables of a store at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Snapshot {
    /// Sixteen hexadecimal digits, of no other snapshot.
    pub(super) id: String,
    /// The snapshot that this one tells the changes since; none for a full one. The key is there all the same.
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) parent: Option<String>,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// Which snapshots it goes on with.
    pub(super) lineage: Lineage,
    /// What the caller gave along.
    pub(super) metadata: Metadata,
    pub(super) tables: Vec<TableEntry>,
}

impl Snapshot {
    /// Returns the entries of its own files.
    pub(super) fn shards(&self) -> impl Iterator<Item = &ShardEntry> {
        self.tables.iter().flat_map(|table| &table.shards)
    }

    /// Checks its names and figures, that every table has a name of its own, and that others can read the metadata.
    fn validate(&self) -> std::result::Result<(), String> {
        self.metadata.check_depth()?;
        [&self.id].into_iter().chain(&self.parent).try_for_each(|name| save_id(name).map(drop))?;
        self.tables.iter().try_for_each(TableEntry::validate)?;
        self.lineage
            .validate()
            .map_err(|message| format!("the lineage of the snapshot {}: {message}", self.id))?;
        let mut names = BTreeSet::from([""]);
        match self.tables.iter().find(|table| !names.insert(&table.name)) {
            Some(table) => Err(format!(
                "the snapshot {} has two tables \"{}\", or one without a name",
                self.id, table.name
            )),
            None => Ok(()),
        }
    }
}

/// What a manifest of version 1 has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestOfVersion1 {
    format: String,
    #[serde(rename = "version")]
    _version: u32,
    snapshots: Vec<SnapshotOfVersion1>,
    checksum: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapshotOfVersion1 {
    id: String,
    #[serde(deserialize_with = "Option::deserialize")]
    parent: Option<String>,
    created: u64,
    metadata: Metadata,
    tables: Vec<TableEntry>,
}

impl ManifestOfVersion1 {
    /// Makes the snapshots one lineage, which begins with the newest: the first one may be gone already.
    fn with_lineage(self) -> Manifest {
        let begins = self.snapshots.last().map_or(String::new(), |newest| newest.id.clone());
        let with_lineage = |SnapshotOfVersion1 { id, parent, created, metadata, tables }| {
            let lineage = Lineage::beginning(&begins, &id);
            Snapshot { id, parent, created, lineage, metadata, tables }
        };
        let snapshots = self.snapshots.into_iter().map(with_lineage).collect();
        let (format, checksum) = (self.format, self.checksum);
        Manifest { format, version: VERSION, snapshots, ended: Vec::new(), checksum }
    }
}

fn within(what: &str, count: usize, most: usize) -> std::result::Result<(), String> {
    match count <= most {
        true => Ok(()),
        false => Err(format!("it has {count} {what}, expected at most {most}")),
    }
}

fn rows_of(tables: &[TableEntry]) -> usize {
    tables.iter().map(TableEntry::rows).fold(0, usize::saturating_add)
}

impl Manifest {
    pub(super) fn empty() -> Self {
        let checksum = NO_CHECKSUM.to_owned();
        let (snapshots, ended) = (Vec::new(), Vec::new());
        Self { format: FORMAT.to_owned(), version: VERSION, snapshots, ended, checksum }
    }

    /// Reads the manifest of a directory; `None` if there is none.
    pub(super) fn read(directory: &Directory) -> Result<Option<Self>> {
        let path = directory.path().join(FILE_NAME);
        let text = match directory.read(FILE_NAME, MAX_TEXT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.map_err(inside(directory))?,
        };
        let unreadable = |error: serde_json::Error| match error.is_data() {
            true => refused(&path, format!("it is no manifest of a checkpoint: {error}")),
            false => refused(&path, error),
        };
        // Another version may have other keys, and its checksum elsewhere.
        let header: Header = serde_json::from_slice(&text).map_err(unreadable)?;
        header.check().map_err(|message| refused(&path, message))?;
        let manifest = match header.version {
            WITHOUT_LINEAGES => serde_json::from_slice(&text).map(ManifestOfVersion1::with_lineage),
            _ => serde_json::from_slice(&text),
        };
        let manifest: Self = manifest.map_err(unreadable)?;
        if checksum_of(text).as_ref() != Some(&manifest.checksum) {
            return Err(refused(&path, "it was changed: its checksum is another"));
        }
        manifest.validate().map_err(|message| refused(&path, message))?;
        Ok(Some(manifest))
    }

    /// Reads the manifest of a directory that has one.
    pub(super) fn existing(directory: &Directory) -> Result<Self> {
        Self::read(directory)?.ok_or_else(|| refused(directory.path(), NOTHING))
    }

    /// Reads the manifest of a directory to save to; it is empty if nothing was saved there yet.
    ///
    /// # Errors
    /// As [`Manifest::read`]; the directory has rows, but no manifest.
    pub(super) fn read_or_new(directory: &Directory) -> Result<Self> {
        if let Some(manifest) = Self::read(directory)? {
            return Ok(manifest);
        }
        match check_no_rows(directory) {
            Ok(()) => Ok(Self::empty()),
            // Unless another save has just ended.
            Err(refused) => Self::read(directory)?.ok_or(refused),
        }
    }

    /// Whether snapshots of a lineage are or were here.
    pub(super) fn has_had(&self, lineage: &String) -> bool {
        self.ended.contains(lineage) || self.lineages().contains(lineage)
    }

    fn lineages(&self) -> BTreeSet<String> {
        self.snapshots.iter().map(|snapshot| snapshot.lineage.id.clone()).collect()
    }

    fn validate(&self) -> std::result::Result<(), String> {
        self.snapshots.iter().try_for_each(Snapshot::validate)?;
        let mut ids = BTreeSet::new();
        if let Some(twice) = self.snapshots.iter().find(|snapshot| !ids.insert(&snapshot.id)) {
            return Err(format!("there are two snapshots {}", twice.id));
        }
        self.ended.iter().try_for_each(|ended| save_id(ended).map(drop))?;
        within("lineages that have snapshots", self.lineages().len(), MAX_LINEAGES)?;
        within("lineages that ended", self.ended.len(), MAX_ENDED)?;
        match self.shards().find(|shard| !shard.has_own_name()) {
            Some(shard) => Err(format!("\"{}\" is not the name of a file of a checkpoint", shard.file)),
            None => Ok(()),
        }
    }

    /// Returns the save of the newest snapshot.
    pub(super) fn newest_save(&self) -> Option<SaveId> {
        self.snapshots.last().and_then(|newest| save_id(&newest.id).ok())
    }

    /// Puts the manifest that `change` makes of this one in its place. `note` is about the files that are no longer
    /// needed then.
    pub(super) fn replace(
        &mut self,
        directory: &Directory,
        note: &mut Unfinished,
        change: impl FnOnce(&mut Self),
    ) -> Result<()> {
        let (before, lineages): (BTreeSet<String>, _) = (self.files().cloned().collect(), self.lineages());
        change(self);
        self.ended.extend(lineages.difference(&self.lineages()).cloned());
        self.ended.drain(..self.ended.len().saturating_sub(MAX_ENDED));
        let needed = self.files().cloned().collect();
        // Noted before the manifest changes: after a crash in between, the next save still knows what to
        // remove.
        note.add(before.difference(&needed).cloned().collect())?;
        self.write(directory)
    }

    /// Puts this manifest in the place of the directory's: readers see the old one or this one.
    fn write(&self, directory: &Directory) -> Result<()> {
        let path = directory.path().join(FILE_NAME);
        // A manifest that a load would refuse is not written: the old one stays.
        self.validate().map_err(|message| refused(&path, message))?;
        directory.replace(FILE_NAME, &self.signed().map_err(at(&path))?).map_err(inside(directory))
    }

    /// Returns the text of the file.
    pub(super) fn signed(&self) -> serde_json::Result<Vec<u8>> {
        let mut signed = Self { checksum: NO_CHECKSUM.to_owned(), ..self.clone() };
        signed.checksum = checksum_of(serde_json::to_vec_pretty(&signed)?).unwrap_or_default();
        serde_json::to_vec_pretty(&signed)
    }

    /// Returns the parents that are missing, each in a sentence.
    pub(super) fn gaps(&self) -> Vec<String> {
        let is_there = |id: &String| self.snapshots.iter().any(|snapshot| snapshot.id == *id);
        let gap = |snapshot: &Snapshot| {
            let parent = snapshot.parent.as_ref().filter(|parent| !is_there(parent))?;
            Some(format!("the snapshot {} follows {parent}, which is missing", snapshot.id))
        };
        self.snapshots.iter().filter_map(gap).collect()
    }

    /// Returns a snapshot, the newest if none is named, and those it follows, the full one first.
    pub(super) fn chain(&self, of: Option<&str>) -> std::result::Result<Vec<&Snapshot>, String> {
        let mut chain: Vec<&Snapshot> = match of {
            None => self.snapshots.last().into_iter().collect(),
            Some(id) => {
                let named = self.snapshots.iter().find(|snapshot| snapshot.id == id);
                vec![named.ok_or_else(|| format!("there is no snapshot {id}"))?]
            }
        };
        while let Some(parent) = chain.last().and_then(|snapshot| snapshot.parent.as_ref()) {
            let found = self.snapshots.iter().find(|snapshot| snapshot.id == *parent);
            let found = found.ok_or_else(|| {
                format!(
                    "the snapshot {} follows {parent}, which is missing: the chain has a gap",
                    chain[chain.len() - 1].id
                )
            })?;
            if chain.contains(&found) {
                return Err(format!("the snapshot {} follows itself", found.id));
            }
            chain.push(found);
        }
        chain.reverse();
        Ok(chain)
    }

    /// Adds a snapshot and drops those that `options` does not keep.
    pub(super) fn add(
        &mut self,
        lineage: Lineage,
        base: Option<String>,
        tables: Vec<TableEntry>,
        options: &SaveOptions<'_>,
    ) {
        if options.replace {
            self.snapshots.retain(|snapshot| snapshot.lineage.id == lineage.id);
        }
        let id = lineage.save.clone();
        let parent = base.filter(|_| tables.iter().any(|table| table.is_delta));
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let metadata = options.metadata.clone();
        self.snapshots.push(Snapshot { id, parent, created, lineage, metadata, tables });
        self.retain(options.keep.max(1));
    }

    /// Puts all rows of `tables` in the place of the newest snapshot and those it follows.
    pub(super) fn replace_chain(&mut self, tables: Vec<TableEntry>) {
        let Some(newest) = self.snapshots.pop() else { return };
        let start = self.snapshots.iter().rposition(|snapshot| snapshot.parent.is_none()).unwrap_or(0);
        self.snapshots.truncate(start);
        self.snapshots.push(Snapshot { parent: None, tables, ..newest });
    }

    /// Puts all rows of `tables`, as the full snapshot `id`, in the place of the newest one.
    pub(super) fn replace_newest(&mut self, id: String, tables: Vec<TableEntry>) {
        let Some(newest) = self.snapshots.pop() else { return };
        self.snapshots.push(Snapshot { id, parent: None, tables, ..newest });
    }

    /// Returns how the newest files are compressed.
    pub(super) fn newest_compression(&self) -> Compression {
        self.snapshots.iter().rev().flat_map(Snapshot::shards).map(Compression::of).next().unwrap_or_default()
    }

    /// Keeps the newest `keep` full snapshots of the newest lineage and what follows them, and returns the others of that
    /// lineage. Those of another one stay.
    pub(super) fn retain(&mut self, keep: usize) -> Vec<Snapshot> {
        let Some(own) = self.snapshots.last().map(|newest| newest.lineage.id.clone()) else {
            return Vec::new();
        };
        let is_own = |snapshot: &Snapshot| snapshot.lineage.id == own;
        let is_full = |snapshot: &Snapshot| is_own(snapshot) && snapshot.parent.is_none();
        let full: Vec<usize> =
            (0..self.snapshots.len()).filter(|&place| is_full(&self.snapshots[place])).collect();
        // Counted by full snapshots: a delta needs all that stand between it and the last full one.
        let first = if full.len() > keep { full[full.len() - keep] } else { 0 };
        let (older, kept) =
            (self.snapshots.drain(..first).collect::<Vec<_>>(), std::mem::take(&mut self.snapshots));
        let (dropped, others): (Vec<_>, Vec<_>) = older.into_iter().partition(is_own);
        self.snapshots = others.into_iter().chain(kept).collect();
        dropped
    }

    /// Returns the files of all snapshots.
    pub(super) fn files(&self) -> impl Iterator<Item = &String> {
        self.shards().map(|shard| &shard.file)
    }

    /// Returns the entries of these files.
    pub(super) fn shards(&self) -> impl Iterator<Item = &ShardEntry> {
        self.snapshots.iter().flat_map(Snapshot::shards)
    }

    /// Returns the rows of the newest snapshot: those of its files, where it holds only changes.
    fn newest_rows(&self) -> usize {
        self.snapshots.last().map_or(0, |newest| rows_of(&newest.tables))
    }

    /// Checks that rows are not replaced by none, unless by the store that has just saved or loaded them, which
    /// `follows` tells, or because the caller says so.
    pub(super) fn check_not_emptied(
        &self,
        directory: &Directory,
        tables: &[TableEntry],
        follows: bool,
        options: &SaveOptions<'_>,
    ) -> Result<()> {
        let (before, now) = (self.newest_rows(), rows_of(tables));
        if before == 0 || now > 0 || follows || options.replace {
            return Ok(());
        }
        Err(refused(
            directory.path(),
            format!(
                "the newest snapshot here has {before} rows, and the store to be saved has none and never had those: load them first, save elsewhere, or say that they are to be replaced (replace=True)"
            ),
        ))
    }
}

/// Removes a checkpoint from a directory: what its manifest and the notes of saves list, and these. What else is there
/// stays.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: another process is saving there; a file cannot be removed, and then a further call removes
/// the rest.
pub fn remove_checkpoint(path: &Path) -> Result<()> {
    let Some(directory) = &found(path)? else { return Ok(()) };
    let held = lock(directory)?;
    let manifest = Manifest::read(directory)?.unwrap_or_else(Manifest::empty);
    remove_unneeded(directory, manifest.files())?;
    manifest.files().try_for_each(|file| remove(directory, file))?;
    // Behind the files it lists: after a crash it still says what is left to remove. The lock goes last, so
    // that no other save begins in between.
    remove(directory, FILE_NAME)?;
    directory.sync().map_err(inside(directory))?;
    remove(directory, LOCK_NAME)?;
    drop(held);
    Ok(())
}

/// Checks that a directory can be saved to: it has a manifest, or no rows.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the directory and one of the files, or what is wrong with its manifest.
pub fn check_checkpoint_directory(path: &Path) -> Result<()> {
    found(path)?.map_or(Ok(()), |directory| Manifest::read_or_new(&directory).map(drop))
}
