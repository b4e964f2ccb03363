//! Makes one full snapshot of a chain of deltas.

use std::path::Path;
use std::sync::Arc;

use super::files::refused;
use super::load::{LoadingStore, load};
use super::manifest::Manifest;
use super::options::{LoadOptions, SaveOptions};
use super::progress::Progress;
use super::reports::SaveReport;
use super::save::{Plan, Saves, cleaned, lock, write};
use super::unfinished::remove_unneeded;
use crate::Result;
use crate::kernel::parallel::Serial;
use crate::kernel::simd::Simd;
use crate::table::Engine;

/// Puts a full snapshot of the same name in the place of the newest one and those it follows; deltas can follow it. A
/// snapshot that follows none stays as it is, and there is no report. Files are compressed if those of the newest snapshot
/// are. It takes as much memory as the tables.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the file; then the directory holds what it held before.
pub fn compact(directory: &Path, progress: Option<&Progress>) -> Result<Option<SaveReport>> {
    let _lock = lock(directory)?;
    let Some(mut manifest) = Manifest::read(directory)? else {
        return Err(refused(directory, "there is no checkpoint here"));
    };
    if manifest.snapshots.last().is_none_or(|newest| newest.parent.is_none()) {
        return Ok(None);
    }
    // One that was killed left a file of the same name.
    remove_unneeded(directory, &manifest)?;
    let compression = manifest.newest_compression();
    let options = LoadOptions { progress, ..LoadOptions::default() };
    let store = LoadingStore {
        engine: Engine { executor: &Serial, simd: Simd::detect() },
        rules: None,
        budget: &Arc::default(),
        configured: &|_, saved| Ok(saved.clone()),
    };
    let loaded = load(directory, &options, store)?;
    let tables: Vec<_> = loaded.tables.into_iter().map(Arc::new).collect();
    let suffix = "-compacted".to_owned();
    let plan = Plan { directory, save: loaded.save, base: None, suffix, compression, part: None };
    let options = SaveOptions { progress, ..SaveOptions::default() };
    let report = write(&|cut| cut(&tables), &mut Saves::default(), &plan, &options, |tables, note| {
        manifest.replace(directory, note, |manifest| manifest.replace_chain(tables))
    });
    cleaned(directory, report).map(Some)
}
