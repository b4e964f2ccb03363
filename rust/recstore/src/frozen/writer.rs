//! Writes the file of a frozen table.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crc32fast::Hasher;
use tempfile::NamedTempFile;

use super::blocks::BLOCK_BYTES;
use super::encoding::Encoding;
use super::index::{self, BuiltIndex, IndexShape};
use super::layout::{Described, Layout};
use crate::config::TableConfig;
use crate::kernel::cache::LINE_BYTES;
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
    mut read: impl FnMut(&[i64], &mut [f32]) -> Result<()>,
) -> Result<u64> {
    let mut rows = vec![0f32; ROWS_PER_CHUNK * spec.config.dim];
    write_file(path, spec, ids.to_vec(), |ids| {
        let rows = &mut rows[..ids.len() * spec.config.dim];
        read(ids, rows)?;
        let encoded = spec.encoding.encode_all(ids, rows);
        encoded
            .map_err(|error| Error::Frozen { path: path.display().to_string(), message: error.to_string() })
    })
}

/// Writes a file beside `path`, which then gets that name, and returns its bytes. `rows` gives the encoded rows of some ids, one
/// behind the other.
pub(super) fn write_file(
    path: &Path,
    spec: FrozenSpec<'_>,
    ids: Vec<i64>,
    mut rows: impl FnMut(&[i64]) -> Result<Vec<u8>>,
) -> Result<u64> {
    let refused = |message: String| Error::Frozen { path: path.display().to_string(), message };
    let failed = |error: io::Error| refused(error.to_string());
    let BuiltIndex { shape, bytes, ids } = index::build(ids).map_err(refused)?;
    let described = described(spec, path, shape)?;
    let (layout, header) = Layout::new(described, ids.len(), bytes.len() / LINE_BYTES).map_err(refused)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // In the same directory: a name can only be changed within one file system.
    let mut file = NamedTempFile::new_in(directory).map_err(failed)?;
    let mut writer = Writer::new(file.as_file_mut());
    writer.out.write_all(&header).map_err(failed)?;
    writer.write(&bytes).map_err(failed)?;
    let mut records = Vec::new();
    for ids in ids.chunks(ROWS_PER_CHUNK) {
        records.clear();
        let encoded = rows(ids)?;
        for (&id, row) in ids.iter().zip(encoded.chunks(layout.record.row_bytes())) {
            records.extend_from_slice(row);
            layout.record.close(&mut records, id);
        }
        writer.write(&records).map_err(failed)?;
    }
    writer.finish(&header).map_err(failed)?;
    // Before it gets its name: after a crash the name must not belong to bytes that never came to the disk.
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(layout.checks.end as u64)
}

fn described(spec: FrozenSpec<'_>, path: &Path, index: IndexShape) -> Result<Described> {
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
    let name = spec.name.to_owned();
    Ok(Described { name, encoding: spec.encoding, dim: spec.config.dim, config, index })
}

/// Writes what is in blocks, and then the checksums.
struct Writer<'a> {
    out: BufWriter<&'a mut File>,
    hasher: Hasher,
    in_block: usize,
    checks: Vec<u32>,
}

impl<'a> Writer<'a> {
    fn new(file: &'a mut File) -> Self {
        Self { out: BufWriter::new(file), hasher: Hasher::new(), in_block: 0, checks: Vec::new() }
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
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
