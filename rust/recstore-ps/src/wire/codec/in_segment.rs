//! The frame that says that frames lie in the memory which both sides of a connection share.

use std::io::{self, Write};
use std::ops::Range;

use super::frame::{Checksum, Frame, Header, Kind, Received, read_frame_checked};
use super::frame_error::FrameError;
use super::section::{Section, unexpected};
use crate::wire::segment::Segment;

/// Says that the frames of a request, or of its answer, take the first `bytes` of the segment.
///
/// # Errors
/// As `to`.
pub(crate) fn write_in_segment(request: u64, bytes: usize, to: &mut impl Write) -> io::Result<()> {
    let bytes = [bytes as i64];
    let sections = vec![Section::I64(&bytes)];
    Frame { header: Header::new(Kind::InSegment, request), sections }.write(to)
}

/// Reads the frame at the beginning of a part of the segment, and returns where it ends.
///
/// # Errors
/// [`FrameError::Malformed`] where no memory is shared; else as reading a frame.
pub(crate) fn read_from_segment(
    segment: Option<&mut Segment>,
    part: Range<usize>,
    limit: u64,
) -> Result<(Received, usize), FrameError> {
    let missing = || FrameError::Malformed("frames in memory that is not shared".to_owned());
    let mut reader = segment.ok_or_else(missing)?.reader(part.start, part.end);
    let frame = read_frame_checked(Checksum::Left, &mut reader, limit)?;
    Ok((frame, reader.place()))
}

impl Received {
    /// Returns how many bytes of the segment the frames take; none if this frame does not say so.
    ///
    /// # Errors
    /// [`FrameError::Malformed`].
    pub(crate) fn bytes_in_segment(&self) -> Result<Option<usize>, FrameError> {
        if self.header.kind != Kind::InSegment {
            return Ok(None);
        }
        match self.sections()?[..] {
            [Section::I64(&[bytes])] if bytes >= 0 => Ok(Some(bytes as usize)),
            ref sections => Err(unexpected("InSegment", sections)),
        }
    }
}
