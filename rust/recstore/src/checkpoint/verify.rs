//! Compares all files of a directory with its manifest. No table is made, and little memory is needed.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::entries::ShardEntry;
use super::files::{FILE_NAME, LOCK_NAME, existing, inside};
use super::manifest::Manifest;
use super::place::SERVER_FILES;
use super::table_file::OpenedFile;
use crate::disk::Directory;
use crate::{Error, Result};

/// What [`verify`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// How many snapshots the directory has.
    pub snapshots: usize,
    /// How many files they have.
    pub files: usize,
    /// The bytes of these files.
    pub bytes: u64,
    /// What is not as the manifest says.
    pub findings: Vec<Finding>,
}

/// A file that is not as the manifest says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What is wrong.
    pub kind: FindingKind,
    /// The file's name.
    pub file: String,
    /// The same in a sentence.
    pub message: String,
}

/// What can be wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// Its content is another.
    Damaged,
    /// It is not there.
    Missing,
    /// The manifest does not list it, which harms no load.
    Unexplained,
}

/// Returns the snapshots of a directory as JSON, the oldest first.
///
/// # Errors
/// [`Error::Checkpoint`]: there is no checkpoint, or its manifest is damaged.
pub fn checkpoint_snapshots(path: &Path) -> Result<String> {
    let manifest = Manifest::existing(&existing(path)?)?;
    // It was JSON before.
    Ok(serde_json::to_string(&manifest.snapshots).unwrap_or_default())
}

/// Compares length, header and checksums of every file of every snapshot. Somebody may save meanwhile: then it begins anew.
///
/// # Errors
/// [`Error::Checkpoint`]: there is no checkpoint, or its manifest is damaged.
pub fn verify(path: &Path) -> Result<Verified> {
    let directory = &existing(path)?;
    let mut manifest = Manifest::existing(directory)?;
    loop {
        let verified = compared(directory, &manifest)?;
        let again = Manifest::existing(directory)?;
        // Files that are not listed may be those of a save under way, and are no reason to begin anew.
        let is_sound = verified.findings.iter().all(|finding| finding.kind == FindingKind::Unexplained);
        if is_sound || again.snapshots == manifest.snapshots {
            return Ok(verified);
        }
        manifest = again;
    }
}

fn compared(directory: &Directory, manifest: &Manifest) -> Result<Verified> {
    let finding = |kind, file: &str, message: &str| Finding {
        kind,
        file: file.to_owned(),
        message: message.to_owned(),
    };
    let files: BTreeMap<&str, &ShardEntry> =
        manifest.shards().map(|entry| (entry.file.as_str(), entry)).collect();
    let gaps = manifest.gaps();
    let mut findings: Vec<Finding> =
        gaps.iter().map(|gap| finding(FindingKind::Damaged, FILE_NAME, gap)).collect();
    for (file, entry) in &files {
        if directory.kind(file).map_err(inside(directory))?.is_none() {
            findings.push(finding(FindingKind::Missing, file, "the manifest lists it"));
        } else if let Err(error) = OpenedFile::open(directory, entry).and_then(|file| file.check_all()) {
            findings.push(finding(FindingKind::Damaged, file, &message_of(error)));
        }
    }
    for (name, _) in directory.entries().map_err(inside(directory))? {
        let name = name.to_string_lossy();
        if ![FILE_NAME, LOCK_NAME].contains(&&*name)
            && !SERVER_FILES.contains(&&*name)
            && !files.contains_key(&*name)
        {
            findings.push(finding(FindingKind::Unexplained, &name, "the manifest does not list it"));
        }
    }
    let bytes = files.values().map(|entry| entry.bytes).fold(0, u64::saturating_add);
    Ok(Verified { snapshots: manifest.snapshots.len(), files: files.len(), bytes, findings })
}

/// What an error says of a file, without its path.
fn message_of(error: Error) -> String {
    match error {
        Error::Checkpoint { message, .. } => message,
        other => other.to_string(),
    }
}
