//! Reads a file, all columns side by side, some rows at a time.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::{Metadata, TensorInfo};

use super::layout::{Column, DELETED, HEADER, Layout, TableState};
use crate::Result;
use crate::checkpoint::compression::Contents;
use crate::checkpoint::entries::ShardEntry;
use crate::checkpoint::files::{at, refused};
use crate::disk::Directory;
use crate::lifecycle::Usage;
use crate::table::CopiedRows;

/// The most bytes of a header: that of a real one takes less than a kilobyte.
const HEADER_LIMIT: u64 = 1 << 20;

impl Contents {
    /// Reads the header, whose checksum is still to be looked at.
    fn header(&self, path: &Path) -> Result<Vec<u8>> {
        let mut beginning = self.piece(HEADER, 0).map_err(at(path))?;
        let mut length = [0; 8];
        beginning.read_exact(&mut length).map_err(at(path))?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_LIMIT.min(self.bytes.saturating_sub(8)) {
            return Err(refused(path, format!("the header cannot have {length} bytes")));
        }
        let mut header = vec![0; length as usize];
        beginning.read_exact(&mut header).map_err(at(path))?;
        Ok(header)
    }
}

/// Returns the names and widths of the slots in a file, in their order.
pub(crate) fn saved_slots(directory: &Directory, entry: &ShardEntry) -> Result<Vec<(String, usize)>> {
    let path = &directory.path().join(&entry.file);
    let header = Contents::open(directory, entry)?.header(path)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(at(path))?;
    let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let slot = |(name, info): (String, &TensorInfo)| {
        Some((name.strip_prefix("slot.")?.to_owned(), *info.shape.get(1)?))
    };
    Ok(tensors.into_iter().filter_map(slot).collect())
}

/// A file being read.
pub(crate) struct Reader {
    path: PathBuf,
    contents: Contents,
    sources: Vec<Source>,
    checksums: BTreeMap<String, u32>,
    /// The ids deleted since the base.
    pub(crate) deleted: Vec<i64>,
    /// What the table remembers besides.
    pub(crate) state: TableState,
    rows_left: usize,
    buffer: Vec<u8>,
}

impl Reader {
    /// Opens a file and checks that it is as the manifest and the table's configuration say.
    pub(crate) fn open(
        directory: &Directory,
        layout: &Layout,
        entry: &ShardEntry,
        is_delta: bool,
    ) -> Result<Self> {
        let path = &directory.path().join(&entry.file);
        let contents = Contents::open(directory, entry)?;
        let (bytes, header) = (contents.bytes, contents.header(path)?);
        let length = header.len() as u64;
        let reader = Self {
            path: path.to_owned(),
            contents,
            sources: Vec::new(),
            checksums: entry.checksums.clone(),
            deleted: Vec::new(),
            state: TableState::default(),
            rows_left: entry.rows,
            buffer: Vec::new(),
        };
        reader.check(HEADER, crc32fast::hash(&header))?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(at(path))?;
        reader.with_streams(layout, &metadata, 8 + length, bytes, entry, is_delta)
    }

    /// Compares the header with what the table's configuration asks for.
    fn with_streams(
        mut self,
        layout: &Layout,
        metadata: &Metadata,
        data: u64,
        bytes: u64,
        entry: &ShardEntry,
        is_delta: bool,
    ) -> Result<Self> {
        let too_large = || refused(&self.path, format!("it cannot hold {} rows", entry.rows));
        let needed = entry.rows.checked_mul(layout.row_bytes()).ok_or_else(too_large)?;
        let is_too_long = |length: usize| length as u64 > bytes / 4;
        if needed as u64 > bytes
            || is_too_long(entry.deleted)
            || entry.state.values().any(|length| is_too_long(*length))
        {
            return Err(too_large());
        }
        self.state = TableState::sized(layout, &entry.state);
        let tensors = layout.tensors(entry.rows, is_delta.then_some(entry.deleted), &entry.state);
        if let Some(name) =
            metadata.tensors().keys().find(|name| !tensors.iter().any(|(known, _)| known == *name))
        {
            return Err(refused(&self.path, format!("the tensor \"{name}\" does not belong there")));
        }
        for (name, expected) in tensors {
            let Some(found) = metadata.info(&name) else {
                return Err(refused(&self.path, format!("the tensor \"{name}\" is missing")));
            };
            if found.dtype != expected.dtype || found.shape != expected.shape {
                let message = format!(
                    "expected the tensor \"{name}\" as {:?} {:?}, got {:?} {:?}",
                    expected.dtype, expected.shape, found.dtype, found.shape
                );
                return Err(refused(&self.path, message));
            }
            let (start, stop) = found.data_offsets;
            if stop as u64 > bytes - data {
                return Err(refused(&self.path, format!("the tensor \"{name}\" lies behind its end")));
            }
            let piece = self.contents.piece(&name, data + start as u64).map_err(at(&self.path))?;
            if let Some(column) = layout.columns.iter().find(|column| column.name == name) {
                self.sources.push(Source { column: column.clone(), bytes: piece, checksum: Hasher::new() });
            } else {
                self.read_whole(&name, piece, entry.deleted)?;
            }
        }
        Ok(self)
    }

    /// Reads a tensor that is about the table.
    fn read_whole(&mut self, name: &str, mut piece: impl Read, deleted: usize) -> Result<()> {
        let mut ids = if name == DELETED { vec![0; deleted] } else { Vec::new() };
        let bytes = match name {
            DELETED => bytemuck::cast_slice_mut(&mut ids),
            _ => self.state.bytes_of(name).unwrap_or_default(),
        };
        piece.read_exact(bytes).map_err(at(&self.path))?;
        let checksum = crc32fast::hash(bytes);
        if name == DELETED {
            self.deleted = ids;
        }
        self.check(name, checksum)
    }

    /// Returns the file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads up to `limit` rows; none at the end, where the checksums are compared.
    pub(crate) fn read(&mut self, layout: &Layout, limit: usize, rows: &mut CopiedRows) -> Result<()> {
        let count = limit.min(self.rows_left);
        self.rows_left -= count;
        // What `rows` held is overwritten; between the columns there were zeros before.
        rows.ids.resize(count, 0);
        rows.usages.resize(if layout.has_eviction { count } else { 0 }, Usage::default());
        rows.records.resize(count * layout.stride, 0.0);
        let buffer = &mut self.buffer;
        for source in &mut self.sources {
            buffer.resize(count * source.column.row_bytes, 0);
            source.bytes.read_exact(buffer).map_err(at(&self.path))?;
            source.checksum.update(buffer);
            source.column.put(layout, buffer, rows);
        }
        if count == 0 {
            for source in &self.sources {
                self.check(&source.column.name, source.checksum.clone().finalize())?;
            }
        }
        Ok(())
    }

    fn check(&self, name: &str, actual: u32) -> Result<()> {
        match self.checksums.get(name) {
            Some(expected) if *expected == actual => Ok(()),
            Some(expected) => {
                let message =
                    format!("\"{name}\" was changed: its checksum is {actual:08x}, expected {expected:08x}");
                Err(refused(&self.path, message))
            }
            None => Err(refused(&self.path, format!("the manifest has no checksum of \"{name}\""))),
        }
    }
}

/// A column on its way from a file.
struct Source {
    column: Column,
    bytes: Box<dyn Read + Send>,
    checksum: Hasher,
}
