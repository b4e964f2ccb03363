//! The log of a server's changes: what was acknowledged survives the end of the process and of the machine.
//!
//! A change is appended before it is made, and acknowledged when the disk has it; whoever waits for the disk waits
//! together with all others. A change that the store refuses is taken back by a record behind it. A server that starts
//! makes the changes of the log again that its checkpoint lacks, and a checkpoint lets the files before it go.

mod appended;
mod durable;
mod left_out;
mod reader;
mod record;
mod segment;
pub(crate) mod stream;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use recstore::{Directory, FileError};

use crate::wire::codec::{ClientId, Frame, Received};
use appended::LARGE_BYTES;
use durable::Durable;
pub use left_out::LeftOut;
pub(crate) use left_out::NAME as LEFT_OUT;
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
    /// The bytes of the log's end that the start left out.
    pub(crate) left_out: u64,
}

/// Changes in the order in which they were made.
#[derive(Debug)]
pub(crate) struct Log {
    directory: Directory,
    tail: Mutex<Tail>,
    durable: Durable,
    left_out: Option<LeftOut>,
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
    /// `after`, in their order. From a record on that cannot be read, and behind which there is none, the end is left out;
    /// [`Log::left_out`] tells it.
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
        let end = files.iter().rposition(|(_, name)| segment::record_bytes(directory, name) > 0);
        let mut left_out = None;
        for (place, (first, name)) in files.iter().enumerate() {
            let path = &directory.path().join(name);
            let next = files.get(place + 1).map(|(first, _)| *first);
            if next.is_some_and(|next| next <= after + 1) {
                continue;
            }
            if *first > last.get() + 1 && left_out.is_none() {
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
            // Only the last file with records may be cut off: one is synced before the next is begun. Those behind it are of
            // starts that wrote nothing.
            let ending = if end.is_none_or(|end| place >= end) { Ending::CutOff } else { Ending::Refused };
            let found = segment::read(directory, name, ending, |entry| match entry {
                Entry::Change(logged) => make(standing.replace(logged)),
                Entry::TakenBack { number } => {
                    standing.take_if(|logged| logged.number == number);
                    // Its number is not given again, and the next file may begin behind it.
                    last.set(last.get().max(number));
                    Ok(())
                }
                Entry::Room => Ok(()),
            })?;
            make(standing)?;
            left_out = left_out.or(found);
        }
        if left_out.is_some() {
            let behind = files.iter().skip(end.map_or(0, |end| end + 1));
            behind
                .into_iter()
                .try_for_each(|(_, name)| directory.remove_file(name).map_err(inside(directory)))?;
        }
        let last = last.into_inner();
        // A new file at each start: none is appended to that an earlier process wrote.
        let segment = Segment::create(directory, last + 1)?;
        let durable = Durable::new(last);
        Ok(Self { directory: directory.clone(), tail: Mutex::new(Tail { segment, last }), durable, left_out })
    }

    /// Returns the end of the log that opening it left out.
    pub(crate) fn left_out(&self) -> Option<&LeftOut> {
        self.left_out.as_ref()
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
            _ = segment::read(directory, name, ending, |entry| match entry {
                Entry::Change(logged) => {
                    each(logged).map_err(|message| refused(directory.path().join(name), message))
                }
                Entry::TakenBack { .. } | Entry::Room => Ok(()),
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
        let left_out = self.left_out.as_ref().map_or(0, |left_out| left_out.bytes);
        Ok(Lag { bytes, pending: self.lock().last.saturating_sub(durable), left_out })
    }

    fn lock(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove_segments(directory: &Directory) -> Result<(), LogError> {
    LeftOut::remove(directory)?;
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
