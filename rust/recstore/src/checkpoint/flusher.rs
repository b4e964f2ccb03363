//! Brings what is written to the disk while more is being written.

use std::fs::File;
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

/// The bytes worth a wait for the disk.
const FLUSH_BYTES: u64 = 64 << 20;

/// Flushes a file now and then, in a thread of its own. Without it the disk has nothing to do until all is written, and
/// then has to write all of it.
#[derive(Default)]
pub(super) struct Flusher {
    worker: Option<(SyncSender<()>, JoinHandle<io::Result<()>>)>,
    unflushed: u64,
}

impl Flusher {
    /// Must be told of the bytes that were written to `file`, always the same one.
    pub(super) fn written(&mut self, file: &File, bytes: u64) -> io::Result<()> {
        self.unflushed += bytes;
        if self.unflushed < FLUSH_BYTES {
            return Ok(());
        }
        self.unflushed = 0;
        if self.worker.is_none() {
            self.worker = Some(start(file.try_clone()?)?);
        }
        if let Some((wake, _)) = &self.worker {
            // If it still has to do, or met an error, that is well too.
            _ = wake.try_send(());
        }
        Ok(())
    }

    /// Ends the thread.
    ///
    /// # Errors
    /// That of a flush: a file's own later `sync_all` would not tell it again.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let Some((wake, worker)) = self.worker.take() else { return Ok(()) };
        drop(wake);
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the thread that flushes the file panicked")))
    }
}

impl Drop for Flusher {
    /// A file that was given up does not keep its room on the disk.
    fn drop(&mut self) {
        _ = self.end();
    }
}

fn start(file: File) -> io::Result<(SyncSender<()>, JoinHandle<io::Result<()>>)> {
    // One wake-up waits at most: a disk that is behind flushes all that came meanwhile in one go.
    let (wake, woken) = sync_channel(1);
    let flush = move || woken.into_iter().try_for_each(|()| file.sync_data());
    Ok((wake, thread::Builder::new().name("recstore-flush".into()).spawn(flush)?))
}
