//! One record: a head of 40 bytes and what follows it.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 7 | number of the change, u64; 0 for room |
//! | 8 to 23 | number of the client, u128; 0 for room, and for a change taken back |
//! | 24 to 31 | bytes that follow, or where in this file the frame is, u64 |
//! | 32 | kind |
//! | 33 to 35 | zeros |
//! | 36 to 39 | CRC-32 of the bytes before, u32 |
//!
//! | kind | what it says | what follows |
//! |---|---|---|
//! | 1 | a change | its frame |
//! | 2 | the change before is taken back | |
//! | 3 | room for a frame that was coming | that much of it as came, before other records were written behind it |
//! | 4 | a change whose frame is in such room before | |
//! | 5 | all changes up to this one have come; only on the way to a follower, never in a file | |
//!
//! The frame has a checksum of its own. Its length is in the head all the same: a frame that says another than was
//! written must not pass for one that a crash cut short.

use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use crate::wire::codec::{ClientId, FrameError, Received, read_frame};

pub(super) const HEAD_BYTES: usize = 40;
/// The bytes that are searched at a time.
const BLOCK_BYTES: u64 = 1 << 20;

const KIND: usize = 32;
const CHECKSUM: usize = 36;

const CHANGE: u8 = 1;
const TAKEN_BACK: u8 = 2;
const ROOM: u8 = 3;
const CHANGE_IN_ROOM: u8 = 4;
const TAIL: u8 = 5;

/// A record without its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    Change { number: u64, client: ClientId, frame_bytes: u64 },
    TakenBack { number: u64 },
    Room { bytes: u64 },
    ChangeInRoom { number: u64, client: ClientId, start: u64 },
    Tail { number: u64 },
}

impl Record {
    pub(super) fn head(&self) -> [u8; HEAD_BYTES] {
        let nobody = ClientId(0);
        let (number, client, word, kind) = match *self {
            Self::Change { number, client, frame_bytes } => (number, client, frame_bytes, CHANGE),
            Self::TakenBack { number } => (number, nobody, 0, TAKEN_BACK),
            Self::Room { bytes } => (0, nobody, bytes, ROOM),
            Self::ChangeInRoom { number, client, start } => (number, client, start, CHANGE_IN_ROOM),
            Self::Tail { number } => (number, nobody, 0, TAIL),
        };
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&number.to_le_bytes());
        head[8..24].copy_from_slice(&client.0.to_le_bytes());
        head[24..32].copy_from_slice(&word.to_le_bytes());
        head[KIND] = kind;
        let checksum = crc32fast::hash(&head[..CHECKSUM]);
        head[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        head
    }

    /// Returns how many bytes are between its head and the next record.
    pub(super) fn following_bytes(&self) -> u64 {
        match *self {
            Self::Change { frame_bytes: bytes, .. } | Self::Room { bytes } => bytes,
            Self::TakenBack { .. } | Self::ChangeInRoom { .. } | Self::Tail { .. } => 0,
        }
    }

    fn of(head: &[u8; HEAD_BYTES]) -> Result<Self, FrameError> {
        let [number, low, high, word] = [0, 8, 16, 24].map(|at| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(bytes)
        });
        let client = ClientId(u128::from(high) << 64 | u128::from(low));
        if crc32fast::hash(&head[..CHECKSUM]).to_le_bytes() != head[CHECKSUM..] {
            return Err(invalid("a record whose checksum does not fit"));
        }
        match head[KIND] {
            CHANGE => Ok(Self::Change { number, client, frame_bytes: word }),
            TAKEN_BACK => Ok(Self::TakenBack { number }),
            ROOM => Ok(Self::Room { bytes: word }),
            CHANGE_IN_ROOM => Ok(Self::ChangeInRoom { number, client, start: word }),
            TAIL => Ok(Self::Tail { number }),
            _ => Err(invalid("a record of an unknown kind")),
        }
    }
}

/// Reads the head of a record; none at the end.
///
/// # Errors
/// What is wrong with it. A head that ends too soon is an `UnexpectedEof`, as is a frame below.
pub(super) fn read_head(from: &mut impl Read) -> Result<Option<Record>, FrameError> {
    let mut head = [0; HEAD_BYTES];
    // The first byte alone: a file that ends before it is whole, one that ends behind it has a head cut
    // short.
    match from.read(&mut head[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut head[1..])?,
    }
    Record::of(&head).map(Some)
}

/// Returns the first record of a file that begins at `start` or behind, and where: whether something came behind a record
/// that cannot be read.
///
/// # Errors
/// As `from`.
pub(super) fn next_record(from: &mut (impl Read + Seek), start: u64) -> io::Result<Option<(u64, Record)>> {
    let (mut place, mut bytes) = (start, Vec::new());
    from.seek(SeekFrom::Start(start))?;
    while from.take(BLOCK_BYTES).read_to_end(&mut bytes)? > 0 {
        let heads = bytes.windows(HEAD_BYTES).enumerate().filter(|(_, head)| {
            (CHANGE..=CHANGE_IN_ROOM).contains(&head[KIND]) && head[KIND + 1..CHECKSUM] == [0; 3]
        });
        let mut records =
            heads.filter_map(|(at, head)| Some((place + at as u64, Record::of(head.try_into().ok()?).ok()?)));
        if let Some(found) = records.next() {
            return Ok(Some(found));
        }
        let searched = bytes.len().saturating_sub(HEAD_BYTES - 1);
        bytes.drain(..searched);
        place += searched as u64;
    }
    Ok(None)
}

/// Reads the frame of a change, for which so many bytes were written.
pub(super) fn read_frame_of(from: &mut impl Read, frame_bytes: u64) -> Result<Received, FrameError> {
    let mut rest = from.take(frame_bytes);
    let frame = read_frame(&mut rest, frame_bytes);
    // A frame that wants more than was written for it is no end of the file.
    if rest.limit() == 0
        && matches!(&frame, Err(FrameError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof)
    {
        return Err(invalid("a frame that is longer than its record"));
    }
    frame?.widened()
}

pub(super) fn invalid(message: &str) -> FrameError {
    FrameError::Io(io::Error::new(ErrorKind::InvalidData, message))
}
