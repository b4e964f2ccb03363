//! Spreading the rows of servers that do not run over another number of shards.
//!
//! New directories are made beside the old ones, which are then moved away, not removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use recstore::{
    Directory, EmbeddingStore, InProcessStore, KnownSaves, LoadOptions, LocalStore, Result, SaveOptions,
    Shard, commit_snapshot, new_snapshot_name,
};

use crate::durable::MANIFEST;
use crate::durable::moves::{WORKSHOP, clear, finish_moves, move_to};
use crate::durable::state_directory::{Durability, StateDirectory, directory_name, shards_in};
use crate::durable::{in_file, unusable};
use crate::handler::Handler;
use crate::router::{HashMethod, Router};
use crate::wire::store_metadata::StoreMetadata;
use crate::workers::WorkerSync;

/// Where all rows lie between the old shards and the new ones.
const GATHERED: &str = "gathered";

/// What spreading rows anew came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resharded {
    /// How many shards there were; none where a checkpoint was spread.
    pub before: Option<usize>,
    /// The rows on each shard.
    pub rows: Vec<usize>,
    /// How ids are spread over them.
    pub hash_method: HashMethod,
    /// Where the shards are that there were before, if they were in the same directory.
    pub moved_to: Option<PathBuf>,
}

/// Spreads the rows of the shards in `from`, or of a checkpoint there, over so many shards in `to`, which may be the same
/// directory. Ids are spread as before where `hash_method` is not given. Takes the memory of one shard of either.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the directory that lacks a shard, that a server uses, or that has others' shards;
/// or the file that cannot be used. Then `from` and its shards are as they were.
pub fn reshard(from: &Path, to: &Path, shards: usize, hash_method: Option<HashMethod>) -> Result<Resharded> {
    if shards == 0 {
        return Err(unusable(to, "rows need one shard at least, got 0"));
    }
    let target = Directory::create(to).map_err(in_file(to))?;
    // First: after a reshard that was cut off, some shards lie in one place and some in the other.
    finish_moves(&target)?;
    let is_same = same_directory(from, to);
    if !is_same {
        check_free(to)?;
    }
    let workshop = to.join(WORKSHOP);
    clear(&target)?;
    let source = Source::of(from)?;
    let facts = StoreMetadata {
        hash_method: hash_method.or(source.facts.as_ref().map(|facts| facts.hash_method)).unwrap_or_default(),
        ..source.facts.clone().unwrap_or_else(|| StoreMetadata::new(HashMethod::default()))
    };
    let (gathered, saves) = source.gather(&workshop)?;
    let mut rows = Vec::new();
    for number in 0..shards {
        let shard = Shard { number, of: shards };
        let (state, made) = make_shard(&gathered, &workshop, shard, &facts)?;
        // The new shards go on with the snapshots of the old ones.
        state.keep_saves(|| Ok(KnownSaves::join(&saves, shard)))?;
        rows.push(made);
    }
    let moved_to = move_all(&source, &target, shards, is_same)?;
    let before = (!source.shards.is_empty()).then_some(source.shards.len());
    Ok(Resharded { before, rows, hash_method: facts.hash_method, moved_to })
}

/// Where rows come from.
struct Source {
    directory: PathBuf,
    /// The shards, which no server gets before they are moved away; none of a checkpoint.
    shards: Vec<StateDirectory>,
    facts: Option<StoreMetadata>,
}

impl Source {
    fn of(directory: &Path) -> Result<Self> {
        let directory = directory.to_owned();
        if directory.join(MANIFEST).is_file() {
            return Ok(Self { directory, shards: Vec::new(), facts: None });
        }
        let found = shards_in(&directory)?;
        let Some(&(_, Shard { of, .. })) = found.first() else {
            return Err(unusable(&directory, "there are no shards and no checkpoint here"));
        };
        if let Some((other, _)) = found.iter().find(|(_, shard)| shard.of != of) {
            return Err(unusable(
                other,
                format!("it is of another number of shards than {} beside it", found[0].0.display()),
            ));
        }
        let missing: Vec<String> = (0..of)
            .map(|number| Shard { number, of })
            .filter(|shard| !found.iter().any(|(_, found)| found == shard))
            .map(directory_name)
            .collect();
        if !missing.is_empty() {
            let message = format!("{} missing here: bring all shards together first", missing.join(", "));
            return Err(unusable(&directory, message));
        }
        let open =
            |(path, shard): &(PathBuf, Shard)| StateDirectory::open(path, *shard, Durability::Checkpoint);
        let shards = found.iter().map(open).collect::<Result<Vec<_>>>()?;
        let facts = agreed(&shards)?;
        Ok(Self { directory, shards, facts })
    }

