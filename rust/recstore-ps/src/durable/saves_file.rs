//! The file in which a server with a log keeps which snapshots its store has saved and loaded. With them it goes on with
//! them after a restart; a copy of the directory from before a save does not.

use std::io::ErrorKind;

use recstore::{Directory, KnownSaves, Result, SERVER_SAVES, Shard};
use serde::{Deserialize, Serialize};

use super::{in_file, unusable};

const FORMAT: &str = "recstore-saves";
const VERSION: u32 = 1;

const MAX_BYTES: u64 = 1 << 20;

/// Whose saves they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Owner {
    /// The number of the store; none before its first client.
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) store: Option<String>,
    pub(super) shard: usize,
    pub(super) of: usize,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavesFile {
    format: String,
    version: u32,
    owner: Owner,
    known: KnownSaves,
    /// Eight hexadecimal digits: the CRC-32 of `owner` and `known` as JSON without spaces, one behind the other.
    checksum: String,
}

/// What every version begins with.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

/// Returns the saves that a directory tells. None if it has no file, or that of another owner, of which the log is told.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the file and what is wrong with it.
pub(super) fn read(directory: &Directory, owner: &Owner) -> Result<Option<KnownSaves>> {
    let path = directory.path().join(SERVER_SAVES);
    let text = match directory.read(SERVER_SAVES, MAX_BYTES) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(in_file(&path))?,
    };
    let file = parsed(&text).map_err(|message| unusable(&path, message + WAY_OUT))?;
    // Before the first client there was nothing to save.
    let is_own = file.owner == *owner || file.owner == Owner { store: None, ..owner.clone() };
    if !is_own {
        let (expected, got) = (owner.to_string(), file.owner.to_string());
        tracing::warn!(file = %path.display(), expected, got, "the file of saves is of another server and does not count");
        return Ok(Some(KnownSaves::new(owner.shard(), 0)));
    }
    Ok(Some(file.known))
}

const WAY_OUT: &str = ". Put back the file as it was, or remove it: without it all snapshots with the number of this \
                       store count as its own";

fn parsed(text: &[u8]) -> std::result::Result<SavesFile, String> {
    let said = |error: serde_json::Error| format!("it is no list of saves: {error}");
    let header: Header = serde_json::from_slice(text).map_err(said)?;
    if header.format != FORMAT || header.version != VERSION {
        return Err(format!(
            "expected the format \"{FORMAT}\" of version {VERSION}, got \"{}\" of version {}",
            header.format, header.version
        ));
    }
    let file: SavesFile = serde_json::from_slice(text).map_err(said)?;
    let expected = checksum(&file.owner, &file.known).map_err(said)?;
    if file.checksum != expected {
        return Err(format!("checksum mismatch: expected {expected}, got \"{}\"", file.checksum));
    }
    file.known.validate().map(|()| file)
}

fn checksum(owner: &Owner, known: &KnownSaves) -> serde_json::Result<String> {
    let text = serde_json::to_string(owner)? + &serde_json::to_string(known)?;
    Ok(format!("{:08x}", crc32fast::hash(text.as_bytes())))
}

/// Puts the saves of a store in the place of those that a directory tells.
///
/// # Errors
/// [`recstore::Error::Checkpoint`] names the file that cannot be written.
pub(super) fn write(directory: &Directory, owner: Owner, known: KnownSaves) -> Result<()> {
    let path = directory.path().join(SERVER_SAVES);
    let text = checksum(&owner, &known).and_then(|checksum| {
        let (format, version) = (FORMAT.to_owned(), VERSION);
        serde_json::to_vec_pretty(&SavesFile { format, version, owner, known, checksum })
    });
    let text = text.map_err(|error| unusable(&path, error))?;
    directory.replace(SERVER_SAVES, &text).map_err(in_file(&path))
}

impl Owner {
    fn shard(&self) -> Shard {
        Shard { number: self.shard, of: self.of }
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let store = self.store.as_deref().unwrap_or("without a number");
        write!(f, "shard {} of {} of the store {store}", self.shard, self.of)
    }
}
