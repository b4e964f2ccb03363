//! Reads a file, all columns side by side, some rows at a time.

use std::io::Read;
use std::path::Path;

use crc32fast::Hasher;

use super::layout::{Column, DELETED, Layout, TableState};
use super::opened::OpenedFile;
use crate::Result;
use crate::checkpoint::entries::ShardEntry;
use crate::checkpoint::files::{at, refused};
use crate::disk::Directory;
use crate::lifecycle::Usage;
use crate::table::CopiedRows;

/// Returns the names and widths of the slots in a file, in their order.
pub(crate) fn saved_slots(directory: &Directory, entry: &ShardEntry) -> Result<Vec<(String, usize)>> {
    let header = OpenedFile::open(directory, entry)?.header;
    let slot = |name: String| {
        let width = *header.info(&name)?.shape.get(1)?;
        Some((name.strip_prefix("slot.")?.to_owned(), width))
    };
    Ok(header.offset_keys().into_iter().filter_map(slot).collect())
}

/// A file being read.
pub(crate) struct Reader<'a> {
    file: OpenedFile<'a>,
    sources: Vec<Source>,
    /// The ids deleted since the base.
    pub(crate) deleted: Vec<i64>,
    /// What the table remembers besides.
    pub(crate) state: TableState,
    rows_left: usize,
    buffer: Vec<u8>,
}

impl<'a> Reader<'a> {
    /// Opens a file and checks that it is as the manifest and the table's configuration say.
    pub(crate) fn open(
        directory: &Directory,
        layout: &Layout,
        entry: &'a ShardEntry,
        is_delta: bool,
    ) -> Result<Self> {
        let reader = Self {
            file: OpenedFile::open(directory, entry)?,
            sources: Vec::new(),
            deleted: Vec::new(),
            state: TableState::default(),
            rows_left: entry.rows,
            buffer: Vec::new(),
        };
        reader.with_streams(layout, entry, is_delta)
    }

    /// Compares the header with what the table's configuration asks for.
    fn with_streams(mut self, layout: &Layout, entry: &ShardEntry, is_delta: bool) -> Result<Self> {
        let bytes = entry.plain_bytes();
        let too_large = || refused(&self.file.path, format!("it cannot hold {} rows", entry.rows));
        let needed = entry.rows.checked_mul(layout.row_bytes()).ok_or_else(too_large)?;
        // An element takes a byte at least: shared rows of 8-bit tables take no more.
        let is_too_long = |length: usize| length as u64 > bytes;
        // Before memory is taken for them: the numbers come from the manifest, the length from the file.
        if needed as u64 > bytes
            || is_too_long(entry.deleted)
            || entry.state.values().any(|length| is_too_long(*length))
        {
            return Err(too_large());
        }
        self.state = TableState::sized(layout, &entry.state);
        let tensors = layout.tensors(entry.rows, is_delta.then_some(entry.deleted), &entry.state);
        if let Some(name) = self
            .file
            .header
            .offset_keys()
            .iter()
            .find(|name| !tensors.iter().any(|(known, _)| known == *name))
        {
            return Err(refused(&self.file.path, format!("the tensor \"{name}\" does not belong there")));
        }
        for (name, expected) in tensors {
            let Some(found) = self.file.header.info(&name) else {
                return Err(refused(&self.file.path, format!("the tensor \"{name}\" is missing")));
            };
            if found.dtype != expected.dtype || found.shape != expected.shape {
                let message = format!(
                    "expected the tensor \"{name}\" as {:?} {:?}, got {:?} {:?}",
                    expected.dtype, expected.shape, found.dtype, found.shape
                );
                return Err(refused(&self.file.path, message));
            }
            let (start, stop) = found.data_offsets;
            if stop as u64 > self.file.bytes() {
                return Err(refused(&self.file.path, format!("the tensor \"{name}\" lies behind its end")));
            }
            let piece = self.file.piece(&name, start)?;
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
        piece.read_exact(bytes).map_err(at(&self.file.path))?;
        let checksum = crc32fast::hash(bytes);
        if name == DELETED {
            self.deleted = ids;
        }
        self.file.check(name, checksum)
    }

    /// Returns the file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.file.path
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
            source.bytes.read_exact(buffer).map_err(at(&self.file.path))?;
            source.checksum.update(buffer);
            source.column.put(layout, buffer, rows);
        }
        // The rows were put already, into a table that no call sees until all its checksums agree.
        if count == 0 {
            for source in &self.sources {
                self.file.check(&source.column.name, source.checksum.clone().finalize())?;
            }
        }
        Ok(())
    }
}

/// A column on its way from a file.
struct Source {
    column: Column,
    bytes: Box<dyn Read + Send>,
    checksum: Hasher,
}