    /// Makes one checkpoint of all rows, and returns where it is, and which snapshots the store of each shard knows.
    fn gather(&self, workshop: &Path) -> Result<(PathBuf, Vec<KnownSaves>)> {
        let mut saves = Vec::new();
        if self.shards.is_empty() {
            return Ok((self.directory.clone(), saves));
        }
        let (gathered, snapshot, of) = (workshop.join(GATHERED), new_snapshot_name(), self.shards.len());
        let mut options = SaveOptions::default();
        // Servers that were killed may have stopped a step apart.
        options.at_any_step = true;
        for (number, state) in self.shards.iter().enumerate() {
            let shard = Shard { number, of };
            let store = kept_store(state, shard)?;
            saves.push(store.known_saves()?);
            store.save_part(&gathered, &snapshot, shard, &options)?;
        }
        commit_snapshot(&gathered, &snapshot, of, &options)?;
        Ok((gathered, saves))
    }
}

/// Returns what the clients of all shards agreed on.
fn agreed(shards: &[StateDirectory]) -> Result<Option<StoreMetadata>> {
    let mut all: Option<StoreMetadata> = None;
    for state in shards {
        match (&all, state.facts()) {
            (Some(all), Some(own)) if *all != own => {
                let message = format!("it has the {own}, and another shard the {all}");
                return Err(unusable(state.path(), message));
            }
            (_, own) => all = all.or(own),
        }
    }
    Ok(all)
}

/// Returns the tables of a shard, log and all.
fn kept_store(state: &StateDirectory, shard: Shard) -> Result<Arc<LocalStore>> {
    let store = Arc::new(LocalStore::default());
    Handler::new(Arc::clone(&store) as _, shard, u64::MAX, WorkerSync::default())?.take(state)?;
    Ok(store)
}

/// Makes the directory of a new shard, and returns how many rows it has.
fn make_shard(
    gathered: &Path,
    workshop: &Path,
    shard: Shard,
    facts: &StoreMetadata,
) -> Result<(StateDirectory, usize)> {
    let (store, router) = (LocalStore::default(), Router::new(facts.hash_method, shard.of));
    let keeps = |id| router.shard_of(id) == shard.number;
    let mut options = LoadOptions::default();
    options.keeps = Some(&keeps);
    options.shard = Some(shard);
    options.without_counts = shard.number > 0;
    store.load(gathered, &options)?;
    let directory = workshop.join(directory_name(shard));
    let report = store.save(&directory, &SaveOptions::default())?;
    let state = StateDirectory::open(&directory, shard, Durability::Checkpoint)?;
    state.set_facts(facts)?;
    Ok((state, report.rows))
}

/// Puts the new shards in the place of the old ones, and returns where those are then.
fn move_all(source: &Source, to: &Directory, shards: usize, is_same: bool) -> Result<Option<PathBuf>> {
    let old: Vec<&Path> = source.shards.iter().filter(|_| is_same).map(StateDirectory::path).collect();
    let aside = free_name(to.path());
    let name = |path: &Path| PathBuf::from(path.file_name().unwrap_or_default());
    let mut moves = Vec::new();
    if !old.is_empty() {
        to.create_subdirectory(name(&aside)).map_err(in_file(&aside))?;
    }
    // The old shards first: a new one may have the name of an old one.
    for directory in &old {
        moves.push((name(directory), name(&aside).join(name(directory))));
    }
    for number in 0..shards {
        let new = directory_name(Shard { number, of: shards });
        moves.push((Path::new(WORKSHOP).join(&new), PathBuf::from(new)));
    }
    // All in one call, which goes on with them after a crash.
    move_to(to, moves)?;
    Ok((!old.is_empty()).then_some(aside))
}

/// Returns a name that nothing has yet, for the shards before.
fn free_name(data: &Path) -> PathBuf {
    let mut names = (1_u64..).map(|number| data.join(format!("before-reshard-{number}")));
    names.find(|path| !path.exists()).unwrap_or_else(|| data.join("before-reshard"))
}

fn check_free(to: &Path) -> Result<()> {
    match shards_in(to)?.first() {
        Some((found, _)) => Err(unusable(to, format!("it has shards, such as {}", found.display()))),
        None if to.join(MANIFEST).exists() => Err(unusable(to, "it is a checkpoint of tables")),
        None => Ok(()),
    }
}

fn same_directory(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| fs::canonicalize(path).ok();
    one == other || canonical(one).is_some_and(|one| Some(one) == canonical(other))
}
