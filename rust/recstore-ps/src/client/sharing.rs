//! The client's side of memory that it shares with a server on the same machine.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Once;

use crate::wire::codec::{Checksum, Frame, FrameError, Received, read_from_segment};
use crate::wire::segment::{MIN_SHARED_BYTES, Segment};

static TOLD: Once = Once::new();

/// What a connection shares.
#[derive(Debug)]
pub(super) struct Sharing {
    segment: Option<Segment>,
    /// The largest frames that went, or came, over the socket for want of room.
    wanted: usize,
    /// Whether memory can be shared, as far as is known.
    is_possible: bool,
}

impl Sharing {
    pub(super) fn new(is_possible: bool) -> Self {
        Self { segment: None, wanted: 0, is_possible }
    }

    /// Shares nothing from here on, and says why once in a process.
    pub(super) fn end(&mut self, why: &str) {
        (self.segment, self.is_possible) = (None, false);
        TOLD.call_once(|| {
            eprintln!("recstore: no memory is shared with the server, all goes over its socket: {why}");
        });
    }

    pub(super) fn is_possible(&self) -> bool {
        self.is_possible
    }

    /// Makes a larger segment if a request of so many bytes, or what came before, wants one. It counts once the server
    /// has taken its descriptor.
    pub(super) fn grown(&self, bytes: usize) -> io::Result<Option<(Segment, OwnedFd)>> {
        let wanted = bytes.max(self.wanted);
        let has = self.segment.as_ref().map_or(0, Segment::len);
        if wanted < MIN_SHARED_BYTES || wanted <= has {
            return Ok(None);
        }
        Segment::create(wanted as u64).map(Some)
    }

    pub(super) fn take(&mut self, segment: Segment) {
        self.segment = Some(segment);
    }

    /// Notes an answer of so many bytes that came over the socket.
    pub(super) fn came_over_the_socket(&mut self, bytes: usize) {
        self.wanted = self.wanted.max(bytes);
    }

    /// Writes a frame to the segment, and returns how many bytes it takes there; none for one that is to go over the
    /// socket.
    pub(super) fn write(&mut self, frame: &Frame<'_>) -> io::Result<Option<usize>> {
        let Some(segment) = self.segment.as_mut().filter(|segment| segment.is_for(frame.bytes())) else {
            return Ok(None);
        };
        let mut writer = segment.writer();
        frame.write_checked(Checksum::Left, &mut writer)?;
        Ok(Some(writer.written()))
    }

    /// Reads the frame at `place` of the first `end` bytes, and returns where it ends.
    pub(super) fn read(
        &mut self,
        place: usize,
        end: usize,
        limit: u64,
    ) -> Result<(Received, usize), FrameError> {
        read_from_segment(self.segment.as_mut(), place..end, limit)
    }
}
