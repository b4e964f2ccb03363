//! Frames: a header, a body of sections, and a checksum.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | version of the layout |
//! | 1 | [`Kind`] |
//! | 2 to 3 | number of sections, u16 |
//! | 4 to 7 | CRC-32 of the header with zeros in these bytes, u32 |
//! | 8 to 15 | bytes of the body, a multiple of 8, u64 |
//! | 16 to 23 | number of the request, which its reply repeats, u64 |
//! | 24 to 31 | number of the table on this server, or 0, i64 |
//! | 32 to 39 | sequence number of a change, or 0, u64 |
//! | behind the body | four zeros; CRC-32 of the header, as it was sent, and the body, u32 |
//!
//! The body's checksum comes behind it, so that each side takes it of what is in its cache while the rest is under way.

use std::io::{self, Read, Write};

use super::buffers;
use super::frame_error::{FrameError, malformed};
use super::section::Section;
use super::version::VERSION;

/// The bytes of a header.
pub const HEADER_BYTES: usize = 40;

/// The bytes behind a body.
const TRAILER_BYTES: usize = 8;

const WORD: usize = size_of::<u64>();

/// How much is sent or received before its checksum is taken.
const BLOCK_BYTES: usize = 128 << 10;

/// How much is made ready for bytes that have not come yet.
const READ_AHEAD: usize = 1 << 20;

/// What a frame asks for, or answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A request in JSON; see [`super::Management`].
    Manage = 1,
    /// Rows of ids.
    Read = 2,
    /// Overwrites rows.
    Write = 3,
    /// Optimizer steps.
    Update = 4,
    /// Indices and rows.
    Lookup = 5,
    /// Deletes rows.
    Delete = 6,
    /// All ids of a table.
    Ids = 7,
    /// Values of an optimizer's slot.
    Slot = 8,
    /// The step of several clients; only servers write it, to their logs.
    Round = 9,
    /// Frames that lie in the memory which both sides share, and how many bytes they take there.
    InSegment = 10,
    /// A piece of the frame of a change that is larger than a frame may be. Since version 4 of the protocol.
    Piece = 11,
    /// The answer to a request.
    Reply = 128,
    /// The error that a request met.
    Refused = 129,
    /// Rows of an answer, the rest of which follows.
    Part = 130,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Manage,
        Self::Read,
        Self::Write,
        Self::Update,
        Self::Lookup,
        Self::Delete,
        Self::Ids,
        Self::Slot,
        Self::Round,
        Self::InSegment,
        Self::Piece,
        Self::Reply,
        Self::Refused,
        Self::Part,
    ];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// What stands before the sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame asks for, or answers.
    pub kind: Kind,
    /// The number of the request.
    pub request: u64,
    /// The number of the table, or 0.
    pub table: i64,
    /// The sequence number of a change, or 0.
    pub sequence: u64,
}

impl Header {
    /// Returns a header without table and sequence number.
    pub fn new(kind: Kind, request: u64) -> Self {
        Self { kind, request, table: 0, sequence: 0 }
    }
}

/// A frame to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame<'a> {
    /// The header.
    pub header: Header,
    /// The sections.
    pub sections: Vec<Section<'a>>,
}

impl Frame<'_> {
    /// Returns the bytes of its body.
    pub fn body_len(&self) -> usize {
        self.sections.iter().map(Section::encoded_len).sum()
    }

    /// Returns the bytes of the whole frame.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.body_len() + TRAILER_BYTES
    }

    /// Writes the frame.
    ///
    /// # Errors
    /// As `to`; more sections than a header can count.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        self.write_checked(Checksum::Taken, to)
    }

    /// Writes the frame, without a checksum of its body where that never leaves memory.
    ///
    /// # Errors
    /// As [`Frame::write`].
    pub(crate) fn write_checked(&self, body: Checksum, to: &mut impl Write) -> io::Result<()> {
        let count = u16::try_from(self.sections.len()).map_err(io::Error::other)?;
        let mut header = [0; HEADER_BYTES];
        header[0] = VERSION;
        header[1] = self.header.kind as u8;
        header[2..4].copy_from_slice(&count.to_le_bytes());
        header[8..16].copy_from_slice(&(self.body_len() as u64).to_le_bytes());
        header[16..24].copy_from_slice(&self.header.request.to_le_bytes());
        header[24..32].copy_from_slice(&self.header.table.to_le_bytes());
        header[32..40].copy_from_slice(&self.header.sequence.to_le_bytes());
        let checksum = crc32fast::hash(&header);
        header[4..8].copy_from_slice(&checksum.to_le_bytes());
        let mut summed = Summed::new(&mut *to, body);
        summed.write_all(&header)?;
        self.sections.iter().try_for_each(|section| section.write(&mut summed))?;
        let trailer = summed.trailer();
        to.write_all(&trailer.to_le_bytes())
    }

    /// Returns the frame as bytes.
    ///
    /// # Errors
    /// More sections than a header can count.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.bytes());
        self.write(&mut bytes).map(|()| bytes)
    }
}

