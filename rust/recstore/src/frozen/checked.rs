//! The bytes of a frozen table, none of which is used before its block was compared with its checksum.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::blocks::Blocks;
use super::mapped::FileBytes;
use crate::kernel::cache::{Cache, prefetch};
use crate::{Error, Result};

/// A file whose blocks have checksums.
#[derive(Debug)]
pub(super) struct CheckedFile {
    path: PathBuf,
    bytes: FileBytes,
    /// The bytes that are in blocks.
    checked: Range<usize>,
    checks: Vec<u32>,
    blocks: Blocks,
}

impl CheckedFile {
    pub(super) fn new(path: &Path, bytes: FileBytes, checked: Range<usize>, checks: Vec<u32>) -> Self {
        let blocks = Blocks::new(checks.len());
        Self { path: path.to_owned(), bytes, checked, checks, blocks }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns some of the bytes in blocks.
    #[inline(always)]
    pub(super) fn part(&self, range: Range<usize>) -> CheckedBytes<'_> {
        // Once all blocks have been compared, one flag stands for them.
        let is_seen = self.blocks.are_all_seen();
        CheckedBytes { bytes: &self.bytes[range.clone()], first: range.start, is_seen, file: self }
    }

    /// Compares every block with its checksum.
    ///
    /// # Errors
    /// [`Error::Frozen`].
    pub(super) fn verify(&self) -> Result<()> {
        self.check(self.checked.clone())
    }

    #[inline(never)]
    fn check(&self, range: Range<usize>) -> Result<()> {
        let checked = self.checked.clone();
        let range = range.start - checked.start..range.end - checked.start;
        self.blocks.check(&self.bytes[checked.clone()], &self.checks, range).map_err(|bytes| {
            self.refused(format!(
                "bytes {} to {} were changed: the checksum is another",
                checked.start + bytes.start,
                checked.start + bytes.end
            ))
        })
    }

    #[cold]
    pub(super) fn refused(&self, message: String) -> Error {
        Error::Frozen { path: self.path.display().to_string(), message }
    }
}

/// Some bytes of a file, with places from their beginning on.
#[derive(Clone, Copy)]
pub(super) struct CheckedBytes<'a> {
    bytes: &'a [u8],
    first: usize,
    is_seen: bool,
    file: &'a CheckedFile,
}

impl<'a> CheckedBytes<'a> {
    pub(super) fn len(self) -> usize {
        self.bytes.len()
    }

    /// Returns the bytes of a range.
    ///
    /// # Errors
    /// [`Error::Frozen`]: one of them was changed.
    #[inline(always)]
    pub(super) fn get(self, range: Range<usize>) -> Result<&'a [u8]> {
        if !self.is_seen {
            self.file.check(self.first + range.start..self.first + range.end)?;
        }
        Ok(&self.bytes[range])
    }

    /// As [`CheckedBytes::get`], of all.
    ///
    /// # Errors
    /// As there.
    pub(super) fn all(self) -> Result<&'a [u8]> {
        self.get(0..self.bytes.len())
    }

    /// Asks for the bytes of a range, if it is one.
    #[inline(always)]
    pub(super) fn prefetch(self, range: Range<usize>) {
        if let Some(bytes) = self.bytes.get(range) {
            prefetch(bytes, Cache::First);
        }
    }

    /// Returns the error of bytes whose checksum is right and that say more than there is: a mapped file that was changed while it is open.
    #[cold]
    pub(super) fn refused(self, message: String) -> Error {
        self.file.refused(message)
    }
}
