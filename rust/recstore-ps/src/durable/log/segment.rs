//! One file of the log, named after the number of its first change.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::appended::{Appended, Appending};
use super::left_out::LeftOut;
use super::record::{self, HEAD_BYTES, Record, next_record};
use super::{LogError, Logged, at, inside, refused};
use recstore::Directory;

use crate::wire::codec::{ClientId, Frame, FrameError, read_frame};

const EXTENSION: &str = "log";

/// What a file begins with: what it is, and the version of its layout.
pub(super) const HEADER: [u8; 16] = *b"RECSTORELOG\0\x01\0\0\0";

/// There is no more room for frames that come in a file of this length: who begins frames and goes away must not make it
/// longer than a file can be.
const MAX_BYTES_WITH_ROOM: u64 = 1 << 40;

/// The file that is appended to.
#[derive(Debug)]
pub(super) struct Segment {
    path: PathBuf,
    first: u64,
    file: Arc<Appended>,
    bytes: u64,
}

impl Segment {
    /// Creates the file whose first change will be number `first`, or takes up one that has none.
    pub(super) fn create(directory: &Directory, first: u64) -> Result<Self, LogError> {
        let name = name_of(first);
        let path = directory.path().join(&name);
        let mut file = directory.lock_file(name).map_err(inside(directory))?;
        let emptied = file.set_len(0).and_then(|()| file.write_all(&HEADER));
        emptied.and_then(|()| file.sync_all()).map_err(at(&path))?;
        directory.sync().map_err(inside(directory))?;
        let bytes = HEADER.len() as u64;
        Ok(Self { path, first, file: Arc::new(Appended::new(file)), bytes })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Returns the file, for whoever syncs it while more is appended.
    pub(super) fn file(&self) -> Arc<Appended> {
        Arc::clone(&self.file)
    }

    pub(super) fn sync(&self) -> Result<(), LogError> {
        self.file.sync().map_err(at(&self.path))
    }

    /// Appends a record and the frame of a change behind it; all of it or nothing.
    pub(super) fn append(&mut self, record: &Record, frame: Option<&Frame<'_>>) -> Result<(), LogError> {
        match self.write(record, frame) {
            Ok(()) => {
                self.bytes += HEAD_BYTES as u64 + record.following_bytes();
                Ok(())
            }
            // Cut off again: behind half a record no later one could be read.
            Err(error) => Err(match self.file.file().set_len(self.bytes) {
                Ok(()) => refused(&self.path, error),
                Err(cut) => refused(&self.path, format!("{error}; and what was written of it stays: {cut}")),
            }),
        }
    }

    fn write(&self, record: &Record, frame: Option<&Frame<'_>>) -> io::Result<()> {
        let bytes = HEAD_BYTES + frame.map_or(0, Frame::bytes);
        let mut file = BufWriter::new(self.file.at(self.bytes, bytes as u64));
        file.write_all(&record.head())?;
        frame.map_or(Ok(()), |frame| frame.write(&mut file))?;
        file.flush()
    }

    /// Leaves room for a frame of so many bytes that comes, and returns what writes it.
    pub(super) fn stage(&mut self, bytes: u64) -> Result<Staged, LogError> {
        if self.bytes >= MAX_BYTES_WITH_ROOM {
            return Err(refused(&self.path, "there is much room in it already"));
        }
        self.append(&Record::Room { bytes }, None)?;
        let start = self.bytes - bytes;
        Ok(Staged { room: self.file.at(start, bytes), start, bytes, segment: self.first, is_kept: false })
    }

    /// Appends a change whose frame may be in room already.
    pub(super) fn append_change(
        &mut self,
        number: u64,
        client: ClientId,
        frame: &Frame<'_>,
        staged: Option<Staged>,
    ) -> Result<(), LogError> {
        // A record refers to room in its own file: after a rotation the frame is written again.
        let Some(mut staged) = staged.filter(|staged| staged.is_whole() && staged.segment == self.first)
        else {
            let frame_bytes = frame.bytes() as u64;
            return self.append(&Record::Change { number, client, frame_bytes }, Some(frame));
        };
        self.append(&Record::ChangeInRoom { number, client, start: staged.start }, None)?;
        staged.is_kept = true;
        Ok(())
    }
}

/// A frame that goes to a file while it comes, and that counts when a change refers to it.
#[derive(Debug)]
pub(crate) struct Staged {
    room: Appending,
    start: u64,
    bytes: u64,
    /// The file, by the number of its first change.
    segment: u64,
    is_kept: bool,
}

impl Staged {
    fn is_whole(&self) -> bool {
        self.room.end() == self.start + self.bytes
    }
}

impl Write for Staged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.room.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.room.flush()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Incomplete, repeated, or a part of a larger step: no record refers to the room, and the disk gets
        // it back.
        if !self.is_kept {
            self.room.file().free(self.start, self.bytes);
        }
    }
}

/// What a log tells.
pub(super) enum Entry {
    Change(Logged),
    TakenBack {
        number: u64,
    },
    /// Space that a change further on may lie in.
    Room,
}

fn name_of(first: u64) -> String {
    format!("{first:016x}.{EXTENSION}")
}

