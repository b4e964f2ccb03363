//! Reads tables from a directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;

use super::entries::{ShardEntry, TableEntry};
use super::files::{FILE_NAME, NOTHING, at, existing, found, refused, save_id};
use super::lineage::Lineage;
use super::manifest::{Manifest, Snapshot};
use super::metadata::Metadata;
use super::options::LoadOptions;
use super::progress::Progress;
use super::reports::LoadReport;
use super::table_file::{BYTES_PER_CHUNK, Layout, Reader, TableState, saved_slots};
use crate::Result;
use crate::config::TableConfig;
use crate::disk::Directory;
use crate::kernel::bits::Bits;
use crate::optimizer::UpdateRules;
use crate::table::{CopiedRows, Engine, MemoryBudget, SaveId, Table};

/// Rows are read into one buffer while those of the other get their places.
const BUFFERS: usize = 2;

/// What a load gives: the tables, the save they are of, and what the save was given along.
pub(crate) struct Loaded {
    pub(crate) tables: Vec<Table>,
    pub(crate) save: SaveId,
    pub(crate) lineage: Lineage,
    /// Whether no table of the snapshot was left out.
    pub(crate) has_all_tables: bool,
    pub(crate) report: LoadReport,
}

/// The store that tables are loaded for.
#[derive(Clone, Copy)]
pub(crate) struct LoadingStore<'a> {
    pub(crate) engine: Engine<'a>,
    /// The rules of the program's own.
    pub(crate) rules: &'a UpdateRules,
    /// What the tables' memory counts in.
    pub(crate) budget: &'a Arc<MemoryBudget>,
    /// Gives the configuration of a table that is there already, which the saved one must agree with.
    pub(crate) configured: &'a dyn Fn(&str, &TableConfig) -> Result<TableConfig>,
}

/// Reads a snapshot of the directory at `path`, the newest if none is named.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file and what is wrong with it; [`crate::Error::MemoryLimit`] and
/// [`crate::Error::Disk`], where a table's rows find no room; [`crate::Error::UnknownRule`]; as
/// [`LoadingStore::configured`].
pub(crate) fn load(path: &Path, options: &LoadOptions<'_>, store: LoadingStore<'_>) -> Result<Loaded> {
    load_from(&existing(path)?, options, store)
}

/// As [`load`], from a directory that is held open.
pub(super) fn load_from(
    directory: &Directory,
    options: &LoadOptions<'_>,
    store: LoadingStore<'_>,
) -> Result<Loaded> {
    loop {
        Progress::restart(options.progress);
        let manifest = Manifest::read_or_new(directory)?;
        if manifest.snapshots.is_empty() {
            return Err(refused(directory.path(), NOTHING));
        }
        match load_snapshot(directory, &manifest, options, store) {
            // A save may have replaced the snapshot under our hands.
            Err(error) if is_replaced(directory, &manifest)? => drop(error),
            loaded => return loaded,
        }
    }
}

/// The files that a directory's manifest lists.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointFiles {
    /// Those of all snapshots.
    pub all: BTreeSet<String>,
    /// Those that a load reads: of one snapshot and those it follows.
    pub loaded: BTreeSet<String>,
}

/// Returns the files that the manifest of a directory lists, whether or not they are there: for who keeps them
/// elsewhere. There are none without a manifest. `snapshot` is what a load reads, the newest without it.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: the manifest is not what it should be, or has no such snapshot.
pub fn checkpoint_files(directory: &Path, snapshot: Option<&str>) -> Result<CheckpointFiles> {
    let manifest = read_at(directory)?.unwrap_or_else(Manifest::empty);
    let broken = |message: String| refused(directory.join(FILE_NAME), message);
    let chain = manifest.chain(snapshot).map_err(broken)?;
    let mut loaded = BTreeSet::new();
    for entry in chain.last().into_iter().flat_map(|snapshot| &snapshot.tables) {
        for part in parts_of(&chain, entry).map_err(broken)? {
            loaded.extend(part.shards.iter().map(|shard| shard.file.clone()));
        }
    }
    Ok(CheckpointFiles { all: manifest.files().cloned().collect(), loaded })
}

/// Returns what the save of a directory's newest snapshot was given along; none where there is no snapshot.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: the manifest is not what it should be.
pub fn checkpoint_metadata(directory: &Path) -> Result<Option<Metadata>> {
    let manifest = read_at(directory)?;
    Ok(manifest.and_then(|manifest| manifest.snapshots.into_iter().last()).map(|newest| newest.metadata))
}

fn read_at(path: &Path) -> Result<Option<Manifest>> {
    found(path)?.map_or(Ok(None), |directory| Manifest::read(&directory))
}

fn is_replaced(directory: &Directory, manifest: &Manifest) -> Result<bool> {
    let now = Manifest::read(directory)?;
    Ok(now.is_some_and(|now| now.snapshots != manifest.snapshots))
}

