//! Copying the checkpoint of another server.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::time::Instant;

use recstore::{remove_checkpoint, write_file};

use super::{Shared, TRANSFER};
use crate::wire::channel::Channel;
use crate::wire::codec::CopiedFile;

/// The names of the files that are being copied, beside them.
const LIST: &str = "copied.json";

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
        clear(&copy)?;
        begin(&copy, files)?;
        for CopiedFile { name, bytes } in files {
            self.receive(stream, &mut File::create(copy.join(name)).map_err(in_copy)?, *bytes)?;
        }
        fs::remove_file(copy.join(LIST)).map_err(in_copy)?;
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

/// Notes which files are about to be copied: they go if not all of them come.
fn begin(copy: &Path, files: &[CopiedFile]) -> Result<(), String> {
    if let Some(CopiedFile { name, .. }) =
        files.iter().find(|file| file.name.contains(['/', '\\']) || file.name.starts_with('.'))
    {
        return Err(format!("\"{name}\" is not the name of a file of a checkpoint"));
    }
    fs::create_dir_all(copy).map_err(|error| format!("{}: {error}", copy.display()))?;
    let names: Vec<&String> = files.iter().map(|file| &file.name).collect();
    let text = serde_json::to_vec_pretty(&names).map_err(|error| error.to_string())?;
    write_file(&copy.join(LIST), &text).map_err(|error| error.to_string())
}

/// Removes what an attempt that was cut off has copied, and nothing else.
fn clear(copy: &Path) -> Result<(), String> {
    let said = |error: io::Error| format!("{}: {error}", copy.display());
    match fs::read(copy.join(LIST)) {
        // All had come, and were not taken yet.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            remove_checkpoint(copy).map_err(|error| error.to_string())
        }
        text => {
            let names: Vec<String> = serde_json::from_slice(&text.map_err(said)?)
                .map_err(|error| format!("{}: {error}", copy.join(LIST).display()))?;
            for name in names.iter().map(String::as_str).chain([LIST]) {
                match fs::remove_file(copy.join(name)) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(said(error)),
                    _ => {}
                }
            }
            Ok(())
        }
    }
}
