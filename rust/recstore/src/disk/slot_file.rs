//! Files of records, one a row index, without a name: their room is given back when the table or the process ends.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use super::reads::Reads;
use super::ring::RingRead;
use super::ring_pool;
use super::slot::{STRIPES, Slot, records_of};

/// The unit in which a file system counts what a file takes.
const BLOCK_BYTES: u64 = 512;

/// Reads so few that a ring gains nothing.
const FEW_READS: usize = 4;

/// The records of a table on disk, each in its [`Slot`].
#[derive(Debug)]
pub(crate) struct SlotFile {
    files: [File; STRIPES],
    record_floats: usize,
    /// The records that have room on the disk for certain.
    reserved: usize,
    /// Whether reads go through a ring, if the system has one.
    uses_rings: bool,
}

impl SlotFile {
    /// Makes an empty file in `directory`.
    pub(crate) fn create(directory: &Path, record_floats: usize) -> io::Result<Self> {
        let uses_rings = ring_pool::are_wanted()?;
        let new = || tempfile::tempfile_in(directory);
        // A write locks its file on ext4, and with one file two threads waited for each other.
        let files = [new()?, new()?, new()?, new()?];
        Ok(Self { files, record_floats, reserved: 0, uses_rings })
    }

    fn record_bytes(&self) -> usize {
        self.record_floats * size_of::<f32>()
    }

    fn file(&self, slot: Slot) -> (&File, u64) {
        (&self.files[slot.stripe as usize], u64::from(slot.position) * self.record_bytes() as u64)
    }

    /// Returns the floats of a record.
    pub(crate) fn record_floats(&self) -> usize {
        self.record_floats
    }

    /// Reads the record at `slot`.
    pub(crate) fn read(&self, slot: Slot, record: &mut [f32]) -> io::Result<()> {
        let (file, offset) = self.file(slot);
        file.read_exact_at(bytemuck::cast_slice_mut(record), offset)
    }

    /// Reads many records, under way together where the system can do so.
    ///
    /// # Errors
    /// Some may have been read or not.
    pub(crate) fn read_all(&self, mut reads: Reads<'_>) -> io::Result<()> {
        let ring = (self.uses_rings && reads.runs.len() >= FEW_READS).then(ring_pool::take).flatten();
        let mut all = Vec::with_capacity(reads.runs.len());
        reads.each(|run, places| {
            let (file, offset) = self.file(run.first);
            all.push(RingRead { file, offset, places, is_done: false });
        });
        // A ring that failed is dropped. Reads that it left undone are repeated below, where their errors
        // show too, so results are the same without rings.
        if let Some(mut ring) = ring
            && ring.read(&mut all).is_ok()
        {
            ring_pool::give_back(ring);
        }
        let mut buffer = Vec::new();
        all.into_iter().filter(|read| !read.is_done).try_for_each(|read| read_plainly(read, &mut buffer))
    }

    /// Writes the records at `slot` and behind it.
    pub(crate) fn write(&self, slot: Slot, records: &[f32]) -> io::Result<()> {
        // `pwrite` took 8.9 us a row of 512 bytes and a ring 12.1: ext4 hands its writes to another thread.
        let (file, offset) = self.file(slot);
        file.write_all_at(bytemuck::cast_slice(records), offset)
    }

    /// Makes sure that writing the records of the indices below `count` finds room on the disk.
    pub(crate) fn reserve(&mut self, count: usize) -> io::Result<()> {
        if count > self.reserved {
            for (stripe, file) in self.files.iter().enumerate() {
                let bytes = records_of(stripe, count) * self.record_bytes();
                if bytes > 0 {
                    room::reserve(file, bytes as u64)?;
                }
            }
            self.reserved = count;
        }
        Ok(())
    }

    /// Returns the bytes that the files take of the disk.
    pub(crate) fn bytes(&self) -> u64 {
        let of_file = |file: &File| file.metadata().map_or(0, |metadata| metadata.blocks() * BLOCK_BYTES);
        self.files.iter().map(of_file).sum()
    }
}

