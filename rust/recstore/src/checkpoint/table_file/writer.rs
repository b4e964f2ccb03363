//! Writes a file, some rows at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::iter;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crc32fast::Hasher;
use safetensors::tensor::Metadata;

use super::layout::{Column, DELETED, HEADER, Layout, TableState};
use crate::Result;
use crate::checkpoint::entries::ShardEntry;
use crate::checkpoint::files::{at, inside, refused};
use crate::checkpoint::flusher::Flusher;
use crate::disk::Directory;
use crate::table::CopiedRows;

/// The bytes written in one call at most: a kernel may let nobody else run on the core until a call ends.
const WRITE_BYTES: usize = 128 << 10;

/// A file being written.
pub(crate) struct Writer {
    name: String,
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
    pub(crate) fn create(
        directory: &Directory,
        name: String,
        layout: &Layout,
        rows: usize,
        deleted: Option<&[i64]>,
        state: &TableState,
    ) -> Result<Self> {
        let path = directory.path().join(&name);
        let tensors = layout.tensors(rows, deleted.map(<[i64]>::len), &state.lengths());
        let metadata = Metadata::new(None, tensors.clone()).map_err(at(&path))?;
        let mut header = serde_json::to_vec(&metadata).map_err(at(&path))?;
        // Tensors begin at a multiple of their widest elements.
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = directory.create_new(&name).map_err(inside(directory))?;
        let data = 8 + header.len() as u64;
        file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).map_err(at(&path))?;
        file.write_all_at(&header, 8).map_err(at(&path))?;
        let mut streams = Vec::new();
        for column in &layout.columns {
            let (_, info) = tensors
                .iter()
                .find(|(name, _)| *name == column.name)
                .ok_or_else(|| refused(&path, "no such column"))?;
            let (start, end) = info.data_offsets;
            streams.push(Stream::new(column, data, start, end));
        }
        let checksums = BTreeMap::from([(HEADER.to_owned(), crc32fast::hash(&header))]);
        let bytes = data + tensors.iter().map(|(_, info)| info.data_offsets.1 as u64).max().unwrap_or(0);
        let ends = tensors.iter().map(|(name, info)| (name.clone(), data + info.data_offsets.1 as u64));
        let pieces = iter::once((HEADER.to_owned(), data)).chain(ends).collect();
        let (deleted_bytes, deleted) =
            deleted.map_or((None, 0), |ids| (Some(bytemuck::cast_slice(ids)), ids.len()));
        let (buffer, flusher, state_lengths) = (Vec::new(), Flusher::default(), state.lengths());
        let mut writer = Self {
            name,
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
    pub(crate) fn write(&mut self, layout: &Layout, rows: &CopiedRows) -> Result<()> {
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
    pub(crate) fn finish(self) -> Result<(ShardEntry, Vec<(String, u64)>)> {
        let Self {
            name,
            path,
            file,
            bytes,
            streams,
            mut checksums,
            rows,
            deleted,
            state,
            pieces,
            flusher,
            ..
        } = self;
        if streams.iter().any(|stream| stream.at != stream.end) {
            return Err(refused(&path, "fewer rows than the snapshot has"));
        }
        // The flusher first: the system reports an error of its flush once, and not to the sync behind it.
        flusher.finish().and_then(|()| file.sync_all()).map_err(at(&path))?;
        for stream in streams {
            checksums.insert(stream.column.name, stream.checksum.finalize());
        }
        Ok((ShardEntry { file: name, bytes, rows, deleted, state, checksums, compressed: None }, pieces))
    }
}

/// A column on its way to a file.
struct Stream {
    column: Column,
    at: u64,
    end: u64,
    checksum: Hasher,
}

impl Stream {
    fn new(column: &Column, data: u64, start: usize, end: usize) -> Self {
        let (at, end) = (data + start as u64, data + end as u64);
        Self { column: column.clone(), at, end, checksum: Hasher::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TableConfig;
    use crate::optimizer::UpdateRules;
    use crate::table::Table;

    #[test]
    fn a_file_gets_as_many_rows_as_it_was_made_for() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = Directory::open(temporary.path()).unwrap();
        let table =
            Table::new("t", &TableConfig::new(2), &UpdateRules::default(), &std::sync::Arc::default());
        let layout = Layout::of(&table.unwrap());
        let two = CopiedRows { ids: vec![7, 8], usages: vec![], records: vec![0.5; 2 * layout.stride] };
        let write = |name: &str, rows| {
            let mut writer =
                Writer::create(&directory, name.to_owned(), &layout, rows, None, &TableState::default())?;
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
