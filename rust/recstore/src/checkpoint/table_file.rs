//! One file of a checkpoint: some rows of a table as safetensors.
//!
//! Tensors are columns: `ids`, `rows`, a `slot.<name>` for each optimizer slot, and in a delta `deleted_ids`. All but the
//! last have a row for each id. A file is written and read some rows at a time, so that neither takes much memory.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::Dtype as TensorType;
use safetensors::tensor::{Metadata, TensorInfo};

use super::manifest::ShardEntry;
use super::{at, refused};
use crate::Result;
use crate::config::Dtype;
use crate::table::{CopiedRows, Table};

const _: () = assert!(cfg!(target_endian = "little"), "tensors are written as they lie in memory");

const IDS: &str = "ids";
const ROWS: &str = "rows";
const DELETED: &str = "deleted_ids";
const HEADER: &str = "header";

/// The most bytes of a header: that of a real one takes less than a kilobyte.
const HEADER_LIMIT: u64 = 1 << 20;

/// What a column is made of.
#[derive(Debug, Clone)]
struct Column {
    name: String,
    tensor_type: TensorType,
    /// The elements of a row.
    width: usize,
    row_bytes: usize,
    /// Where it begins in a record, in bytes; ids lie in none.
    in_record: Option<usize>,
}

/// How the records of a table are cut into columns.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    columns: Vec<Column>,
    stride: usize,
}

impl Layout {
    pub(super) fn of(table: &Table) -> Self {
        let (weight_words, stride) = table.record_words();
        let (tensor_type, size) = match table.config().dtype {
            Dtype::Float32 => (TensorType::F32, 4),
            Dtype::Bfloat16 => (TensorType::BF16, 2),
            Dtype::Float16 => (TensorType::F16, 2),
        };
        let dim = table.config().dim;
        let rows = Column {
            name: ROWS.to_owned(),
            tensor_type,
            width: dim,
            row_bytes: size * dim,
            in_record: Some(0),
        };
        let mut columns = vec![id_column(IDS), rows];
        let mut word = weight_words;
        for slot in table.record_slots() {
            let (name, bytes) = (format!("slot.{}", slot.name), slot.width * size_of::<f32>());
            let tensor_type = TensorType::F32;
            columns.push(Column {
                name,
                tensor_type,
                width: slot.width,
                row_bytes: bytes,
                in_record: Some(word * size_of::<f32>()),
            });
            word += slot.width;
        }
        Self { columns, stride }
    }

    /// Returns the bytes of a row in a file.
    pub(super) fn row_bytes(&self) -> usize {
        self.columns.iter().map(|column| column.row_bytes).sum()
    }

    fn tensors(&self, rows: usize, deleted: Option<usize>) -> Vec<(String, TensorInfo)> {
        let mut start = 0;
        let mut tensor = |column: &Column, rows: usize| {
            let end = start + rows * column.row_bytes;
            let shape = match column.in_record {
                None => vec![rows],
                Some(_) => vec![rows, column.width],
            };
            let info = TensorInfo { dtype: column.tensor_type, shape, data_offsets: (start, end) };
            start = end;
            (column.name.clone(), info)
        };
        // Wide elements first: every tensor is aligned to its elements.
        let deleted = deleted.map(|deleted| tensor(&id_column(DELETED), deleted));
        let mut columns: Vec<_> = self.columns.iter().collect();
        columns.sort_by_key(|column| Reverse(column.tensor_type.bitsize()));
        let columns: Vec<_> = columns.into_iter().map(|column| tensor(column, rows)).collect();
        deleted.into_iter().chain(columns).collect()
    }
}

fn id_column(name: &str) -> Column {
    let tensor_type = TensorType::I64;
    Column { name: name.to_owned(), tensor_type, width: 1, row_bytes: size_of::<i64>(), in_record: None }
}

/// A column on its way to or from a file.
struct Stream {
    column: Column,
    at: u64,
    end: u64,
    checksum: Hasher,
}

