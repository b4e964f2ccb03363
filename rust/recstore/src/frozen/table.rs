//! A frozen table, to be read.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::blocks::Blocks;
use super::encoding::Encoding;
use super::index::{Line, LineMatch, bucket, ids_of, look, num_buckets};
use super::layout::Layout;
use super::mapped::{FileBytes, FrozenMemory};
use super::source::{NO_ROW, RowSource};
use super::walk::read;
use crate::config::TableConfig;
use crate::disk::{FileError, open_file};
use crate::kernel::cache::{Cache, prefetch, prefetch_one};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::{Lanes, Simd, SimdLevel};
use crate::table::{Initializer, TableValidator};
use crate::{Error, Result};

/// The rows of a table that no longer change, in a file that is mapped into memory.
pub struct FrozenTable {
    path: PathBuf,
    file: FileBytes,
    layout: Layout,
    config: TableConfig,
    checks: Vec<u32>,
    blocks: Blocks,
    rules: TableValidator,
    initializer: Initializer,
    buckets: usize,
    simd: Simd,
}

impl fmt::Debug for FrozenTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrozenTable")
            .field("path", &self.path)
            .field("table", &self.layout.described)
            .finish()
    }
}

fn refused(path: &Path, error: &io::Error) -> Error {
    let FileError { path, reason, .. } = FileError::at(path, error);
    Error::Frozen { path: path.display().to_string(), message: reason }
}

impl FrozenTable {
    /// Opens a frozen table by the path of its file, as [`FrozenTable::of_file`] does.
    ///
    /// # Errors
    /// [`Error::Frozen`]: as there, or it cannot be opened.
    pub fn open(path: &Path, memory: FrozenMemory) -> Result<Self> {
        Self::of_file(&open_file(path).map_err(|error| refused(path, &error))?, path, memory)
    }

    /// Opens the file of a frozen table, whose `path` is for errors. One that is mapped must not be changed or cut as long as the table is there.
    ///
    /// A block of 64 KiB is compared with its checksum when it is first read: when it is copied, all are.
    ///
    /// # Errors
    /// [`Error::Frozen`]: the file cannot be read, is cut off, or is no frozen table of this version.
    pub fn of_file(file: &File, path: &Path, memory: FrozenMemory) -> Result<Self> {
        let file = FileBytes::new(file, memory).map_err(|error| refused(path, &error))?;
        let refused = |message: String| Error::Frozen { path: path.display().to_string(), message };
        // Read before it is compared with its checksum: the header says where the checksums lie.
        let layout = Layout::read(&file).map_err(refused)?;
        let numbers = file[layout.checks.clone()].as_chunks::<4>().0;
        let mut checks: Vec<u32> = numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        if checks.remove(0) != crc32fast::hash(&file[layout.header.clone()]) {
            return Err(refused("its header was changed: the checksum is another".to_owned()));
        }
        let config = layout.described.table_config()?;
        let rules = TableValidator::new(&layout.described.name, &config)?;
        let initializer = Initializer::new(&layout.described.name, &config);
        let (blocks, buckets) = (Blocks::new(checks.len()), num_buckets(layout.num_rows));
        let path = path.to_owned();
        let simd = Simd::detect();
        let table = Self { path, file, layout, config, checks, blocks, rules, initializer, buckets, simd };
        if memory == FrozenMemory::Copied {
            table.verify()?;
        }
        Ok(table)
    }

    /// Reads with kernels compiled for another level than the machine's widest. Every level reads the same bits.
    ///
    /// # Errors
    /// [`Error::UnavailableSimd`].
    pub fn with_simd(mut self, level: SimdLevel) -> Result<Self> {
        self.simd = Simd::new(level)?;
        Ok(self)
    }

    /// Returns what its kernels run with.
    pub(super) fn simd(&self) -> Simd {
        self.simd
    }

