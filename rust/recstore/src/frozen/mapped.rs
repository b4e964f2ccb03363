//! The bytes of a file as memory: mapped, so that all processes of a machine share its pages, or copied to huge pages.

#![expect(unsafe_code, reason = "a mapped file may change under a reader's feet, which no type can rule out")]

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::str::FromStr;

use memmap2::{Advice, Mmap};

use crate::kernel::pages::Pages;
use crate::{Error, Result};

/// Where the bytes of a frozen table are while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FrozenMemory {
    /// In the pages of the file, which all processes share, and which come as they are read.
    #[default]
    Mapped,
    /// In huge pages of the process, copied when the table is opened. A lookup misses the address cache three times less.
    Copied,
}

impl FromStr for FrozenMemory {
    type Err = Error;

    /// Reads `mapped` or `copied`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "mapped" => Ok(Self::Mapped),
            "copied" => Ok(Self::Copied),
            _ => Err(Error::InvalidConfig {
                message: format!("a frozen table is opened as mapped or copied, not as \"{name}\""),
            }),
        }
    }
}

/// The bytes of a file.
pub(super) enum FileBytes {
    Mapped(Mmap),
    Copied(Pages<u8>),
}

impl FileBytes {
    /// Takes a whole file. One that is mapped must not be changed or cut as long as it is: those who write frozen tables
    /// write a new file and rename it.
    pub(super) fn new(file: &File, memory: FrozenMemory) -> io::Result<Self> {
        // SAFETY: 1. the file is opened for reading only, and the map is read only. 2. Its bytes are read as numbers, for
        // which every pattern of bits is a value, and each number from the file is checked where it is used: a program that
        // changes the file against the rule above gives wrong rows or an error. One that cuts it ends the process (SIGBUS).
        let map = unsafe { Mmap::map(file)? };
        if memory == FrozenMemory::Mapped {
            // Lookups read here and there: what the system would read ahead is seldom asked for.
            _ = map.advise(Advice::Random);
            return Ok(Self::Mapped(map));
        }
        _ = map.advise(Advice::Sequential);
        let mut pages = Pages::try_zeroed(map.len()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::OutOfMemory, "the system has no memory for a copy")
        })?;
        pages.copy_from_slice(&map);
        Ok(Self::Copied(pages))
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Copied(pages) => pages,
        }
    }
}

impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileBytes").field("bytes", &self.len()).finish()
    }
}
