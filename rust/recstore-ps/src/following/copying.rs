//! Copying the checkpoint of another server.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::time::Instant;

use recstore::remove_checkpoint;

use super::{Shared, TRANSFER};
use crate::wire::channel::Channel;
use crate::wire::codec::CopiedFile;

/// How many bytes are read and written at a time.
const BLOCK_BYTES: usize = 1 << 20;

impl Shared {
    /// Takes the files of the other server's checkpoint, and then its tables in the place of those here.
    pub(super) fn copy(&self, stream: &mut Channel, files: &[CopiedFile]) -> Result<(), String> {
        let (state, _) = self.handler.kept_with_log("follow").map_err(|error| error.to_string())?;
        let copy = state.copy();
        let in_copy = |error: io::Error| format!("{}: {error}", copy.display());
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        tracing::info!(shard = self.shard.number, files = files.len(), bytes, "copying tables");
        // What an earlier attempt left.
        remove_checkpoint(&copy).map_err(|error| error.to_string())?;
        fs::create_dir_all(&copy).map_err(in_copy)?;
        for CopiedFile { name, bytes } in files {
            let is_name = !name.contains(['/', '\\']) && !name.starts_with('.');
            if !is_name {
                return Err(format!("\"{name}\" is not the name of a file of a checkpoint"));
            }
            self.receive(stream, &mut File::create(copy.join(name)).map_err(in_copy)?, *bytes)?;
        }
        File::open(&copy).and_then(|copy| copy.sync_all()).map_err(in_copy)?;
        self.handler.take_copy().map_err(|error| error.to_string())
    }

    fn receive(&self, stream: &mut Channel, file: &mut File, bytes: u64) -> Result<(), String> {
        let said = |error: io::Error| error.to_string();
        let mut block = vec![0; BLOCK_BYTES];
        let mut left = bytes;
        while left > 0 {
            if self.is_over() {
                return Err("it is over".to_owned());
            }
            let count = block.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            stream.until(Instant::now() + TRANSFER).read_exact(&mut block[..count]).map_err(said)?;
            file.write_all(&block[..count]).map_err(said)?;
            left -= count as u64;
        }
        file.sync_all().map_err(said)
    }
}
