//! The protocol over HTTP: health is answered here, and all else by the program behind the port.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue, WWW_AUTHENTICATE};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use tonic::{Code, Status};

use super::memory_budget::{MemoryBudget, Reservation};
use super::queue::{Answer, Arrival};
use super::{Kind, Shared};
use crate::metrics::Refusal;
use crate::ports::{Arrived, Arriving, Leaving, Seat, is_authorized};

/// What a peer reads for which there is no room.
pub(super) const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n\
    Retry-After: 1\r\nConnection: close\r\nContent-Length: 60\r\n\r\n\
    {\"error\": \"there are too many connections: try again later\"}";

/// How long a body is read on that is not taken.
const LINGERING: Duration = Duration::from_secs(2);

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const WRONG_TOKEN: &str = "the token is not the server's";

/// The headers that the program is told.
const HEADERS: [&str; 2] = ["content-encoding", "inference-header-content-length"];

type Reply = Response<Leaving<Full<Bytes>, Option<Reservation>>>;

/// Answers a request at a port of HTTP.
pub(super) async fn answer(
    shared: Arc<Shared>,
    kind: Kind,
    request: Request<Incoming>,
    seat: Arc<Seat>,
) -> Reply {
    let path = request.uri().path();
    let is_health = kind != Kind::Metrics && is_below_health(path);
    if let Some(answer) = is_health.then(|| health(&shared, request.method(), path)).flatten() {
        seat.heard();
        return answer.map(|body| Leaving::new(body, None, None));
    }
    let needs_token = kind == Kind::Http && !is_health;
    if needs_token && !is_authorized(shared.config.token.as_deref(), request.headers()) {
        seat.refused(Refusal::Token, WRONG_TOKEN);
        discard(request.headers().contains_key(EXPECT), request.into_body());
        return unauthorized().map(|body| Leaving::new(body, None, None));
    }
    seat.heard();
    // A request without a token, or for which it counts nothing, takes no memory: what it says is left unread.
    let (head, body) = request.into_parts();
    let (taken, arrived) = match needs_token {
        true => {
            let (mut body, arrived) = Arriving::new(body, Arc::clone(&seat), shared.config.transfer_timeout);
            let taken = taken(&mut body, &head.headers, shared.config.max_body, &shared.http_room).await;
            if taken.is_err() {
                discard(head.headers.contains_key(EXPECT), body);
            }
            (taken, arrived)
        }
        false => (Ok((Vec::new(), None)), Arrived::default()),
    };
    let under_way = arrived.take().or_else(|| seat.begin());
    let (body, held, failure) = match taken {
        Ok((body, held)) => (body, held, None),
        Err(failure) => (Vec::new(), None, Some(failure)),
    };
    let told = |name: &'static str| Some((name, head.headers.get(name)?.as_bytes().to_vec()));
    let asked = Arrival {
        port: kind.name(),
        method: head.method.as_str().to_owned(),
        path: head.uri.path().to_owned(),
        headers: HEADERS.into_iter().filter_map(told).collect(),
        body,
        failure,
    };
    let answered = shared.ask(asked).answered().await;
    // The request keeps its memory and its connection until the peer has taken the answer.
    response(answered).map(|body| Leaving::new(body, under_way, held))
}

fn is_below_health(path: &str) -> bool {
    path.trim_matches('/').split('/').take(2).eq(["v2", "health"])
}

/// Answers a question for health, if it is one.
fn health(shared: &Shared, method: &Method, path: &str) -> Option<Response<Full<Bytes>>> {
    if method != Method::GET && method != Method::HEAD {
        return None;
    }
    let (status, text) = match (path.trim_matches('/'), shared.is_ready()) {
        ("v2/health/live", _) => (StatusCode::OK, "{\"live\": true}"),
        ("v2/health/ready", true) => (StatusCode::OK, "{\"ready\": true}"),
        ("v2/health/ready", false) => (StatusCode::SERVICE_UNAVAILABLE, "{\"ready\": false}"),
        _ => return None,
    };
    Some(json(status, text.to_owned()))
}

fn json(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut answer = Response::new(text.into());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, JSON);
    answer
}

fn unauthorized() -> Response<Full<Bytes>> {
    let mut answer = json(StatusCode::UNAUTHORIZED, format!("{{\"error\": \"{WRONG_TOKEN}\"}}"));
    answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    answer
}

/// Reads on for a while beside the answer, which a peer may look for only after it has sent all. One that waits for leave
/// to send has sent nothing.
fn discard<B: Body<Data = Bytes, Error: Send> + Send + Unpin + 'static>(waits_for_leave: bool, mut body: B) {
    if !waits_for_leave {
        let rest = async move { while let Some(Ok(_)) = body.frame().await {} };
        tokio::spawn(tokio::time::timeout(LINGERING, rest));
    }
}

type ReceivedBody = (Vec<u8>, Option<Reservation>);
pub(super) type Failure = (&'static str, String);

/// Takes a body of HTTP as it comes.
async fn taken(
    body: &mut Arriving,
    headers: &HeaderMap,
    most: usize,
    room: &Arc<MemoryBudget>,
) -> Result<ReceivedBody, Failure> {
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    // Refused before a byte is read; a body that announces nothing is counted as it comes.
    if let Some(size) = announced.filter(|size: &u64| *size > most as u64) {
        return Err(("too_large", format!("the body has {size} bytes, at most {most} are taken")));
    }
    let too_large =
        || ("too_large", format!("the body has more than {most} bytes, at most {most} are taken"));
    let enough = |bytes: &[u8]| if bytes.len() > most { Err(too_large()) } else { Ok(()) };
    whole(body, room, enough).await
}

/// Takes a body as it comes, and room for it as it comes, as long as `check` finds nothing against it.
pub(super) async fn whole(
    body: &mut Arriving,
    room: &Arc<MemoryBudget>,
    check: impl Fn(&[u8]) -> Result<(), Failure>,
) -> Result<ReceivedBody, Failure> {
    let (mut bytes, mut held) = (Vec::new(), Reservation::new(room));
    while let Some(frame) = body.frame().await {
        let Ok(part) = frame.map_err(failure)?.into_data() else { continue };
        // Part by part, as they come: a length that is only announced takes no memory from others.
        if !held.take(part.len()) {
            let message = "the requests under way take all memory for requests: try again later";
            return Err(("busy", message.to_owned()));
        }
        bytes.extend_from_slice(&part);
        check(&bytes)?;
    }
    Ok((bytes, Some(held)))
}

#[expect(clippy::needless_pass_by_value, reason = "it is mapped over errors")]
fn failure(status: Status) -> Failure {
    let kind = if status.code() == Code::DeadlineExceeded { "slow" } else { "invalid" };
    (kind, status.message().to_owned())
}

/// Returns the answer of the program; without one it has ended.
fn response(answer: Option<Answer>) -> Response<Full<Bytes>> {
    let Some(Answer { status, headers, body }) = answer else {
        return json(StatusCode::SERVICE_UNAVAILABLE, "{\"error\": \"the server ends\"}".to_owned());
    };
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    for (name, value) in headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            answer.headers_mut().insert(name, value);
        }
    }
    answer
}
