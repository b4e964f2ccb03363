//! Saves to and loads from an object store.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStore;
use recstore::{
    CheckpointFiles, EmbeddingStore, LoadOptions, LoadReport, SaveOptions, SaveReport, checkpoint_files,
};
use tempfile::TempDir;

use crate::error::named;
use crate::location::{CHECKPOINT, Location};
use crate::manifests::{self, Numbered, Put};
use crate::objects;
use crate::waiting::Requests;
use crate::{Error, Result};

/// The name of a manifest in a directory.
const MANIFEST: &str = "manifest.json";

/// A checkpoint in an object store.
#[derive(Debug)]
pub struct ObjectCheckpoint {
    location: Location,
    staging: Option<PathBuf>,
    requests: Requests,
}

impl ObjectCheckpoint {
    /// Returns the checkpoint at a URL, whether or not there is one: `s3://bucket/prefix` or `file:///path`.
    ///
    /// `options` are those of [`object_store::aws::AmazonS3ConfigKey`], such as `region` or `endpoint`; what is not given
    /// is taken from the environment. `file://` has none.
    ///
    /// # Errors
    /// [`Error::Url`]: the URL or an option is not understood.
    pub fn from_url<'a>(url: &str, options: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        Self::at(Location::from_url(CHECKPOINT, url, options)?)
    }

    /// Returns the checkpoint below `prefix` in an object store.
    ///
    /// # Errors
    /// [`Error::Url`]: no thread can be started.
    pub fn new(objects: Arc<dyn ObjectStore>, prefix: &str) -> Result<Self> {
        Self::at(Location::new(objects, prefix.into()))
    }

    fn at(location: Location) -> Result<Self> {
        Ok(Self { requests: Requests::to(&location)?, location, staging: None })
    }

    /// Makes temporary directories in `directory` instead of where the system has them.
    #[must_use]
    pub fn staged_in(self, directory: &Path) -> Self {
        Self { staging: Some(directory.to_owned()), ..self }
    }

    /// Saves all tables, as [`EmbeddingStore::save`] does to a directory. What is written lies in a temporary directory
    /// until it is uploaded.
    ///
    /// # Errors
    /// [`Error`]; then what was saved before is the newest snapshot still. [`Error::Conflict`]: somebody else has saved
    /// meanwhile.
    pub fn save(&self, store: &dyn EmbeddingStore, options: &SaveOptions<'_>) -> Result<SaveReport> {
        let directory = self.temporary_directory()?;
        let newest = self.requests.wait(|| manifests::newest(&self.location))?;
        // With it in place, the store knows the snapshot before and can write a delta to it. Its files are
        // not needed for that, only the names.
        if let Some(newest) = &newest {
            self.write_manifest(directory.path(), newest)?;
        }
        // Taken before the save, which rewrites the manifest.
        let before = self.files(directory.path(), None)?;
        let saved = store.save(directory.path(), options);
        let report = saved.map_err(|error| named(error, &self.location.url, directory.path()))?;
        let after = self.files(directory.path(), None)?;
        // The number after the one that was read. Another process that saves meanwhile takes the same, and
        // only one of them gets it.
        let number = newest.map_or(1, |newest| newest.number + 1);
        let text = self.read_manifest(directory.path())?;
        self.requests
            .wait(|| self.publish(directory.path(), &before.all, &after.all, Numbered { number, text }))?;
        Ok(report)
    }

    /// Loads a snapshot, the newest if none is named, as [`EmbeddingStore::load`] does from a directory. Its files are downloaded to a
    /// temporary directory first.
    ///
    /// # Errors
    /// [`Error`]; then the store is as before.
    pub fn load(&self, store: &dyn EmbeddingStore, options: &LoadOptions<'_>) -> Result<LoadReport> {
        loop {
            let directory = self.temporary_directory()?;
            let Some(newest) = self.requests.wait(|| manifests::newest(&self.location))? else {
                let message = "there is no checkpoint here".to_owned();
                return Err(Error::Url { of: self.location.of, url: self.location.url.clone(), message });
            };
            self.write_manifest(directory.path(), &newest)?;
            let files = self.files(directory.path(), options.snapshot)?;
            let downloaded = self
                .requests
                .wait(|| objects::download_all(&self.location, files.loaded.iter(), directory.path()));
            match downloaded {
                // A save may have dropped the snapshot under our hands.
                Err(error) if self.requests.wait(|| manifests::newest(&self.location))? != Some(newest) => {
                    drop(error);
                }
                failed @ Err(_) => failed?,
                Ok(()) => {
                    let loaded = store.load(directory.path(), options);
                    return loaded.map_err(|error| named(error, &self.location.url, directory.path()));
                }
            }
        }
    }

    /// Uploads the files that are new, then the manifest, and removes what is not needed any more.
    async fn publish(
        &self,
        directory: &Path,
        before: &BTreeSet<String>,
        after: &BTreeSet<String>,
        manifest: Numbered,
    ) -> Result<()> {
        let location = &self.location;
        let new: Vec<String> = after.difference(before).cloned().collect();
        // The files first: a manifest must never name one that is not there yet.
        if let Err(error) = objects::upload_all(location, directory, &new).await {
            objects::remove(location, new.iter()).await;
            return Err(error);
        }
        match manifests::put(location, &manifest).await {
            Put::Counts => {}
            Put::Refused(error) => {
                objects::remove(location, new.iter()).await;
                return Err(error);
            }
            // The manifest may count, and the files with it, so they stay.
            Put::Unknown(error) => return Err(error),
        }
        // Only after the manifest counts: until then the snapshot before is the newest and needs them.
        objects::remove(location, before.difference(after)).await;
        let newest = manifests::name_of(manifest.number);
        objects::remove_old(location, |name| name == newest || after.contains(name)).await;
        Ok(())
    }

    fn temporary_directory(&self) -> Result<TempDir> {
        let mut builder = tempfile::Builder::new();
        let made = match &self.staging {
            Some(staging) => builder.prefix("recstore-").tempdir_in(staging),
            None => builder.prefix("recstore-").tempdir(),
        };
        made.map_err(|source| self.staging_error(self.staging.as_deref().unwrap_or(Path::new("")), source))
    }

    #[expect(clippy::disallowed_methods, reason = "a temporary directory of its own")]
    fn write_manifest(&self, directory: &Path, manifest: &Numbered) -> Result<()> {
        let path = directory.join(MANIFEST);
        fs::write(&path, &manifest.text).map_err(|source| self.staging_error(&path, source))
    }

    #[expect(clippy::disallowed_methods, reason = "a temporary directory of its own")]
    fn read_manifest(&self, directory: &Path) -> Result<Vec<u8>> {
        let path = directory.join(MANIFEST);
        fs::read(&path).map_err(|source| self.staging_error(&path, source))
    }

    fn files(&self, directory: &Path, snapshot: Option<&str>) -> Result<CheckpointFiles> {
        checkpoint_files(directory, snapshot).map_err(|error| named(error, &self.location.url, directory))
    }

    fn staging_error(&self, path: &Path, source: std::io::Error) -> Error {
        let (of, url) = (self.location.of, self.location.url.clone());
        Error::Staging { of, url, path: path.display().to_string(), source }
    }
}
