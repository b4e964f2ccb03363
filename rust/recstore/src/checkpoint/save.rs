//! Writes the tables of a store to a directory.

use std::collections::hash_map::RandomState;
use std::fs::{self, File, TryLockError};
use std::hash::BuildHasher;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::compression::{Compression, compress};
use super::entries::{ShardEntry, TableEntry};
use super::files::{COMPRESSED_EXTENSION, FILE_EXTENSION, at, create_directory, refused, sync_directory};
use super::manifest::Manifest;
use super::options::{SaveKind, SaveOptions};
use super::progress::Progress;
use super::reports::SaveReport;
use super::table_file::{BYTES_AT_A_TIME, Layout, TableState, Writer};
use crate::Result;
use crate::table::{AdmissionCounts, CopiedRows, CutTables, SaveId, TableCut, cut};

const LOCK_NAME: &str = ".lock";

/// The last save that this store made, or that it was loaded from.
pub(crate) type LastSave = Option<SaveId>;

/// Cuts all tables of a store by what it is given.
pub(crate) type AllTables<'a> = dyn Fn(&CutTables<'_>) -> Result<Vec<TableCut>> + 'a;

/// Saves `tables` to `directory`, which is made if it is not there. Only the moment at which all tables are locked
/// together stops those who train.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file; then the directory holds what it held before.
pub(crate) fn save(
    tables: &AllTables<'_>,
    last: &mut LastSave,
    directory: &Path,
    options: &SaveOptions<'_>,
) -> Result<SaveReport> {
    options.compression.validate(directory)?;
    create_directory(directory)?;
    let _lock = lock(directory)?;
    let mut manifest = Manifest::read(directory)?.unwrap_or_else(Manifest::empty);
    let base = base_of(&manifest, *last, directory, options.kind)?;
    let (suffix, compression) = (String::new(), options.compression);
    let plan = Plan { directory, save: new_save(), base, suffix, compression };
    let saved = write(tables, last, &plan, options, |tables| {
        manifest.add(name_of(plan.save), base.map(name_of), tables, options);
        manifest.write(directory)
    });
    cleaned(directory, saved)
}

/// What is to be saved where.
pub(super) struct Plan<'a> {
    pub(super) directory: &'a Path,
    pub(super) save: SaveId,
    /// The save that a delta follows.
    pub(super) base: Option<SaveId>,
    /// What tells the names of its files from those of other parts of the snapshot.
    pub(super) suffix: String,
    pub(super) compression: Compression,
}

/// Returns the name of a snapshot that does not exist yet.
pub fn new_snapshot_name() -> String {
    name_of(new_save())
}

fn new_save() -> SaveId {
    RandomState::new().hash_one(SystemTime::now())
}

/// Writes the files of all tables and then calls `commit`, which makes them count.
pub(super) fn write(
    tables: &AllTables<'_>,
    last: &mut LastSave,
    plan: &Plan<'_>,
    options: &SaveOptions<'_>,
    commit: impl FnOnce(Vec<TableEntry>) -> Result<()>,
) -> Result<SaveReport> {
    let cuts = tables(&|tables| cut(tables, plan.base, plan.save))?;
    if let Some(on_cut) = options.on_cut {
        on_cut();
    }
    let saved = write_tables(&cuts, plan, options.progress).and_then(|entries| {
        let report = report(plan.save, &entries);
        commit(entries).map(|()| report)
    });
    cuts.iter().for_each(|cut| cut.end(saved.is_ok()));
    *last = saved.is_ok().then_some(plan.save);
    saved
}

/// Keeps others from saving to a directory.
pub(super) struct DirectoryLock(File);

impl Drop for DirectoryLock {
    /// Closing the file would not do: a child forked meanwhile has it open too.
    fn drop(&mut self) {
        _ = self.0.unlock();
    }
}

