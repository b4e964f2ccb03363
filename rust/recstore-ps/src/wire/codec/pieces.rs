//! A change that is larger than a server takes at a time. Its frame goes in pieces, each in a frame of its own, and is a
//! request when the last one has come: it is made as a whole or not at all.

use std::io::{self, Write};

use super::frame::{Frame, Header, Kind, Received, decode};
use super::frame_error::{FrameError, malformed};
use super::request::Request;
use super::section::{Section, unexpected};

/// The first version of the protocol in which a change may go in pieces.
const WITH_PIECES: u16 = 4;

/// A frame in pieces has at most so many times the bytes of one that goes as a whole.
const MAX_PIECES: u64 = 64;

/// The bytes of sections around what a piece holds.
const MARGIN: u64 = 64;

/// The most bytes of a piece.
const PIECE_BYTES: u64 = 4 << 20;

const WORD: usize = size_of::<i64>();

/// Returns the most bytes of a request to a server that takes `limit` at a time.
pub(crate) fn largest_request(request: &Request<'_>, limit: u64, version: u16) -> u64 {
    let is_change = matches!(request, Request::Write { .. } | Request::Update(_) | Request::Delete { .. });
    if is_change && version >= WITH_PIECES { limit.saturating_mul(MAX_PIECES) } else { limit }
}

/// Writes a frame in pieces, in frames of at most `limit` bytes.
///
/// # Errors
/// As `to`.
pub(crate) fn write_in_pieces(frame: &Frame<'_>, limit: u64, to: &mut impl Write) -> io::Result<()> {
    let words = piece_bytes(limit) / WORD;
    let mut pieces = Pieces {
        to,
        request: frame.header.request,
        total: frame.bytes(),
        place: 0,
        words: vec![0; words],
        filled: 0,
    };
    frame.write(&mut pieces)?;
    pieces.flush()
}

struct Pieces<'a, W> {
    to: &'a mut W,
    request: u64,
    /// The bytes of the whole frame, and of the pieces before the one under way.
    total: usize,
    place: usize,
    words: Vec<i64>,
    /// The bytes of the piece under way.
    filled: usize,
}

impl<W: Write> Write for Pieces<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = &mut bytemuck::cast_slice_mut::<i64, u8>(&mut self.words)[self.filled..];
        let count = bytes.len().min(room.len());
        room[..count].copy_from_slice(&bytes[..count]);
        self.filled += count;
        if self.filled == self.words.len() * WORD {
            self.flush()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.filled == 0 {
            return Ok(());
        }
        let head = [self.total as i64, self.place as i64];
        // Frames have whole words.
        let sections = vec![Section::I64(&head), Section::I64(&self.words[..self.filled / WORD])];
        Frame { header: Header::new(Kind::Piece, self.request), sections }.write(self.to)?;
        self.place += self.filled;
        self.filled = 0;
        Ok(())
    }
}

/// Returns the bytes of a piece in frames of at most `limit` bytes.
fn piece_bytes(limit: u64) -> usize {
    (PIECE_BYTES.min(limit.saturating_sub(MARGIN)) as usize).max(WORD)
}

/// Returns the frame whose `first` piece came; `next` reads the other ones, and gets how many pieces what came before makes.
/// Memory grows with what has come.
///
/// # Errors
/// [`FrameError::TooLarge`]; [`FrameError::Malformed`]: pieces that do not follow each other, or of no change; as `next`.
pub(crate) fn whole_of_pieces(
    first: Received,
    limit: u64,
    mut next: impl FnMut(u32) -> Result<Received, FrameError>,
) -> Result<Received, FrameError> {
    let (mut bytes, mut piece) = (Vec::new(), first);
    let (limit_of_frame, limit) = (limit, limit.saturating_mul(MAX_PIECES));
    loop {
        let total = add_piece(&mut bytes, &piece, limit)?;
        if bytes.len() == total {
            break;
        }
        piece = next(bytes.len().div_ceil(piece_bytes(limit_of_frame)) as u32)?;
    }
    let frame = decode(&bytes, limit)?;
    match frame.header.kind {
        Kind::Write | Kind::Update | Kind::Delete => Ok(frame),
        kind => Err(malformed(format!("pieces of a frame of the kind {kind:?}"))),
    }
}

