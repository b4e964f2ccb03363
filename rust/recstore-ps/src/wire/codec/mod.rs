//! What goes over the wire: frames of typed arrays, the requests and replies in them, and errors as values.
//!
//! Integers are little-endian. A frame is a header of [`HEADER_BYTES`] and a body of sections; `frame` has the layout.
//! Nothing is allocated for a length that a peer only claims: memory grows with the bytes that have come.

mod buffers;
mod error;
mod frame;
mod management;
mod reply;
mod request;
mod section;

pub use buffers::Floats;
pub use error::WireError;
pub(crate) use frame::read_frame_beside;
pub use frame::{Frame, FrameError, HEADER_BYTES, Header, Kind, Received, VERSION, decode, read_frame};
pub use management::{LoadShard, Managed, Management, SavePart};
pub use reply::{Answer, Reply, Rows};
pub(crate) use reply::{take_part, with_reply_frame, write_reply};
pub use request::{MergedUpdate, Request, RoundMember, TableIds};
pub use section::Section;

#[cfg(target_endian = "big")]
compile_error!("frames are read where they lie, which needs a little-endian machine");