/// Keeps others, in this process too, from saving to the directory as long as what is returned lives.
pub(super) fn lock(directory: &Path) -> Result<DirectoryLock> {
    let path = directory.join(LOCK_NAME);
    let file = File::create(&path).map_err(at(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(DirectoryLock(file)),
        Err(TryLockError::WouldBlock) => Err(refused(directory, "another process or store is saving to it")),
        Err(TryLockError::Error(error)) => Err(refused(&path, error)),
    }
}

/// Returns the save that a delta follows; none for a full snapshot.
pub(super) fn base_of(
    manifest: &Manifest,
    last: LastSave,
    directory: &Path,
    kind: SaveKind,
) -> Result<Option<SaveId>> {
    let newest = manifest.snapshots.last().map(|snapshot| &snapshot.id);
    let base = last.filter(|last| newest == Some(&name_of(*last)));
    match kind {
        SaveKind::Full => Ok(None),
        SaveKind::Auto => Ok(base),
        SaveKind::Delta if base.is_some() => Ok(base),
        SaveKind::Delta => Err(refused(
            directory,
            "a delta must follow the last save or load of this store, which is not the newest snapshot here: save all rows first",
        )),
    }
}

pub(super) fn name_of(save: SaveId) -> String {
    format!("{save:016x}")
}

/// Returns the save of a snapshot's name.
pub(super) fn save_id(snapshot: &str) -> std::result::Result<SaveId, String> {
    let parsed = SaveId::from_str_radix(snapshot, 16).ok().filter(|save| name_of(*save) == snapshot);
    parsed.ok_or_else(|| format!("\"{snapshot}\" is not the name of a snapshot: sixteen hexadecimal digits"))
}

/// Writes a file for each table; all or, after an error, none.
fn write_tables(cuts: &[TableCut], plan: &Plan<'_>, progress: Option<&Progress>) -> Result<Vec<TableEntry>> {
    let layouts: Vec<Layout> = cuts.iter().map(|cut| Layout::of(&cut.table)).collect();
    let bytes = cuts.iter().zip(&layouts).map(|(cut, layout)| (cut.cut.rows * layout.row_bytes()) as u64);
    Progress::expect(progress, bytes.sum());
    let mut entries = Vec::new();
    for (number, (cut, layout)) in cuts.iter().zip(&layouts).enumerate() {
        let table = &cut.table;
        let mut entry =
            TableEntry::new(table.name(), table.config(), cut.progress.clone(), cut.cut.is_delta)?;
        let path = plan.directory.join(file_name(plan, number, table.name()));
        entry.shards.push(write_table(cut, layout, &path, plan.compression, progress)?);
        entries.push(entry);
    }
    sync_directory(plan.directory)?;
    Ok(entries)
}

/// Returns the name of a table's file: for people to recognize, and of no other table's.
fn file_name(plan: &Plan<'_>, number: usize, table: &str) -> PathBuf {
    const MOST: usize = 64;
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let plain: String =
        table.chars().take(MOST).map(|letter| if is_plain(letter) { letter } else { '_' }).collect();
    format!("{}-{number:03}-{plain}{}{FILE_EXTENSION}", name_of(plan.save), plan.suffix).into()
}

fn write_table(
    cut: &TableCut,
    layout: &Layout,
    path: &Path,
    compression: Compression,
    progress: Option<&Progress>,
) -> Result<ShardEntry> {
    let deleted = cut.cut.is_delta.then_some(&cut.cut.deleted[..]);
    let state =
        TableState { admission: cut.admission.as_ref().map(AdmissionCounts::sorted), leaving: cut.leaving() };
    let mut writer = Writer::create(path, layout, cut.cut.rows, deleted, &state)?;
    let limit = (BYTES_AT_A_TIME / layout.row_bytes()).max(1);
    let (mut next, mut rows) = (Some(0), CopiedRows::default());
    while let Some(start) = next {
        rows.clear();
        next = cut.copy(start, limit, &mut rows)?;
        // Behind the last row nothing is kept any more: these are all.
        cut.cut.snapshot.take_kept(&mut rows);
        writer.write(layout, &rows)?;
        Progress::advance(progress, (rows.ids.len() * layout.row_bytes()) as u64);
    }
    let (entry, pieces) = writer.finish()?;
    match compression {
        Compression::None => Ok(entry),
        Compression::Zstd { level } => compress(path, entry, &pieces, level),
    }
}

fn report(save: SaveId, entries: &[TableEntry]) -> SaveReport {
    let shards = || entries.iter().flat_map(|entry| &entry.shards);
    SaveReport {
        snapshot: name_of(save),
        is_delta: entries.iter().any(|entry| entry.is_delta),
        rows: shards().map(|shard| shard.rows).sum(),
        deleted: shards().map(|shard| shard.deleted).sum(),
        bytes: shards().map(|shard| shard.bytes).sum(),
    }
}

/// Removes what a save left, and returns what that save did. Files that cannot be removed do no harm: the save counts
/// all the same, and the next one tries again.
pub(super) fn cleaned<T>(directory: &Path, saved: Result<T>) -> Result<T> {
    _ = remove_unneeded(directory);
    saved
}

/// Removes files that no snapshot needs: of snapshots that were dropped, and of saves that never ended.
pub(super) fn remove_unneeded(directory: &Path) -> Result<()> {
    let manifest = Manifest::read(directory)?.unwrap_or_else(Manifest::empty);
    for file in fs::read_dir(directory).map_err(at(directory))? {
        let file = file.map_err(at(directory))?;
        let name = file.file_name().to_string_lossy().into_owned();
        let is_file = file.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && is_own(&name) && !manifest.needs(&name) {
            fs::remove_file(file.path()).map_err(at(&file.path()))?;
        }
    }
    Ok(())
}

/// Whether a file is one of ours by its name: rows, or what a shard saved.
fn is_own(name: &str) -> bool {
    let hexadecimal = name.bytes().take_while(u8::is_ascii_hexdigit).count();
    let ends = [FILE_EXTENSION, COMPRESSED_EXTENSION, ".json", ".new"];
    hexadecimal == 16 && name.as_bytes().get(16) == Some(&b'-') && ends.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_the_save_though_a_forked_child_has_its_file_open() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock(directory.path()).unwrap();
        let inherited = held.0.try_clone().unwrap();
        assert!(lock(directory.path()).is_err());
        drop(held);
        assert!(lock(directory.path()).is_ok());
        drop(inherited);
    }
}
