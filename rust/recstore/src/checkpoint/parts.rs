//! A snapshot that several stores save together, each the rows of its shard, and one commits.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::entries::TableEntry;
use super::files::{MAX_TEXT_BYTES, at, created, found, inside, lock, name_of, refused, save_id};
use super::manifest::Manifest;
use super::options::{SaveOptions, Shard, share_of};
use super::place::check_free;
use super::reports::SaveReport;
use super::save::{AllTables, Plan, base_of, cleaned, write};
use super::saves::{Claim, Saves};
use super::unfinished::Unfinished;
use crate::disk::Directory;
use crate::{Error, Result};

/// What one store saved.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    base: Option<String>,
    /// None in parts of before, which tell only whether the store had saved or loaded the newest snapshot.
    #[serde(default)]
    claim: Option<Claim>,
    #[serde(default, skip_serializing)]
    follows: bool,
    tables: Vec<TableEntry>,
}

impl Part {
    /// Returns what its store said of itself.
    fn claim(&mut self) -> Claim {
        let follows = self.follows || self.base.is_some();
        let before = || Claim { follows, newest: self.base.clone(), ..Claim::default() };
        self.claim.take().unwrap_or_else(before)
    }
}

fn part_name(snapshot: &str, shard: Shard) -> String {
    format!("{snapshot}-part-{}-of-{}.json", shard.number, shard.of)
}

/// Saves the rows of one shard for `snapshot`, which [`commit`] makes the directory's newest when all shards are there.
pub(crate) fn save_part(
    tables: &AllTables<'_>,
    saves: &mut Saves,
    path: &Path,
    (snapshot, shard): (&str, Shard),
    options: &SaveOptions<'_>,
) -> Result<SaveReport> {
    if shard.number >= shard.of {
        return Err(refused(path, format!("there is no shard {} of {}", shard.number, shard.of)));
    }
    let save = save_id(snapshot).map_err(|message| refused(path, message))?;
    options.compression.validate(path)?;
    check_free(path, options)?;
    let directory = &created(path)?;
    // Without the directory's lock: shards save here at the same time, each to files of its own.
    let manifest = Manifest::read_or_new(directory)?;
    let share = share_of(shard);
    let known = saves.of_share(share);
    let base = base_of(&manifest, known, directory, options.kind)?;
    let claim = known.claim(&manifest, directory, options)?;
    let kept = claim.check(&manifest, directory, options)?;
    let lineage = claim.clone().lineage(&manifest, snapshot);
    let (suffix, name) = (format!("-{}-of-{}", shard.number, shard.of), part_name(snapshot, shard));
    let (compression, part) = (options.compression, Some(name.clone()));
    let plan = Plan { directory, save, base, suffix, compression, part };
    let report = write(tables, &plan, options, |tables, _| {
        // Written after the files that it lists: `commit` takes it as the sign that they are there.
        let part = Part { base: base.map(name_of), claim: Some(claim), follows: false, tables };
        let text = serde_json::to_vec_pretty(&part).map_err(at(path))?;
        directory.replace(name, &text).map_err(inside(directory))
    })?;
    saves.note(save, &lineage, share);
    Ok(SaveReport { kept, ..report })
}

/// Makes what all `of` shards saved for `snapshot` the newest snapshot of a directory. Returns what [`SaveReport::kept`]
/// says.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: a shard is missing, or shards do not fit together, or another store has saved since they
/// did; then the directory's newest snapshot is what it was.
pub fn commit(path: &Path, snapshot: &str, of: usize, options: &SaveOptions<'_>) -> Result<Option<String>> {
    save_id(snapshot).map_err(|message| refused(path, message))?;
    check_free(path, options)?;
    let directory = &found(path)?.ok_or_else(|| refused(path, "no shard has been saved here"))?;
    // With the lock, as the manifest changes below.
    let _lock = lock(directory)?;
    let mut manifest = Manifest::read_or_new(directory)?;
    let part = |number| part_name(snapshot, Shard { number, of });
    let parts = (0..of).map(|number| read(directory, &part(number))).collect::<Result<Vec<_>>>()?;
    let (claim, Part { base, tables, .. }) = merged(parts, directory, options)?;
    let kept = claim.check(&manifest, directory, options)?;
    manifest.check_not_emptied(directory, &tables, claim.follows, options)?;
    let lineage = claim.lineage(&manifest, snapshot);
    check_there(directory, &tables)?;
    let mut note = Unfinished::begin(directory, &format!("{snapshot}-commit"), BTreeSet::new())?;
    let added = manifest.replace(directory, &mut note, |manifest| {
        manifest.add(lineage, base, tables, options);
    });
    cleaned(directory, added.map(|()| kept))
}

/// Checks that what the parts list has not been removed: a save that another job began may have been taken for one that
/// was killed.
fn check_there(directory: &Directory, tables: &[TableEntry]) -> Result<()> {
    for shard in tables.iter().flat_map(|table| &table.shards) {
        let path = directory.path().join(&shard.file);
        let file = directory.open_file(&shard.file).map_err(inside(directory))?;
        let found = file.metadata().map_err(at(&path))?.len();
        if found != shard.bytes {
            return Err(refused(&path, format!("expected {} bytes, got {found}", shard.bytes)));
        }
    }
    Ok(())
}

fn read(directory: &Directory, name: &str) -> Result<Part> {
    let path = directory.path().join(name);
    let text = directory.read(name, MAX_TEXT_BYTES).map_err(|error| match error.kind() {
        ErrorKind::NotFound => refused(&path, "this shard has not been saved"),
        _ => inside(directory)(error),
    })?;
    serde_json::from_slice(&text).map_err(at(&path))
}

/// Puts the parts of all shards together, table by table.
fn merged(parts: Vec<Part>, directory: &Directory, options: &SaveOptions<'_>) -> Result<(Claim, Part)> {
    let mut parts = parts.into_iter();
    let Some(mut first) = parts.next() else {
        return Err(refused(directory.path(), "a snapshot of no shard cannot be committed"));
    };
    let mut claim = first.claim();
    let Part { base, tables, .. } = &mut first;
    for (number, mut part) in parts.enumerate() {
        let differs =
            |what: &str| refused(directory.path(), format!("shard {} saved {what} than shard 0", number + 1));
        if part.base != *base || part.tables.len() != tables.len() {
            return Err(differs("other changes or tables"));
        }
        claim.join(part.claim());
        for (table, mut own) in tables.iter_mut().zip(part.tables) {
            if options.at_any_step {
                table.level_steps(&mut own);
            }
            let steps = [table.step(), own.step()];
            table.add_shards(own).map_err(|name| match steps {
                [first, other] if first != other => apart(directory, &name, number + 1, steps),
                _ => differs(&format!("another table \"{name}\"")),
            })?;
        }
    }
    Ok((claim, first))
}

/// Says how shards that stopped a step apart come together again.
fn apart(directory: &Directory, table: &str, shard: usize, [first, other]: [u64; 2]) -> Error {
    refused(
        directory.path(),
        format!(
            "shard 0 saved table \"{table}\" at step {first}, shard {shard} at step {other}: a step reached only some \
             shards. Take the step again, or end all programs: on servers the next one that opens the table gives all \
             shards the greatest step, and ranks load a checkpoint"
        ),
    )
}
