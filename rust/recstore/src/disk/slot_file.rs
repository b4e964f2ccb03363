//! A file of records, one a row index, without a name: its room is given back when the table or the process ends.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// The unit in which a file system counts what a file takes.
const BLOCK_BYTES: u64 = 512;

/// The records of a table on disk: that of row index `i` begins at byte `i * record bytes`.
#[derive(Debug)]
pub(crate) struct SlotFile {
    file: File,
    record_floats: usize,
    /// The records that have room on the disk for certain.
    reserved: usize,
}

impl SlotFile {
    /// Makes an empty file in `directory`.
    pub(crate) fn create(directory: &Path, record_floats: usize) -> io::Result<Self> {
        Ok(Self { file: tempfile::tempfile_in(directory)?, record_floats, reserved: 0 })
    }

    fn start_of(&self, index: u32) -> u64 {
        u64::from(index) * (self.record_floats * size_of::<f32>()) as u64
    }

    /// Returns the floats of a record.
    pub(crate) fn record_floats(&self) -> usize {
        self.record_floats
    }

    /// Reads the records of `index` and those behind it.
    pub(crate) fn read(&self, index: u32, records: &mut [f32]) -> io::Result<()> {
        self.file.read_exact_at(bytemuck::cast_slice_mut(records), self.start_of(index))
    }

    /// Writes the records of `index` and those behind it.
    pub(crate) fn write(&self, index: u32, records: &[f32]) -> io::Result<()> {
        self.file.write_all_at(bytemuck::cast_slice(records), self.start_of(index))
    }

    /// Makes sure that writing the records below `count` finds room on the disk.
    pub(crate) fn reserve(&mut self, count: usize) -> io::Result<()> {
        if count > self.reserved {
            room::reserve(&self.file, (count * self.record_floats * size_of::<f32>()) as u64)?;
            self.reserved = count;
        }
        Ok(())
    }

    /// Returns the bytes that the file takes of the disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * BLOCK_BYTES)
    }
}

/// Room on a disk.
#[cfg(target_os = "linux")]
mod room {
    #![expect(unsafe_code, reason = "the call is not in the standard library")]

    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;

    /// Takes room for the first `bytes` of a file. A file system that cannot do so finds out when it writes.
    pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
        // SAFETY: 1. the descriptor is open as long as `file` lives; the call touches no memory.
        let failed = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes.cast_signed()) } != 0;
        let error = io::Error::last_os_error();
        let is_refused = failed && error.raw_os_error() != Some(libc::EOPNOTSUPP);
        if is_refused { Err(error) } else { Ok(()) }
    }
}

/// Room on a disk.
#[cfg(not(target_os = "linux"))]
mod room {
    use std::fs::File;
    use std::io;

    /// Makes a file long enough; whether there is room is found out when it is written.
    pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
        let len = file.metadata()?.len();
        if len < bytes { file.set_len(bytes) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_a_short_file_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = SlotFile::create(directory.path(), 3).unwrap();
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
        file.write(5, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let mut record = [0.0; 3];
        file.read(6, &mut record).unwrap();
        assert_eq!(record, [4.0, 5.0, 6.0]);
        file.reserve(1000).unwrap();
        file.read(5, &mut record).unwrap();
        assert_eq!(record, [1.0, 2.0, 3.0]);
        assert!(file.bytes() >= 12_000);
        file.file.set_len(70).unwrap();
        assert_eq!(file.read(5, &mut record).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert!(SlotFile::create(&directory.path().join("none"), 3).is_err());
    }
}
