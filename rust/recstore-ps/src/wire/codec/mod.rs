//! What goes over the wire: frames of typed arrays, the requests and replies in them, and errors as values.
//!
//! Integers are little-endian. A frame is a header of [`HEADER_BYTES`] and a body of sections; `frame` has the layout.
//! Nothing is allocated for a length that a peer only claims: memory grows with the bytes that have come.

mod buffers;
mod client_id;
mod error;
mod frame;
mod frame_error;
mod in_segment;
mod management;
mod narrow;
mod pieces;
mod reply;
mod request;
mod section;
mod tagged;
mod version;
mod worker_state;

pub use buffers::Floats;
pub use client_id::ClientId;
pub use error::WireError;
pub(crate) use frame::{Checksum, frame_bytes, read_frame_beside};
pub use frame::{Frame, HEADER_BYTES, Header, Kind, Received, decode, read_frame};
pub use frame_error::FrameError;
pub(crate) use in_segment::{read_from_segment, write_in_segment};
pub(crate) use management::MAX_COUNTED_STEPS;
pub use management::{CopiedFile, Follow, LastStep, LoadShard, Managed, Management, SavePart, TakeChanges};
pub(crate) use pieces::{largest_request, whole_of_pieces, write_in_pieces};
pub use reply::{Answer, Reply, Rows};
pub(crate) use reply::{changed_bytes, take_part, with_reply_frame, write_reply, write_reply_checked};
pub use request::{MergedUpdate, Request, RoundMember, TableIds};
pub use section::Section;
pub use version::VERSION;
pub use worker_state::WorkerState;

#[cfg(target_endian = "big")]
compile_error!("frames are read where they lie, which needs a little-endian machine");
