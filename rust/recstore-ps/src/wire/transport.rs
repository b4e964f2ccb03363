//! Streams with deadlines: no peer holds a thread longer than it may, whatever it sends, or does not.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::time::{Duration, Instant};

/// A stream whose reads and writes can be given a limit of time.
pub(crate) trait Transport: Read + Write + Send {
    /// Limits the time of each read.
    ///
    /// # Errors
    /// As the system's call.
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()>;

    /// Limits the time of each write.
    ///
    /// # Errors
    /// As the system's call.
    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()>;
}

/// A stream that fails once its deadline is over, even for a peer that sends a byte now and then.
#[derive(Debug)]
pub(crate) struct Timed<S> {
    stream: S,
    deadline: Instant,
    /// What is left from the first byte on, while that is waited for.
    after_first: Option<Duration>,
}

impl<S: Transport> Timed<S> {
    pub(crate) fn new(stream: S, deadline: Instant) -> Self {
        Self { stream, deadline, after_first: None }
    }

    /// Reads and writes until `deadline`.
    pub(crate) fn until(&mut self, deadline: Instant) -> &mut Self {
        (self.deadline, self.after_first) = (deadline, None);
        self
    }

    /// Waits up to `idle` for the first byte, and then up to `rest` for all others.
    pub(crate) fn waiting(&mut self, idle: Duration, rest: Duration) -> &mut Self {
        (self.deadline, self.after_first) = (Instant::now() + idle, Some(rest));
        self
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    pub(crate) fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::Error::new(ErrorKind::TimedOut, "no answer in time")),
            false => Ok(left),
        }
    }
}

/// A read or write that the system gave up says so in words.
fn named(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            io::Error::new(ErrorKind::TimedOut, "no answer in time")
        }
        _ => error,
    }
}

impl<S: Transport> Read for Timed<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        // Before each read, to what is left: a peer that sends byte by byte does not get its time anew with
        // each.
        self.stream.set_read_timeout(self.left()?)?;
        let count = self.stream.read(bytes).map_err(named)?;
        if let Some(rest) = self.after_first.take_if(|_| count > 0) {
            self.deadline = Instant::now() + rest;
        }
        Ok(count)
    }
}

impl<S: Transport> Write for Timed<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes).map_err(named)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write_vectored(pieces).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
