//! A directory that is held open: what lies inside is opened relative to it and never reached over a symbolic link.
//!
//! The path of the directory itself is the caller's own, and may lead over links. What is inside may have been put there
//! by somebody else: a name that leads out, a link, a FIFO or a device is refused before anything is read or changed.

mod error;
mod kind;
mod name;
mod opening;
#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

pub use error::FileError;
pub use kind::FileKind;
pub use name::check_name;

/// A directory that is held open. A clone holds the same one.
#[derive(Debug, Clone)]
pub struct Directory {
    held: Arc<OwnedFd>,
    path: PathBuf,
}

/// All errors are [`FileError`]s in an [`io::Error`]; one about a name that leads out is [`ErrorKind::InvalidInput`].
impl Directory {
    /// Opens a directory. Its own path may lead over links.
    ///
    /// # Errors
    /// It is not there or no directory, or it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let held =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| FileError::new(path, errno))?;
        Ok(Self { held: Arc::new(held), path: path.to_owned() })
    }

    /// Opens a directory, which it makes with those above it if it is not there, so that their names survive a crash.
    ///
    /// # Errors
    /// It cannot be made or read.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        match Self::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            opened => return opened,
        }
        let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let above = Self::create(above)?;
        match fs::create_dir(path) {
            // Somebody else was faster.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made.map_err(|error| FileError::at(path, &error))?,
        }
        above.sync()?;
        Self::open(path)
    }

    /// Returns its path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a directory inside.
    ///
    /// # Errors
    /// It is not there or no directory, or it cannot be read.
    pub fn subdirectory(&self, name: impl AsRef<Path>) -> io::Result<Self> {
        let name = name.as_ref();
        let held = self.open_as(name, OFlags::RDONLY | OFlags::DIRECTORY, FileKind::Directory)?;
        Ok(Self { held: Arc::new(held), path: self.path.join(name) })
    }

    /// Opens a directory inside, which it makes if it is not there, so that its name survives a crash.
    ///
    /// # Errors
    /// It cannot be made or read.
    pub fn create_subdirectory(&self, name: impl AsRef<Path>) -> io::Result<Self> {
        let (parent, name) = self.parent_of(name.as_ref())?;
        match rustix::fs::mkdirat(parent.as_fd(), name, Mode::from_raw_mode(0o777)) {
            Ok(()) => parent.sync()?,
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(parent.failed(name, errno, FileKind::Directory)),
        }
        parent.subdirectory(name)
    }

    /// Opens a file to be read.
    ///
    /// # Errors
    /// It is not there or no regular file, or it cannot be read.
    pub fn open_file(&self, name: impl AsRef<Path>) -> io::Result<File> {
        self.open_as(name.as_ref(), OFlags::RDONLY, FileKind::File).map(File::from)
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// As [`Directory::open_file`]; it has more than `at_most` bytes.
    pub fn read(&self, name: impl AsRef<Path>, at_most: u64) -> io::Result<Vec<u8>> {
        let name = name.as_ref();
        let mut bytes = Vec::new();
        // One byte more than allowed: the length of a file that still grows is known only by reading.
        let read = self.open_file(name)?.take(at_most.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| FileError::at(&self.path.join(name), &error))?;
        if bytes.len() as u64 > at_most {
            let reason = format!("it has more than {at_most} bytes, the most that are read of such a file");
            return Err(refused(&self.path.join(name), Errno::FBIG, reason).into());
        }
        Ok(bytes)
    }

    /// Makes a file, to be written and read.
    ///
    /// # Errors
    /// The name is taken, or it cannot be written.
    pub fn create_new(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        self.open_as(name.as_ref(), flags, FileKind::File).map(File::from)
    }

    /// Opens a file that is there to be written and read.
    ///
    /// # Errors
    /// It is not there or no regular file, or it cannot be written.
    pub fn open_to_write(&self, name: impl AsRef<Path>) -> io::Result<File> {
        self.open_as(name.as_ref(), OFlags::RDWR, FileKind::File).map(File::from)
    }

    /// Opens a file to be written at its end, which it makes if it is not there.
    ///
    /// # Errors
    /// It is no regular file, or it cannot be written.
    pub fn append_to(&self, name: impl AsRef<Path>) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
        self.open_as(name.as_ref(), flags, FileKind::File).map(File::from)
    }

    /// Opens a file to be locked, which it makes if it is not there. What it holds stays.
    ///
    /// # Errors
    /// It is no regular file, or it cannot be written.
    pub fn lock_file(&self, name: impl AsRef<Path>) -> io::Result<File> {
        self.open_as(name.as_ref(), OFlags::RDWR | OFlags::CREATE, FileKind::File).map(File::from)
    }

    /// Writes a file beside the one of a name and gives it that name, so that it survives a crash: readers see the old file
    /// or the new one. What a crash left beside it is replaced.
    ///
    /// # Errors
    /// Something else than a file has the name, or there is no room for it; the old file stays.
    pub fn replace(&self, name: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
        let (parent, name) = self.parent_of(name.as_ref())?;
        let beside = name::beside(name);
        parent.check_free_for_file(name)?;
        // Removed and made anew, never opened and cut: a link of that name would lead the write elsewhere.
        if parent.check_free_for_file(&beside)? {
            parent.remove_file(&beside)?;
        }
        let mut file = parent.create_new(&beside)?;
        // Synced before the rename: the name must not survive a crash without the bytes. The name itself
        // survives only once the directory is synced too.
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        let replaced = written
            .map_err(|error| FileError::at(&parent.path.join(&beside), &error).into())
            .and_then(|()| parent.rename(&beside, name));
        if replaced.is_err() {
            // What is cut off has no use, and the disk may be full.
            _ = parent.remove_file(&beside);
        }
        replaced.and_then(|()| parent.sync())
    }

    /// Removes a file.
    ///
    /// # Errors
    /// It is not there or no regular file, or it cannot be removed.
    pub fn remove_file(&self, name: impl AsRef<Path>) -> io::Result<()> {
        self.unlink(name.as_ref(), FileKind::File, AtFlags::empty())
    }

    /// Removes a directory that is empty.
    ///
    /// # Errors
    /// It is not there, no directory or not empty, or it cannot be removed.
    pub fn remove_directory(&self, name: impl AsRef<Path>) -> io::Result<()> {
        self.unlink(name.as_ref(), FileKind::Directory, AtFlags::REMOVEDIR)
    }

    /// Removes a directory with all that is in it: of links the links themselves, never what they lead to.
    ///
    /// # Errors
    /// It is not there or no directory, or something in it cannot be removed.
    pub fn remove_tree(&self, name: impl AsRef<Path>) -> io::Result<()> {
        let directory = self.subdirectory(name.as_ref())?;
        for (entry, kind) in directory.entries()? {
            match kind {
                FileKind::Directory => directory.remove_tree(&entry)?,
                other => directory.unlink(Path::new(&entry), other, AtFlags::empty())?,
            }
        }
        self.remove_directory(name)
    }

    /// Gives a file or directory inside another name inside. A file takes the place of a file of that name.
    ///
    /// # Errors
    /// It is not there, it or what has the name is something else, or it cannot be moved.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let ((old, from), (new, to)) = (self.parent_of(from.as_ref())?, self.parent_of(to.as_ref())?);
        let kind =
            if old.expected(from)? == FileKind::Directory { FileKind::Directory } else { FileKind::File };
        old.check_kind(from, kind)?;
        if new.kind(to)?.is_some() {
            new.check_kind(to, kind)?;
        }
        let renamed = rustix::fs::renameat(old.as_fd(), from, new.as_fd(), to);
        renamed.map_err(|errno| new.failed(to, errno, kind))
    }

    /// Gives a file a further name, in another directory.
    ///
    /// # Errors
    /// It is not there or no regular file, the name is taken there, or the file system cannot do that.
    pub fn link(&self, name: impl AsRef<Path>, other: &Self) -> io::Result<()> {
        let ((old, from), (new, to)) = (self.parent_of(name.as_ref())?, other.parent_of(name.as_ref())?);
        old.check_kind(from, FileKind::File)?;
        let linked = rustix::fs::linkat(old.as_fd(), from, new.as_fd(), to, AtFlags::empty());
        linked.map_err(|errno| new.failed(to, errno, FileKind::File))
    }

    /// Returns what has a name inside, a link itself and not what it leads to.
    ///
    /// # Errors
    /// It cannot be told.
    pub fn kind(&self, name: impl AsRef<Path>) -> io::Result<Option<FileKind>> {
        let (parent, name) = match self.parent_of(name.as_ref()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        match rustix::fs::statat(parent.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(FileKind::of(&found))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(FileError::new(&parent.path.join(name), errno).into()),
        }
    }

    /// Returns the names inside with what they are, sorted.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn entries(&self) -> io::Result<Vec<(OsString, FileKind)>> {
        let failed = |errno| FileError::new(&self.path, errno);
        let mut entries = Vec::new();
        for entry in Dir::read_from(self.as_fd()).map_err(failed)? {
            let name = name::of_entry(&entry.map_err(failed)?);
            if name == "." || name == ".." {
                continue;
            }
            // One that was removed meanwhile is not there.
            if let Some(kind) = self.kind(&name)? {
                entries.push((name, kind));
            }
        }
        entries.sort_unstable();
        Ok(entries)
    }

    /// Makes the names inside survive a crash.
    ///
    /// # Errors
    /// The system's.
    pub fn sync(&self) -> io::Result<()> {
        rustix::fs::fsync(self.as_fd()).map_err(|errno| FileError::new(&self.path, errno).into())
    }

    /// Opens what has a name inside and checks on the opened handle that it is what is expected.
    fn open_as(&self, name: &Path, flags: OFlags, expected: FileKind) -> io::Result<OwnedFd> {
        check_name(name, &self.path.display())?;
        let opened = opening::open_inside(self.as_fd(), name, flags);
        let opened = opened.map_err(|errno| self.failed(name, errno, expected))?;
        // On the opened handle: between a look at the name and its opening something else may take the name.
        let found =
            rustix::fs::fstat(&opened).map_err(|errno| FileError::new(&self.path.join(name), errno))?;
        match FileKind::of(&found) {
            kind if kind == expected => Ok(opened),
            kind => Err(self.is_another(name, kind, expected)),
        }
    }

    /// Opens the directory inside that has the last part of a name, and returns that part too.
    fn parent_of<'a>(&self, name: &'a Path) -> io::Result<(Self, &'a OsStr)> {
        check_name(name, &self.path.display())?;
        let last = name.file_name().unwrap_or_default();
        match name.parent().filter(|above| !above.as_os_str().is_empty()) {
            Some(above) => Ok((self.subdirectory(above)?, last)),
            None => Ok((self.clone(), last)),
        }
    }

    /// Whether a file has a name. Something else that has it is refused.
    fn check_free_for_file(&self, name: &OsStr) -> io::Result<bool> {
        match self.kind(name)? {
            Some(_) => self.check_kind(name, FileKind::File).map(|()| true),
            None => Ok(false),
        }
    }

    fn unlink(&self, name: &Path, expected: FileKind, flags: AtFlags) -> io::Result<()> {
        let (parent, name) = self.parent_of(name)?;
        parent.check_kind(name, expected)?;
        rustix::fs::unlinkat(parent.as_fd(), name, flags)
            .map_err(|errno| parent.failed(name, errno, expected))
    }

    fn check_kind(&self, name: &OsStr, expected: FileKind) -> io::Result<()> {
        match self.expected(name)? {
            kind if kind == expected => Ok(()),
            kind => Err(self.is_another(Path::new(name), kind, expected)),
        }
    }

    /// Returns the kind of what must be there.
    fn expected(&self, name: &OsStr) -> io::Result<FileKind> {
        self.kind(name)?.ok_or_else(|| FileError::new(&self.path.join(name), Errno::NOENT).into())
    }

    /// Says why a name cannot be opened: which of its parts is something else than it should be, or what the system says.
    fn failed(&self, name: impl AsRef<Path>, errno: Errno, expected: FileKind) -> io::Error {
        let name = name.as_ref();
        let mut parts: Vec<&Path> = name.ancestors().filter(|part| !part.as_os_str().is_empty()).collect();
        parts.reverse();
        for part in parts {
            let expected = if part == name { expected } else { FileKind::Directory };
            let Ok(found) = rustix::fs::statat(self.as_fd(), part, AtFlags::SYMLINK_NOFOLLOW) else { break };
            let kind = FileKind::of(&found);
            if kind != expected {
                return self.is_another(part, kind, expected);
            }
        }
        FileError::new(&self.path.join(name), errno).into()
    }

    fn is_another(&self, name: &Path, found: FileKind, expected: FileKind) -> io::Error {
        is_another(&self.path.join(name), found, expected).into()
    }
}

/// Opens a file of the caller's own path, which may lead over links, to be read.
///
/// # Errors
/// A [`FileError`]: it is not there or no regular file, or it cannot be read.
pub fn open_file(path: &Path) -> io::Result<File> {
    let opened = opening::open_path(path).map_err(|errno| FileError::new(path, errno))?;
    let found = rustix::fs::fstat(&opened).map_err(|errno| FileError::new(path, errno))?;
    match FileKind::of(&found) {
        FileKind::File => Ok(File::from(opened)),
        kind => Err(is_another(path, kind, FileKind::File).into()),
    }
}

fn is_another(path: &Path, found: FileKind, expected: FileKind) -> FileError {
    match found {
        FileKind::Link => refused(path, Errno::LOOP, "it is a symbolic link, which is not followed"),
        _ => refused(path, expected.errno(found), format!("it is {found}, not {expected}")),
    }
}

fn refused(path: &Path, errno: Errno, reason: impl Display) -> FileError {
    FileError { path: path.to_owned(), errno: errno.raw_os_error(), reason: reason.to_string() }
}

impl AsFd for Directory {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.held.as_fd()
    }
}
