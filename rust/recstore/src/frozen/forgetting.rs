//! Ids in frozen tables and other safetensors files, and a frozen table without the rows of some.

use std::collections::HashSet;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use safetensors::Dtype as TensorType;
use safetensors::tensor::Metadata;

use super::index::{IndexShape, consecutive};
use super::layout::{FORMAT, Layout};
use super::mapped::FrozenMemory;
use super::table::FrozenTable;
use super::writer::{FrozenSpec, write_file};
use crate::kernel::cache::LINE_BYTES;
use crate::kernel::id_tally::{IdTally, read_parts};
use crate::{Error, Result};

/// The most bytes of a header of any program's file.
const HEADER_LIMIT: u64 = 100_000_000;

const RECORDS_PER_CHUNK: usize = 1024;

/// Tensors of 64-bit integers that have no ids, in the files of a checkpoint.
const NO_IDS: [&str; 2] = ["usage.step", "usage.count"];

/// Writes the frozen table at `from` to `to`, without the rows of `ids` and with those of all others as they are, to the
/// bit. Returns how many rows were left out, and the bytes of the file.
///
/// # Errors
/// [`Error::Frozen`]: `from` is no frozen table, or a byte of it was changed; `to` cannot be written.
pub fn freeze_without(from: &Path, to: &Path, ids: &[i64]) -> Result<(usize, u64)> {
    let table = FrozenTable::open(from, FrozenMemory::Mapped)?;
    table.verify()?;
    let gone: HashSet<i64> = ids.iter().copied().collect();
    let mut kept = table.ids()?;
    let all = kept.len();
    kept.retain(|id| !gone.contains(id));
    let left_out = all - kept.len();
    let spec = FrozenSpec { name: table.name(), config: table.config(), encoding: table.encoding() };
    let bytes = write_file(to, spec, kept, |ids| {
        let mut rows = Vec::new();
        for &id in ids {
            let row = table.row_of(id)?.ok_or_else(|| Error::Frozen {
                path: from.display().to_string(),
                message: format!("its index does not find id {id}, which has a row"),
            })?;
            rows.extend_from_slice(row);
        }
        Ok(rows)
    })?;
    Ok((left_out, bytes))
}

/// Counts the ids in the tensors of 64-bit integers of a file, which is read to its end: any safetensors, also a file of a
/// checkpoint, or a frozen table, whose ids count if it is one of `tables`. False: it is of another format.
///
/// # Errors
/// It is cut off; as `from`.
pub fn ids_in_tensors(from: &mut impl Read, tables: &[String], ids: &mut IdTally) -> io::Result<bool> {
    let Some(header) = read_header(from)? else { return Ok(false) };
    match read_tensors(from, &header, tables, ids) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            Err(io::Error::new(ErrorKind::UnexpectedEof, "it is cut off"))
        }
        read => read.map(|()| true),
    }
}

/// Reads the header of a safetensors file, if it is one, and returns the bytes that it takes.
fn read_header(from: &mut impl Read) -> io::Result<Option<(Metadata, usize)>> {
    let mut text = Vec::new();
    if from.take(8).read_to_end(&mut text)? < 8 {
        return Ok(None);
    }
    let length = u64::from_le_bytes(text.as_slice().try_into().map_err(io::Error::other)?);
    text.clear();
    from.take(length.min(HEADER_LIMIT)).read_to_end(&mut text)?;
    let header = (text.len() as u64 == length).then(|| serde_json::from_slice(&text).ok()).flatten();
    Ok(header.map(|header| (header, 8 + text.len())))
}

fn read_tensors(
    from: &mut impl Read,
    (header, bytes): &(Metadata, usize),
    tables: &[String],
    ids: &mut IdTally,
) -> io::Result<()> {
    if header.metadata().as_ref().and_then(|about| about.get("format")).is_some_and(|format| format == FORMAT)
    {
        let layout = Layout::of_header(header, *bytes).map_err(io::Error::other)?;
        return match tables.contains(&layout.described.name) {
            true => read_frozen(from, &layout, ids),
            false => Ok(()),
        };
    }
    for name in header.offset_keys() {
        let Some(tensor) = header.info(&name) else { continue };
        let has_ids =
            matches!(tensor.dtype, TensorType::I64 | TensorType::U64) && !NO_IDS.contains(&name.as_str());
        read_parts(from, tensor.data_offsets.1 - tensor.data_offsets.0, |part| {
            if has_ids {
                ids.add_all(part);
            }
        })?;
    }
    Ok(())
}

/// Counts the ids of a frozen table, wherever it has them.
fn read_frozen(from: &mut impl Read, layout: &Layout, ids: &mut IdTally) -> io::Result<()> {
    let (index, mut line) = (layout.described.index, 0);
    read_parts(from, layout.index.len(), |lines| {
        index.for_each_id(line, lines, |id| ids.add(id));
        line += lines.len() / LINE_BYTES;
    })?;
    let record = layout.record;
    // Whole records, as a part of any length may end within an id.
    let mut records = vec![0; record.stride() * RECORDS_PER_CHUNK];
    for first in (0..layout.num_rows).step_by(RECORDS_PER_CHUNK) {
        let count = RECORDS_PER_CHUNK.min(layout.num_rows - first);
        let records = &mut records[..count * record.stride()];
        from.read_exact(records)?;
        records.chunks(record.stride()).filter_map(|own| record.id_of(own)).for_each(|id| ids.add(id));
    }
    if let IndexShape::Consecutive { first } = index {
        // After the rows: a header may say more of them than the file has.
        consecutive(first, layout.num_rows).for_each(|id| ids.add(id));
    }
    read_parts(from, layout.checks.len(), |_| {})
}