fn load_snapshot(
    directory: &Directory,
    manifest: &Manifest,
    options: &LoadOptions<'_>,
    store: LoadingStore<'_>,
) -> Result<Loaded> {
    let broken = |message: String| refused(directory.path().join(FILE_NAME), message);
    let chain = manifest.chain(options.snapshot).map_err(broken)?;
    let Some(newest) = chain.last() else {
        return Err(broken("there is no snapshot".to_owned()));
    };
    let save = save_id(&newest.id).map_err(broken)?;
    let entries = chosen(newest, options).map_err(|message| refused(directory.path(), message))?;
    let has_all_tables = entries.len() == newest.tables.len();
    let parts = entries.into_iter().map(|entry| Ok((entry, parts_of(&chain, entry).map_err(broken)?)));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let bytes = parts
        .iter()
        .flat_map(|(_, parts)| parts)
        .flat_map(|part| &part.shards)
        .map(|shard| shard.plain_bytes());
    let bytes = bytes.fold(0, u64::saturating_add);
    Progress::expect(options.progress, bytes);
    let mut tables = Vec::new();
    for (entry, parts) in parts {
        let saved = entry.config().map_err(|error| broken(format!("table \"{}\": {error}", entry.name)))?;
        let config = (store.configured)(&entry.name, &saved)?;
        let read_only = options.without_rules.then(|| rules_of_files(directory, &parts)).transpose()?;
        let rules = read_only.as_ref().unwrap_or(store.rules);
        let mut table = Table::new(&entry.name, &config, rules, store.budget)?;
        let states = load_table(&mut table, directory, &parts, options, store.engine)?;
        restore_shared_rows(&mut table, &states, options)?;
        restore_state(&mut table, entry, states, options)?;
        let progress =
            if options.without_counts { entry.progress.without_counts() } else { entry.progress.clone() };
        table.restore(&progress, save).map_err(|error| broken(error.to_string()))?;
        tables.push(table);
    }
    let rows = tables.iter().map(|table| (table.name().to_owned(), table.len())).collect();
    let report =
        LoadReport { snapshot: newest.id.clone(), metadata: newest.metadata.clone(), tables: rows, bytes };
    Ok(Loaded { tables, save, lineage: newest.lineage.clone(), has_all_tables, report })
}

/// Returns the tables of a snapshot that are to be loaded.
fn chosen<'a>(
    newest: &'a Snapshot,
    options: &LoadOptions<'_>,
) -> std::result::Result<Vec<&'a TableEntry>, String> {
    let Some(names) = options.tables else { return Ok(newest.tables.iter().collect()) };
    let find = |name: &String| {
        let found = newest.tables.iter().find(|entry| entry.name == *name);
        found.ok_or_else(|| format!("the snapshot {} has no table \"{name}\"", newest.id))
    };
    names.iter().map(find).collect()
}

/// Returns what stands for the rule of a table that nobody is to step: with the slots that its files have.
fn rules_of_files(directory: &Directory, parts: &[&TableEntry]) -> Result<UpdateRules> {
    let slots = |shard: &ShardEntry| saved_slots(directory, shard);
    let first = parts.iter().flat_map(|part| &part.shards).next();
    first.map_or(Ok(Vec::new()), slots).map(UpdateRules::elsewhere)
}

/// Returns what makes up a table: all of its rows at some snapshot, and its deltas from there on.
fn parts_of<'a>(
    chain: &[&'a Snapshot],
    newest: &TableEntry,
) -> std::result::Result<Vec<&'a TableEntry>, String> {
    let mut parts = Vec::new();
    for snapshot in chain.iter().rev() {
        let found = snapshot.tables.iter().find(|entry| entry.name == newest.name);
        let gap = || format!("the snapshot {} lacks the table \"{}\"", snapshot.id, newest.name);
        let part = found.ok_or_else(gap)?;
        parts.push(part);
        if !part.is_delta {
            parts.reverse();
            return Ok(parts);
        }
    }
    Err(format!("there is no full snapshot of the table \"{}\"", newest.name))
}

fn load_table(
    table: &mut Table,
    directory: &Directory,
    parts: &[&TableEntry],
    options: &LoadOptions<'_>,
    engine: Engine<'_>,
) -> Result<Vec<(PathBuf, TableState)>> {
    let layout = Layout::of(table);
    let mut states = Vec::new();
    for part in parts {
        Table::check_room(&part.name, part.rows())
            .map_err(|error| refused(directory.path().join(FILE_NAME), error))?;
        let open = |shard| {
            let reader = Reader::open(directory, &layout, shard, part.is_delta)?;
            // Opening has read all but the rows.
            Progress::advance(
                options.progress,
                shard.plain_bytes() - (shard.rows * layout.row_bytes()) as u64,
            );
            Ok(reader)
        };
        // All are opened first: now it is known that there are as many rows as the manifest says.
        let readers = part.shards.iter().map(open).collect::<Result<Vec<_>>>()?;
        // With a filter most rows may be left out, so the map grows with those that come.
        if options.keeps.is_none() {
            table.reserve(part.rows());
        }
        let mut seen = Bits::default();
        // Counts and shared rows are whole in every file of a table: those of the newest part stand.
        states.clear();
        for mut reader in readers {
            states.push((reader.path().to_owned(), std::mem::take(&mut reader.state)));
            load_file((table, &layout), reader, &mut seen, options, engine)?;
        }
    }
    Ok(states)
}

