//! The log of a server's changes: what was acknowledged survives the end of the process and of the machine.
//!
//! A change is appended before it is made, and acknowledged when the disk has it; whoever waits for the disk waits
//! together with all others. A change that the store refuses is taken back by a record behind it. A server that starts
//! makes the changes of the log again that its checkpoint lacks, and a checkpoint lets the files before it go.

mod appended;
mod durable;
mod reader;
mod record;
mod segment;
pub(crate) mod stream;

use std::cell::Cell;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use recstore::{Directory, FileError};

use crate::wire::codec::{ClientId, Frame, Received};
use appended::LARGE_BYTES;
use durable::Durable;
pub(crate) use reader::{Reader, Sent};
use record::Record;
pub(crate) use segment::Staged;
use segment::{Ending, Entry, Segment, segments};

/// A log that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", path.display())]
pub(crate) struct LogError {
    /// The file.
    pub(crate) path: PathBuf,
    /// What is wrong with it.
    pub(crate) message: String,
}

/// A change of the log that is to be made again.
pub(crate) struct Logged {
    /// Its number in the log, from 1 on.
    pub(crate) number: u64,
    pub(crate) client: ClientId,
    pub(crate) frame: Received,
}

/// How far behind its log a server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lag {
    /// The bytes of log behind the last checkpoint.
    pub(crate) bytes: u64,
    /// The changes that the disk is not known to have yet.
    pub(crate) pending: u64,
}

/// Changes in the order in which they were made.
#[derive(Debug)]
pub(crate) struct Log {
    directory: Directory,
    tail: Mutex<Tail>,
    durable: Durable,
}

/// Where the log ends.
#[derive(Debug)]
struct Tail {
    segment: Segment,
    /// The number of the last change.
    last: u64,
}

impl Log {
    /// Opens the log in `directory`, and calls `again` with each change behind number
    /// `after`, in their order. What a crash left of a record at the end is cut off: nobody was told of it.
    ///
    /// # Errors
    /// [`LogError`]: a file is damaged before its end, or changes are missing; as `again`.
    pub(crate) fn open(
        directory: &Directory,
        after: u64,
        mut again: impl FnMut(Logged) -> Result<(), String>,
    ) -> Result<Self, LogError> {
        let last = Cell::new(after);
        let files = segments(directory)?;
        for (place, (first, name)) in files.iter().enumerate() {
            let path = &directory.path().join(name);
            let next = files.get(place + 1).map(|(first, _)| *first);
            if next.is_some_and(|next| next <= after + 1) {
                continue;
            }
            if *first > last.get() + 1 {
                let missing = last.get() + 1;
                return Err(refused(path, format!("the changes from {missing} on are missing before it")));
            }
            // A change is made again when it is known that it was not taken back.
            let mut standing: Option<Logged> = None;
            let mut make = |logged: Option<Logged>| {
                let Some(logged) = logged.filter(|logged| logged.number > last.get()) else { return Ok(()) };
                let number = logged.number;
                last.set(number);
                again(logged).map_err(|message| refused(path, format!("change {number}: {message}")))
            };
            // Only the last file may be cut off: one is synced before the next is begun.
            let ending = if next.is_none() { Ending::CutOff } else { Ending::Refused };
            segment::read(directory, name, ending, |entry| match entry {
                Entry::Change(logged) => make(standing.replace(logged)),
                Entry::TakenBack { number } => {
                    standing.take_if(|logged| logged.number == number);
                    // Its number is not given again, and the next file may begin behind it.
                    last.set(last.get().max(number));
                    Ok(())
                }
            })?;
            make(standing)?;
        }
        let last = last.into_inner();
        // A new file at each start: none is appended to that an earlier process wrote.
        let segment = Segment::create(directory, last + 1)?;
        let durable = Durable::new(last);
        Ok(Self { directory: directory.clone(), tail: Mutex::new(Tail { segment, last }), durable })
    }

