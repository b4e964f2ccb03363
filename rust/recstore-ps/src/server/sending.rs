//! Sending a shard's changes to a server that follows.

use std::fs::File;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use recstore::Error;

use super::bulk::Shared;
use crate::durable::log::stream;
use crate::handler::Stream;
use crate::wire::channel::Channel;
use crate::wire::codec::{Answer, ClientId, CopiedFile, Follow, FrameError, Managed, write_reply};
use crate::wire::gathered::Gathered;

/// How often a follower is told how far the server is.
const BEAT: Duration = Duration::from_millis(250);

impl Shared {
    /// Sends what a follower lacks, and changes as they are made, until the connection or the server ends.
    pub(super) fn send_changes(
        &self,
        stream: &mut Channel,
        follower: ClientId,
        request: u64,
        follow: &Follow,
    ) -> Result<(), FrameError> {
        let opened = match self.handler.leads() {
            true => self.handler.stream_to(follower, follow),
            false => {
                Err(Error::Unsupported { operation: "follow", message: self.handler.standing().to_string() })
            }
        };
        let started = opened.and_then(|opened| Ok((listed(&opened)?, opened)));
        let (files, opened) = match started {
            Ok((files, opened)) => (files, opened),
            Err(error) => return self.reply(stream, request, &Err(error)),
        };
        let answer = Answer::Managed(Managed::Following { runs: opened.runs.clone(), files });
        self.reply(stream, request, &Ok(answer))?;
        tracing::info!(shard = self.config.shard.number, copies = opened.files.is_some(), "followed");
        self.send_all(stream, opened, follow.synchronous)?;
        // Who finds the connection ended begins anew.
        Err(io::Error::from(io::ErrorKind::ConnectionAborted).into())
    }

    pub(super) fn reply(
        &self,
        stream: &mut Channel,
        request: u64,
        outcome: &Result<Answer, Error>,
    ) -> Result<(), FrameError> {
        let mut stream = Gathered::new(stream.until(Instant::now() + self.config.transfer_timeout));
        write_reply(request, outcome, false, &mut stream)?;
        Ok(stream.flush()?)
    }

    fn send_all(
        &self,
        stream: &mut Channel,
        opened: Stream<'_>,
        synchronous: bool,
    ) -> Result<(), FrameError> {
        let Stream { place, files, mut reader, .. } = opened;
        for (_, mut file) in files.into_iter().flatten() {
            self.send_file(stream, &mut file)?;
        }
        let Ok((_, journal)) = self.handler.kept_with_log("follow") else { return Ok(()) };
        // A synchronous follower syncs its disk while this server does.
        let feed = if synchronous { &journal.made } else { &journal.acknowledged };
        let mut last = 0;
        while !self.is_stopping() {
            let until = feed.wait_beyond(last, BEAT);
            // A load makes changes behind it come to other tables.
            if place.is_over() {
                return Ok(());
            }
            let mut to = Gathered::new(stream.until(Instant::now() + self.config.transfer_timeout));
            while let Some(sent) = reader.next(until).map_err(io::Error::other)? {
                stream::write_change(&mut to, &sent)?;
                place.sent(sent.number);
            }
            stream::write_tail(&mut to, until)?;
            to.flush()?;
            last = until;
        }
        Ok(())
    }

    fn send_file(&self, stream: &mut Channel, file: &mut File) -> io::Result<()> {
        let mut block = vec![0; 1 << 20];
        loop {
            let count = file.read(&mut block)?;
            if count == 0 {
                return Ok(());
            }
            stream.until(Instant::now() + self.config.transfer_timeout).write_all(&block[..count])?;
        }
    }
}

/// Returns the names and lengths of the files that are sent.
fn listed(opened: &Stream<'_>) -> Result<Option<Vec<CopiedFile>>, Error> {
    let listed = |(name, file): &(String, File)| {
        let unreadable =
            |error: io::Error| Error::Checkpoint { path: name.clone(), message: error.to_string() };
        Ok(CopiedFile { name: name.clone(), bytes: file.metadata().map_err(unreadable)?.len() })
    };
    opened.files.as_ref().map(|files| files.iter().map(listed).collect()).transpose()
}
