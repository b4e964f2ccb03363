//! Which snapshots of a directory have some ids, found without tables and with little memory.

use std::path::Path;

use serde::Serialize;

use super::entries::{ShardEntry, TableEntry};
use super::files::{FILE_NAME, found, refused};
use super::manifest::Manifest;
use super::table_file::{ADMISSION_COUNTS, ADMISSION_IDS, DELETED, IDS, LEAVING, OpenedFile};
use super::unfinished::has_notes;
use crate::Result;
use crate::config::AdmissionConfig;
use crate::disk::Directory;
use crate::kernel::id_tally::IdTally;
use crate::lifecycle::Sketch;

/// The columns of ids that a file may have, and what their ids are.
const COLUMNS: [(&str, &str); 4] =
    [(IDS, "rows"), (DELETED, "deleted ids"), (ADMISSION_IDS, "counts"), (LEAVING, "rows chosen to leave")];

/// Where counters are above zero, be it for other ids.
const SKETCHED: &str = "a sketch";

/// What a directory has of some ids.
#[derive(Debug, Clone, Default, Serialize)]
pub struct IdsFound {
    /// All snapshots, the oldest first.
    pub snapshots: Vec<String>,
    /// Those that have an id, or follow one that has.
    pub holding: Vec<String>,
    /// The files that have ids.
    pub held: Vec<HeldIds>,
    /// The manifest, from the directory on.
    pub manifest: String,
    /// What the save of each snapshot was given along, as JSON.
    pub metadata: Vec<(String, String)>,
    /// Whether a save was cut off, which may have left files of snapshots that are gone.
    pub unfinished: bool,
}

/// Ids that a file has.
#[derive(Debug, Clone, Serialize)]
pub struct HeldIds {
    /// The file, from the directory on.
    pub file: String,
    /// As what it has them: `rows`, `deleted ids`, `counts`, `rows chosen to leave`, `a sketch` or `log`.
    pub what: &'static str,
    /// Which, and how often.
    pub ids: Vec<(i64, u64)>,
}

/// Returns the names of the tables of all snapshots.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: the manifest is not what it should be.
pub fn checkpoint_tables(path: &Path) -> Result<Vec<String>> {
    let manifest = manifest_at(path)?.1;
    Ok(manifest.snapshots.into_iter().flat_map(|snapshot| snapshot.tables).map(|table| table.name).collect())
}

/// Returns what a directory has of some ids of tables. One without a manifest has none.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file that is missing or damaged.
pub fn ids_in_checkpoint(path: &Path, tables: &[String], ids: &mut IdTally) -> Result<IdsFound> {
    let mut all = IdsFound { manifest: FILE_NAME.to_owned(), ..IdsFound::default() };
    let (Some(directory), manifest) = manifest_at(path)? else { return Ok(all) };
    all.unfinished = has_notes(&directory)?;
    for snapshot in manifest.snapshots {
        let before = all.held.len();
        for table in snapshot.tables.iter().filter(|table| tables.contains(&table.name)) {
            for entry in &table.shards {
                look_into(&directory, table, entry, ids, &mut all.held)?;
            }
        }
        // What follows a snapshot that goes cannot be read without it.
        let follows = snapshot.parent.is_some_and(|parent| all.holding.contains(&parent));
        if follows || all.held.len() > before {
            all.holding.push(snapshot.id.clone());
        }
        all.metadata.push((snapshot.id.clone(), snapshot.metadata.as_str().to_owned()));
        all.snapshots.push(snapshot.id);
    }
    Ok(all)
}

fn manifest_at(path: &Path) -> Result<(Option<Directory>, Manifest)> {
    let directory = found(path)?;
    let manifest = directory.as_ref().map_or(Ok(None), Manifest::read)?;
    Ok((directory, manifest.unwrap_or_else(Manifest::empty)))
}

fn look_into(
    directory: &Directory,
    table: &TableEntry,
    entry: &ShardEntry,
    ids: &mut IdTally,
    held: &mut Vec<HeldIds>,
) -> Result<()> {
    let file = OpenedFile::open(directory, entry)?;
    let mut note = |what, ids: Vec<(i64, u64)>| {
        if !ids.is_empty() {
            held.push(HeldIds { file: entry.file.clone(), what, ids });
        }
    };
    for (name, what) in COLUMNS {
        file.read(name, |part| ids.add_all(part))?;
        note(what, ids.take());
    }
    if let Some(AdmissionConfig::Sketch { epsilon, delta, .. }) = table.config()?.admission {
        let mut counters = Vec::new();
        let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        file.read(ADMISSION_COUNTS, |part| counters.extend(part.as_chunks().0.iter().map(number)))?;
        let sketch = Sketch::of(epsilon, delta, counters);
        let sketch = sketch.ok_or_else(|| {
            refused(directory.path().join(&entry.file), "it has not the counters of the table's sketch")
        })?;
        let counted = ids.ids().iter().filter(|id| sketch.estimate(**id) > 0);
        note(SKETCHED, counted.map(|id| (*id, 1)).collect());
    }
    Ok(())
}