/// Gives a table the shared rows of the newest snapshot: of as many stores as save and load together those of its own,
/// else the mean of those of all.
fn restore_shared_rows(
    table: &mut Table,
    states: &[(PathBuf, TableState)],
    options: &LoadOptions<'_>,
) -> Result<()> {
    if table.config().shared_rows().is_none() {
        return Ok(());
    }
    let layout = Layout::of(table);
    let own = options.shard.filter(|shard| shard.of == states.len()).map(|shard| shard.number);
    let chosen = states.get(own.map_or(0..states.len(), |own| own..own + 1)).unwrap_or_default();
    let mut all = Vec::new();
    for (path, state) in chosen {
        let records = state.shared_records(&layout).map_err(|message| refused(path, message))?;
        // Put to be checked, each by itself: what stands in the end is put below.
        table.put_shared_rows(&records).map_err(|message| refused(path, message))?;
        all.push(records);
    }
    // Where nobody has trained any they have their initial values.
    all.retain(|records| !records.is_empty());
    let records = match &all[..] {
        [] => return Ok(()),
        [one] => one.clone(),
        several => table.mean_of_records(several),
    };
    table.put_shared_rows(&records).map_err(|message| refused(FILE_NAME, message))
}

/// Gives a table what the shards of the newest snapshot remembered besides its rows.
fn restore_state(
    table: &mut Table,
    entry: &TableEntry,
    states: Vec<(PathBuf, TableState)>,
    options: &LoadOptions<'_>,
) -> Result<()> {
    let keeps = |id: &i64| options.keeps.is_none_or(|keeps| keeps(*id));
    let mut leaving = Vec::new();
    for (path, state) in states {
        if let Some(counts) = &state.admission {
            let added = table.add_admission_counts(counts, |id| keeps(&id));
            added.map_err(|message| refused(&path, message))?;
        }
        leaving.extend(state.leaving.into_iter().flatten().filter(keeps));
    }
    if let Some(steps) = entry.progress.sweep {
        table.set_leaving(steps, leaving);
    }
    Ok(())
}

/// Reads rows in a thread of their own, while those before get their places in the table.
fn load_file(
    (table, layout): (&mut Table, &Layout),
    mut reader: Reader<'_>,
    seen: &mut Bits,
    options: &LoadOptions<'_>,
    engine: Engine<'_>,
) -> Result<()> {
    // Before the rows: an id that was deleted and came back since is among both.
    table.remove_records(&reader.deleted);
    let path = reader.path().to_owned();
    let limit = (BYTES_PER_CHUNK / layout.row_bytes()).max(1);
    // Two buffers go round: reading overlaps with putting, and takes no more memory however fast it is.
    let (read, to_put) = mpsc::sync_channel(0);
    let (emptied, to_fill) = mpsc::sync_channel(BUFFERS);
    (0..BUFFERS).try_for_each(|_| emptied.send(CopiedRows::default())).map_err(at(&path))?;
    thread::scope(|scope| {
        let read_all = move || {
            for mut rows in to_fill {
                let found = reader.read(layout, limit, &mut rows);
                let is_over = found.is_err() || rows.ids.is_empty();
                // Whoever puts rows may have met an error, and then wants no more.
                if read.send(found.map(|()| rows)).is_err() || is_over {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("recstore-load".into())
            .spawn_scoped(scope, read_all)
            .map_err(at(&path))?;
        for rows in to_put {
            let mut rows: CopiedRows = rows?;
            Progress::advance(options.progress, (rows.ids.len() * layout.row_bytes()) as u64);
            put_rows(table, &path, &mut rows, seen, options, engine)?;
            // The reader may have ended, and then takes none back.
            _ = emptied.send(rows);
        }
        Ok(())
    })
}

fn put_rows(
    table: &mut Table,
    path: &Path,
    rows: &mut CopiedRows,
    seen: &mut Bits,
    options: &LoadOptions<'_>,
    engine: Engine<'_>,
) -> Result<()> {
    table.check_loaded(&rows.ids).map_err(|error| refused(path, error))?;
    if let Some(keeps) = options.keeps {
        rows.retain(keeps);
    }
    match table.put_records(engine, rows, seen)? {
        Some(id) => Err(refused(path, format!("the id {id} comes twice"))),
        None => Ok(()),
    }
}
