//! Files of rows made smaller with Zstandard.
//!
//! A finished file is compressed piece by piece: its header and each of its tensors become a frame of their own, one
//! after another. So `zstd -d` gives the plain file, and a load reads all columns side by side, a few frames at a time in
//! memory and nothing on disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use zstd::stream::{read::Decoder, write::Encoder};

use super::entries::{Compressed, Kind, ShardEntry};
use super::files::{COMPRESSED_EXTENSION, FILE_EXTENSION, at, inside, refused};
use crate::Result;
use crate::disk::Directory;

const LEVELS: std::ops::RangeInclusive<i32> = 1..=19;

/// The base-2 logarithm of the most bytes that a reader keeps of a frame; no level asks for more.
const WINDOW: u32 = 23;

/// No frame holds more bytes for one of its own: a block of 128 KiB takes 4 bytes at least.
const MAX_TIMES_SMALLER: u64 = 1 << 15;

/// How the files of a save are made smaller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Compression {
    /// Not at all: plain safetensors files.
    #[default]
    None,
    /// Zstandard.
    Zstd {
        /// From 1, the fastest, to 19, the smallest.
        level: i32,
    },
}

impl From<Option<i32>> for Compression {
    /// Takes the level of zstd; none for plain files.
    fn from(level: Option<i32>) -> Self {
        level.map_or(Self::None, |level| Self::Zstd { level })
    }
}

impl Compression {
    /// Returns the level of zstd; none for plain files.
    pub fn level(self) -> Option<i32> {
        match self {
            Self::None => None,
            Self::Zstd { level } => Some(level),
        }
    }

    /// Checks that there is such a level.
    pub(super) fn validate(self, directory: &Path) -> Result<()> {
        match self {
            Self::Zstd { level } if !LEVELS.contains(&level) => {
                let (least, most) = (LEVELS.start(), LEVELS.end());
                Err(refused(
                    directory,
                    format!("the level of zstd must be from {least} to {most}, got {level}"),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns how the file of an entry was made smaller.
    pub(super) fn of(entry: &ShardEntry) -> Self {
        entry.compressed.as_ref().map(|compressed| compressed.level).into()
    }
}

/// Where the pieces of a plain file end, by name, from its beginning on.
pub(super) type Pieces = [(String, u64)];

/// Puts a compressed file in the place of the finished one of an entry, and returns its own entry.
pub(super) fn compress(
    directory: &Directory,
    plain: ShardEntry,
    pieces: &Pieces,
    level: i32,
) -> Result<ShardEntry> {
    let file = plain.file.replace(FILE_EXTENSION, COMPRESSED_EXTENSION);
    let to = directory.path().join(&file);
    let source = directory.open_file(&plain.file).map_err(inside(directory))?;
    let mut target = BufWriter::new(directory.create_new(&file).map_err(inside(directory))?);
    let frames = write_frames(source, &mut target, pieces, level).map_err(at(&to))?;
    let target = target.into_inner().map_err(|error| refused(&to, error.error()))?;
    target.sync_all().map_err(at(&to))?;
    let bytes = target.metadata().map_err(at(&to))?.len();
    // Only when the compressed one is on the disk.
    directory.remove_file(&plain.file).map_err(inside(directory))?;
    let compressed = Compressed { kind: Kind::Zstd, level, bytes: plain.bytes, frames };
    Ok(ShardEntry { file, bytes, compressed: Some(compressed), ..plain })
}

fn write_frames(
    mut source: File,
    target: &mut BufWriter<File>,
    pieces: &Pieces,
    level: i32,
) -> io::Result<BTreeMap<String, u64>> {
    let (mut frames, mut start) = (BTreeMap::new(), 0);
    for (name, end) in pieces {
        frames.insert(name.clone(), target.stream_position()?);
        let mut encoder = Encoder::new(&mut *target, level)?;
        encoder.set_pledged_src_size(Some(end - start))?;
        io::copy(&mut (&mut source).take(end - start), &mut encoder)?;
        encoder.finish()?.flush()?;
        start = *end;
    }
    Ok(frames)
}

/// A file of rows, whose pieces can be read side by side.
pub(super) struct Contents {
    file: Arc<File>,
    compressed: Option<Compressed>,
    /// The length of the plain file.
    pub(super) bytes: u64,
}

impl Contents {
    /// Opens a file and checks its length.
    pub(super) fn open(directory: &Directory, entry: &ShardEntry) -> Result<Self> {
        let path = &directory.path().join(&entry.file);
        let file = Arc::new(directory.open_file(&entry.file).map_err(inside(directory))?);
        let bytes = file.metadata().map_err(at(path))?.len();
        if bytes != entry.bytes {
            return Err(refused(path, format!("expected {} bytes, got {bytes}", entry.bytes)));
        }
        let plain = entry.plain_bytes();
        // A length that no frame can have is refused before memory is taken for its rows.
        if plain > bytes.saturating_mul(MAX_TIMES_SMALLER) {
            return Err(refused(path, format!("{bytes} bytes cannot be {plain} compressed ones")));
        }
        Ok(Self { file, compressed: entry.compressed.clone(), bytes: plain })
    }

    /// Returns what reads the piece `name`, which begins at `start` in the plain file.
    pub(super) fn piece(&self, name: &str, start: u64) -> io::Result<Box<dyn Read + Send>> {
        let file = Arc::clone(&self.file);
        let Some(compressed) = &self.compressed else {
            return Ok(Box::new(FileFrom { file, at: start }));
        };
        let at = *compressed.frames.get(name).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("the manifest has no frame of \"{name}\""))
        })?;
        // One frame alone: the next one is another piece.
        let mut decoder = Decoder::with_buffer(BufReader::new(FileFrom { file, at }))?.single_frame();
        // A frame may ask for far more memory than any level of a save does.
        decoder.window_log_max(WINDOW)?;
        Ok(Box::new(decoder))
    }
}

/// A file from some place on, whoever else reads it.
struct FileFrom {
    file: Arc<File>,
    at: u64,
}

impl Read for FileFrom {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