    /// Calls `each` with all changes of the log in `directory`, also those that were taken back, and changes nothing there.
    ///
    /// # Errors
    /// [`LogError`]: a file is damaged before its end; as `each`.
    pub(crate) fn look_through(
        directory: &Directory,
        mut each: impl FnMut(Logged) -> Result<(), String>,
    ) -> Result<(), LogError> {
        let files = Self::files(directory)?;
        for (place, name) in files.iter().enumerate() {
            let ending = if place + 1 == files.len() { Ending::Left } else { Ending::Refused };
            segment::read(directory, name, ending, |entry| match entry {
                Entry::Change(logged) => {
                    each(logged).map_err(|message| refused(directory.path().join(name), message))
                }
                Entry::TakenBack { .. } => Ok(()),
            })?;
        }
        Ok(())
    }

    /// Returns the names of the files of the log in `directory`, in their order.
    ///
    /// # Errors
    /// [`LogError`]: the directory cannot be read.
    pub(crate) fn files(directory: &Directory) -> Result<Vec<String>, LogError> {
        Ok(segments(directory)?.into_iter().map(|(_, name)| name).collect())
    }

    /// Leaves room for a large frame of so many bytes, which goes there while it comes: so the disk works meanwhile, and
    /// the bytes are copied while the processor still has them. None if that cannot be, or is not worth it.
    pub(crate) fn stage(&self, bytes: u64) -> Option<Staged> {
        if bytes < LARGE_BYTES || self.durable.check().is_err() {
            return None;
        }
        self.lock().segment.stage(bytes).ok()
    }

    /// Appends a change and returns its number. `staged` is its frame, if it was written while it came.
    ///
    /// # Errors
    /// [`LogError`]: nothing was appended.
    pub(crate) fn append(
        &self,
        client: ClientId,
        frame: &Frame<'_>,
        staged: Option<Staged>,
    ) -> Result<u64, LogError> {
        let mut tail = self.writable()?;
        let number = tail.last + 1;
        tail.segment.append_change(number, client, frame, staged)?;
        tail.last = number;
        Ok(number)
    }

    /// Appends a change under the number that it has in the log of the server that made it.
    ///
    /// # Errors
    /// [`LogError`]: nothing was appended, or the log has a change of that number.
    pub(crate) fn append_as(&self, number: u64, client: ClientId, frame: &Frame<'_>) -> Result<(), LogError> {
        let mut tail = self.writable()?;
        if number <= tail.last {
            let message = format!("change {number} comes behind change {}", tail.last);
            return Err(refused(tail.segment.path(), message));
        }
        tail.segment.append_change(number, client, frame, None)?;
        tail.last = number;
        Ok(())
    }

    /// Gives the next number to no change, and returns it.
    ///
    /// # Errors
    /// As [`Log::append`].
    pub(crate) fn pass_over(&self) -> Result<u64, LogError> {
        self.pass_to(self.last() + 1)
    }

    /// Gives the numbers up to `number` to no change, those that have none, and returns the last that is given.
    ///
    /// # Errors
    /// As [`Log::append`].
    pub(crate) fn pass_to(&self, number: u64) -> Result<u64, LogError> {
        let mut tail = self.writable()?;
        if number > tail.last {
            tail.segment.append(&Record::TakenBack { number }, None)?;
            tail.last = number;
        }
        Ok(tail.last)
    }

    /// Returns the number of the last change.
    pub(crate) fn last(&self) -> u64 {
        self.lock().last
    }

    /// Begins anew behind change `last`: what was in the log is gone.
    ///
    /// # Errors
    /// [`LogError`]: a file cannot be removed or made.
    pub(crate) fn restart(&self, last: u64) -> Result<(), LogError> {
        let mut tail = self.writable()?;
        remove_segments(&self.directory)?;
        *tail = Tail { segment: Segment::create(&self.directory, last + 1)?, last };
        self.durable.restart(last);
        Ok(())
    }

    /// Returns what reads the changes behind number `last` while more are written; none if the log begins later.
    ///
    /// # Errors
    /// [`LogError`]: a file cannot be read.
    pub(crate) fn reader(&self, last: u64) -> Result<Option<Reader>, LogError> {
        Reader::behind(&self.directory, last)
    }

