//! What a name of a directory stands for.

use std::fmt;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

/// What a name of a directory stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A FIFO, which makes those who open it wait.
    Fifo,
    /// A socket.
    Socket,
    /// A device.
    Device,
    /// Something that the system knows and this library does not.
    Unknown,
}

impl FileKind {
    pub(super) fn of(found: &Stat) -> Self {
        match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Link,
            FileType::Fifo => Self::Fifo,
            FileType::Socket => Self::Socket,
            FileType::CharacterDevice | FileType::BlockDevice => Self::Device,
            FileType::Unknown => Self::Unknown,
        }
    }

    /// The number of the error that something else was found.
    pub(super) fn errno(self, found: Self) -> Errno {
        match (self, found) {
            (_, Self::Directory) => Errno::ISDIR,
            (Self::Directory, _) => Errno::NOTDIR,
            _ => Errno::INVAL,
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "a regular file",
            Self::Directory => "a directory",
            Self::Link => "a symbolic link",
            Self::Fifo => "a FIFO",
            Self::Socket => "a socket",
            Self::Device => "a device",
            Self::Unknown => "of an unknown kind",
        })
    }
}
