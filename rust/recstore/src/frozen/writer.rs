//! Writes the file of a frozen table.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crc32fast::Hasher;
use tempfile::NamedTempFile;

use super::encoding::Encoding;
use super::index;
use super::layout::{BLOCK_BYTES, Described, Layout};
use crate::config::TableConfig;
use crate::{Error, Result};

/// The rows that are read and written at a time.
const ROWS_PER_CHUNK: usize = 4096;

/// The table that is to be frozen.
#[derive(Debug, Clone, Copy)]
pub struct FrozenSpec<'a> {
    /// Its name, from which initial values are drawn.
    pub name: &'a str,
    /// Its configuration.
    pub config: &'a TableConfig,
    /// How rows are kept.
    pub encoding: Encoding,
}

/// Writes a table's rows to a file beside `path`, which then gets that name, and returns its bytes.
///
/// `read` writes the rows of ids, one behind the other.
///
/// # Errors
/// Those of `read`; [`Error::Frozen`]: the file cannot be written, an id is there twice, or a row has a value that the
/// encoding has no number for. Whatever was at `path` before is there still.
pub fn freeze(
    path: &Path,
    spec: FrozenSpec<'_>,
    ids: &[i64],
    read: impl FnMut(&[i64], &mut [f32]) -> Result<()>,
) -> Result<u64> {
    write_file(path, spec, ids.to_vec(), |writer, ids| write_rows(writer, spec, ids, read, path))
}

/// Writes a file beside `path`, which then gets that name, and returns its bytes. `rows` writes the row of each id, in
/// the order in which it gets them.
pub(super) fn write_file(
    path: &Path,
    spec: FrozenSpec<'_>,
    mut ids: Vec<i64>,
    rows: impl FnOnce(&mut Writer<'_>, &[i64]) -> Result<()>,
) -> Result<u64> {
    let refused = |message: String| Error::Frozen { path: path.display().to_string(), message };
    let failed = |error: io::Error| refused(error.to_string());
    let lines = index::build(&mut ids).map_err(|id| refused(format!("id {id} is there twice")))?;
    let (layout, header) = Layout::new(described(spec, path)?, ids.len(), lines.len()).map_err(refused)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // In the same directory: a name can only be changed within one file system.
    let mut file = NamedTempFile::new_in(directory).map_err(failed)?;
    let mut writer = Writer::new(file.as_file_mut());
    writer.out.write_all(&header).map_err(failed)?;
    writer.write(bytemuck::cast_slice(&lines)).map_err(failed)?;
    rows(&mut writer, &ids)?;
    writer.finish(&header).map_err(failed)?;
    // Before it gets its name: after a crash the name must not belong to bytes that never came to the disk.
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(layout.checks.end as u64)
}

fn described(spec: FrozenSpec<'_>, path: &Path) -> Result<Described> {
    if spec.config.shared_rows().is_some() {
        return Err(Error::Frozen {
            path: path.display().to_string(),
            message: format!(
                "table \"{}\" has admission.shared_rows, which a frozen table cannot have",
                spec.name
            ),
        });
    }
    let text = spec.config.without_memory().to_json()?;
    let config =
        serde_json::from_str(&text).map_err(|error| Error::InvalidConfig { message: error.to_string() })?;
    Ok(Described { name: spec.name.to_owned(), encoding: spec.encoding, dim: spec.config.dim, config })
}

fn write_rows(
    writer: &mut Writer<'_>,
    spec: FrozenSpec<'_>,
    ids: &[i64],
    mut read: impl FnMut(&[i64], &mut [f32]) -> Result<()>,
    path: &Path,
) -> Result<()> {
    let refused = |message: String| Error::Frozen { path: path.display().to_string(), message };
    let mut rows = vec![0f32; ROWS_PER_CHUNK * spec.config.dim];
    for ids in ids.chunks(ROWS_PER_CHUNK) {
        let rows = &mut rows[..ids.len() * spec.config.dim];
        read(ids, rows)?;
        let bytes = spec.encoding.encode_all(ids, rows).map_err(|error| refused(error.to_string()))?;
        writer.write(&bytes).map_err(|error| refused(error.to_string()))?;
    }
    Ok(())
}

/// Writes what is in blocks, and then the checksums.
pub(super) struct Writer<'a> {
    out: BufWriter<&'a mut File>,
    hasher: Hasher,
    in_block: usize,
    checks: Vec<u32>,
}

impl<'a> Writer<'a> {
    fn new(file: &'a mut File) -> Self {
        Self { out: BufWriter::new(file), hasher: Hasher::new(), in_block: 0, checks: Vec::new() }
    }

    pub(super) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        while !bytes.is_empty() {
            let (own, others) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.in_block));
            self.hasher.update(own);
            self.in_block += own.len();
            bytes = others;
            if self.in_block == BLOCK_BYTES {
                self.end_block();
            }
        }
        Ok(())
    }

    fn end_block(&mut self) {
        self.checks.push(std::mem::take(&mut self.hasher).finalize());
        self.in_block = 0;
    }

    fn finish(mut self, header: &[u8]) -> io::Result<()> {
        if self.in_block > 0 {
            self.end_block();
        }
        // The header's comes first, though it is no block: its reader needs it before all others.
        self.checks.insert(0, crc32fast::hash(header));
        self.out.write_all(bytemuck::cast_slice(&self.checks))?;
        self.out.flush()
    }
}
