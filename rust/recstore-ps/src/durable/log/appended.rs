//! A file that is appended to and synced, and read only after a crash: the system need not keep it in memory.
//!
//! Without this a log of gigabytes is always written to fresh pages of memory, which takes a virtual machine several
//! times as long as the disk does; and the disk begins only when somebody waits for it.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Less than this is left to the system.
pub(super) const LARGE_BYTES: u64 = 1 << 20;

/// The unit of the system's cache, or a part of it.
const PAGE_BYTES: u64 = 4096;

/// A file of the log.
#[derive(Debug)]
pub(super) struct Appended {
    file: File,
    /// Up to here its pages go.
    let_go: AtomicU64,
}

impl Appended {
    pub(super) fn new(file: File) -> Self {
        Self { file, let_go: AtomicU64::new(0) }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns a writer of the `bytes` from `start` on.
    pub(super) fn at(self: &Arc<Self>, start: u64, bytes: u64) -> Appending {
        if bytes >= LARGE_BYTES {
            advice::reserve(&self.file, start, bytes);
        }
        Appending { appended: Arc::clone(self), begun: start, end: start }
    }

    /// Gives the disk back what it keeps of bytes that nobody will read.
    pub(super) fn free(&self, start: u64, bytes: u64) {
        advice::free(&self.file, start, bytes);
    }

    /// Waits until the disk has all there is. The memory of it goes later: that takes a tenth of the time of the sync, and
    /// who waits for the disk need not wait for it.
    pub(super) fn sync(self: &Arc<Self>) -> io::Result<()> {
        self.file.sync_data()?;
        // Written pages leave the memory: with fresh pages each time a virtual machine took 82 ms for 26 MB
        // and a sync, and 10 ms if they were released.
        let start = self.let_go.load(Ordering::Relaxed);
        // The last page is written again with what comes next.
        let end = self.file.metadata()?.len() / PAGE_BYTES * PAGE_BYTES;
        if end >= start + LARGE_BYTES {
            self.let_go.store(end, Ordering::Relaxed);
            let shared = Arc::clone(self);
            let let_go = move || advice::let_go(&shared.file, start, end - start);
            _ = thread::Builder::new().name("recstore-let-go".to_owned()).spawn(let_go);
        }
        Ok(())
    }
}

/// Writes to a place of a file, and lets the disk begin with what is written while more comes.
#[derive(Debug)]
pub(super) struct Appending {
    appended: Arc<Appended>,
    /// Up to here the disk was told to begin.
    begun: u64,
    end: u64,
}

impl Appending {
    /// Returns where the next byte goes.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn file(&self) -> &Appended {
        &self.appended
    }
}

impl Write for Appending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let file = &self.appended.file;
        let count = file.write_at(bytes, self.end)?;
        self.end += count as u64;
        if self.end >= self.begun + LARGE_BYTES {
            advice::begin_writing(file, self.begun, self.end - self.begun);
            self.begun = self.end;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the system is told of a file. It changes nothing of what is read of the file, and may be ignored.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "calls of the system that the standard library does not have")]
mod advice {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    /// A disk without room shows when it is written to.
    pub(super) fn reserve(file: &File, start: u64, bytes: u64) {
        // KEEP_SIZE: room alone does not make the file longer.
        // SAFETY:
        // 1. The descriptor is open as long as `file` is borrowed.
        // 2. The call takes no pointers.
        unsafe {
            libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, start as i64, bytes as i64);
        }
    }

    pub(super) fn free(file: &File, start: u64, bytes: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY:
        // 1. The descriptor is open as long as `file` is borrowed.
        // 2. The call takes no pointers.
        unsafe {
            libc::fallocate(file.as_raw_fd(), mode, start as i64, bytes as i64);
        }
    }

    pub(super) fn begin_writing(file: &File, start: u64, bytes: u64) {
        // SAFETY:
        // 1. The descriptor is open as long as `file` is borrowed.
        // 2. The call takes no pointers.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), start as i64, bytes as i64, libc::SYNC_FILE_RANGE_WRITE);
        }
    }

    pub(super) fn let_go(file: &File, start: u64, bytes: u64) {
        // SAFETY:
        // 1. The descriptor is open as long as `file` is borrowed.
        // 2. The call takes no pointers.
        unsafe {
            libc::posix_fadvise(file.as_raw_fd(), start as i64, bytes as i64, libc::POSIX_FADV_DONTNEED);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod advice {
    use std::fs::File;

    pub(super) fn reserve(_: &File, _: u64, _: u64) {}

    pub(super) fn free(_: &File, _: u64, _: u64) {}

    pub(super) fn begin_writing(_: &File, _: u64, _: u64) {}

    pub(super) fn let_go(_: &File, _: u64, _: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_let_go_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let appended = Arc::new(Appended::new(File::create(&path).unwrap()));
        let mut expected = Vec::new();
        for round in 0..4u8 {
            let bytes: Vec<u8> = (0..LARGE_BYTES + 1_000).map(|place| (place as u8) ^ round).collect();
            appended.at(expected.len() as u64, bytes.len() as u64).write_all(&bytes).unwrap();
            appended.sync().unwrap();
            expected.extend(bytes);
        }
        let end = expected.len() as u64 / PAGE_BYTES * PAGE_BYTES;
        assert_eq!(appended.let_go.load(Ordering::Relaxed), end);
        assert!(std::fs::read(&path).unwrap() == expected);
    }
}