/// Reads neighbouring records by one call, several by way of a buffer.
fn read_plainly(read: RingRead<'_, '_>, buffer: &mut Vec<u8>) -> io::Result<()> {
    if let [single] = read.places {
        return read.file.read_exact_at(single, read.offset);
    }
    buffer.resize(read.places.iter().map(|place| place.len()).sum(), 0);
    read.file.read_exact_at(buffer, read.offset)?;
    let mut rest = &buffer[..];
    for place in read.places {
        let (own, behind) = rest.split_at(place.len());
        place.copy_from_slice(own);
        rest = behind;
    }
    Ok(())
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
    use proptest::prelude::*;

    fn file(record_floats: usize, uses_rings: bool) -> (tempfile::TempDir, SlotFile) {
        let directory = tempfile::tempdir().unwrap();
        let file = SlotFile::create(directory.path(), record_floats).unwrap();
        (directory, SlotFile { uses_rings, ..file })
    }

    fn read_all(file: &SlotFile, indices: &[u32]) -> io::Result<Vec<f32>> {
        let mut records = vec![0.0; indices.len() * file.record_floats()];
        let mut slots: Vec<Slot> = indices.iter().map(|index| Slot::of(*index)).collect();
        slots.sort_unstable();
        let mut reads = Reads::default();
        for (slot, record) in slots.into_iter().zip(records.chunks_exact_mut(file.record_floats())) {
            reads.push(slot, record);
        }
        file.read_all(reads).map(|()| records)
    }

    #[test]
    fn records_come_back_and_a_short_file_is_an_error() {
        for uses_rings in [false, true] {
            let (directory, mut file) = file(3, uses_rings);
            assert_eq!(directory.path().read_dir().unwrap().count(), 0);
            file.write(Slot::of(5), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
            let mut record = [0.0; 3];
            file.read(Slot::of(6), &mut record).unwrap();
            assert_eq!(record, [4.0, 5.0, 6.0]);
            file.reserve(5_000).unwrap();
            file.read(Slot::of(5), &mut record).unwrap();
            assert_eq!(record, [1.0, 2.0, 3.0]);
            assert!(file.bytes() >= 60_000);
            file.files[0].set_len(70).unwrap();
            let kind = io::ErrorKind::UnexpectedEof;
            assert_eq!(file.read(Slot::of(5), &mut record).unwrap_err().kind(), kind);
            // What is whole is read, and the short one told of, in whatever company.
            assert_eq!(read_all(&file, &[0, 2, 4, 1024, 2048]).unwrap().len(), 15);
            for indices in [&[5][..], &[0, 2, 4, 5, 1024, 2048], &[0, 2, 4, 2048, 9_000, 9_001]] {
                assert_eq!(read_all(&file, indices).unwrap_err().kind(), kind);
            }
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert!(SlotFile::create(&directory.path().join("none"), 3).is_err());
    }

    proptest! {
        #[test]
        fn both_ways_read_what_was_written(
            indices in prop::collection::btree_set(0..6_000u32, 1..700),
            also in prop::collection::btree_set(0..6_000u32, 0..40),
        ) {
            let (_directory, mut file) = file(2, false);
            for &index in &indices {
                file.write(Slot::of(index), &[index as f32, -1.0]).unwrap();
            }
            file.reserve(6_000).unwrap();
            let asked: Vec<u32> = indices.union(&also).copied().collect();
            let plain = read_all(&file, &asked).unwrap();
            file.uses_rings = true;
            prop_assert_eq!(&read_all(&file, &asked).unwrap(), &plain);
            let mut slots: Vec<(Slot, u32)> = asked.iter().map(|index| (Slot::of(*index), *index)).collect();
            slots.sort_unstable();
            for ((_, index), record) in slots.iter().zip(plain.chunks_exact(2)) {
                let expected = if indices.contains(index) { [*index as f32, -1.0] } else { [0.0; 2] };
                prop_assert_eq!(record, expected);
            }
        }
    }
}
