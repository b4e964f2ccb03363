//! What a client and the server have agreed on for one connection.

use std::os::fd::OwnedFd;

use recstore::Result;

use crate::handler::no_segment;
use crate::wire::channel::Channel;
use crate::wire::codec::{
    Answer, Checksum, FrameError, Managed, Received, read_from_segment, write_in_segment, write_reply,
    write_reply_checked,
};
use crate::wire::gathered::Gathered;
use crate::wire::segment::Segment;

/// What was agreed on.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// Whether rows go as bfloat16.
    pub(super) is_narrow: bool,
    /// Where large frames lie; none where all go over the socket.
    segment: Option<Segment>,
}

impl Terms {
    /// Shares the memory that a client made, in the place of what was shared before.
    pub(super) fn attach(&mut self, handed: Option<OwnedFd>, limit: u64) -> Result<Answer> {
        let file = handed.ok_or_else(|| no_segment("no descriptor came with it"))?;
        self.segment = None;
        self.segment = Some(Segment::attach(&file, limit).map_err(no_segment)?);
        Ok(Answer::Managed(Managed::Done {}))
    }

    /// Returns the frame that lies where `frame` says, or `frame` itself.
    pub(super) fn frame_of(
        &mut self,
        frame: Received,
        limit: u64,
    ) -> std::result::Result<Received, FrameError> {
        let Some(bytes) = frame.bytes_in_segment()? else { return Ok(frame) };
        read_from_segment(self.segment.as_mut(), 0..bytes, limit).map(|(frame, _)| frame)
    }

    /// Sends what a request gave, and returns how many bytes that were.
    pub(super) fn send(
        &mut self,
        request: u64,
        outcome: &Result<Answer>,
        to: &mut Gathered<&mut Channel>,
    ) -> std::result::Result<u64, FrameError> {
        let bytes = outcome.as_ref().map_or(0, Answer::payload_bytes);
        if let Some(segment) = self.segment.as_mut().filter(|segment| segment.is_for(bytes)) {
            let mut writer = segment.writer();
            // One that does not fit with its headers goes over the socket.
            if write_reply_checked(Checksum::Left, request, outcome, self.is_narrow, &mut writer).is_ok() {
                let written = writer.written();
                write_in_segment(request, written, to)?;
                return Ok(written as u64);
            }
        }
        write_reply(request, outcome, self.is_narrow, to)
    }
}
