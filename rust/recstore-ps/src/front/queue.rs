//! Requests on their way to the program that answers them, and answers on their way back.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A request that has come whole, or cannot.
#[derive(Debug)]
pub struct Arrival {
    /// The name of the port.
    pub port: &'static str,
    /// The method of HTTP, or that of the service of gRPC.
    pub method: String,
    /// The path of HTTP.
    pub path: String,
    /// Headers of HTTP that mean something, by their names in lower case.
    pub headers: Vec<(&'static str, Vec<u8>)>,
    /// The body, or the message of gRPC.
    pub body: Vec<u8>,
    /// Why the body did not come: the kind of refusal, and the reason.
    pub failure: Option<(&'static str, String)>,
}

/// What an answer is.
#[derive(Debug)]
pub struct Answer {
    /// The status of HTTP, or the code of gRPC.
    pub status: u16,
    /// Headers of HTTP.
    pub headers: Vec<(String, String)>,
    /// The body; the message of gRPC, or the text of its error.
    pub body: Vec<u8>,
}

/// What happened at a port.
#[derive(Debug)]
pub enum Event {
    /// A request has come, and has a number.
    Arrival(u64, Arrival),
    /// The client of a request has gone.
    Gone(u64),
}

/// Requests and answers.
#[derive(Debug)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    /// One byte lies here while there are events.
    bell: (UnixStream, UnixStream),
}

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    events: Vec<Event>,
    pending: HashMap<u64, oneshot::Sender<Answer>>,
}

/// A request that waits for its answer. If it is dropped before, its client has gone.
#[derive(Debug)]
pub(super) struct Pending {
    queue: Arc<Queue>,
    number: u64,
    answer: oneshot::Receiver<Answer>,
}

impl Queue {
    pub(super) fn new() -> io::Result<Self> {
        let bell = UnixStream::pair()?;
        bell.0.set_nonblocking(true)?;
        bell.1.set_nonblocking(true)?;
        Ok(Self { inner: Mutex::default(), bell })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, inner: &mut Inner, event: Event) {
        if inner.events.is_empty() {
            // It has room for the one byte, which `take` reads.
            _ = (&self.bell.0).write(&[1]);
        }
        inner.events.push(event);
    }

    pub(super) fn ask(self: &Arc<Self>, asked: Arrival) -> Pending {
        let (sender, answer) = oneshot::channel();
        let mut inner = self.lock();
        inner.last += 1;
        let number = inner.last;
        // Before the event: whoever takes it may answer at once.
        inner.pending.insert(number, sender);
        self.push(&mut inner, Event::Arrival(number, asked));
        Pending { queue: Arc::clone(self), number, answer }
    }

    pub(super) fn take(&self) -> Vec<Event> {
        let mut inner = self.lock();
        // Under the lock, as it is rung: there is a byte exactly while there are events.
        _ = (&self.bell.1).read(&mut [0; 8]);
        std::mem::take(&mut inner.events)
    }

    pub(super) fn answer(&self, number: u64, answer: Answer) {
        let pending = self.lock().pending.remove(&number);
        // A client that has gone takes none.
        _ = pending.map(|pending| pending.send(answer));
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.1.as_fd()
    }
}

impl Pending {
    /// Waits for the answer; none if there will be none.
    pub(super) async fn answered(mut self) -> Option<Answer> {
        (&mut self.answer).await.ok()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut inner = self.queue.lock();
        // Still there: the peer has gone before its answer came.
        if inner.pending.remove(&self.number).is_some() {
            self.queue.push(&mut inner, Event::Gone(self.number));
        }
    }
}
