//! The protocol over gRPC: each call has one message and one answer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Request, Response};
use tonic::{Code, Status};

use super::http::{Failure, whole};
use super::memory_budget::Reservation;
use super::queue::{Answer, Arrival};
use super::{Kind, Shared};
use crate::metrics::Refusal;
use crate::ports::{Arriving, Leaving, Seat, is_authorized};

const SERVICE: &str = "/inference.GRPCInferenceService/";
const METHODS: [&str; 4] = ["ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"];

/// What is before a message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The most bytes of a question for health, which anybody may ask.
const MAX_HEALTH: usize = 4096;

type Reply = Response<Leaving<Message, Option<Reservation>>>;

/// Answers a call.
pub(super) async fn answer(shared: Arc<Shared>, call: Request<Incoming>, seat: Arc<Seat>) -> Reply {
    let path = call.uri().path();
    let method = path.strip_prefix(SERVICE).unwrap_or_default().to_owned();
    if matches!(method.as_str(), "ServerLive" | "ServerReady") {
        return health(&shared, call, &method, seat).await;
    }
    if !METHODS.contains(&method.as_str()) {
        return refused(&Status::unimplemented(format!("there is no method {path}")));
    }
    if !is_authorized(shared.config.token.as_deref(), call.headers()) {
        const WHY: &str = "the token is not the server's";
        seat.refused(Refusal::Token, WHY);
        return refused(&Status::unauthenticated(WHY));
    }
    seat.heard();
    let most = shared.config.max_body;
    let (mut body, arrived) = Arriving::new(call.into_body(), seat, shared.config.transfer_timeout);
    let (body, held, failure) = match whole(&mut body, &shared.grpc_room, |bytes| check(bytes, most)).await {
        Ok((bytes, held)) => match message(bytes) {
            Ok(message) => (message, held, None),
            Err(failure) => (Vec::new(), held, Some(failure)),
        },
        Err(failure) => (Vec::new(), None, Some(failure)),
    };
    let (path, headers) = (String::new(), Vec::new());
    let asked = Arrival { port: Kind::Grpc.name(), method, path, headers, body, failure };
    let answered = shared.ask(asked).answered().await;
    let status = |answer: Answer| match answer.status {
        0 => Ok(Message::new(&answer.body)),
        code => Err(Status::new(Code::from(i32::from(code)), String::from_utf8_lossy(&answer.body))),
    };
    match answered.map_or_else(|| Err(Status::unavailable("the server ends")), status) {
        Ok(message) => accepted(message).map(|body| Leaving::new(body, arrived.take(), held)),
        Err(status) => refused(&status),
    }
}

/// Answers a question for health, which needs no token and takes no room.
async fn health(shared: &Shared, call: Request<Incoming>, method: &str, seat: Arc<Seat>) -> Reply {
    let (mut body, arrived) = Arriving::new(call.into_body(), seat, shared.config.handshake_timeout);
    // Room of its own: health is answered also while requests take all theirs.
    let room = Arc::new(super::MemoryBudget::new(2 * MAX_HEALTH));
    let asked = whole(&mut body, &room, |bytes| check(bytes, MAX_HEALTH)).await;
    if let Err((_, why)) = asked.and_then(|(bytes, _)| message(bytes)) {
        return refused(&Status::invalid_argument(why));
    }
    let is_so = method == "ServerLive" || shared.is_ready();
    // The first field, a truth value; false is left out.
    let answer = Message::new(if is_so { &[8, 1] } else { &[] });
    accepted(answer).map(|body| Leaving::new(body, arrived.take(), None))
}

/// Looks at what has come of a message.
fn check(bytes: &[u8], most: usize) -> Result<(), Failure> {
    let Some(prefix) = bytes.first_chunk::<PREFIX>() else { return Ok(()) };
    let size = size_in(*prefix);
    if prefix[0] != 0 {
        return Err(("encoding", "messages are taken as they are, not compressed".to_owned()));
    }
    if size > most {
        return Err(("too_large", format!("the message has {size} bytes, at most {most} are taken")));
    }
    match bytes.len() > PREFIX + size {
        true => Err(("invalid", "the call has more than one message".to_owned())),
        false => Ok(()),
    }
}

fn size_in([_, size @ ..]: [u8; PREFIX]) -> usize {
    u32::from_be_bytes(size) as usize
}

/// Returns the message that has come.
fn message(mut bytes: Vec<u8>) -> Result<Vec<u8>, Failure> {
    let prefix = *bytes.first_chunk().ok_or_else(|| ("invalid", "the call has no message".to_owned()))?;
    if bytes.len() != PREFIX + size_in(prefix) {
        return Err(("invalid", "the message is cut off".to_owned()));
    }
    bytes.drain(..PREFIX);
    Ok(bytes)
}

fn accepted(message: Message) -> Response<Message> {
    let mut answer = Response::new(message);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    answer
}

fn refused(status: &Status) -> Reply {
    status.clone().into_http::<Message>().map(|body| Leaving::new(body, None, None))
}

/// A message and the word that all is well.
#[derive(Debug, Default)]
pub(super) struct Message {
    bytes: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl Message {
    fn new(message: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(PREFIX + message.len());
        bytes.push(0);
        // An answer of 4 GiB does not come to be: its tensors are bounded by the model.
        bytes.extend(u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(message);
        let trailers = HeaderMap::from_iter([(
            hyper::header::HeaderName::from_static("grpc-status"),
            HeaderValue::from_static("0"),
        )]);
        Self { bytes: Some(bytes.into()), trailers: Some(trailers) }
    }
}

impl Body for Message {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let bytes = self.bytes.take().map(Frame::data);
        Poll::Ready(bytes.or_else(|| self.trailers.take().map(Frame::trailers)).map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none() && self.trailers.is_none()
    }
}
