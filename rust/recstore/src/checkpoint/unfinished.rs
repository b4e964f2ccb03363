//! What saves may leave behind: noted before it is there, so that a later save removes just that and nothing else.
//!
//! A save that is killed leaves files that no snapshot needs; one that ends drops snapshots, whose files it may not get
//! to remove. Both are listed in a note beside them. A file of a like name that no note lists belongs to somebody else.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{
    COMPRESSED_EXTENSION, FILE_EXTENSION, FILE_NAME, at, refused, sync_directory, write_file,
};
use super::manifest::Manifest;
use super::save::{LOCK_NAME, lock, new_snapshot_name};
use crate::Result;

const FORMAT: &str = "recstore-unfinished";
const VERSION: u32 = 1;
const END: &str = "-unfinished.json";

/// The text of a note.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    format: String,
    version: u32,
    files: BTreeSet<String>,
}

/// The note of a save under way.
pub(super) struct Unfinished {
    path: PathBuf,
    files: BTreeSet<String>,
}

impl Unfinished {
    /// Notes the `files` that the save `name` is about to write to a directory.
    pub(super) fn begin(directory: &Path, name: &str, files: BTreeSet<String>) -> Result<Self> {
        let note = Self { path: directory.join(format!("{name}{END}")), files };
        note.write()?;
        Ok(note)
    }

    /// Notes further files, which will not be needed once the save has ended.
    pub(super) fn add(&mut self, files: BTreeSet<String>) -> Result<()> {
        if files.is_subset(&self.files) {
            return Ok(());
        }
        self.files.extend(files);
        self.write()
    }

    fn write(&self) -> Result<()> {
        let note = Note { format: FORMAT.to_owned(), version: VERSION, files: self.files.clone() };
        let text = serde_json::to_vec_pretty(&note).map_err(at(&self.path))?;
        write_file(&self.path, &text)
    }
}

/// Notes files that are about to be copied into a directory, and returns the note, which goes when the manifest that needs
/// them is there. Until then [`remove_checkpoint`] removes those that have come.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: the note cannot be written.
pub fn note_unfinished(directory: &Path, files: BTreeSet<String>) -> Result<PathBuf> {
    Unfinished::begin(directory, &new_snapshot_name(), files).map(|note| note.path)
}

/// Removes a checkpoint from a directory: what its manifest and the notes of saves list, and these. What else is there
/// stays.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: another process is saving there; a file cannot be removed, and then a further call removes
/// the rest.
pub fn remove_checkpoint(directory: &Path) -> Result<()> {
    if !directory.is_dir() {
        return Ok(());
    }
    let held = lock(directory)?;
    let manifest = Manifest::read(directory)?.unwrap_or_else(Manifest::empty);
    remove_unneeded(directory, &manifest)?;
    manifest.files().try_for_each(|file| remove(&directory.join(file)))?;
    remove(&directory.join(FILE_NAME))?;
    sync_directory(directory)?;
    remove(&directory.join(LOCK_NAME))?;
    drop(held);
    Ok(())
}

/// Removes the files that notes list and no snapshot needs, and then the notes.
pub(super) fn remove_unneeded(directory: &Path, manifest: &Manifest) -> Result<()> {
    let needed: BTreeSet<&String> = manifest.files().collect();
    for (path, note) in notes(directory)? {
        for file in note.files.iter().filter(|file| is_own(file) && !needed.contains(file)) {
            remove(&directory.join(file))?;
        }
        remove(&path)?;
    }
    Ok(())
}

/// Checks that a directory can be saved to: it has a manifest, or no rows.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names the directory and one of the files, or what is wrong with its manifest.
pub fn check_checkpoint_directory(directory: &Path) -> Result<()> {
    Manifest::read_or_new(directory).map(drop)
}

/// Checks that a directory without a manifest has no rows: such a manifest was lost, or not copied with them.
pub(super) fn check_no_rows(directory: &Path) -> Result<()> {
    // Before the notes: a save that begins meanwhile notes its files first.
    let files = names(directory)?;
    let noted: BTreeSet<String> = notes(directory)?.into_iter().flat_map(|(_, note)| note.files).collect();
    let is_row_file = |name: &String| {
        is_own(name) && [FILE_EXTENSION, COMPRESSED_EXTENSION].iter().any(|end| name.ends_with(end))
    };
    let mut found = files.into_iter().filter(|name| is_row_file(name) && !noted.contains(name));
    let Some(first) = found.next() else { return Ok(()) };
    let message = format!(
        "there is no manifest.json here, but {} of rows, such as {first}: copy the manifest that they belong to, or choose another directory",
        match found.count() {
            0 => "a file".to_owned(),
            more => format!("{} files", more + 1),
        }
    );
    Err(refused(directory, message))
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(at(path)),
    }
}

/// Returns the notes of a directory. A file that only has the name of one is none.
fn notes(directory: &Path) -> Result<Vec<(PathBuf, Note)>> {
    let mut notes = Vec::new();
    for name in names(directory)?.into_iter().filter(|name| is_own(name) && name.ends_with(END)) {
        let path = directory.join(name);
        // Another save may have removed it meanwhile.
        let Ok(text) = fs::read(&path) else { continue };
        let read = serde_json::from_slice(&text).ok();
        let is_one = |note: &Note| note.format == FORMAT && note.version == VERSION;
        notes.extend(read.filter(is_one).map(|note| (path, note)));
    }
    Ok(notes)
}

/// Returns the names of the files in a directory, sorted.
fn names(directory: &Path) -> Result<BTreeSet<String>> {
    let files = fs::read_dir(directory).map_err(at(directory))?;
    let plain = |file: std::io::Result<fs::DirEntry>| {
        let file = file.map_err(at(directory))?;
        let is_file = file.file_type().is_ok_and(|kind| kind.is_file());
        Ok(is_file.then(|| file.file_name().to_string_lossy().into_owned()))
    };
    files.map(plain).filter_map(Result::transpose).collect()
}

/// Whether a file can be a save's by its name: rows, or what a shard saved.
fn is_own(name: &str) -> bool {
    let hexadecimal = name.bytes().take_while(u8::is_ascii_hexdigit).count();
    let ends = [FILE_EXTENSION, COMPRESSED_EXTENSION, ".json"];
    hexadecimal == 16 && name.as_bytes().get(16) == Some(&b'-') && ends.iter().any(|end| name.ends_with(end))
}
