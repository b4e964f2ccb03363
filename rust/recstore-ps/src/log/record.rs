//! One record: a head of 40 bytes and, for a change, its frame.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 7 | number of the change, u64 |
//! | 8 to 23 | number of the client, u128; 0 for a change taken back |
//! | 24 to 31 | bytes of the frame, u64 |
//! | 32 | 1: a change, whose frame follows; 2: the change before is taken back |
//! | 33 to 35 | zeros |
//! | 36 to 39 | CRC-32 of the bytes before, u32 |
//!
//! The frame has a checksum of its own. Its length is in the head all the same: a frame that says another than was
//! written must not pass for one that a crash cut short.

use std::io::{self, ErrorKind, Read};

use super::Logged;
use crate::clients::ClientId;
use crate::codec::{FrameError, read_frame};

pub(super) const HEAD_BYTES: usize = 40;
const KIND: usize = 32;
const CHECKSUM: usize = 36;

const CHANGE: u8 = 1;
const TAKEN_BACK: u8 = 2;

/// A record without its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    Change { number: u64, client: ClientId },
    TakenBack { number: u64 },
}

/// A record that was read.
pub(super) enum Entry {
    Change(Logged),
    TakenBack { number: u64 },
}

impl Record {
    /// Returns the head before a frame of so many bytes.
    pub(super) fn head(&self, frame_bytes: u64) -> [u8; HEAD_BYTES] {
        let (number, client, kind) = match *self {
            Self::Change { number, client } => (number, client.0, CHANGE),
            Self::TakenBack { number } => (number, 0, TAKEN_BACK),
        };
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&number.to_le_bytes());
        head[8..24].copy_from_slice(&client.to_le_bytes());
        head[24..32].copy_from_slice(&frame_bytes.to_le_bytes());
        head[KIND] = kind;
        let checksum = crc32fast::hash(&head[..CHECKSUM]);
        head[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        head
    }

    /// Returns the record of a head, and the bytes of its frame.
    fn of(head: &[u8; HEAD_BYTES]) -> Result<(Self, u64), FrameError> {
        let [number, low, high, frame_bytes] = [0, 8, 16, 24].map(|at| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(bytes)
        });
        let client = ClientId(u128::from(high) << 64 | u128::from(low));
        if crc32fast::hash(&head[..CHECKSUM]).to_le_bytes() != head[CHECKSUM..] {
            return Err(invalid("a record whose checksum does not fit"));
        }
        match head[KIND] {
            CHANGE => Ok((Self::Change { number, client }, frame_bytes)),
            TAKEN_BACK => Ok((Self::TakenBack { number }, frame_bytes)),
            _ => Err(invalid("a record of an unknown kind")),
        }
    }
}

/// Reads a record; none at the end.
///
/// # Errors
/// What is wrong with it. A record that ends too soon is an `UnexpectedEof`.
pub(super) fn read(from: &mut impl Read) -> Result<Option<Entry>, FrameError> {
    let mut head = [0; HEAD_BYTES];
    match from.read(&mut head[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut head[1..])?,
    }
    match Record::of(&head)? {
        (Record::TakenBack { number }, _) => Ok(Some(Entry::TakenBack { number })),
        (Record::Change { number, client }, frame_bytes) => {
            let mut rest = from.take(frame_bytes);
            let frame = read_frame(&mut rest, frame_bytes);
            // A frame that wants more than was written for it is no end of the file.
            if rest.limit() == 0
                && matches!(&frame, Err(FrameError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof)
            {
                return Err(invalid("a frame that is longer than its record"));
            }
            Ok(Some(Entry::Change(Logged { number, client, frame: frame? })))
        }
    }
}

fn invalid(message: &str) -> FrameError {
    FrameError::Io(io::Error::new(ErrorKind::InvalidData, message))
}
