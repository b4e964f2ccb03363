//! Writes the tables of a store to a directory.

use std::collections::BTreeSet;
use std::path::Path;

use super::compression::{Compression, compress};
use super::entries::{ShardEntry, TableEntry};
use super::files::{COMPRESSED_EXTENSION, FILE_EXTENSION, created, inside, lock, name_of, new_save, refused};
use super::manifest::Manifest;
use super::options::{SaveKind, SaveOptions};
use super::place::check_free;
use super::progress::Progress;
use super::reports::SaveReport;
use super::saves::Saves;
use super::table_file::{BYTES_PER_CHUNK, Layout, TableState, Writer};
use super::unfinished::{Unfinished, remove_unneeded};
use crate::Result;
use crate::disk::Directory;
use crate::table::{AdmissionCounts, CopiedRows, CutTables, SaveId, TableCut, cut};

/// Cuts all tables of a store by what it is given.
pub(crate) type AllTables<'a> = dyn Fn(&CutTables<'_>) -> Result<Vec<TableCut>> + 'a;

/// Saves `tables` to the directory at `path`, which is made if it is not there. Only the moment at which all tables are locked
/// together stops those who train.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file; then the directory holds what it held before.
pub(crate) fn save(
    tables: &AllTables<'_>,
    saves: &mut Saves,
    path: &Path,
    options: &SaveOptions<'_>,
) -> Result<SaveReport> {
    options.compression.validate(path)?;
    check_free(path, options)?;
    let directory = &created(path)?;
    let _lock = lock(directory)?;
    // Under the lock: another save may have replaced it until now.
    let mut manifest = Manifest::read_or_new(directory)?;
    let share = saves.share_of_save(options);
    let known = saves.of_share(share);
    let base = base_of(&manifest, known, directory, options.kind)?;
    let claim = known.claim(&manifest, directory, options)?;
    let kept = claim.check(&manifest, directory, options)?;
    let (save, follows) = (new_save(), claim.follows);
    let lineage = claim.lineage(&manifest, &name_of(save));
    let (suffix, compression) = (String::new(), options.compression);
    let plan = Plan { directory, save, base, suffix, compression, part: None };
    let saved = write(tables, &plan, options, |tables, note| {
        manifest.check_not_emptied(directory, &tables, follows, options)?;
        manifest.replace(directory, note, |manifest| {
            manifest.add(lineage.clone(), base.map(name_of), tables, options);
        })
    });
    if saved.is_ok() {
        saves.note(save, &lineage, share);
    }
    cleaned(directory, saved.map(|report| SaveReport { kept, ..report }))
}

/// What is to be saved where.
pub(super) struct Plan<'a> {
    pub(super) directory: &'a Directory,
    pub(super) save: SaveId,
    /// The save that a delta follows.
    pub(super) base: Option<SaveId>,
    /// What tells the names of its files from those of other parts of the snapshot.
    pub(super) suffix: String,
    pub(super) compression: Compression,
    /// The file that tells what a shard saved, where shards save together.
    pub(super) part: Option<String>,
}

impl Plan<'_> {
    /// What begins the names of its own files that hold no rows.
    fn name(&self) -> String {
        format!("{}{}", name_of(self.save), self.suffix)
    }

    /// Returns the names of all files that it may write.
    fn files(&self, cuts: &[TableCut]) -> BTreeSet<String> {
        let plain = cuts.iter().enumerate().map(|(number, cut)| file_name(self, number, cut.table.name()));
        let mut files: BTreeSet<String> = plain.collect();
        if self.compression != Compression::None {
            let compressed = |file: &String| file.replace(FILE_EXTENSION, COMPRESSED_EXTENSION);
            files.extend(files.iter().map(compressed).collect::<Vec<_>>());
        }
        files.extend(self.part.clone());
        files
    }
}

/// Writes the files of all tables and then calls `commit`, which makes them count.
pub(super) fn write(
    tables: &AllTables<'_>,
    plan: &Plan<'_>,
    options: &SaveOptions<'_>,
    commit: impl FnOnce(Vec<TableEntry>, &mut Unfinished) -> Result<()>,
) -> Result<SaveReport> {
    let cuts = tables(&|tables| cut(tables, plan.base, plan.save))?;
    if let Some(on_cut) = options.on_cut {
        on_cut();
    }
    let saved = write_noted(&cuts, plan, options.progress, commit);
    // Also after an error: then the notes from before the cut count again, and no delta misses a row.
    cuts.iter().for_each(|cut| cut.end(saved.is_ok()));
    saved
}