    fn writable(&self) -> Result<MutexGuard<'_, Tail>, LogError> {
        let tail = self.lock();
        self.durable.check().map_err(|message| refused(tail.segment.path(), message))?;
        Ok(tail)
    }

    /// Takes change `number` back, the last one: the store refused it.
    pub(crate) fn take_back(&self, number: u64) -> Result<(), LogError> {
        self.lock().segment.append(&Record::TakenBack { number }, None)
    }

    /// Waits until change `number` is on the disk.
    ///
    /// # Errors
    /// [`LogError`]: the disk failed. Then no change is taken any more: nobody knows what the file holds.
    pub(crate) fn wait(&self, number: u64) -> Result<(), LogError> {
        // File and number under one lock: a sync of this file covers all changes up to this number.
        let last = || {
            let tail = self.lock();
            (tail.segment.file(), tail.last)
        };
        self.durable.wait(number, last).map_err(|message| refused(self.directory.path(), message))
    }

    /// Takes no more changes, and says why.
    pub(crate) fn fail(&self, message: &str) {
        self.durable.fail(message);
    }

    /// Begins another file and returns the number of the last change before it.
    pub(crate) fn rotate(&self) -> Result<u64, LogError> {
        let mut tail = self.lock();
        let last = tail.last;
        if tail.segment.first() <= last {
            // Later syncs are of the new file only.
            tail.segment.sync()?;
            tail.segment = Segment::create(&self.directory, last + 1)?;
        }
        Ok(last)
    }

    /// Removes files all of whose changes have numbers up to `last`.
    pub(crate) fn trim(&self, last: u64) -> Result<(), LogError> {
        let files = segments(&self.directory)?;
        // The last file has no next one and always stays: it is appended to.
        for ((_, name), (next, _)) in files.iter().zip(files.iter().skip(1)) {
            if *next <= last + 1 {
                self.directory.remove_file(name).map_err(inside(&self.directory))?;
            }
        }
        Ok(())
    }

    /// Removes the files of the log `name` of a directory, which no server keeps any more.
    pub(crate) fn remove(directory: &Directory, name: &str) -> Result<(), LogError> {
        match directory.subdirectory(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            opened => remove_segments(&opened.map_err(inside(directory))?),
        }
    }

    /// Returns how much a server that starts now would make again, and how much a crash could take away.
    ///
    /// # Errors
    /// [`LogError`]: the directory cannot be read.
    pub(crate) fn lag(&self) -> Result<Lag, LogError> {
        let files = segments(&self.directory)?;
        let bytes = files.iter().map(|(_, name)| segment::record_bytes(&self.directory, name)).sum();
        let durable = self.durable.last();
        Ok(Lag { bytes, pending: self.lock().last.saturating_sub(durable) })
    }

    fn lock(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove_segments(directory: &Directory) -> Result<(), LogError> {
    let remove = |(_, name): (u64, String)| directory.remove_file(name).map_err(inside(directory));
    segments(directory)?.into_iter().try_for_each(remove)
}

/// Says which file of a directory an error is about.
fn inside(directory: &Directory) -> impl FnOnce(io::Error) -> LogError {
    move |error| {
        let FileError { path, reason, .. } = FileError::at(directory.path(), &error);
        refused(path, reason)
    }
}

fn refused(path: impl AsRef<Path>, message: impl Display) -> LogError {
    LogError { path: path.as_ref().to_owned(), message: message.to_string() }
}

fn at<E: Display>(path: &Path) -> impl FnOnce(E) -> LogError {
    move |error| refused(path, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec::Request;
    use recstore::TableId;
    use std::fs;

    fn append(log: &Log, client: u128, id: i64) -> u64 {
        let (ids, request) = ([id], 7);
        let delete = Request::Delete { table: TableId(1), ids: &ids };
        delete
            .with_frame(request, id as u64, |frame| log.append(ClientId(client), frame, None))
            .unwrap()
            .unwrap()
    }

    /// Number, client, and the sequence number of the frame.
    type Made = (u64, u128, u64);

    /// Opens a log and returns the changes behind `after`.
    fn opened(directory: &Path, after: u64) -> Result<(Log, Vec<Made>), LogError> {
        let mut made = Vec::new();
        let log = Log::open(&Directory::open(directory).unwrap(), after, |logged| {
            made.push((logged.number, logged.client.0, logged.frame.header.sequence));
            Ok(())
        })?;
        Ok((log, made))
    }

    #[test]
    fn changes_come_back_in_their_order_but_for_those_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!(made, []);
        assert_eq!([append(&log, 1, 10), append(&log, 2, 20)], [1, 2]);
        log.take_back(2).unwrap();
        append(&log, u128::MAX, 30);
        log.wait(3).unwrap();
        drop(log);
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!(made, [(1, 1, 10), (3, u128::MAX, 30)]);
        assert_eq!(append(&log, 1, 40), 4);
        drop(log);
        assert_eq!(opened(directory.path(), 1).unwrap().1, [(3, u128::MAX, 30), (4, 1, 40)]);
    }

    #[test]
    fn a_change_taken_back_at_the_end_of_a_file_is_not_missed() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        append(&log, 1, 10);
        append(&log, 1, 20);
        log.take_back(2).unwrap();
        assert_eq!(log.rotate().unwrap(), 2);
        assert_eq!(append(&log, 1, 30), 3);
        log.take_back(3).unwrap();
        drop(log);
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!(made, [(1, 1, 10)]);
        assert_eq!(append(&log, 1, 40), 4);
        drop(log);
        assert_eq!(opened(directory.path(), 0).unwrap().1, [(1, 1, 10), (4, 1, 40)]);
    }

    #[test]
    fn a_log_cut_anywhere_gives_the_changes_before_and_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        let ends: Vec<u64> = (0..3)
            .map(|id| {
                append(&log, 1, -1 - id);
                fs::metadata(directory.path().join("0000000000000001.log")).unwrap().len()
            })
            .collect();
        let whole = fs::read(directory.path().join("0000000000000001.log")).unwrap();
        for len in 0..=whole.len() {
            for tail in [0, 5_000] {
                let other = tempfile::tempdir().unwrap();
                let mut bytes = whole[..len].to_vec();
                bytes.resize(if len < 16 { len } else { len + tail }, 0);
                fs::write(other.path().join("0000000000000001.log"), bytes).unwrap();
                let expected = ends.iter().filter(|end| **end <= len as u64).count();
                let (log, made) = opened(other.path(), 0).unwrap();
                assert_eq!(made.len(), expected, "{len}");
                append(&log, 1, 99);
                drop(log);
                assert_eq!(opened(other.path(), 0).unwrap().1.len(), expected + 1, "{len}");
            }
        }
    }

    #[test]
    fn a_byte_that_flipped_within_a_log_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        (0..3).for_each(|id| _ = append(&log, 1, id));
        let path = directory.path().join("0000000000000001.log");
        let whole = fs::read(&path).unwrap();
        let second = whole.len() / 3;
        for place in 0..second {
            let mut bytes = whole.clone();
            bytes[place] ^= 0x40;
            fs::write(&path, bytes).unwrap();
            let error = opened(directory.path(), 0).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{place}: {error}");
        }
    }

    #[test]
    fn files_go_when_a_checkpoint_has_their_changes() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        for round in 0..3 {
            append(&log, 1, round * 2);
            append(&log, 1, round * 2 + 1);
            assert_eq!(log.rotate().unwrap(), 2 * round as u64 + 2);
            assert_eq!(log.rotate().unwrap(), 2 * round as u64 + 2);
        }
        assert_eq!(segments(&Directory::open(directory.path()).unwrap()).unwrap().len(), 4);
        log.trim(5).unwrap();
        drop(log);
        assert_eq!(opened(directory.path(), 4).unwrap().1, [(5, 1, 4), (6, 1, 5)]);
        let error = opened(directory.path(), 2).unwrap_err().to_string();
        assert!(error.ends_with("the changes from 3 on are missing before it"), "{error}");
    }

    #[test]
    fn threads_wait_for_the_disk_together() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        std::thread::scope(|scope| {
            for client in 0..4 {
                let log = &log;
                scope.spawn(move || (0..25).for_each(|id| log.wait(append(log, client, id)).unwrap()));
            }
        });
        drop(log);
        assert_eq!(opened(directory.path(), 0).unwrap().1.len(), 100);
    }

    /// A frame that is worth staging.
    fn large(log: &Log, sequence: u64, end: impl FnOnce(&Frame<'_>, Option<Staged>)) {
        let ids: Vec<i64> = (0..LARGE_BYTES as i64 / 8).collect();
        let delete = Request::Delete { table: TableId(1), ids: &ids };
        let written = delete.with_frame(7, sequence, |frame| {
            let mut staged = log.stage(frame.bytes() as u64);
            frame.write(staged.as_mut().unwrap()).unwrap();
            end(frame, staged);
        });
        written.unwrap();
    }

    #[test]
    fn frames_written_while_they_came_come_back_in_the_order_of_their_changes() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        large(&log, 10, |first, staged| {
            // Others come and go before the first is whole.
            append(&log, 2, 20);
            large(&log, 30, |frame, staged| _ = log.append(ClientId(3), frame, staged).unwrap());
            large(&log, 40, |_, staged| drop(staged));
            assert_eq!(log.append(ClientId(1), first, staged).unwrap(), 3);
        });
        log.wait(3).unwrap();
        let bytes = log.lag().unwrap().bytes;
        assert!((3 * LARGE_BYTES..4 * LARGE_BYTES).contains(&bytes), "{bytes}: a frame was written twice");
        drop(log);
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!(made, [(1, 2, 20), (2, 3, 30), (3, 1, 10)]);
        append(&log, 1, 50);
        drop(log);
        assert_eq!(opened(directory.path(), 2).unwrap().1, [(3, 1, 10), (4, 1, 50)]);
    }

    #[test]
    fn a_frame_staged_before_the_next_file_or_in_part_is_written_again() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        append(&log, 1, 5);
        large(&log, 10, |frame, staged| {
            assert_eq!(log.rotate().unwrap(), 1);
            log.append(ClientId(1), frame, staged).unwrap();
            let partly = log.stage(frame.bytes() as u64 + 1);
            log.append(ClientId(1), frame, partly).unwrap();
        });
        drop(log);
        assert_eq!(opened(directory.path(), 0).unwrap().1, [(1, 1, 5), (2, 1, 10), (3, 1, 10)]);
    }

    #[test]
    fn a_frame_that_was_coming_at_the_end_counts_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let (log, _) = opened(directory.path(), 0).unwrap();
        append(&log, 1, 10);
        let path = directory.path().join("0000000000000001.log");
        let before = fs::metadata(&path).unwrap().len();
        large(&log, 20, |frame, staged| _ = log.append(ClientId(1), frame, staged).unwrap());
        drop(log);
        let whole = fs::read(&path).unwrap();
        let kept = |bytes: &[u8]| {
            let other = tempfile::tempdir().unwrap();
            fs::write(other.path().join("0000000000000001.log"), bytes).unwrap();
            opened(other.path(), 0).map(|(_, made)| made.len())
        };
        assert_eq!(kept(&whole).unwrap(), 2);
        // In the head of the room, in the room, at its end, in the record that refers to it.
        for len in [before + 7, before + 40, before + 50_000, whole.len() as u64 - 40, whole.len() as u64 - 1]
        {
            assert_eq!(kept(&whole[..len as usize]).unwrap(), 1, "{len}");
        }
        // What a crash left of a frame that nobody was told of, and what it cannot have left.
        let mut flipped = whole.clone();
        flipped[before as usize + 50_000] ^= 1;
        assert_eq!(kept(&flipped).unwrap(), 1);
        let another = [&flipped[..], &whole[16..before as usize]].concat();
        let error = kept(&another).unwrap_err().to_string();
        assert!(error.contains("damaged behind its first"), "{error}");
    }
}