/// Returns the files of a log and the numbers of their first changes, in their order.
pub(super) fn segments(directory: &Directory) -> Result<Vec<(u64, String)>, LogError> {
    let entries = directory.entries().map_err(inside(directory))?;
    let own = |name: String| {
        let first = u64::from_str_radix(name.split_once('.')?.0, 16).ok()?;
        // A like name is somebody else's.
        (name == name_of(first)).then_some((first, name))
    };
    let mut found: Vec<_> =
        entries.into_iter().filter_map(|(name, _)| own(name.into_string().ok()?)).collect();
    found.sort();
    Ok(found)
}

/// Returns the bytes of a file's records; none of one that is gone.
pub(super) fn record_bytes(directory: &Directory, name: &str) -> u64 {
    let file = directory.open_file(name).and_then(|file| file.metadata());
    file.map_or(0, |file| file.len().saturating_sub(HEADER.len() as u64))
}

/// What is done with the end of a file from a record on that cannot be read, and behind which there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It is damage: another file with records is behind this one.
    Refused,
    /// It is cut off.
    CutOff,
    /// It stays there.
    Left,
}

/// Calls `each` with the records of a file, in their order. Returns the end of the file that is left out, if any is.
pub(super) fn read(
    directory: &Directory,
    name: &str,
    ending: Ending,
    mut each: impl FnMut(Entry) -> Result<(), LogError>,
) -> Result<Option<LeftOut>, LogError> {
    let is_last = ending != Ending::Refused;
    let path = &directory.path().join(name);
    let open = || directory.open_file(name).map_err(inside(directory));
    let mut file = BufReader::new(open()?);
    let mut header = [0; HEADER.len()];
    match file.read_exact(&mut header) {
        // As of a start that a crash cut off; nobody can tell whether there were records.
        Err(error) if is_last && error.kind() == io::ErrorKind::UnexpectedEof => {
            let error = record::invalid("the file ends within its header");
            return leave_out(directory, name, ending, 0, &error).map(Some);
        }
        read => read.map_err(at(path))?,
    }
    if header != HEADER {
        return Err(refused(path, "this is no log of this version"));
    }
    // A handle of its own: frames in room are read without leaving the place between the records.
    let mut rooms = open()?;
    loop {
        let start = file.stream_position().map_err(at(path))?;
        match read_entry(&mut file, &mut rooms, is_last) {
            Ok(Some(entry)) => each(entry)?,
            Ok(None) => return Ok(None),
            Err(error) => match next_record(&mut file, start + 1).map_err(at(path))? {
                // The head of room says how long it is, as the change that lies in it does.
                Some((place, Record::ChangeInRoom { start: room, .. }))
                    if room == start + HEAD_BYTES as u64 =>
                {
                    file.seek(SeekFrom::Start(place)).map_err(at(path))?;
                }
                None if is_last => return leave_out(directory, name, ending, start, &error).map(Some),
                _ => return Err(refused(path, format!("damaged behind its first {start} bytes: {error}"))),
            },
        }
    }
}

fn leave_out(
    directory: &Directory,
    name: &str,
    ending: Ending,
    start: u64,
    error: &FrameError,
) -> Result<LeftOut, LogError> {
    let len = directory.open_file(name).and_then(|file| file.metadata()).map_err(inside(directory))?.len();
    let left_out = LeftOut::now(name, start, len.saturating_sub(start), error.to_string());
    if ending == Ending::CutOff {
        // Noted first: a start that is cut off here leaves the same out again.
        left_out.write(directory)?;
        cut(directory, name, start)?;
    }
    Ok(left_out)
}

/// Reads the next record, and the frame of a change from where it is.
fn read_entry(
    file: &mut (impl Read + Seek),
    rooms: &mut File,
    is_last: bool,
) -> Result<Option<Entry>, FrameError> {
    let Some(record) = record::read_head(file)? else { return Ok(None) };
    Ok(Some(match record {
        Record::TakenBack { number } => Entry::TakenBack { number },
        Record::Change { number, client, frame_bytes } => {
            let frame = record::read_frame_of(file, frame_bytes)?;
            Entry::Change(Logged { number, client, frame })
        }
        Record::ChangeInRoom { number, client, start } => {
            rooms.seek(SeekFrom::Start(start))?;
            let frame = read_frame(&mut BufReader::new(rooms), u64::MAX)?.widened()?;
            Entry::Change(Logged { number, client, frame })
        }
        Record::Tail { .. } => return Err(record::invalid("a record that no file has")),
        Record::Room { bytes } => {
            let bytes = i64::try_from(bytes).map_err(|_| record::invalid("room without end"))?;
            file.seek_relative(bytes)?;
            // A frame that was still coming counts nowhere. Of the last file nobody can tell whether a change behind it was
            // cut off; of another one the numbers in the next file do.
            if is_last && file.stream_position()? >= rooms.metadata()?.len() {
                return Err(record::invalid("the file ends with room for a frame that no change refers to"));
            }
            Entry::Room
        }
    }))
}

fn cut(directory: &Directory, name: &str, bytes: u64) -> Result<(), LogError> {
    let file = directory.open_to_write(name).map_err(inside(directory))?;
    file.set_len(bytes).and_then(|()| file.sync_all()).map_err(at(&directory.path().join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_does_not_become_long_by_room_alone() {
        let directory = tempfile::tempdir().unwrap();
        let mut segment = Segment::create(&Directory::open(directory.path()).unwrap(), 1).unwrap();
        segment.bytes = MAX_BYTES_WITH_ROOM - 1;
        assert!(segment.stage(1).is_ok());
        assert!(segment.stage(1).is_err());
    }
}
