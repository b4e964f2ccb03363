//! One file of a checkpoint: some rows of a table as safetensors.
//!
//! Most tensors are columns, with a row for each id: `ids`, `rows`, a `slot.<name>` for each optimizer slot, and what is
//! known of the rows' usage. Others are about the table: in a delta `deleted_ids`, and what admission and eviction have to
//! remember. Columns are written and read some rows at a time, so that neither takes much memory.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::iter;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::Dtype as TensorType;
use safetensors::tensor::{Metadata, TensorInfo};

use super::compression::Contents;
use super::entries::ShardEntry;
use super::files::{at, refused};
use super::flusher::Flusher;
use crate::Result;
use crate::config::Dtype;
use crate::lifecycle::Usage;
use crate::table::{AdmissionCounts, CopiedRows, Table};

const _: () = assert!(cfg!(target_endian = "little"), "tensors are written as they lie in memory");

const IDS: &str = "ids";
const ROWS: &str = "rows";
const USAGE_STEP: &str = "usage.step";
const USAGE_COUNT: &str = "usage.count";
const DELETED: &str = "deleted_ids";
const ADMISSION_IDS: &str = "admission.ids";
const ADMISSION_COUNTS: &str = "admission.counts";
const LEAVING: &str = "eviction.ids";
const HEADER: &str = "header";

/// The most bytes of a header: that of a real one takes less than a kilobyte.
const HEADER_LIMIT: u64 = 1 << 20;

/// About how many bytes are copied or read at a time.
pub(super) const BYTES_AT_A_TIME: usize = 512 << 10;

/// The bytes written in one call at most: a kernel may let nobody else run on the core until a call ends.
const WRITE_BYTES: usize = 128 << 10;

/// What a column is made of.
#[derive(Debug, Clone)]
struct Column {
    name: String,
    tensor_type: TensorType,
    /// The elements of a row.
    width: usize,
    row_bytes: usize,
    origin: Origin,
}

/// Where the values of a column are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Ids,
    UsageStep,
    UsageCount,
    /// In the record, from this byte on.
    Record(usize),
}

/// How a table is cut into tensors.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    columns: Vec<Column>,
    stride: usize,
    has_admission: bool,
    has_eviction: bool,
}

/// What a table remembers that is not about its rows.
#[derive(Debug, Default)]
pub(super) struct TableState {
    /// None for a table that admits all ids.
    pub(super) admission: Option<AdmissionCounts>,
    /// Ids of rows that will leave; none for a table that no row leaves.
    pub(super) leaving: Option<Vec<i64>>,
}

impl TableState {
    /// Returns the tensors: names, types and values.
    fn tensors(&self) -> Vec<(&'static str, TensorType, &[u8])> {
        let mut tensors = Vec::new();
        if let Some(AdmissionCounts { ids, counts }) = &self.admission {
            tensors.push((ADMISSION_IDS, TensorType::I64, bytemuck::cast_slice(ids)));
            tensors.push((ADMISSION_COUNTS, TensorType::U32, bytemuck::cast_slice(counts)));
        }
        if let Some(ids) = &self.leaving {
            tensors.push((LEAVING, TensorType::I64, bytemuck::cast_slice(ids)));
        }
        tensors
    }

    /// Returns the elements of each tensor.
    fn lengths(&self) -> BTreeMap<String, usize> {
        let length = |(name, kind, bytes): (&str, TensorType, &[u8])| {
            (name.to_owned(), bytes.len() * 8 / kind.bitsize())
        };
        self.tensors().into_iter().map(length).collect()
    }

    /// Returns room for what a file has.
    fn sized(layout: &Layout, lengths: &BTreeMap<String, usize>) -> Self {
        let length = |name: &str| lengths.get(name).copied().unwrap_or(0);
        let admission = || AdmissionCounts {
            ids: vec![0; length(ADMISSION_IDS)],
            counts: vec![0; length(ADMISSION_COUNTS)],
        };
        Self {
            admission: layout.has_admission.then(admission),
            leaving: layout.has_eviction.then(|| vec![0; length(LEAVING)]),
        }
    }

