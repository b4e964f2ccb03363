//! A snapshot that several stores save together, each the rows of its shard, and one commits.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::entries::TableEntry;
use super::files::{at, create_directory, refused, write_beside};
use super::manifest::Manifest;
use super::options::SaveOptions;
use super::reports::SaveReport;
use super::save::{AllTables, LastSave, Plan, base_of, cleaned, lock, name_of, save_id, write};
use crate::Result;
use crate::kernel::hash::mix;

/// Which of the stores that save together this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The store's number, from 0.
    pub number: usize,
    /// How many stores there are.
    pub of: usize,
}

impl Shard {
    /// Whether an id is of this shard, where ids are spread by splitmix64 of the id modulo the number of shards. The
    /// same on every machine and in every release.
    ///
    /// # Panics
    /// There are 0 shards.
    pub fn holds(self, id: i64) -> bool {
        mix(id) % self.of as u64 == self.number as u64
    }
}

/// What one store saved.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    base: Option<String>,
    tables: Vec<TableEntry>,
}

fn path_of(directory: &Path, snapshot: &str, shard: Shard) -> PathBuf {
    directory.join(format!("{snapshot}-part-{}-of-{}.json", shard.number, shard.of))
}

/// Saves the rows of one shard for `snapshot`, which [`commit`] makes the directory's newest when all shards are there.
pub(crate) fn save_part(
    tables: &AllTables<'_>,
    last: &mut LastSave,
    directory: &Path,
    (snapshot, shard): (&str, Shard),
    options: &SaveOptions<'_>,
) -> Result<SaveReport> {
    if shard.number >= shard.of {
        return Err(refused(directory, format!("there is no shard {} of {}", shard.number, shard.of)));
    }
    let save = save_id(snapshot).map_err(|message| refused(directory, message))?;
    options.compression.validate(directory)?;
    create_directory(directory)?;
    let manifest = Manifest::read(directory)?.unwrap_or_else(Manifest::empty);
    let base = base_of(&manifest, *last, directory, options.kind)?;
    let suffix = format!("-{}-of-{}", shard.number, shard.of);
    let plan = Plan { directory, save, base, suffix, compression: options.compression };
    write(tables, last, &plan, options, |tables| {
        let path = path_of(directory, snapshot, shard);
        let text = serde_json::to_vec_pretty(&Part { base: base.map(name_of), tables }).map_err(at(&path))?;
        write_beside(&path, &text)
    })
}

/// Makes what all `of` shards saved for `snapshot` the newest snapshot of a directory.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: a shard is missing, or shards do not fit together; then the directory's newest snapshot
/// is what it was.
pub fn commit(directory: &Path, snapshot: &str, of: usize, options: &SaveOptions<'_>) -> Result<()> {
    save_id(snapshot).map_err(|message| refused(directory, message))?;
    let _lock = lock(directory)?;
    let mut manifest = Manifest::read(directory)?.unwrap_or_else(Manifest::empty);
    let paths: Vec<PathBuf> =
        (0..of).map(|number| path_of(directory, snapshot, Shard { number, of })).collect();
    let parts = paths.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    let (base, tables) = merged(parts, directory)?;
    manifest.add(snapshot.to_owned(), base, tables, options);
    manifest.write(directory)?;
    cleaned(directory, Ok(()))
}

fn read(path: &Path) -> Result<Part> {
    let text = fs::read(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => refused(path, "this shard has not been saved"),
        _ => refused(path, error),
    })?;
    serde_json::from_slice(&text).map_err(at(path))
}

/// Puts the parts of all shards together, table by table.
fn merged(parts: Vec<Part>, directory: &Path) -> Result<(Option<String>, Vec<TableEntry>)> {
    let mut parts = parts.into_iter();
    let Some(Part { base, mut tables }) = parts.next() else {
        return Err(refused(directory, "a snapshot of no shard cannot be committed"));
    };
    for (number, part) in parts.enumerate() {
        let differs =
            |what: &str| refused(directory, format!("shard {} saved {what} than shard 0", number + 1));
        if part.base != base || part.tables.len() != tables.len() {
            return Err(differs("other changes or tables"));
        }
        for (table, own) in tables.iter_mut().zip(part.tables) {
            table.add_shards(own).map_err(|name| differs(&format!("another table \"{name}\"")))?;
        }
    }
    Ok((base, tables))
}