    /// Returns the name that the table had when it was frozen.
    pub fn name(&self) -> &str {
        &self.layout.described.name
    }

    /// Returns the configuration that it had.
    pub fn config(&self) -> &TableConfig {
        &self.config
    }

    /// Returns how its rows are kept.
    pub fn encoding(&self) -> Encoding {
        self.layout.described.encoding
    }

    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.layout.num_rows
    }

    /// Returns the elements of a row.
    pub fn dim(&self) -> usize {
        self.layout.described.dim
    }

    /// Returns a number that another file has with a probability of 2^-32: a checksum of all checksums.
    pub fn fingerprint(&self) -> u32 {
        crc32fast::hash(&self.file[self.layout.checks.clone()])
    }

    /// Returns the bytes of the file.
    pub fn file_bytes(&self) -> usize {
        self.file.len()
    }

    /// Returns all ids, in the order of their rows.
    ///
    /// # Errors
    /// [`Error::Frozen`]: a byte of them was changed.
    pub fn ids(&self) -> Result<Vec<i64>> {
        self.check(self.layout.lines.clone())?;
        Ok(ids_of(self.lines()).collect())
    }

    /// Writes the row of each id to `rows`. An id without a row reads as its initial value.
    ///
    /// # Errors
    /// [`Error::IdOutOfRange`]; [`Error::DimMismatch`]; [`Error::Frozen`]: a byte that was read was changed.
    pub fn read(&self, executor: &dyn Executor, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.rules.check_rows("emb_read", ids, rows.len())?;
        read(self, self.simd, executor, ids, rows)
    }

    /// Returns what calls are checked by.
    pub(super) fn rules(&self) -> &TableValidator {
        &self.rules
    }

    /// Compares every byte with its checksum.
    ///
    /// # Errors
    /// [`Error::Frozen`].
    pub fn verify(&self) -> Result<()> {
        self.check(self.layout.checked())
    }

    /// Returns the bytes of a row.
    #[inline(always)]
    pub(super) fn row_bytes(&self) -> usize {
        self.layout.row_bytes()
    }

    fn lines(&self) -> &[Line] {
        bytemuck::cast_slice(&self.file[self.layout.lines.clone()])
    }

    /// Checks the blocks of a range of the file, which lies behind the header.
    #[inline(always)]
    fn check(&self, range: Range<usize>) -> Result<()> {
        // Once all blocks have been compared, one flag stands for them.
        match self.blocks.are_all_seen() {
            true => Ok(()),
            false => self.check_blocks(range),
        }
    }

    #[inline(never)]
    fn check_blocks(&self, range: Range<usize>) -> Result<()> {
        let checked = self.layout.checked();
        let data = &self.file[checked.clone()];
        let range = range.start - checked.start..range.end - checked.start;
        self.blocks.check(data, &self.checks, range).map_err(|bytes| Error::Frozen {
            path: self.path.display().to_string(),
            message: format!(
                "bytes {} to {} were changed: the checksum is another",
                checked.start + bytes.start,
                checked.start + bytes.end
            ),
        })
    }

    /// Returns where in the file the row of a number lies.
    #[inline(always)]
    fn row_range(&self, number: usize) -> Range<usize> {
        let start = self.layout.rows.start + number * self.layout.row_bytes();
        start..start + self.layout.row_bytes()
    }

    #[cold]
    fn damaged(&self, line: usize) -> Error {
        Error::Frozen {
            path: self.path.display().to_string(),
            message: format!("line {line} of the ids says more ids or rows than there are"),
        }
    }
}

impl RowSource for &FrozenTable {
    type Bucket = usize;

    #[inline(always)]
    fn dim(self) -> usize {
        self.layout.described.dim
    }

    #[inline(always)]
    fn encoding(self) -> Encoding {
        self.layout.described.encoding
    }

    #[inline(always)]
    fn fill_initial(self, id: i64, row: &mut [f32]) {
        self.initializer.fill(self.simd, &[id], row);
    }

