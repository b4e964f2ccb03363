//! Metrics over HTTP: `GET /metrics`, as Prometheus asks for them.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::runtime::{self, Runtime};
use tokio::sync::Semaphore;

use super::exposition::exposition;
use crate::handler::Handler;

/// Who asks for metrics keeps a connection or two; more than this many are turned away.
const MOST_CONNECTIONS: usize = 16;

/// How long a peer may take to ask and to take its answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long to wait when no connection can be taken, for the system may be out of descriptors.
const PAUSE: Duration = Duration::from_millis(10);

type Answer = Response<Full<Bytes>>;

/// The port of metrics, on a thread of its own.
#[derive(Debug)]
pub(super) struct MetricsPort {
    address: SocketAddr,
    runtime: Runtime,
}

impl MetricsPort {
    pub(super) fn start(handler: Arc<Handler>, address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("recstore-metrics")
            .enable_all()
            .build()?;
        runtime.spawn(accept(listener, handler));
        Ok(Self { address, runtime })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn stop(self) {
        self.runtime.shutdown_background();
    }
}

async fn accept(listener: TcpListener, handler: Arc<Handler>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let seats = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let Ok(seat) = Arc::clone(&seats).try_acquire_owned() else { continue };
        let handler = Arc::clone(&handler);
        tokio::spawn(async move {
            serve(stream, handler).await;
            drop(seat);
        });
    }
}

/// Answers one peer once, if it does not take too long.
async fn serve(stream: TcpStream, handler: Arc<Handler>) {
    let answering = service_fn(move |request| answer(request, Arc::clone(&handler)));
    let answered = http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), answering);
    // What breaks a connection of a reader of metrics is nothing that the server could mend.
    _ = tokio::time::timeout(PATIENCE, answered).await;
}

async fn answer(request: Request<Incoming>, handler: Arc<Handler>) -> Result<Answer, Infallible> {
    Ok(match (request.uri().path(), request.method()) {
        ("/metrics", &Method::GET) => metrics(handler).await,
        ("/metrics", _) => refusal(StatusCode::METHOD_NOT_ALLOWED, "the metrics are to be asked for by GET"),
        _ => refusal(StatusCode::NOT_FOUND, "the metrics are at /metrics"),
    })
}

/// Tells the metrics. Tables may be held by others for a while: that is waited for on a thread for such.
async fn metrics(handler: Arc<Handler>) -> Answer {
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

fn refusal(status: StatusCode, why: &str) -> Answer {
    let mut answer = Response::new(format!("{why}\n").into());
    *answer.status_mut() = status;
    answer
}
