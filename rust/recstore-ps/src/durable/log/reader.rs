//! Reading a log while it is written, for followers.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::PathBuf;

use super::record::{self, Record};
use super::segment::{HEADER, segments};
use super::{LogError, at, inside, refused};
use recstore::Directory;

use crate::wire::codec::{ClientId, FrameError, HEADER_BYTES, frame_bytes};

/// A change on its way to a follower.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) number: u64,
    pub(crate) client: ClientId,
    /// The frame as the log has it.
    pub(crate) frame: Vec<u8>,
}

/// Reads changes in their order. It must not be asked for any that the log does not have as a whole.
#[derive(Debug)]
pub(crate) struct Reader {
    directory: Directory,
    /// The number of the last change that was read or passed over.
    last: u64,
    file: LogFile,
}

/// The file that is read, up to a place between two records.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    first: u64,
    file: BufReader<File>,
}

impl LogFile {
    fn new(directory: &Directory, (first, name): (u64, String)) -> Result<Self, LogError> {
        let path = directory.path().join(&name);
        let mut file = BufReader::new(directory.open_file(name).map_err(inside(directory))?);
        file.seek(SeekFrom::Start(HEADER.len() as u64)).map_err(at(&path))?;
        Ok(Self { path, first, file })
    }

    /// Reads the next record; none where the file ends.
    fn record(&mut self) -> Result<Option<Record>, FrameError> {
        let start = self.file.stream_position()?;
        let read = record::read_head(&mut self.file);
        if !matches!(read, Ok(Some(_))) {
            // What was read ahead may change.
            self.file.seek(SeekFrom::Start(start))?;
        }
        read
    }

    /// Takes a record that takes change `number` back, if that is what comes next.
    fn takes_back(&mut self, number: u64) -> io::Result<bool> {
        let start = self.file.stream_position()?;
        // The record behind a whole one may be half there.
        if matches!(record::read_head(&mut self.file), Ok(Some(Record::TakenBack { number: taken })) if taken == number)
        {
            return Ok(true);
        }
        self.file.seek(SeekFrom::Start(start)).map(|_| false)
    }

    fn bytes(&mut self, count: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(count).map_err(io::Error::other)?];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Returns the frame that begins at `start`.
    fn frame_at(&mut self, start: u64) -> io::Result<Vec<u8>> {
        let place = self.file.stream_position()?;
        self.file.seek(SeekFrom::Start(start))?;
        let mut header = [0; HEADER_BYTES];
        self.file.read_exact(&mut header)?;
        self.file.seek(SeekFrom::Start(start))?;
        let frame = self.bytes(frame_bytes(&header))?;
        self.file.seek(SeekFrom::Start(place))?;
        Ok(frame)
    }

    /// Returns the frame of a record; none for one that is no change.
    fn frame(&mut self, record: &Record) -> io::Result<Option<Vec<u8>>> {
        match *record {
            Record::Change { frame_bytes, .. } => self.bytes(frame_bytes).map(Some),
            Record::ChangeInRoom { start, .. } => self.frame_at(start).map(Some),
            Record::Room { bytes } => {
                let bytes = i64::try_from(bytes).map_err(io::Error::other)?;
                self.file.seek_relative(bytes).map(|()| None)
            }
            Record::TakenBack { .. } => Ok(None),
            Record::Tail { .. } => Err(ErrorKind::InvalidData.into()),
        }
    }
}

impl Reader {
    /// Returns a reader of the changes behind number `last`; none if the log in `directory` begins later.
    pub(super) fn behind(directory: &Directory, last: u64) -> Result<Option<Self>, LogError> {
        // The newest file that does not begin too late has the change, if any has.
        let file = segments(directory)?.into_iter().rev().find(|(first, _)| *first <= last + 1);
        let reader =
            |file| Ok(Self { directory: directory.clone(), last, file: LogFile::new(directory, file)? });
        file.map(reader).transpose()
    }

