//! Memory that a client and its server share: frames lie there, and their socket says only that they do.
//!
//! The client makes it, as a file without a name that cannot shrink, and hands the server its descriptor. It goes with the
//! last process that has it, however that ends. Either side may find anything there at any time, since the other one may
//! be broken. So nobody ever has a reference to it: bytes are copied in and out, and what was copied out is checked like
//! what comes over a socket, which is the safe twin of this module.

#![expect(unsafe_code, reason = "another process changes this memory, which no type can rule out")]

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::ptr;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

/// What the system says of the file system that memory without a name lies in.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// Smaller frames go over the socket, which takes one call of the system for them.
pub(crate) const MIN_SHARED_BYTES: usize = 16 << 10;

/// Smaller segments are not made.
const MIN_BYTES: u64 = 1 << 20;

/// Shared memory, mapped.
#[derive(Debug)]
pub(crate) struct Segment(MmapRaw);

impl Segment {
    /// Makes a segment of at least `bytes`, and returns it with its descriptor.
    ///
    /// # Errors
    /// As the system's calls.
    pub(crate) fn create(bytes: u64) -> io::Result<(Self, OwnedFd)> {
        let bytes = bytes.max(MIN_BYTES).checked_next_power_of_two().ok_or(ErrorKind::OutOfMemory)?;
        let file = rustix::fs::memfd_create(c"recstore", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes)?;
        // Sealed before anyone else has it: reading behind an end that moved would end this process too.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(&file, bytes)?, file))
    }

    /// Maps a segment that another process made, of at most `limit` bytes.
    ///
    /// # Errors
    /// Says what is wrong with it; as the system's calls.
    pub(crate) fn attach(file: &OwnedFd, limit: u64) -> io::Result<Self> {
        let wrong = |what: String| Err(io::Error::new(ErrorKind::InvalidInput, what));
        // Memory behind an end that moves, or that only a few pages of the machine can fill, would end this process.
        let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        let kind = rustix::fs::fstatfs(file)?.f_type;
        if !seals.contains(SealFlags::SHRINK) || kind != TMPFS_MAGIC {
            return wrong("it is no memory that cannot shrink".to_owned());
        }
        let bytes = rustix::fs::fstat(file)?.st_size as u64;
        if bytes == 0 || bytes > limit {
            return wrong(format!("it has {bytes} bytes, of 1 to {limit}"));
        }
        Self::map(file, bytes)
    }

    fn map(file: &OwnedFd, bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        MmapOptions::new().len(len).map_raw(file).map(Self)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether frames of so many bytes go through it: those that fit, and are not for the socket.
    pub(crate) fn is_for(&self, bytes: usize) -> bool {
        (MIN_SHARED_BYTES..=self.len()).contains(&bytes)
    }

    /// Copies as many of `bytes` as fit behind the first `place`.
    fn copy_in(&mut self, place: usize, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.len().saturating_sub(place));
        if count > 0 {
            // SAFETY: (1) `place + count <= len`, which is mapped to its end: the file cannot shrink. `bytes` are this
            // process's own, and nobody in it has a reference to the segment.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_mut_ptr().add(place), count) };
        }
        count
    }

    /// Fills as much of `bytes` as there is from `place` to `end`.
    fn copy_out(&mut self, place: usize, end: usize, bytes: &mut [u8]) -> usize {
        let count = bytes.len().min(end.min(self.len()).saturating_sub(place));
        if count > 0 {
            // SAFETY: (2) as (1). The other process may write meanwhile: then the copy has bytes of before and after,
            // and any byte is valid.
            unsafe { ptr::copy_nonoverlapping(self.0.as_ptr().add(place), bytes.as_mut_ptr(), count) };
        }
        count
    }

    /// Writes from the beginning on.
    pub(crate) fn writer(&mut self) -> SegmentWriter<'_> {
        SegmentWriter { segment: self, place: 0 }
    }

    /// Reads what lies from `place` to `end`.
    pub(crate) fn reader(&mut self, place: usize, end: usize) -> SegmentReader<'_> {
        SegmentReader { segment: self, place, end }
    }
}

/// Writes to a segment until it is full.
pub(crate) struct SegmentWriter<'a> {
    segment: &'a mut Segment,
    place: usize,
}

impl SegmentWriter<'_> {
    /// Returns how many bytes were written.
    pub(crate) fn written(&self) -> usize {
        self.place
    }
}

impl Write for SegmentWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.segment.copy_in(self.place, bytes);
        self.place += count;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads what was written to a segment.
pub(crate) struct SegmentReader<'a> {
    segment: &'a mut Segment,
    place: usize,
    end: usize,
}

impl SegmentReader<'_> {
    /// Returns where it goes on.
    pub(crate) fn place(&self) -> usize {
        self.place
    }
}

impl Read for SegmentReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.segment.copy_out(self.place, self.end, bytes);
        self.place += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::File;

    fn pair(bytes: u64) -> (Segment, Segment) {
        let (own, file) = Segment::create(bytes).unwrap();
        let other = Segment::attach(&file, 1 << 30).unwrap();
        (own, other)
    }

    proptest! {
        #[test]
        fn what_one_side_writes_the_other_reads(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..999), 0..9)) {
            let (mut own, mut other) = pair(1);
            let mut writer = own.writer();
            // The twin: the same bytes in memory of this process.
            let mut twin = Vec::new();
            for piece in &pieces {
                writer.write_all(piece).unwrap();
                twin.write_all(piece).unwrap();
            }
            prop_assert_eq!(writer.written(), twin.len());
            let mut read = Vec::new();
            other.reader(0, twin.len()).read_to_end(&mut read).unwrap();
            prop_assert_eq!(read, twin);
        }
    }

    #[test]
    fn a_segment_ends_where_it_ends() {
        let (mut own, mut other) = pair(MIN_BYTES + 1);
        assert_eq!((own.len(), other.len()), (2 << 20, 2 << 20));
        let full = vec![7; other.len() + 1];
        assert_eq!(own.writer().write_all(&full).unwrap_err().kind(), ErrorKind::WriteZero);
        let mut read = Vec::new();
        other.reader(0, usize::MAX).read_to_end(&mut read).unwrap();
        assert_eq!(read, full[1..]);
    }

    #[test]
    fn memory_that_could_end_this_process_is_refused() {
        let refused = |file: &OwnedFd| Segment::attach(file, 1 << 20).unwrap_err().to_string();
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert_eq!(refused(&file), "it is no memory that cannot shrink");
        let unsealed = rustix::fs::memfd_create(c"t", MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(refused(&unsealed), "it is no memory that cannot shrink");
        rustix::fs::fcntl_add_seals(&unsealed, SealFlags::SHRINK).unwrap();
        assert_eq!(refused(&unsealed), "it has 0 bytes, of 1 to 1048576");
        File::from(unsealed.try_clone().unwrap()).set_len((1 << 20) + 1).unwrap();
        assert_eq!(refused(&unsealed), "it has 1048577 bytes, of 1 to 1048576");
        let (_segment, sealed) = Segment::create(1).unwrap();
        assert!(File::from(sealed).set_len(1).is_err());
    }
}
