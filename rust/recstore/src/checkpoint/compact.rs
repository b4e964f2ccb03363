//! Writes the newest state of a directory as one full snapshot: of a chain of deltas, or without some ids.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::entries::TableEntry;
use super::files::{DirectoryLock, existing, lock, name_of, new_save, new_snapshot_name, refused};
use super::load::{LoadingStore, load_from};
use super::manifest::Manifest;
use super::options::{LoadOptions, SaveOptions};
use super::progress::Progress;
use super::reports::SaveReport;
use super::save::{Plan, cleaned, write};
use super::unfinished::{Unfinished, remove_unneeded};
use crate::Result;
use crate::disk::Directory;
use crate::kernel::parallel::Serial;
use crate::kernel::simd::Simd;
use crate::optimizer::UpdateRules;
use crate::table::{Engine, SaveId, Table};

/// Puts a full snapshot of the same name in the place of the newest one and those it follows; deltas can follow it. A
/// snapshot that follows none stays as it is, and there is no report. Files are compressed if those of the newest snapshot
/// are. It takes as much memory as the tables.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file; then the directory holds what it held before.
pub fn compact(path: &Path, progress: Option<&Progress>) -> Result<Option<SaveReport>> {
    let directory = &existing(path)?;
    let (_lock, mut manifest) = locked(directory)?;
    if manifest.snapshots.last().is_none_or(|newest| newest.parent.is_none()) {
        return Ok(None);
    }
    // One that was killed left a file of the same name.
    remove_unneeded(directory, manifest.files())?;
    let newest = Newest::load(directory, progress)?;
    let (save, suffix) = (newest.save, "-compacted");
    newest.write(&mut manifest, (save, suffix), Manifest::replace_chain).map(Some)
}

/// What is to be left out of a directory, and which of its snapshots have it.
#[derive(Debug, Clone, Copy)]
pub struct Forgetting<'a> {
    /// The tables whose rows go.
    pub tables: &'a [String],
    /// The ids, distinct.
    pub ids: &'a [i64],
    /// All snapshots of the directory, when somebody looked which have the ids.
    pub snapshots: &'a [String],
    /// Those that have them, or follow one that has.
    pub holding: &'a [String],
}

/// What forgetting ids came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Forgotten {
    /// The rows that the newest state had of them.
    pub rows: usize,
    /// What was written in its place; none if it had nothing of them.
    pub written: Option<SaveReport>,
}

/// Takes the snapshots that hold some ids out of a directory. If the newest one is among them, a full snapshot of a new
/// name takes its place, without the ids: no delta of a store that still has them can follow it. Other rows, optimizer
/// state and counts stay as they are. It takes as much memory as the tables.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file, or says that others saved meanwhile; then the directory holds what it held
/// before.
pub fn forget(path: &Path, forgetting: &Forgetting<'_>, progress: Option<&Progress>) -> Result<Forgotten> {
    let directory = &existing(path)?;
    let (_lock, mut manifest) = locked(directory)?;
    if !manifest.snapshots.iter().map(|snapshot| &snapshot.id).eq(forgetting.snapshots) {
        return Err(refused(path, "somebody has saved to it meanwhile: begin again"));
    }
    let drop_holding = |manifest: &mut Manifest| {
        manifest.snapshots.retain(|snapshot| !forgetting.holding.contains(&snapshot.id));
    };
    check_parents_stay(directory, &manifest, forgetting.holding)?;
    // Those that one which was killed has dropped have the ids too.
    remove_unneeded(directory, manifest.files())?;
    if manifest.snapshots.last().is_none_or(|newest| !forgetting.holding.contains(&newest.id)) {
        if !forgetting.holding.is_empty() {
            let mut note = Unfinished::begin(directory, &new_snapshot_name(), BTreeSet::new())?;
            cleaned(directory, manifest.replace(directory, &mut note, drop_holding))?;
        }
        return Ok(Forgotten::default());
    }
    let newest = Newest::load(directory, progress)?;
    let rows = newest.erase(forgetting)?;
    let save = new_save();
    let written = newest.write(&mut manifest, (save, ""), |manifest, tables| {
        manifest.replace_newest(name_of(save), tables);
        drop_holding(manifest);
    })?;
    Ok(Forgotten { rows, written: Some(written) })
}

/// Keeps others from saving to a directory that has a checkpoint. One that has none is left without a lock.
pub(super) fn locked(directory: &Directory) -> Result<(DirectoryLock, Manifest)> {
    Manifest::existing(directory)?;
    let held = lock(directory)?;
    // Read again: another save may have replaced it before the lock was had.
    Ok((held, Manifest::existing(directory)?))
}

/// Checks that no snapshot which stays follows one that goes.
fn check_parents_stay(directory: &Directory, manifest: &Manifest, leaving: &[String]) -> Result<()> {
    let stays = |id: &String| !leaving.contains(id);
    let loses = |parent: &Option<String>| parent.as_ref().is_some_and(|parent| !stays(parent));
    match manifest.snapshots.iter().find(|snapshot| stays(&snapshot.id) && loses(&snapshot.parent)) {
        Some(lost) => {
            Err(refused(directory.path(), format!("the snapshot {} follows one that is to go", lost.id)))
        }
        None => Ok(()),
    }
}

/// The newest state of a directory, in memory.
struct Newest<'a> {
    directory: &'a Directory,
    tables: Vec<Arc<Table>>,
    save: SaveId,
    progress: Option<&'a Progress>,
}

impl<'a> Newest<'a> {
    fn load(directory: &'a Directory, progress: Option<&'a Progress>) -> Result<Self> {
        // Rows are copied and take no step: a program's own rule need not be there.
        let options = LoadOptions { without_rules: true, progress, ..LoadOptions::default() };
        let store = LoadingStore {
            engine: Engine { executor: &Serial, simd: Simd::detect() },
            rules: &UpdateRules::default(),
            budget: &Arc::default(),
            configured: &|_, saved| Ok(saved.clone()),
        };
        let loaded = load_from(directory, &options, store)?;
        let tables = loaded.tables.into_iter().map(Arc::new).collect();
        Ok(Self { directory, tables, save: loaded.save, progress })
    }

    /// Leaves ids out, and returns how many rows they had.
    fn erase(&self, Forgetting { tables, ids, .. }: &Forgetting<'_>) -> Result<usize> {
        let named = self.tables.iter().filter(|table| tables.iter().any(|name| name == table.name()));
        named.map(|table| table.erase(ids).map(|found| found.len())).sum()
    }

    /// Writes all rows, compressed as the newest files are, and then the manifest that `change` makes of them.
    fn write(
        &self,
        manifest: &mut Manifest,
        (save, suffix): (SaveId, &str),
        change: impl FnOnce(&mut Manifest, Vec<TableEntry>),
    ) -> Result<SaveReport> {
        let (directory, compression) = (self.directory, manifest.newest_compression());
        let plan = Plan { directory, save, base: None, suffix: suffix.to_owned(), compression, part: None };
        let options = SaveOptions { progress: self.progress, ..SaveOptions::default() };
        let report = write(&|cut| cut(&self.tables), &plan, &options, |tables, note| {
            manifest.replace(directory, note, |manifest| change(manifest, tables))
        });
        cleaned(directory, report)
    }
}