    /// Returns the next change up to number `until`.
    ///
    /// # Errors
    /// [`LogError`]: a file is not there any more, or damaged.
    pub(crate) fn next(&mut self, until: u64) -> Result<Option<Sent>, LogError> {
        while self.last < until {
            let path = self.file.path.clone();
            let Some(record) = self.file.record().map_err(at(&path))? else {
                self.open_next()?;
                continue;
            };
            let frame = self.file.frame(&record).map_err(at(&path))?;
            match (record, frame) {
                (Record::TakenBack { number }, _) => self.last = self.last.max(number),
                (
                    Record::Change { number, client, .. } | Record::ChangeInRoom { number, client, .. },
                    Some(frame),
                ) if number > self.last => {
                    self.last = number;
                    // A change that failed is in the log and taken back by the record behind it: it is not
                    // sent.
                    if !self.file.takes_back(number).map_err(at(&path))? {
                        return Ok(Some(Sent { number, client, frame }));
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }

    fn open_next(&mut self) -> Result<(), LogError> {
        // Listed anew: the log has begun files, and removed some, since the last look.
        let next = segments(&self.directory)?.into_iter().find(|(first, _)| *first > self.file.first);
        match next.filter(|(first, _)| *first <= self.last + 1) {
            Some(next) => LogFile::new(&self.directory, next).map(|file| self.file = file),
            None => {
                let message = format!("change {} is not there any more", self.last + 1);
                Err(refused(&self.file.path, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Log;
    use super::*;
    use crate::wire::codec::{Request, read_frame};
    use recstore::TableId;

    fn append(log: &Log, id: i64) -> u64 {
        let ids = [id];
        let delete = Request::Delete { table: TableId(1), ids: &ids };
        let append = |frame: &crate::wire::codec::Frame<'_>| log.append(ClientId(7), frame, None);
        delete.with_frame(0, id as u64, append).unwrap().unwrap()
    }

    /// Returns number and sequence number of the changes that a reader gives.
    fn read(reader: &mut Reader, until: u64) -> Vec<(u64, u64)> {
        let next = || reader.next(until).unwrap();
        std::iter::from_fn(next)
            .map(|sent| {
                let frame = read_frame(&mut &sent.frame[..], u64::MAX).unwrap();
                assert_eq!(sent.client, ClientId(7));
                (sent.number, frame.header.sequence)
            })
            .collect()
    }

    fn opened(directory: &std::path::Path) -> Log {
        Log::open(&Directory::open(directory).unwrap(), 0, |_| Ok(())).unwrap()
    }

    #[test]
    fn changes_are_read_as_they_come_but_for_those_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let log = opened(directory.path());
        let mut reader = log.reader(0).unwrap().unwrap();
        assert_eq!(read(&mut reader, 0), []);
        assert_eq!([append(&log, 10), append(&log, 20), append(&log, 30)], [1, 2, 3]);
        assert_eq!(read(&mut reader, 2), [(1, 10), (2, 20)]);
        log.take_back(3).unwrap();
        assert_eq!(read(&mut reader, 3), []);
        assert_eq!(log.rotate().unwrap(), 3);
        append(&log, 40);
        assert_eq!(log.pass_over().unwrap(), 5);
        append(&log, 60);
        assert_eq!(read(&mut reader, 6), [(4, 40), (6, 60)]);
        // Files that were read may go; one that begins in the middle reads the rest.
        log.trim(3).unwrap();
        assert_eq!(read(&mut log.reader(4).unwrap().unwrap(), 6), [(6, 60)]);
        assert!(log.reader(2).unwrap().is_none());
    }

    #[test]
    fn a_change_in_room_is_read_from_where_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let log = opened(directory.path());
        let rows = vec![1.5_f32; 400_000];
        let write = Request::Write { table: TableId(1), ids: &[5], rows: &rows };
        let bytes = write.with_frame(3, 50, |frame| frame.to_bytes().unwrap()).unwrap();
        let mut staged = log.stage(bytes.len() as u64).unwrap();
        append(&log, 10);
        io::Write::write_all(&mut staged, &bytes).unwrap();
        write.with_frame(3, 50, |frame| log.append(ClientId(7), frame, Some(staged))).unwrap().unwrap();
        append(&log, 30);
        let mut reader = log.reader(0).unwrap().unwrap();
        assert_eq!(read(&mut reader, 3), [(1, 10), (2, 50), (3, 30)]);
    }

    #[test]
    fn a_file_that_is_gone_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let log = opened(directory.path());
        append(&log, 10);
        let mut reader = log.reader(0).unwrap().unwrap();
        log.rotate().unwrap();
        append(&log, 20);
        log.rotate().unwrap();
        append(&log, 30);
        log.trim(2).unwrap();
        assert_eq!(reader.next(3).unwrap().unwrap().number, 1);
        let error = reader.next(3).unwrap_err().to_string();
        assert!(error.ends_with("change 2 is not there any more"), "{error}");
    }
}
