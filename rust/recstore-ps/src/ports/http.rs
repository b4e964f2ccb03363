//! HTTP on a connection, in both versions.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use subtle::ConstantTimeEq;

use super::listening::{Stop, stopped};
use super::pool::Seat;
use super::watched::Stream;
use crate::metrics::Refusal;

/// How often a silent peer is asked whether it is there, and how long it may take to say so.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// The most bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// Requests that one connection may have under way.
const MAX_STREAMS: u32 = 64;

/// Answers requests of HTTP/1.1 until the peer ends or `stop` says so.
pub(crate) async fn serve_http1<B, F>(
    stream: Stream,
    seat: Arc<Seat>,
    mut stop: Stop,
    keeps_alive: bool,
    answer: impl Fn(Request<Incoming>, Arc<Seat>) -> F,
) where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
    F: Future<Output = Response<B>>,
{
    let asked = Arc::clone(&seat);
    let service = service_fn(move |request| {
        let answered = answer(request, Arc::clone(&asked));
        async { Ok::<_, Infallible>(answered.await) }
    });
    // Heads are bounded, so that half ones fill no memory.
    let served = http1::Builder::new()
        .keep_alive(keeps_alive)
        .half_close(false)
        .title_case_headers(true)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stopped(&mut stop) => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    tell_of_bad_form(&seat, ended);
}

/// Answers requests of HTTP/2 until the peer ends or `stop` says so.
pub(crate) async fn serve_http2<B, F>(
    stream: Stream,
    seat: Arc<Seat>,
    mut stop: Stop,
    answer: impl Fn(Request<Incoming>, Arc<Seat>) -> F,
) where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
{
    let asked = Arc::clone(&seat);
    let service = service_fn(move |request| {
        let answered = answer(request, Arc::clone(&asked));
        async { Ok::<_, Infallible>(answered.await) }
    });
    let served = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .max_concurrent_streams(MAX_STREAMS)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stopped(&mut stop) => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    tell_of_bad_form(&seat, ended);
}

/// Whether a request has the token that is needed, if one is.
pub(crate) fn is_authorized(token: Option<&str>, headers: &HeaderMap) -> bool {
    let Some(token) = token else { return true };
    let given = headers.get(AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
    // In constant time: how long a refusal takes must not show how much of a token is right.
    bool::from(token.as_bytes().ct_eq(given))
}

/// Counts a peer that does not speak the protocol, unless it only went away.
fn tell_of_bad_form(seat: &Seat, ended: hyper::Result<()>) {
    let Err(error) = ended else { return };
    let went_away = error.is_incomplete_message()
        || error.is_canceled()
        || error.is_body_write_aborted()
        || source_of::<io::Error>(&error).is_some();
    let reason = if seat.is_identified() { Refusal::Form } else { Refusal::Handshake };
    if error.is_parse() || !went_away {
        seat.refused(reason, &format!("it does not speak the protocol: {}", in_full(&error)));
    }
}

fn source_of<'a, E: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a E> {
    let mut next = error.source();
    while let Some(source) = next {
        if let Some(found) = source.downcast_ref() {
            return Some(found);
        }
        next = source.source();
    }
    None
}

fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}