/// A file being written.
pub(super) struct Writer {
    path: PathBuf,
    file: File,
    bytes: u64,
    streams: Vec<Stream>,
    checksums: BTreeMap<String, u32>,
    rows: usize,
    deleted: usize,
    buffer: Vec<u8>,
}

impl Writer {
    /// Creates a file for `rows` rows; with `deleted` ids for a delta.
    pub(super) fn create(path: &Path, layout: &Layout, rows: usize, deleted: Option<&[i64]>) -> Result<Self> {
        let tensors = layout.tensors(rows, deleted.map(<[i64]>::len));
        let metadata = Metadata::new(None, tensors.clone()).map_err(at(path))?;
        let mut header = serde_json::to_vec(&metadata).map_err(at(path))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = File::create_new(path).map_err(at(path))?;
        let data = 8 + header.len() as u64;
        file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).map_err(at(path))?;
        file.write_all_at(&header, 8).map_err(at(path))?;
        let mut streams = Vec::new();
        for column in &layout.columns {
            let (_, info) = tensors
                .iter()
                .find(|(name, _)| *name == column.name)
                .ok_or_else(|| refused(path, "no such column"))?;
            let (start, end) = info.data_offsets;
            streams.push(Stream::new(column, data, start, end));
        }
        let checksums = BTreeMap::from([(HEADER.to_owned(), crc32fast::hash(&header))]);
        let bytes = data + tensors.iter().map(|(_, info)| info.data_offsets.1 as u64).max().unwrap_or(0);
        let path = path.to_owned();
        let mut writer = Self { path, file, bytes, streams, checksums, rows, deleted: 0, buffer: Vec::new() };
        if let Some(ids) = deleted {
            let ids_bytes = bytemuck::cast_slice(ids);
            writer.file.write_all_at(ids_bytes, data).map_err(at(&writer.path))?;
            writer.checksums.insert(DELETED.to_owned(), crc32fast::hash(ids_bytes));
            writer.deleted = ids.len();
        }
        Ok(writer)
    }

    /// Appends rows.
    pub(super) fn write(&mut self, layout: &Layout, rows: &CopiedRows) -> Result<()> {
        for stream in &mut self.streams {
            let column = &stream.column;
            let bytes = match column.in_record {
                None => bytemuck::cast_slice(&rows.ids),
                Some(start) => {
                    self.buffer.clear();
                    for record in
                        bytemuck::cast_slice::<f32, u8>(&rows.records).chunks_exact(layout.stride * 4)
                    {
                        self.buffer.extend_from_slice(&record[start..][..column.row_bytes]);
                    }
                    &self.buffer[..]
                }
            };
            if stream.at + bytes.len() as u64 > stream.end {
                return Err(refused(&self.path, "more rows than the snapshot has"));
            }
            self.file.write_all_at(bytes, stream.at).map_err(at(&self.path))?;
            stream.at += bytes.len() as u64;
            stream.checksum.update(bytes);
        }
        Ok(())
    }

    /// Makes the file survive a crash.
    pub(super) fn finish(self) -> Result<ShardEntry> {
        let Self { path, file, bytes, streams, mut checksums, rows, deleted, .. } = self;
        if streams.iter().any(|stream| stream.at != stream.end) {
            return Err(refused(&path, "fewer rows than the snapshot has"));
        }
        file.sync_all().map_err(at(&path))?;
        for stream in streams {
            checksums.insert(stream.column.name, stream.checksum.finalize());
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(ShardEntry { file: name.unwrap_or_default(), bytes, rows, deleted, checksums })
    }
}

impl Stream {
    fn new(column: &Column, data: u64, start: usize, end: usize) -> Self {
        let (at, end) = (data + start as u64, data + end as u64);
        Self { column: column.clone(), at, end, checksum: Hasher::new() }
    }
}

