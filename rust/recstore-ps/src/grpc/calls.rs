//! What a call goes through before its method, and an answer after it.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::server::NamedService;
use tonic::service::Routes;

use super::proto::rec_store_server::RecStoreServer;
use super::service::{Service, TokenCheck};
use crate::ports::{Arriving, Leaving, Seat};

/// What answers calls.
#[derive(Debug)]
pub(super) struct Calls {
    pub(super) routes: Routes,
    pub(super) token: TokenCheck,
    pub(super) timeout: Duration,
}

impl Calls {
    /// Answers a call: the token is compared before any of the message is taken.
    pub(super) async fn answer(self: Arc<Self>, call: Request<Incoming>, seat: Arc<Seat>) -> Response<Body> {
        if let Err(status) = self.token.check(call.headers(), &seat) {
            return status.into_http();
        }
        seat.heard();
        let routes = self.routes.clone();
        // Calls of health and reflection may last for ever, and give way to others.
        if !is_of_recstore(call.uri().path()) {
            return routed(routes, call).await;
        }
        let (head, body) = call.into_parts();
        let (body, arrived) = Arriving::new(body, seat, self.timeout);
        let answer = routed(routes, Request::from_parts(head, body)).await;
        answer.map(|body| Body::new(Leaving::new(body, arrived.take(), ())))
    }
}

/// Answers a call of health, which anybody may ask for.
pub(super) async fn answer_health(
    routes: Routes,
    call: Request<Incoming>,
    seat: Arc<Seat>,
) -> Response<Body> {
    seat.heard();
    routed(routes, call).await
}

async fn routed<B>(mut routes: Routes, call: Request<B>) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<tonic::codegen::StdError>> + Send + 'static,
{
    let Ok(answer) = routes.call(call).await;
    answer
}

fn is_of_recstore(path: &str) -> bool {
    path.strip_prefix('/').and_then(|path| path.strip_prefix(RecStoreServer::<Service>::NAME)).is_some()
}
