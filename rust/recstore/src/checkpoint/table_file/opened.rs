//! A file whose header is as the manifest says, and its tensors, read without a table.

use std::io::Read;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::Metadata;

use super::layout::HEADER;
use crate::Result;
use crate::checkpoint::compression::Contents;
use crate::checkpoint::entries::ShardEntry;
use crate::checkpoint::files::{at, refused};
use crate::disk::Directory;
use crate::kernel::id_tally::read_parts;

/// The most bytes of a header: that of a real one takes less than a kilobyte.
const HEADER_LIMIT: u64 = 1 << 20;

/// A file whose tensors can be read side by side.
pub(in crate::checkpoint) struct OpenedFile<'a> {
    pub(super) path: PathBuf,
    entry: &'a ShardEntry,
    contents: Contents,
    pub(super) header: Metadata,
    /// Where the tensors begin in the plain file.
    begin: u64,
}

impl<'a> OpenedFile<'a> {
    /// Opens the file of an entry and compares its length and its header with it.
    pub(in crate::checkpoint) fn open(directory: &Directory, entry: &'a ShardEntry) -> Result<Self> {
        let path = directory.path().join(&entry.file);
        let contents = Contents::open(directory, entry)?;
        let mut beginning = contents.piece(HEADER, 0).map_err(at(&path))?;
        let mut length = [0; 8];
        beginning.read_exact(&mut length).map_err(at(&path))?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_LIMIT.min(contents.bytes.saturating_sub(8)) {
            return Err(refused(&path, format!("the header cannot have {length} bytes")));
        }
        let mut text = vec![0; length as usize];
        beginning.read_exact(&mut text).map_err(at(&path))?;
        check(&path, entry, HEADER, crc32fast::hash(&text))?;
        let header = serde_json::from_slice(&text).map_err(at(&path))?;
        Ok(Self { path, entry, contents, header, begin: 8 + length })
    }

    /// Returns the bytes of all tensors, as the length of the plain file has them.
    pub(super) fn bytes(&self) -> u64 {
        self.contents.bytes - self.begin
    }

    /// Returns what reads a tensor, which begins so many bytes behind the header.
    pub(super) fn piece(&self, name: &str, start: usize) -> Result<Box<dyn Read + Send>> {
        self.contents.piece(name, self.begin + start as u64).map_err(at(&self.path))
    }

    /// Calls `take` with the bytes of a tensor, some at a time, and compares its checksum. One that is not there has none.
    pub(in crate::checkpoint) fn read(&self, name: &str, mut take: impl FnMut(&[u8])) -> Result<()> {
        let Some(tensor) = self.header.info(name) else { return Ok(()) };
        let (start, end) = tensor.data_offsets;
        if end as u64 > self.bytes() {
            return Err(refused(&self.path, format!("the tensor \"{name}\" lies behind its end")));
        }
        let (mut piece, mut checksum) = (self.piece(name, start)?, Hasher::new());
        let take = |part: &[u8]| {
            checksum.update(part);
            take(part);
        };
        read_parts(&mut *piece, end - start, take).map_err(at(&self.path))?;
        self.check(name, checksum.finalize())
    }

    /// Compares all tensors, which must be those of the manifest and fill the file.
    pub(in crate::checkpoint) fn check_all(&self) -> Result<()> {
        let (expected, names) = (self.header.data_len() as u64, self.header.offset_keys());
        if expected != self.bytes() {
            let message = format!("expected {expected} bytes behind the header, got {}", self.bytes());
            return Err(refused(&self.path, message));
        }
        if let Some(name) = self.entry.checksums.keys().find(|name| *name != HEADER && !names.contains(name))
        {
            return Err(refused(&self.path, format!("the tensor \"{name}\" is missing")));
        }
        names.iter().try_for_each(|name| self.read(name, |_| {}))
    }

    /// Compares a checksum with that of the manifest.
    pub(super) fn check(&self, name: &str, actual: u32) -> Result<()> {
        check(&self.path, self.entry, name, actual)
    }
}

fn check(path: &Path, entry: &ShardEntry, name: &str, actual: u32) -> Result<()> {
    let message = match entry.checksums.get(name) {
        Some(expected) if *expected == actual => return Ok(()),
        Some(expected) => {
            format!("\"{name}\" was changed: its checksum is {actual:08x}, expected {expected:08x}")
        }
        None => format!("the manifest has no checksum of \"{name}\""),
    };
    Err(refused(path, message))
}