    #[inline(always)]
    fn seek(self, id: i64) -> usize {
        let bucket = bucket(id, self.buckets);
        prefetch_one(&self.lines()[bucket], Cache::First);
        bucket
    }

    #[inline(always)]
    fn number(self, lanes: impl Lanes, bucket: usize, id: i64) -> Result<usize> {
        for (number, line) in self.lines().iter().enumerate().skip(bucket) {
            let first = self.layout.lines.start + number * size_of::<Line>();
            // Compared before it is believed. A sound checksum does not make the line's numbers fit the file:
            // `look` checks those.
            self.check(first..first + size_of::<Line>())?;
            match look(lanes, line, id, self.num_rows()) {
                Some(LineMatch::At(number)) => return Ok(number),
                Some(LineMatch::Nowhere) => return Ok(NO_ROW),
                Some(LineMatch::Behind) => {}
                None => return Err(self.damaged(number)),
            }
        }
        Ok(NO_ROW)
    }

    #[inline(always)]
    fn prefetch_row(self, number: usize) {
        prefetch(&self.file[self.row_range(number)], Cache::First);
    }

    #[inline(always)]
    fn row<'a>(self, number: usize) -> Result<&'a [u8]>
    where
        Self: 'a,
    {
        let range = self.row_range(number);
        self.check(range.clone())?;
        Ok(&self.file[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frozen::{FrozenSpec, freeze};
    use crate::kernel::parallel::Serial;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::fs;

    const DIM: usize = 5;

    fn config() -> TableConfig {
        TableConfig::from_json(DIM, r#"{"initializer": {"kind": "normal", "std": 1.0}, "seed": 3}"#).unwrap()
    }

    fn row(id: i64) -> [f32; DIM] {
        std::array::from_fn(|column| (id % 100) as f32 / 8.0 + column as f32)
    }

    fn frozen(directory: &Path, ids: &[i64], encoding: Encoding) -> PathBuf {
        let path = directory.join("t.safetensors");
        let config = config();
        let spec = FrozenSpec { name: "t", config: &config, encoding };
        let read = |ids: &[i64], rows: &mut [f32]| {
            ids.iter().zip(rows.chunks_mut(DIM)).for_each(|(id, own)| own.copy_from_slice(&row(*id)));
            Ok(())
        };
        let bytes = freeze(&path, spec, ids, read).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
        path
    }

    fn read(table: &FrozenTable, ids: &[i64]) -> Result<Vec<f32>> {
        let mut rows = vec![f32::NAN; ids.len() * DIM];
        table.read(&Serial, ids, &mut rows).map(|()| rows)
    }

    proptest! {
        #[test]
        fn rows_are_those_that_were_frozen_and_initial_values_elsewhere(
            ids in prop::collection::hash_set(any::<i64>(), 0..200), others in prop::collection::vec(any::<i64>(), 0..40)
        ) {
            let directory = tempfile::tempdir().unwrap();
            let ids: Vec<i64> = ids.into_iter().collect();
            let kept: HashMap<i64, [f32; DIM]> = ids.iter().map(|&id| (id, row(id))).collect();
            let asked: Vec<i64> = ids.iter().chain(&others).copied().collect();
            let initializer = Initializer::new("t", &config());
            let mut expected = Vec::new();
            for id in &asked {
                let mut own = [0.0; DIM];
                initializer.fill(Simd::baseline(), &[*id], &mut own);
                expected.extend(kept.get(id).copied().unwrap_or(own));
            }
            let table = FrozenTable::open(&frozen(directory.path(), &ids, Encoding::Float32), FrozenMemory::Mapped).unwrap();
            prop_assert_eq!(read(&table, &asked), Ok(expected));
            prop_assert_eq!((table.num_rows(), table.name(), table.dim()), (ids.len(), "t", DIM));
            prop_assert_eq!(table.verify(), Ok(()));
        }
    }

    #[test]
    fn every_encoding_gives_what_it_keeps() {
        let directory = tempfile::tempdir().unwrap();
        let ids: Vec<i64> = (0..1000).map(|number| number * 7 - 999).collect();
        for encoding in Encoding::ALL {
            let table =
                FrozenTable::open(&frozen(directory.path(), &ids, encoding), FrozenMemory::Mapped).unwrap();
            let rows = read(&table, &ids).unwrap();
            for (id, kept) in ids.iter().zip(rows.chunks(DIM)) {
                let mut bytes = vec![0; encoding.row_bytes(DIM)];
                encoding.encode(&row(*id), &mut bytes).unwrap();
                let mut expected = [0.0; DIM];
                encoding.decode(&bytes, &mut expected);
                assert_eq!(kept, expected, "{encoding}, id {id}");
            }
        }
    }

    #[test]
    fn every_changed_byte_is_told_and_none_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let ids: Vec<i64> = (0..20).collect();
        let path = frozen(directory.path(), &ids, Encoding::Int4);
        let whole = fs::read(&path).unwrap();
        let expected = read(&FrozenTable::open(&path, FrozenMemory::Mapped).unwrap(), &ids).unwrap();
        for place in 0..whole.len() {
            let mut changed = whole.clone();
            changed[place] ^= 1 << (place % 8);
            let other = directory.path().join("changed");
            fs::write(&other, &changed).unwrap();
            let found = FrozenTable::open(&other, FrozenMemory::Mapped).and_then(|table| read(&table, &ids));
            match found {
                Err(error) => assert!(error.to_string().contains("changed"), "byte {place}: {error}"),
                Ok(rows) => {
                    panic!("byte {place}: {}", if rows == expected { "not seen" } else { "other rows" })
                }
            }
        }
    }

    #[test]
    fn a_file_that_is_cut_off_or_another_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = frozen(directory.path(), &[1, 2, 3], Encoding::Float32);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            let other = directory.path().join("cut");
            fs::write(&other, &whole[..length]).unwrap();
            let error = FrozenTable::open(&other, FrozenMemory::Mapped).unwrap_err();
            assert!(matches!(error, Error::Frozen { .. }), "{length} bytes: {error}");
        }
        let error = FrozenTable::open(&directory.path().join("missing"), FrozenMemory::Mapped)
            .unwrap_err()
            .to_string();
        assert!(error.contains("missing"), "{error}");
        let newer = String::from_utf8_lossy(&whole).replace(r#""version":"1""#, r#""version":"2""#);
        let other = directory.path().join("newer");
        // The bytes behind the header need not be text.
        let header = whole.len().min(newer.find('}').unwrap_or(0) + 400);
        fs::write(&other, [&newer.as_bytes()[..header.min(newer.len())], &whole[header..]].concat()).unwrap();
        let error = FrozenTable::open(&other, FrozenMemory::Mapped).unwrap_err().to_string();
        assert!(error.contains("version 2 of the format, this program reads 1"), "{error}");
    }

    #[test]
    fn rows_that_cannot_be_frozen_leave_the_file_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = frozen(directory.path(), &[1], Encoding::Float32);
        let before = fs::read(&path).unwrap();
        let config = config();
        let spec = FrozenSpec { name: "t", config: &config, encoding: Encoding::Int8 };
        let message = |ids: &[i64], value: f32| {
            let read = |_: &[i64], rows: &mut [f32]| {
                rows.fill(value);
                Ok(())
            };
            freeze(&path, spec, ids, read).unwrap_err().to_string()
        };
        let name = path.display();
        assert_eq!(
            message(&[4], 1e9),
            format!("frozen table: {name}: 1000000000 in the row of id 4 cannot be kept as int8")
        );
        assert_eq!(message(&[4, 5, 4], 0.0), format!("frozen table: {name}: id 4 is there twice"));
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing else is left");
    }
}
