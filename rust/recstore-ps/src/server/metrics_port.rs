//! Metrics over HTTP: `GET /metrics`, as Prometheus asks for them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request, Response, StatusCode};

use super::exposition::exposition;
use crate::config::ServerConfig;
use crate::handler::Handler;
use crate::ports::{Leaving, Listening, Rules, Seat, serve_http1};

type Answer = Response<Leaving<Full<Bytes>>>;

/// Tells the metrics of `handler` at `address`, on a thread of its own.
pub(super) fn start(
    handler: &Arc<Handler>,
    config: &ServerConfig,
    address: SocketAddr,
) -> io::Result<Listening> {
    let port = config.port_of(&handler.metrics().exposition);
    let (rules, handler) = (Rules { port, encryption: None, farewell: b"" }, Arc::clone(handler));
    Listening::start(address, 1, rules, move |stream, seat, stop| {
        let handler = Arc::clone(&handler);
        // One request a connection: readers of metrics come seldom.
        serve_http1(stream, seat, stop, false, move |request, seat| {
            answer(request, Arc::clone(&handler), seat)
        })
    })
}

async fn answer(request: Request<Incoming>, handler: Arc<Handler>, seat: Arc<Seat>) -> Answer {
    let under_way = seat.begin();
    let answer = match (request.uri().path(), request.method()) {
        ("/metrics", &Method::GET) => metrics(handler).await,
        ("/metrics", _) => refusal(StatusCode::METHOD_NOT_ALLOWED, "the metrics are to be asked for by GET"),
        _ => refusal(StatusCode::NOT_FOUND, "the metrics are at /metrics"),
    };
    answer.map(|text| Leaving::new(text, under_way, ()))
}

/// Tells the metrics. Tables may be held by others for a while: that is waited for on a thread for such.
async fn metrics(handler: Arc<Handler>) -> Response<Full<Bytes>> {
    match tokio::task::spawn_blocking(move || exposition(&handler)).await {
        Ok(Ok(text)) => {
            let mut answer = Response::new(text.into());
            let form = hyper::header::HeaderValue::from_static(prometheus::TEXT_FORMAT);
            answer.headers_mut().insert(CONTENT_TYPE, form);
            answer
        }
        Ok(Err(error)) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Err(_) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "the server met an internal panic"),
    }
}

fn refusal(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(format!("{why}\n").into());
    *answer.status_mut() = status;
    answer
}