/// A file being read.
pub(super) struct Reader {
    path: PathBuf,
    file: File,
    streams: Vec<Stream>,
    checksums: BTreeMap<String, u32>,
    /// The ids deleted since the base.
    pub(super) deleted: Vec<i64>,
    rows_left: usize,
    buffer: Vec<u8>,
}

impl Reader {
    /// Opens a file and checks that it is as the manifest and the table's configuration say.
    pub(super) fn open(path: &Path, layout: &Layout, entry: &ShardEntry, is_delta: bool) -> Result<Self> {
        let file = File::open(path).map_err(at(path))?;
        let bytes = file.metadata().map_err(at(path))?.len();
        if bytes != entry.bytes {
            return Err(refused(path, format!("expected {} bytes, got {bytes}", entry.bytes)));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(at(path))?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_LIMIT.min(bytes - 8) {
            return Err(refused(path, format!("the header cannot have {length} bytes")));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(at(path))?;
        let reader = Self {
            path: path.to_owned(),
            file,
            streams: Vec::new(),
            checksums: entry.checksums.clone(),
            deleted: Vec::new(),
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
        if needed as u64 > bytes || entry.deleted as u64 > bytes / 8 {
            return Err(too_large());
        }
        let tensors = layout.tensors(entry.rows, is_delta.then_some(entry.deleted));
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
            if let Some(column) = layout.columns.iter().find(|column| column.name == name) {
                self.streams.push(Stream::new(column, data, start, stop));
            } else {
                self.deleted = vec![0; entry.deleted];
                let buffer = bytemuck::cast_slice_mut(&mut self.deleted);
                self.file.read_exact_at(buffer, data + start as u64).map_err(at(&self.path))?;
                let checksum = crc32fast::hash(buffer);
                self.check(DELETED, checksum)?;
            }
        }
        Ok(self)
    }

    /// Returns the file's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads up to `limit` rows; none at the end, where the checksums are compared.
    pub(super) fn read(&mut self, layout: &Layout, limit: usize, rows: &mut CopiedRows) -> Result<()> {
        let count = limit.min(self.rows_left);
        self.rows_left -= count;
        rows.ids.clear();
        rows.ids.resize(count, 0);
        rows.records.clear();
        rows.records.resize(count * layout.stride, 0.0);
        let buffer = &mut self.buffer;
        for stream in &mut self.streams {
            let Column { row_bytes, in_record, .. } = stream.column;
            buffer.resize(count * row_bytes, 0);
            self.file.read_exact_at(buffer, stream.at).map_err(at(&self.path))?;
            stream.at += buffer.len() as u64;
            stream.checksum.update(buffer);
            let Some(start) = in_record else {
                bytemuck::cast_slice_mut(&mut rows.ids).copy_from_slice(buffer);
                continue;
            };
            let records =
                bytemuck::cast_slice_mut::<f32, u8>(&mut rows.records).chunks_exact_mut(layout.stride * 4);
            for (record, row) in records.zip(buffer.chunks_exact(row_bytes)) {
                record[start..][..row_bytes].copy_from_slice(row);
            }
        }
        if count == 0 {
            for stream in &self.streams {
                self.check(&stream.column.name, stream.checksum.clone().finalize())?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TableConfig;

    #[test]
    fn a_file_gets_as_many_rows_as_it_was_made_for() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::of(&Table::new("t", &TableConfig::new(2)));
        let two = CopiedRows { ids: vec![7, 8], records: vec![0.5; 2 * layout.stride] };
        let write = |name: &str, rows| {
            let mut writer = Writer::create(&directory.path().join(name), &layout, rows, None)?;
            writer.write(&layout, &two)?;
            writer.finish()
        };
        assert_eq!(write("as many", 2).unwrap().rows, 2);
        let message = |result: Result<ShardEntry>| result.unwrap_err().to_string();
        assert!(message(write("more", 1)).ends_with("more rows than the snapshot has"));
        assert!(message(write("fewer", 3)).ends_with("fewer rows than the snapshot has"));
        assert!(message(write("more", 2)).contains("File exists"));
    }
}
