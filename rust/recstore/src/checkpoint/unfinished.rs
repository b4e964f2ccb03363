//! What saves may leave behind: noted before it is there, so that a later save removes just that and nothing else.
//!
//! A save that is killed leaves files that no snapshot needs; one that ends drops snapshots, whose files it may not get
//! to remove. Both are listed in a note beside them. A file of a like name that no note lists belongs to somebody else.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use super::files::{
    COMPRESSED_EXTENSION, FILE_EXTENSION, MAX_TEXT_BYTES, at, inside, new_snapshot_name, refused,
};
use crate::Result;
use crate::disk::{Directory, FileKind};

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
    directory: Directory,
    name: String,
    files: BTreeSet<String>,
}

impl Unfinished {
    /// Notes the `files` that the save `name` is about to write to a directory.
    pub(super) fn begin(directory: &Directory, name: &str, files: BTreeSet<String>) -> Result<Self> {
        let note = Self { directory: directory.clone(), name: format!("{name}{END}"), files };
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
        let text = serde_json::to_vec_pretty(&note).map_err(at(self.directory.path()))?;
        self.directory.replace(&self.name, &text).map_err(inside(&self.directory))
    }
}

/// Notes files that are about to be copied into a directory, and returns the name of the note, which goes when the manifest that needs
/// them is there. Until then [`remove_checkpoint`](crate::remove_checkpoint) removes those that have come.
///
/// # Errors
/// [`crate::Error::Checkpoint`]: the note cannot be written.
pub fn note_unfinished(directory: &Directory, files: BTreeSet<String>) -> Result<String> {
    Unfinished::begin(directory, &new_snapshot_name(), files).map(|note| note.name)
}

/// Removes the files that notes list and no snapshot needs, and then the notes.
pub(super) fn remove_unneeded<'a>(
    directory: &Directory,
    needed: impl Iterator<Item = &'a String>,
) -> Result<()> {
    let needed: BTreeSet<&String> = needed.collect();
    for (name, note) in notes(directory)? {
        // A note is a file as others are: whatever it lists, only names that saves give are removed.
        for file in note.files.iter().filter(|file| is_own(file) && !needed.contains(file)) {
            remove(directory, file)?;
        }
        remove(directory, &name)?;
    }
    Ok(())
}

/// Checks that a directory without a manifest has no rows: such a manifest was lost, or not copied with them.
pub(super) fn check_no_rows(directory: &Directory) -> Result<()> {
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
    Err(refused(directory.path(), message))
}

pub(super) fn remove(directory: &Directory, name: &str) -> Result<()> {
    match directory.remove_file(name) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(inside(directory)),
    }
}

/// Whether saves have left notes.
pub(super) fn has_notes(directory: &Directory) -> Result<bool> {
    notes(directory).map(|notes| !notes.is_empty())
}

/// Returns the notes of a directory with their names. A file that only has the name of one is none.
fn notes(directory: &Directory) -> Result<Vec<(String, Note)>> {
    let mut notes = Vec::new();
    for name in names(directory)?.into_iter().filter(|name| is_own(name) && name.ends_with(END)) {
        let text = match directory.read(&name, MAX_TEXT_BYTES) {
            // Another save may have removed it meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            text => text.map_err(inside(directory))?,
        };
        let read = serde_json::from_slice(&text).ok();
        let is_one = |note: &Note| note.format == FORMAT && note.version == VERSION;
        notes.extend(read.filter(is_one).map(|note| (name, note)));
    }
    Ok(notes)
}

/// Returns the names in a directory, sorted, but for those of directories, which are never a save's.
fn names(directory: &Directory) -> Result<BTreeSet<String>> {
    let entries = directory.entries().map_err(inside(directory))?.into_iter();
    let files = entries.filter(|(_, kind)| *kind != FileKind::Directory);
    Ok(files.map(|(name, _)| name.to_string_lossy().into_owned()).collect())
}

/// Whether a file can be a save's by its name: rows, or what a shard saved.
fn is_own(name: &str) -> bool {
    let hexadecimal = name.bytes().take_while(u8::is_ascii_hexdigit).count();
    let ends = [FILE_EXTENSION, COMPRESSED_EXTENSION, ".json"];
    hexadecimal == 16 && name.as_bytes().get(16) == Some(&b'-') && ends.iter().any(|end| name.ends_with(end))
}