    fn bytes_of(&mut self, name: &str) -> Option<&mut [u8]> {
        let Self { admission, leaving } = self;
        match name {
            ADMISSION_IDS => admission.as_mut().map(|counts| bytemuck::cast_slice_mut(&mut counts.ids)),
            ADMISSION_COUNTS => admission.as_mut().map(|counts| bytemuck::cast_slice_mut(&mut counts.counts)),
            LEAVING => leaving.as_mut().map(|ids| bytemuck::cast_slice_mut(ids)),
            _ => None,
        }
    }
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
            origin: Origin::Record(0),
        };
        let mut columns = vec![integers(IDS, Origin::Ids), rows];
        let mut word = weight_words;
        for slot in table.record_slots() {
            let (name, bytes) = (format!("slot.{}", slot.name), slot.width * size_of::<f32>());
            let tensor_type = TensorType::F32;
            columns.push(Column {
                name,
                tensor_type,
                width: slot.width,
                row_bytes: bytes,
                origin: Origin::Record(word * size_of::<f32>()),
            });
            word += slot.width;
        }
        let has_eviction = table.config().eviction.is_some();
        if has_eviction {
            columns.push(integers(USAGE_STEP, Origin::UsageStep));
            columns.push(integers(USAGE_COUNT, Origin::UsageCount));
        }
        Self { columns, stride, has_admission: table.config().admission.is_some(), has_eviction }
    }

    /// Returns the tensors about the table, of these lengths.
    fn state_tensors(&self, lengths: &BTreeMap<String, usize>) -> Vec<(String, TensorType, Vec<usize>)> {
        let admission = [(ADMISSION_IDS, TensorType::I64), (ADMISSION_COUNTS, TensorType::U32)];
        let admission = admission.into_iter().filter(|_| self.has_admission);
        let eviction = self.has_eviction.then_some((LEAVING, TensorType::I64));
        let tensor =
            |(name, kind): (&str, _)| (name.to_owned(), kind, vec![lengths.get(name).copied().unwrap_or(0)]);
        admission.chain(eviction).map(tensor).collect()
    }

    /// Returns the bytes of a row in a file.
    pub(super) fn row_bytes(&self) -> usize {
        self.columns.iter().map(|column| column.row_bytes).sum()
    }

    fn tensors(
        &self,
        rows: usize,
        deleted: Option<usize>,
        state: &BTreeMap<String, usize>,
    ) -> Vec<(String, TensorInfo)> {
        let deleted = deleted.map(|deleted| (DELETED.to_owned(), TensorType::I64, vec![deleted]));
        let columns = self.columns.iter().map(|column| {
            let shape = match column.origin {
                Origin::Record(_) => vec![rows, column.width],
                Origin::Ids | Origin::UsageStep | Origin::UsageCount => vec![rows],
            };
            (column.name.clone(), column.tensor_type, shape)
        });
        let mut tensors: Vec<_> =
            deleted.into_iter().chain(self.state_tensors(state)).chain(columns).collect();
        // Wide elements first: every tensor is aligned to its elements.
        tensors.sort_by_key(|(_, kind, _)| Reverse(kind.bitsize()));
        let mut start = 0;
        let placed = tensors.into_iter().map(|(name, dtype, shape)| {
            let end = start + shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let info = TensorInfo { dtype, shape, data_offsets: (start, end) };
            start = end;
            (name, info)
        });
        placed.collect()
    }
}

fn integers(name: &str, origin: Origin) -> Column {
    let tensor_type = TensorType::I64;
    Column { name: name.to_owned(), tensor_type, width: 1, row_bytes: size_of::<i64>(), origin }
}

/// A column on its way to a file.
struct Stream {
    column: Column,
    at: u64,
    end: u64,
    checksum: Hasher,
}

/// A column on its way from a file.
struct Source {
    column: Column,
    bytes: Box<dyn Read + Send>,
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
    state: BTreeMap<String, usize>,
    /// Where the header and each tensor end.
    pieces: Vec<(String, u64)>,
    buffer: Vec<u8>,
    flusher: Flusher,
}