fn write_noted(
    cuts: &[TableCut],
    plan: &Plan<'_>,
    progress: Option<&Progress>,
    commit: impl FnOnce(Vec<TableEntry>, &mut Unfinished) -> Result<()>,
) -> Result<SaveReport> {
    // Names are noted before there are files: after a crash the next save removes those that no manifest
    // lists.
    let mut note = Unfinished::begin(plan.directory, &plan.name(), plan.files(cuts))?;
    let entries = write_tables(cuts, plan, progress)?;
    let report = report(plan.save, &entries);
    commit(entries, &mut note).map(|()| report)
}

/// Returns the save that a delta follows; none for a full snapshot.
pub(super) fn base_of(
    manifest: &Manifest,
    saves: &Saves,
    directory: &Directory,
    kind: SaveKind,
) -> Result<Option<SaveId>> {
    let base = saves.last().filter(|last| manifest.newest_save() == Some(*last));
    match kind {
        SaveKind::Full => Ok(None),
        SaveKind::Auto => Ok(base),
        SaveKind::Delta if base.is_some() => Ok(base),
        SaveKind::Delta => Err(refused(
            directory.path(),
            "a delta must follow the last save or load of this store, which is not the newest snapshot here: save all rows first",
        )),
    }
}

/// Writes a file for each table of which there is something to tell; all or, after an error, none.
fn write_tables(cuts: &[TableCut], plan: &Plan<'_>, progress: Option<&Progress>) -> Result<Vec<TableEntry>> {
    let layouts: Vec<Layout> = cuts.iter().map(|cut| Layout::of(&cut.table)).collect();
    let bytes = cuts.iter().zip(&layouts).map(|(cut, layout)| (cut.cut.rows * layout.row_bytes()) as u64);
    Progress::expect(progress, bytes.sum());
    let mut entries = Vec::new();
    for (number, (cut, layout)) in cuts.iter().zip(&layouts).enumerate() {
        let table = &cut.table;
        let mut entry =
            TableEntry::new(table.name(), table.config(), cut.progress.clone(), cut.cut.is_delta)?;
        if !cut.is_empty_delta() {
            let name = file_name(plan, number, table.name());
            entry.shards.push(write_table(cut, layout, plan, name, progress)?);
        }
        entries.push(entry);
    }
    // The names must survive a crash before a manifest lists them.
    plan.directory.sync().map_err(inside(plan.directory))?;
    Ok(entries)
}

/// Returns the name of a table's file: for people to recognize, and of no other table's.
fn file_name(plan: &Plan<'_>, number: usize, table: &str) -> String {
    const MAX: usize = 64;
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let plain: String =
        table.chars().take(MAX).map(|letter| if is_plain(letter) { letter } else { '_' }).collect();
    // The number tells tables apart whose names become the same by the letters that are replaced, or cut off.
    format!("{}-{number:03}-{plain}{}{FILE_EXTENSION}", name_of(plan.save), plan.suffix)
}

fn write_table(
    cut: &TableCut,
    layout: &Layout,
    plan: &Plan<'_>,
    name: String,
    progress: Option<&Progress>,
) -> Result<ShardEntry> {
    let deleted = cut.cut.is_delta.then_some(&cut.cut.deleted[..]);
    let counts = cut.admission.as_ref().map(AdmissionCounts::sorted);
    let state = TableState::of(layout, counts, cut.shared.clone().unwrap_or_default(), cut.leaving());
    let mut writer = Writer::create(plan.directory, name, layout, cut.cut.rows, deleted, &state)?;
    let limit = (BYTES_PER_CHUNK / layout.row_bytes()).max(1);
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
    match plan.compression {
        Compression::None => Ok(entry),
        Compression::Zstd { level } => compress(plan.directory, entry, &pieces, level),
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
        kept: None,
    }
}

/// Removes what a save left, and returns what that save did. Files that cannot be removed do no harm: the save counts
/// all the same, and the next one tries again.
pub(super) fn cleaned<T>(directory: &Directory, saved: Result<T>) -> Result<T> {
    let manifest = Manifest::read(directory).map(|manifest| manifest.unwrap_or_else(Manifest::empty));
    // Files that stay do no harm to what was saved: the next save looks for them again.
    _ = manifest.and_then(|manifest| remove_unneeded(directory, manifest.files()));
    saved
}
