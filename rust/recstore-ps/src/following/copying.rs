//! Copying the checkpoint of another server.

use std::io::{self, Read, Write};
use std::time::Instant;

use recstore::{note_unfinished, remove_checkpoint};

use super::{Shared, TRANSFER};
use crate::durable::MANIFEST;
use crate::wire::channel::Channel;
use crate::wire::codec::CopiedFile;

/// How many bytes are read and written at a time.
const BLOCK_BYTES: usize = 1 << 20;

impl Shared {
    /// Takes the files of the other server's checkpoint, and then its tables in the place of those here.
    pub(super) fn copy(&self, stream: &mut Channel, files: &[CopiedFile]) -> Result<(), String> {
        let (state, _) = self.handler.kept_with_log("follow").map_err(|error| error.to_string())?;
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        tracing::info!(shard = self.shard.number, files = files.len(), bytes, "copying tables");
        let (manifest, rows) = checked(files)?;
        let said = |error: recstore::Error| error.to_string();
        let in_copy = |error: io::Error| error.to_string();
        let copy = state.copy().map_err(said)?;
        // What an attempt that was cut off has copied.
        remove_checkpoint(copy.path()).map_err(said)?;
        let names = rows.iter().map(|file| file.name.clone()).collect();
        let note = note_unfinished(&copy, names).map_err(said)?;
        for CopiedFile { name, bytes } in rows {
            let mut file = copy.create_new(name).map_err(in_copy)?;
            self.receive(stream, &mut file, *bytes)?;
            file.sync_all().map_err(in_copy)?;
        }
        let mut text = Vec::new();
        self.receive(stream, &mut text, manifest.bytes)?;
        // The manifest last: until it is there, the note says which files to remove.
        copy.replace(MANIFEST, &text).map_err(in_copy)?;
        copy.remove_file(note).map_err(in_copy)?;
        copy.sync().map_err(in_copy)?;
        self.handler.take_copy().map_err(|error| error.to_string())
    }

    fn receive(&self, stream: &mut Channel, to: &mut impl Write, bytes: u64) -> Result<(), String> {
        let said = |error: io::Error| error.to_string();
        let mut block = vec![0; BLOCK_BYTES];
        let mut left = bytes;
        while left > 0 {
            if self.is_over() {
                return Err("it is over".to_owned());
            }
            let count = block.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            stream.until(Instant::now() + TRANSFER).read_exact(&mut block[..count]).map_err(said)?;
            to.write_all(&block[..count]).map_err(said)?;
            left -= count as u64;
        }
        Ok(())
    }
}

/// Returns the manifest, which comes last, and the files of rows.
fn checked(files: &[CopiedFile]) -> Result<(&CopiedFile, &[CopiedFile]), String> {
    let is_none = |file: &&CopiedFile| file.name.contains(['/', '\\']) || file.name.starts_with('.');
    if let Some(CopiedFile { name, .. }) = files.iter().find(is_none) {
        return Err(format!("\"{name}\" is not the name of a file of a checkpoint"));
    }
    let last = files.split_last().filter(|(last, _)| last.name == MANIFEST);
    last.ok_or_else(|| "the files of a checkpoint come without its manifest".to_owned())
}