impl Writer {
    /// Creates a file for `rows` rows; with `deleted` ids for a delta.
    pub(super) fn create(
        path: &Path,
        layout: &Layout,
        rows: usize,
        deleted: Option<&[i64]>,
        state: &TableState,
    ) -> Result<Self> {
        let tensors = layout.tensors(rows, deleted.map(<[i64]>::len), &state.lengths());
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
        let ends = tensors.iter().map(|(name, info)| (name.clone(), data + info.data_offsets.1 as u64));
        let pieces = iter::once((HEADER.to_owned(), data)).chain(ends).collect();
        let (deleted_bytes, deleted) =
            deleted.map_or((None, 0), |ids| (Some(bytemuck::cast_slice(ids)), ids.len()));
        let (buffer, flusher, state_lengths) = (Vec::new(), Flusher::default(), state.lengths());
        let mut writer = Self {
            path,
            file,
            bytes,
            streams,
            checksums,
            rows,
            deleted,
            state: state_lengths,
            pieces,
            buffer,
            flusher,
        };
        let whole = state.tensors().into_iter().map(|(name, _, bytes)| (name, bytes));
        for (name, bytes) in deleted_bytes.map(|bytes| (DELETED, bytes)).into_iter().chain(whole) {
            if let Some((_, info)) = tensors.iter().find(|(known, _)| known == name) {
                writer.write_whole(name, bytes, data + info.data_offsets.0 as u64)?;
            }
        }
        Ok(writer)
    }

    /// Writes a tensor that has all of its values.
    fn write_whole(&mut self, name: &str, bytes: &[u8], at_byte: u64) -> Result<()> {
        self.file.write_all_at(bytes, at_byte).map_err(at(&self.path))?;
        self.checksums.insert(name.to_owned(), crc32fast::hash(bytes));
        Ok(())
    }

    /// Appends rows.
    pub(super) fn write(&mut self, layout: &Layout, rows: &CopiedRows) -> Result<()> {
        for stream in &mut self.streams {
            let column = &stream.column;
            let bytes = column.bytes(layout, rows, &mut self.buffer);
            if stream.at + bytes.len() as u64 > stream.end {
                return Err(refused(&self.path, "more rows than the snapshot has"));
            }
            for piece in bytes.chunks(WRITE_BYTES) {
                self.file.write_all_at(piece, stream.at).map_err(at(&self.path))?;
                stream.at += piece.len() as u64;
            }
            self.flusher.written(&self.file, bytes.len() as u64).map_err(at(&self.path))?;
            stream.checksum.update(bytes);
        }
        Ok(())
    }

    /// Makes the file survive a crash, and returns with its entry where its pieces end.
    pub(super) fn finish(self) -> Result<(ShardEntry, Vec<(String, u64)>)> {
        let Self { path, file, bytes, streams, mut checksums, rows, deleted, state, pieces, flusher, .. } =
            self;
        if streams.iter().any(|stream| stream.at != stream.end) {
            return Err(refused(&path, "fewer rows than the snapshot has"));
        }
        flusher.finish().and_then(|()| file.sync_all()).map_err(at(&path))?;
        for stream in streams {
            checksums.insert(stream.column.name, stream.checksum.finalize());
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let file = name.unwrap_or_default();
        Ok((ShardEntry { file, bytes, rows, deleted, state, checksums, compressed: None }, pieces))
    }
}

impl Column {
    /// Returns the column of `rows`; it may lie in `buffer`.
    fn bytes<'a>(&self, layout: &Layout, rows: &'a CopiedRows, buffer: &'a mut Vec<u8>) -> &'a [u8] {
        let of_usage = |buffer: &'a mut Vec<u8>, value: fn(Usage) -> u64| {
            buffer.extend(rows.usages.iter().flat_map(|usage| value(*usage).to_le_bytes()));
            &buffer[..]
        };
        buffer.clear();
        match self.origin {
            Origin::Ids => bytemuck::cast_slice(&rows.ids),
            Origin::UsageStep => of_usage(buffer, Usage::step),
            Origin::UsageCount => of_usage(buffer, Usage::count),
            Origin::Record(start) => {
                let records = bytemuck::cast_slice::<f32, u8>(&rows.records);
                for record in records.chunks_exact(layout.stride * size_of::<f32>()) {
                    buffer.extend_from_slice(&record[start..][..self.row_bytes]);
                }
                &buffer[..]
            }
        }
    }