/// Adds a piece to those before it, and returns the bytes of the whole.
fn add_piece(bytes: &mut Vec<u8>, piece: &Received, limit: u64) -> Result<usize, FrameError> {
    let sections = piece.sections()?;
    let (Kind::Piece, &[Section::I64(&[total, place]), Section::I64(words)]) =
        (piece.header.kind, &sections[..])
    else {
        return Err(unexpected(&format!("{:?} in the place of a piece", piece.header.kind), &sections));
    };
    let total = total as u64;
    if total > limit {
        return Err(FrameError::TooLarge { bytes: total, limit });
    }
    let (have, more) = (bytes.len(), words.len() * WORD);
    if place as u64 != have as u64 || more == 0 || (have + more) as u64 > total {
        return Err(malformed(format!("a piece of {more} bytes at {place} behind {have} of {total} bytes")));
    }
    bytes.extend_from_slice(bytemuck::cast_slice(words));
    Ok(total as usize)
}

#[cfg(test)]
mod tests {
    use super::super::frame::read_frame;
    use super::*;
    use recstore::TableId;

    const LIMIT: u64 = 256;

    fn pieces(ids: &[i64]) -> Vec<u8> {
        let (mut bytes, delete) = (Vec::new(), Request::Delete { table: TableId(3), ids });
        delete.with_frame(7, 9, |frame| write_in_pieces(frame, LIMIT, &mut bytes)).unwrap().unwrap();
        bytes
    }

    fn whole(mut bytes: &[u8]) -> Result<Received, FrameError> {
        let first = read_frame(&mut bytes, LIMIT)?;
        whole_of_pieces(first, LIMIT, |_| read_frame(&mut bytes, LIMIT))
    }

    #[test]
    fn a_frame_in_pieces_is_the_frame() {
        for count in [1, 23, 24, 25, 48, 500] {
            let ids: Vec<i64> = (0..count).collect();
            let received = whole(&pieces(&ids)).unwrap();
            assert_eq!(Request::of(&received).unwrap(), Request::Delete { table: TableId(3), ids: &ids });
            assert_eq!((received.header.request, received.header.sequence), (7, 9));
        }
    }

    #[test]
    fn pieces_that_do_not_make_a_change_are_refused() {
        let ids: Vec<i64> = (0..100).collect();
        let good = pieces(&ids);
        let first = {
            let mut rest = &good[..];
            read_frame(&mut rest, LIMIT).unwrap();
            good.len() - rest.len()
        };
        let refused = |bytes: &[u8]| whole(bytes).unwrap_err().to_string();
        // One twice, one left out, another frame between, and an end too soon.
        assert!(
            refused(&[&good[..first], &good[..first]].concat())
                .contains("a piece of 192 bytes at 0 behind 192")
        );
        assert!(refused(&good[first..]).contains("at 192 behind 0"));
        let between = Request::Ids { table: TableId(1) };
        let between = between.with_frame(1, 0, |frame| frame.to_bytes().unwrap()).unwrap();
        assert!(refused(&[&good[..first], &between].concat()).contains("Ids in the place of a piece"));
        assert!(matches!(whole(&good[..good.len() - 1]), Err(FrameError::Io(_))));
        let many: Vec<i64> = (0..(LIMIT * MAX_PIECES) as i64 / 8).collect();
        assert!(matches!(whole(&pieces(&many)), Err(FrameError::TooLarge { .. })));
        let mut bytes = Vec::new();
        let read = Request::Ids { table: TableId(1) };
        read.with_frame(1, 0, |frame| write_in_pieces(frame, LIMIT, &mut bytes)).unwrap().unwrap();
        assert!(refused(&bytes).contains("pieces of a frame of the kind Ids"));
    }
}
