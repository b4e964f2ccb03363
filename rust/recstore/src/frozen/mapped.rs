//! A file as memory, whose pages all processes of a machine share.

#![expect(unsafe_code, reason = "a mapped file may change under a reader's feet, which no type can rule out")]

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Advice, Mmap};

/// The bytes of a file.
pub(super) struct MappedFile(Mmap);

impl MappedFile {
    /// Maps a whole file. It must not be changed or cut as long as it is mapped: those who write frozen tables write a new
    /// file and rename it.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: 1. the file is opened for reading only, and the map is read only. 2. Its bytes are read as numbers, for
        // which every pattern of bits is a value, and each number from the file is checked where it is used: a program that
        // changes the file against the rule above gives wrong rows or an error. One that cuts it ends the process (SIGBUS).
        let map = unsafe { Mmap::map(file)? };
        // Lookups read here and there: what the system would read ahead is seldom asked for.
        _ = map.advise(Advice::Random);
        Ok(Self(map))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedFile").field("bytes", &self.len()).finish()
    }
}
