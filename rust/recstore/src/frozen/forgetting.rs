//! Ids in frozen tables and other safetensors files, and a frozen table without the rows of some.

use std::collections::HashSet;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use safetensors::Dtype as TensorType;
use safetensors::tensor::Metadata;

use super::index::{Line, ids_of};
use super::layout::{Described, FORMAT};
use super::mapped::FrozenMemory;
use super::source::RowSource;
use super::table::FrozenTable;
use super::writer::{FrozenSpec, write_file};
use crate::kernel::id_tally::{IdTally, read_parts};
use crate::{Error, Result};

/// The most bytes of a header of any program's file.
const HEADER_LIMIT: u64 = 100_000_000;

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
    let all = table.ids()?;
    let stays = |(_, id): &(usize, &i64)| !gone.contains(id);
    let (numbers, kept): (Vec<usize>, Vec<i64>) = all.iter().enumerate().filter(stays).unzip();
    let left_out = all.len() - kept.len();
    let spec = FrozenSpec { name: table.name(), config: table.config(), encoding: table.encoding() };
    let failed =
        |error: std::io::Error| Error::Frozen { path: to.display().to_string(), message: error.to_string() };
    // Ids are in the order of their hashes here and there.
    let bytes = write_file(to, spec, kept, |writer, _| {
        numbers.iter().try_for_each(|&number| writer.write((&table).row(number)?).map_err(failed))
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

/// Reads the header of a safetensors file, if it is one.
fn read_header(from: &mut impl Read) -> io::Result<Option<Metadata>> {
    let mut text = Vec::new();
    if from.take(8).read_to_end(&mut text)? < 8 {
        return Ok(None);
    }
    let length = u64::from_le_bytes(text.as_slice().try_into().map_err(io::Error::other)?);
    text.clear();
    from.take(length.min(HEADER_LIMIT)).read_to_end(&mut text)?;
    Ok((text.len() as u64 == length).then(|| serde_json::from_slice(&text).ok()).flatten())
}

fn read_tensors(
    from: &mut impl Read,
    header: &Metadata,
    tables: &[String],
    ids: &mut IdTally,
) -> io::Result<()> {
    let about = header.metadata().clone().unwrap_or_default();
    let is_frozen = about.get("format").is_some_and(|format| format == FORMAT);
    if is_frozen {
        let described: Described = serde_json::from_str(about.get("table").map_or("", String::as_str))?;
        if !tables.contains(&described.name) {
            return Ok(());
        }
    }
    for name in header.offset_keys() {
        let Some(tensor) = header.info(&name) else { continue };
        let has_ids =
            matches!(tensor.dtype, TensorType::I64 | TensorType::U64) && !NO_IDS.contains(&name.as_str());
        read_parts(from, tensor.data_offsets.1 - tensor.data_offsets.0, |part| match (has_ids, is_frozen) {
            (false, _) => {}
            (true, false) => ids.add_all(part),
            (true, true) => {
                let lines = part.as_chunks::<{ size_of::<Line>() }>().0;
                let lines: Vec<Line> = lines.iter().map(|line| bytemuck::pod_read_unaligned(line)).collect();
                ids_of(&lines).for_each(|id| ids.add(id));
            }
        })?;
    }
    Ok(())
}
