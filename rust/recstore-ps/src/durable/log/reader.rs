//! Reading a log while it is written, for followers.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::record::{self, Record};
use super::segment::{HEADER, segments};
use super::{LogError, at, refused};
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
    directory: PathBuf,
    /// The number of the last change that was read or passed over.
    last: u64,
    file: Opened,
}

/// The file that is read, up to a place between two records.
#[derive(Debug)]
struct Opened {
    path: PathBuf,
    first: u64,
    file: BufReader<File>,
}

impl Opened {
    fn new((first, path): (u64, PathBuf)) -> Result<Self, LogError> {
        let mut file = BufReader::new(recstore::open_file(&path).map_err(at(&path))?);
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
    pub(super) fn behind(directory: &Path, last: u64) -> Result<Option<Self>, LogError> {
        let file = segments(directory)?.into_iter().rev().find(|(first, _)| *first <= last + 1);
        let reader = |file| Ok(Self { directory: directory.to_owned(), last, file: Opened::new(file)? });
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
        let next = segments(&self.directory)?.into_iter().find(|(first, _)| *first > self.file.first);
        match next.filter(|(first, _)| *first <= self.last + 1) {
            Some(next) => Opened::new(next).map(|file| self.file = file),
            None => {
                let message = format!("change {} is not there any more", self.last + 1);
                Err(refused(&self.file.path, message))
            }
        }
    }
}