/// Whether a checksum stands behind a body, or zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksum {
    Taken,
    Left,
}

/// Takes the checksum of what goes through, block by block.
struct Summed<S> {
    stream: S,
    checksum: Option<crc32fast::Hasher>,
}

impl<S> Summed<S> {
    fn new(stream: S, checksum: Checksum) -> Self {
        let checksum = (checksum == Checksum::Taken).then(crc32fast::Hasher::new);
        Self { stream, checksum }
    }

    /// Returns what stands behind a body that has gone through with its header.
    fn trailer(self) -> u64 {
        u64::from(self.checksum.map_or(0, crc32fast::Hasher::finalize)) << 32
    }

    fn note(&mut self, bytes: &[u8]) {
        if let Some(checksum) = &mut self.checksum {
            checksum.update(bytes);
        }
    }
}

impl<S: Write> Write for Summed<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Block by block, while a block lies in the cache: this side's checksum then runs beside the other
        // side's copy.
        let count = self.stream.write(&bytes[..bytes.len().min(BLOCK_BYTES)])?;
        self.note(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl<S: Read> Read for Summed<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let most = bytes.len().min(BLOCK_BYTES);
        let count = self.stream.read(&mut bytes[..most])?;
        self.note(&bytes[..count]);
        Ok(count)
    }
}

/// A frame that came, every length in it checked.
#[derive(Debug)]
pub struct Received {
    /// The header.
    pub header: Header,
    count: u16,
    words: Vec<u64>,
    /// The bytes of the frame that came.
    len: usize,
}

impl Drop for Received {
    fn drop(&mut self) {
        buffers::put_back(&mut self.words);
    }
}

impl Received {
    /// Returns the bytes that the frame had.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// Returns the frame with other sections, as many as it has, in whole words.
    pub(super) fn with_body(self, body: &[u8]) -> Self {
        let mut words = buffers::take(body.len() / WORD);
        words.resize(body.len() / WORD, 0);
        bytemuck::cast_slice_mut(&mut words).copy_from_slice(body);
        Self { header: self.header, count: self.count, words, len: self.len }
    }

    /// Returns the sections.
    ///
    /// # Errors
    /// [`FrameError::Malformed`], never for a frame of [`read_frame`] or [`decode`].
    pub fn sections(&self) -> Result<Vec<Section<'_>>, FrameError> {
        let mut rest = &self.words[..];
        let mut sections = Vec::new();
        for _ in 0..self.count {
            let (section, behind) = Section::parse(rest)?;
            sections.push(section);
            rest = behind;
        }
        match rest.len() {
            0 => Ok(sections),
            words => Err(malformed(format!("{words} words behind the last section"))),
        }
    }
}

/// Reads a frame whose body has at most `limit` bytes.
///
/// # Errors
/// [`FrameError`]; a reader that ends before the frame gives [`FrameError::Io`].
pub fn read_frame(from: &mut impl Read, limit: u64) -> Result<Received, FrameError> {
    read_frame_checked(Checksum::Taken, from, limit)
}

/// As [`read_frame`], of a body with a checksum or without.
///
/// # Errors
/// As [`read_frame`].
pub(crate) fn read_frame_checked(
    body: Checksum,
    from: &mut impl Read,
    limit: u64,
) -> Result<Received, FrameError> {
    read_beside(body, from, limit, |_, _| None::<io::Sink>).map(|(received, _)| received)
}

/// As [`read_frame`]; writes the frame's bytes, as they come, to what `beside` returns for its header and its number of
/// bytes, and returns that too. It is gone if it could not be written to.
///
/// # Errors
/// As [`read_frame`].
pub(crate) fn read_frame_beside<W: Write>(
    from: &mut impl Read,
    limit: u64,
    beside: impl FnOnce(&Header, u64) -> Option<W>,
) -> Result<(Received, Option<W>), FrameError> {
    read_beside(Checksum::Taken, from, limit, beside)
}

