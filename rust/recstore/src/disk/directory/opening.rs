//! Opens a name relative to a directory, over no symbolic link.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

const FILE_MODE: u32 = 0o666;

/// Opens a checked name. A FIFO or device in its place makes nobody wait, and no terminal takes the process.
pub(super) fn open_inside(directory: BorrowedFd<'_>, name: &Path, flags: OFlags) -> Result<OwnedFd> {
    open_beneath(directory, name, flags | guards()).and_then(blocking)
}

/// Opens a path to be read, over links: it is the caller's own.
pub(super) fn open_path(path: &Path) -> Result<OwnedFd> {
    let flags = guards() - OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::empty()).and_then(blocking)
}

/// For a regular file the flag would mean nothing to most readers, but rings hand it on.
fn blocking(opened: OwnedFd) -> Result<OwnedFd> {
    rustix::fs::fcntl_setfl(&opened, rustix::fs::fcntl_getfl(&opened)? - OFlags::NONBLOCK)?;
    Ok(opened)
}

fn guards() -> OFlags {
    OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NOFOLLOW
}

/// In one call where the system has it. It is missing before Linux 5.6, and some sandboxes forbid it.
#[cfg(target_os = "linux")]
fn open_beneath(directory: BorrowedFd<'_>, name: &Path, flags: OFlags) -> Result<OwnedFd> {
    static IS_MISSING: AtomicBool = AtomicBool::new(false);
    if IS_MISSING.load(Ordering::Relaxed) {
        return open_by_parts(directory, name, flags);
    }
    match open_in_one(directory, name, flags) {
        Err(Errno::NOSYS) => IS_MISSING.store(true, Ordering::Relaxed),
        Err(Errno::PERM) => {}
        opened => return opened,
    }
    open_by_parts(directory, name, flags)
}

#[cfg(not(target_os = "linux"))]
fn open_beneath(directory: BorrowedFd<'_>, name: &Path, flags: OFlags) -> Result<OwnedFd> {
    open_by_parts(directory, name, flags)
}

#[cfg(target_os = "linux")]
fn open_in_one(directory: BorrowedFd<'_>, name: &Path, flags: OFlags) -> Result<OwnedFd> {
    use rustix::fs::ResolveFlags;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // A directory above that is moved meanwhile: the kernel could not tell where the name led.
    const ATTEMPTS: usize = 100;
    for _ in 1..ATTEMPTS {
        match rustix::fs::openat2(directory, name, flags, mode(flags), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
    rustix::fs::openat2(directory, name, flags, mode(flags), resolve)
}

/// Part by part: each is opened in the directory before it, and none is a link.
fn open_by_parts(directory: BorrowedFd<'_>, name: &Path, flags: OFlags) -> Result<OwnedFd> {
    let above = OFlags::RDONLY | OFlags::DIRECTORY | guards();
    let mut held: Option<OwnedFd> = None;
    let mut parts = name.iter().peekable();
    while let Some(part) = parts.next() {
        let parent = held.as_ref().map_or(directory, std::os::fd::AsFd::as_fd);
        let flags = if parts.peek().is_some() { above } else { flags };
        held = Some(rustix::fs::openat(parent, part, flags, mode(flags))?);
    }
    held.ok_or(Errno::NOENT)
}

/// `openat2` refuses a mode where nothing is made.
fn mode(flags: OFlags) -> Mode {
    match flags.contains(OFlags::CREATE) {
        true => Mode::from_raw_mode(FILE_MODE),
        false => Mode::empty(),
    }
}

#[cfg(test)]
pub(super) mod ways {
    //! Each way of opening, for tests.
    pub(in super::super) type Way = fn(BorrowedFd<'_>, &Path, OFlags) -> Result<OwnedFd>;
    use super::*;

    pub(in super::super) fn all() -> Vec<Way> {
        vec![
            #[cfg(target_os = "linux")]
            |directory, name, flags| open_in_one(directory, name, flags | guards()),
            |directory, name, flags| open_by_parts(directory, name, flags | guards()),
        ]
    }
}
