//! Bodies of requests that arrive in time, and bodies of answers that keep their connection.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;

use super::pool::{Seat, UnderWay};
use crate::metrics::Refusal;

/// The body of a request. The connection counts as idle between its parts, so that peers that send nothing further give
/// way to others; once all has come the request is under way.
#[derive(Debug)]
pub(crate) struct Arriving {
    body: Incoming,
    seat: Arc<Seat>,
    deadline: Pin<Box<Sleep>>,
    timeout: Duration,
    arrived: Arc<Mutex<Option<UnderWay>>>,
}

/// Whether a request has arrived.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrived(Arc<Mutex<Option<UnderWay>>>);

impl Arrived {
    /// Takes what keeps the connection while the request is under way.
    pub(crate) fn take(&self) -> Option<UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Arriving {
    pub(crate) fn new(body: Incoming, seat: Arc<Seat>, timeout: Duration) -> (Self, Arrived) {
        let (deadline, arrived) = (Box::pin(sleep_until(Instant::now() + timeout)), Arrived::default());
        (Self { body, seat, deadline, timeout, arrived: Arc::clone(&arrived.0) }, arrived)
    }

    fn end(&self) -> Result<(), Status> {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        if arrived.is_none() {
            let gone = || Status::unavailable("the connection was closed before its request had come");
            *arrived = Some(self.seat.begin().ok_or_else(gone)?);
        }
        Ok(())
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        // The body is asked before the clock: what has come counts, even if it is late.
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(match frame {
                None => self.end().err().map(Err),
                Some(Ok(frame)) => {
                    self.seat.heard();
                    Some(Ok(frame))
                }
                Some(Err(error)) => {
                    Some(Err(Status::invalid_argument(format!("the request is cut off: {error}"))))
                }
            });
        }
        ready!(self.deadline.as_mut().poll(context));
        let message = format!("the request did not arrive within {} s", self.timeout.as_secs_f64());
        self.seat.refused(Refusal::Slow, &message);
        Poll::Ready(Some(Err(Status::deadline_exceeded(message))))
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer, which keeps its connection until the peer has taken it.
#[derive(Debug)]
pub(crate) struct Leaving<B, H = ()> {
    body: B,
    _under_way: Option<UnderWay>,
    _held: H,
}

impl<B, H> Leaving<B, H> {
    /// `held` is given back together with the connection.
    pub(crate) fn new(body: B, under_way: Option<UnderWay>, held: H) -> Self {
        let under_way = under_way.map(UnderWay::answered);
        Self { body, _under_way: under_way, _held: held }
    }
}

impl<B: Body + Unpin, H: Unpin> Body for Leaving<B, H> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
