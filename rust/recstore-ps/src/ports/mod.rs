//! Ports: how many connections there may be, who gives way, and how long a peer may be silent.
//!
//! The bulk port has a thread a connection and sees to its deadlines itself. All other ports are a [`Listening`], whose
//! connections are tasks that speak HTTP.

mod arrival;
mod connection_state;
mod descriptors;
mod http;
mod listening;
mod pool;
mod watched;

pub(crate) use arrival::{Arrived, Arriving, Leaving};
pub(crate) use connection_state::Limits;
pub use descriptors::raise_descriptor_limit;
pub(crate) use descriptors::{pool, tell_of_limits};
pub(crate) use http::{is_authorized, serve_http1, serve_http2};
pub(crate) use listening::{BACKLOG, Encryption, Listening, Rules};
pub(crate) use pool::{Admission, Port, SILENT, Seat};