    /// Puts the column of `rows`, which have their number of rows, where it belongs.
    fn put(&self, layout: &Layout, bytes: &[u8], rows: &mut CopiedRows) {
        let values = || bytes.as_chunks().0.iter().map(|value| u64::from_le_bytes(*value));
        match self.origin {
            Origin::Ids => bytemuck::cast_slice_mut(&mut rows.ids).copy_from_slice(bytes),
            Origin::UsageStep => {
                let usages = rows.usages.iter_mut().zip(values());
                usages.for_each(|(usage, step)| *usage = Usage::new(step, usage.count()));
            }
            Origin::UsageCount => {
                let usages = rows.usages.iter_mut().zip(values());
                usages.for_each(|(usage, count)| *usage = Usage::new(usage.step(), count));
            }
            Origin::Record(start) => {
                let records = bytemuck::cast_slice_mut::<f32, u8>(&mut rows.records);
                let records = records.chunks_exact_mut(layout.stride * size_of::<f32>());
                for (record, row) in records.zip(bytes.chunks_exact(self.row_bytes)) {
                    record[start..][..self.row_bytes].copy_from_slice(row);
                }
            }
        }
    }
}

impl Stream {
    fn new(column: &Column, data: u64, start: usize, end: usize) -> Self {
        let (at, end) = (data + start as u64, data + end as u64);
        Self { column: column.clone(), at, end, checksum: Hasher::new() }
    }
}

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
pub(super) fn saved_slots(path: &Path, entry: &ShardEntry) -> Result<Vec<(String, usize)>> {
    let header = Contents::open(path, entry)?.header(path)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(at(path))?;
    let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let slot = |(name, info): (String, &TensorInfo)| {
        Some((name.strip_prefix("slot.")?.to_owned(), *info.shape.get(1)?))
    };
    Ok(tensors.into_iter().filter_map(slot).collect())
}

/// A file being read.
pub(super) struct Reader {
    path: PathBuf,
    contents: Contents,
    sources: Vec<Source>,
    checksums: BTreeMap<String, u32>,
    /// The ids deleted since the base.
    pub(super) deleted: Vec<i64>,
    /// What the table remembers besides.
    pub(super) state: TableState,
    rows_left: usize,
    buffer: Vec<u8>,
}

impl Reader {
    /// Opens a file and checks that it is as the manifest and the table's configuration say.
    pub(super) fn open(path: &Path, layout: &Layout, entry: &ShardEntry, is_delta: bool) -> Result<Self> {
        let contents = Contents::open(path, entry)?;
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
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads up to `limit` rows; none at the end, where the checksums are compared.
    pub(super) fn read(&mut self, layout: &Layout, limit: usize, rows: &mut CopiedRows) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TableConfig;
    use crate::optimizer::UpdateRules;

    #[test]
    fn a_file_gets_as_many_rows_as_it_was_made_for() {
        let directory = tempfile::tempdir().unwrap();
        let table =
            Table::new("t", &TableConfig::new(2), &UpdateRules::default(), &std::sync::Arc::default());
        let layout = Layout::of(&table.unwrap());
        let two = CopiedRows { ids: vec![7, 8], usages: vec![], records: vec![0.5; 2 * layout.stride] };
        let write = |name: &str, rows| {
            let mut writer =
                Writer::create(&directory.path().join(name), &layout, rows, None, &TableState::default())?;
            writer.write(&layout, &two)?;
            writer.finish().map(|(entry, _)| entry)
        };
        assert_eq!(write("as many", 2).unwrap().rows, 2);
        let message = |result: Result<ShardEntry>| result.unwrap_err().to_string();
        assert!(message(write("more", 1)).ends_with("more rows than the snapshot has"));
        assert!(message(write("fewer", 3)).ends_with("fewer rows than the snapshot has"));
        assert!(message(write("more", 2)).contains("File exists"));
    }
}