fn read_beside<W: Write>(
    body: Checksum,
    from: &mut impl Read,
    limit: u64,
    beside: impl FnOnce(&Header, u64) -> Option<W>,
) -> Result<(Received, Option<W>), FrameError> {
    let mut bytes = [0; HEADER_BYTES];
    let mut summed = Summed::new(&mut *from, body);
    summed.read_exact(&mut bytes)?;
    // The header has a checksum of its own, as its lengths decide what is read before the other one comes.
    let (header, count, len) = parse_header(&bytes, limit)?;
    let mut copied =
        Copied { from: summed, to: beside(&header, (HEADER_BYTES + len + TRAILER_BYTES) as u64) };
    copied.copy(&bytes);
    let words = read_words(&mut copied, len / WORD)?;
    let received = Received { header, count, words, len: HEADER_BYTES + len + TRAILER_BYTES };
    let Copied { from: summed, to } = copied;
    let expected = summed.trailer();
    // The trailer goes beside the checksum, not into it.
    let mut rest = Copied { from, to };
    let mut trailer = [0; TRAILER_BYTES];
    rest.read_exact(&mut trailer)?;
    if trailer != expected.to_le_bytes() {
        return Err(unfitting_checksum());
    }
    // Once here, so that no later look at the sections can fail.
    received.sections()?;
    Ok((received, rest.to))
}

/// Copies what is read, as long as that works.
struct Copied<R, W> {
    from: R,
    to: Option<W>,
}

impl<R, W: Write> Copied<R, W> {
    fn copy(&mut self, bytes: &[u8]) {
        // A copy that fails is given up and the frame still comes: the log then writes it as a whole, or says
        // why not.
        self.to.take_if(|to| to.write_all(bytes).is_err());
    }
}

impl<R: Read, W: Write> Read for Copied<R, W> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(bytes)?;
        self.copy(&bytes[..count]);
        Ok(count)
    }
}

/// Reads the one frame that `bytes` are.
///
/// # Errors
/// As [`read_frame`], and if there are bytes behind the frame.
pub fn decode(mut bytes: &[u8], limit: u64) -> Result<Received, FrameError> {
    let received = read_frame(&mut bytes, limit)?;
    match bytes.len() {
        0 => Ok(received),
        behind => Err(malformed(format!("{behind} bytes behind the frame"))),
    }
}

/// Returns the bytes of the whole frame that a header begins, as it says.
pub(crate) fn frame_bytes(header: &[u8; HEADER_BYTES]) -> u64 {
    let body = u64::from_le_bytes(std::array::from_fn(|byte| header[8 + byte]));
    body.saturating_add((HEADER_BYTES + TRAILER_BYTES) as u64)
}

fn unfitting_checksum() -> FrameError {
    malformed("the checksum does not fit")
}

/// Returns the header, the number of sections and the bytes of the body.
fn parse_header(bytes: &[u8; HEADER_BYTES], limit: u64) -> Result<(Header, u16, usize), FrameError> {
    // Before the checksum, which another version may have elsewhere.
    if bytes[0] != VERSION {
        return Err(FrameError::Version(bytes[0]));
    }
    let mut plain = *bytes;
    plain[4..8].fill(0);
    if crc32fast::hash(&plain).to_le_bytes() != bytes[4..8] {
        return Err(unfitting_checksum());
    }
    let kind = Kind::of(bytes[1]).ok_or_else(|| malformed(format!("the unknown kind {}", bytes[1])))?;
    let word = |place: usize| -> [u8; 8] { std::array::from_fn(|byte| bytes[place + byte]) };
    let len = u64::from_le_bytes(word(8));
    if len > limit {
        return Err(FrameError::TooLarge { bytes: len, limit });
    }
    if !len.is_multiple_of(8) {
        return Err(malformed(format!("a body of {len} bytes, which is no multiple of 8")));
    }
    let len = usize::try_from(len).map_err(|_| FrameError::TooLarge { bytes: len, limit })?;
    let header = Header {
        kind,
        request: u64::from_le_bytes(word(16)),
        table: i64::from_le_bytes(word(24)),
        sequence: u64::from_le_bytes(word(32)),
    };
    Ok((header, u16::from_le_bytes([bytes[2], bytes[3]]), len))
}

/// Memory is made as bytes come, at most [`READ_AHEAD`] or what there is already before them, beside what is used again.
fn read_words(from: &mut impl Read, count: usize) -> Result<Vec<u64>, FrameError> {
    let (mut words, mut have) = (buffers::take(count), 0);
    while have < count {
        words.resize(count.min(words.len().max(have + have.max(READ_AHEAD / 8))), 0);
        from.read_exact(bytemuck::cast_slice_mut(&mut words[have..]))?;
        have = words.len();
    }
    Ok(words)
}
