//! A frozen table without the rows of some ids.

use std::collections::HashSet;
use std::path::Path;

use super::mapped::FrozenMemory;
use super::source::RowSource;
use super::table::FrozenTable;
use super::writer::{FrozenSpec, write_file};
use crate::{Error, Result};

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
