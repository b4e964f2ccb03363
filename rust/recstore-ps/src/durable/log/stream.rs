//! Changes on the way from a server to one that follows it: the records of the log, and between them how far they are.

use std::io::{self, Read, Write};

use super::record::{self, Record};
use super::{Logged, Sent};
use crate::wire::codec::FrameError;

/// What comes to a follower.
pub(crate) enum Coming {
    Change(Logged),
    /// All changes up to a number have come.
    Tail(u64),
}

/// Writes a change.
pub(crate) fn write_change(to: &mut impl Write, sent: &Sent) -> io::Result<()> {
    let Sent { number, client, ref frame } = *sent;
    to.write_all(&Record::Change { number, client, frame_bytes: frame.len() as u64 }.head())?;
    to.write_all(frame)
}

/// Writes that all changes up to a number were written.
pub(crate) fn write_tail(to: &mut impl Write, number: u64) -> io::Result<()> {
    to.write_all(&Record::Tail { number }.head())
}

/// Reads what comes next; nothing at the end.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn read(from: &mut impl Read) -> Result<Option<Coming>, FrameError> {
    Ok(match record::read_head(from)? {
        None => None,
        Some(Record::Tail { number }) => Some(Coming::Tail(number)),
        Some(Record::Change { number, client, frame_bytes }) => {
            let frame = record::read_frame_of(from, frame_bytes)?;
            Some(Coming::Change(Logged { number, client, frame }))
        }
        Some(_) => return Err(record::invalid("a record that is not for followers")),
    })
}
