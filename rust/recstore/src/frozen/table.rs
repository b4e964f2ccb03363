//! A frozen table, to be read.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use super::checked::{CheckedBytes, CheckedFile};
use super::encoding::Encoding;
use super::index::Index;
use super::layout::Layout;
use super::mapped::{FileBytes, FrozenMemory};
use super::record::Record;
use super::source::{RowSource, row_of};
use super::walk::read;
use crate::config::TableConfig;
use crate::disk::{FileError, open_file};
use crate::kernel::parallel::Executor;
use crate::kernel::simd::{Lanes, Simd, SimdLevel};
use crate::table::{Initializer, TableValidator};
use crate::{Error, Result};

/// The rows of a table that no longer change, in a file that is mapped into memory.
pub struct FrozenTable {
    file: CheckedFile,
    layout: Layout,
    index: Index,
    config: TableConfig,
    rules: TableValidator,
    initializer: Initializer,
    simd: Simd,
}

impl fmt::Debug for FrozenTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrozenTable")
            .field("path", &self.file.path())
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
        let file = CheckedFile::new(path, file, layout.checked(), checks);
        let part = file.part(layout.index.clone());
        let index = Index::open(layout.described.index, part, layout.num_rows)?;
        let table = Self { file, layout, index, config, rules, initializer, simd: Simd::detect() };
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
        crc32fast::hash(&self.file.bytes()[self.layout.checks.clone()])
    }

    /// Returns the bytes of the file.
    pub fn file_bytes(&self) -> usize {
        self.file.bytes().len()
    }

    /// Returns all ids, in the order of their rows.
    ///
    /// # Errors
    /// [`Error::Frozen`]: a byte of them was changed.
    pub fn ids(&self) -> Result<Vec<i64>> {
        let FrozenRows { index, rows, record, .. } = self.rows();
        if let Some(ids) = self.index.ids(index, self.num_rows())? {
            return Ok(ids);
        }
        let records = rows.all()?.chunks_exact(record.stride());
        Ok(records.filter_map(|record_bytes| record.id_of(record_bytes)).collect())
    }

    /// Writes the row of each id to `rows`. An id without a row reads as its initial value.
    ///
    /// # Errors
    /// [`Error::IdOutOfRange`]; [`Error::DimMismatch`]; [`Error::Frozen`]: a byte that was read was changed.
    pub fn read(&self, executor: &dyn Executor, ids: &[i64], rows: &mut [f32]) -> Result<()> {
        self.rules.check_rows("emb_read", ids, rows.len())?;
        read(self.rows(), self.simd, executor, ids, rows)
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
        self.file.verify()
    }

    /// Returns the bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.layout.record.row_bytes()
    }

    /// Returns its rows, to be read.
    pub(super) fn rows(&self) -> FrozenRows<'_> {
        FrozenRows {
            table: self,
            index: self.file.part(self.layout.index.clone()),
            rows: self.file.part(self.layout.rows.clone()),
            num_rows: self.layout.num_rows,
            record: self.layout.record,
        }
    }

    /// Returns the bytes of the row of an id, if it has one.
    ///
    /// # Errors
    /// [`Error::Frozen`]: a byte that was read was changed.
    pub(super) fn row_of(&self, id: i64) -> Result<Option<&[u8]>> {
        row_of(self.rows(), id).map(|found| found.map(|(_, row)| row))
    }
}

/// The rows of a frozen table and its index.
#[derive(Clone, Copy)]
pub(super) struct FrozenRows<'a> {
    table: &'a FrozenTable,
    index: CheckedBytes<'a>,
    rows: CheckedBytes<'a>,
    num_rows: usize,
    record: Record,
}

impl FrozenRows<'_> {
    #[inline(always)]
    pub(super) fn num_rows(self) -> usize {
        self.num_rows
    }

    #[inline(always)]
    pub(super) fn row_bytes(self) -> usize {
        self.record.row_bytes()
    }

    #[inline(always)]
    fn record_range(self, number: usize) -> Range<usize> {
        let start = number * self.record.stride();
        start..start + self.record.stride()
    }
}

impl RowSource for FrozenRows<'_> {
    #[inline(always)]
    fn dim(self) -> usize {
        self.table.dim()
    }

    #[inline(always)]
    fn encoding(self) -> Encoding {
        self.table.encoding()
    }

    #[inline(always)]
    fn fill_initial(self, id: i64, row: &mut [f32]) {
        self.table.initializer.fill(self.table.simd, &[id], row);
    }

    #[inline(always)]
    fn seek(self, ids: &[i64], hashes: &mut [u64]) {
        self.table.index.seek(self.index, ids, hashes);
    }

    #[inline(always)]
    fn find(self, _: impl Lanes, ids: &[i64], hashes: &[u64], numbers: &mut [usize]) -> Result<()> {
        self.table.index.find(self.index, self.num_rows, (ids, hashes), numbers)
    }

    #[inline(always)]
    fn prefetch_row(self, number: usize) {
        self.rows.prefetch(self.record_range(number));
    }

    #[inline(always)]
    fn row<'a>(self, number: usize, id: i64) -> Result<Option<&'a [u8]>>
    where
        Self: 'a,
    {
        Ok(self.record.row_of(self.rows.get(self.record_range(number))?, id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frozen::{FrozenSpec, freeze};
    use crate::kernel::parallel::Serial;
    use crate::kernel::simd::ScalarLanes;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::fs;
    use std::path::PathBuf;

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

    /// Ids of every kind of index: side by side, near, and far.
    fn ids_of_any_kind() -> impl Strategy<Value = Vec<i64>> {
        let first = prop::sample::select(vec![i64::MIN, -50, 0, i64::MAX - 2_000]);
        let near = (first, 1i64..9, prop::collection::hash_set(0i64..200, 0..200));
        prop_oneof![
            prop::collection::hash_set(any::<i64>(), 0..200).prop_map(|ids| ids.into_iter().collect()),
            near.prop_map(|(first, step, ids)| ids.into_iter().map(|id| first + id * step).collect()),
            (-9i64..9, 0i64..200).prop_map(|(first, count)| (first..first + count).collect()),
        ]
    }

    proptest! {
        #[test]
        fn rows_are_those_that_were_frozen_and_initial_values_elsewhere(
            ids in ids_of_any_kind(), others in prop::collection::vec(any::<i64>(), 0..40)
        ) {
            let directory = tempfile::tempdir().unwrap();
            let others: Vec<i64> = others.into_iter().chain(ids.iter().map(|id| id.wrapping_add(1))).collect();
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
                encoding.decode(ScalarLanes, &bytes, &mut expected);
                assert_eq!(kept, expected, "{encoding}, id {id}");
            }
        }
    }

    #[test]
    fn every_changed_byte_is_told_and_none_is_used() {
        for step in [1, 3, 1_000] {
            every_change_is_told(&(0..20).map(|id| id * step).collect::<Vec<_>>());
        }
    }

    fn every_change_is_told(ids: &[i64]) {
        let directory = tempfile::tempdir().unwrap();
        let path = frozen(directory.path(), ids, Encoding::Int4);
        let whole = fs::read(&path).unwrap();
        let expected = read(&FrozenTable::open(&path, FrozenMemory::Mapped).unwrap(), ids).unwrap();
        for place in 0..whole.len() {
            let mut changed = whole.clone();
            changed[place] ^= 1 << (place % 8);
            let other = directory.path().join("changed");
            fs::write(&other, &changed).unwrap();
            let found = FrozenTable::open(&other, FrozenMemory::Mapped).and_then(|table| read(&table, ids));
            match found {
                Err(error) => assert!(error.to_string().contains("changed"), "byte {place}: {error}"),
                Ok(rows) => {
                    panic!("byte {place}: {}", if rows == expected { "not seen" } else { "other rows" })
                }
            }
        }
    }

    /// Writes a file with a text of its header replaced by another of as many bytes, and the checksum that it has then.
    fn with_header(directory: &Path, path: &Path, from: &str, to: &str) -> PathBuf {
        let mut file = fs::read(path).unwrap();
        let checks = Layout::read(&file).unwrap().checks.start;
        let length = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        let text = String::from_utf8(file[8..length].to_vec()).unwrap();
        assert!(text.contains(from), "{text}");
        file[8..length].copy_from_slice(text.replace(from, to).as_bytes());
        let sum = crc32fast::hash(&file[..length]).to_le_bytes();
        file[checks..checks + 4].copy_from_slice(&sum);
        let other = directory.join("other");
        fs::write(&other, file).unwrap();
        other
    }

    #[test]
    fn an_index_that_does_not_fit_its_rows_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let bits = frozen(directory.path(), &[0, 2, 4, 6], Encoding::Float32);
        let said = |path: &Path, from, to| {
            let other = with_header(directory.path(), path, from, to);
            FrozenTable::open(&other, FrozenMemory::Mapped)
                .and_then(|table| table.ids())
                .unwrap_err()
                .to_string()
        };
        let lines = r#"\"kind\":\"bits\"#;
        let error = said(&bits, lines, r#"\"kind\":\"blts\"#);
        assert!(error.contains("unknown variant `blts`"), "{error}");
        let error = said(&bits, r#""version":"2""#, r#""version":"1""#);
        assert!(error.contains("version 1 of the format, and the index of the other"), "{error}");
        let far = frozen(directory.path(), &[0, 1 << 40, 1 << 50], Encoding::Float32);
        let error = said(&far, r#"\"parts\":1"#, r#"\"parts\":9"#);
        assert!(error.contains("expected 2 lines of the index or more, got 1"), "{error}");
        let error = said(&far, r#"\"spare\":1"#, r#"\"spare\":0"#);
        assert!(error.contains("the hash of its 3 ids does not add up"), "{error}");
    }

    #[test]
    fn a_row_that_the_index_does_not_lead_to_is_not_lost_without_a_word() {
        let directory = tempfile::tempdir().unwrap();
        let path = frozen(directory.path(), &[0, 1 << 40, 1 << 50], Encoding::Float32);
        let mut file = fs::read(&path).unwrap();
        let layout = Layout::read(&file).unwrap();
        // The ids of two rows change places, and the checksum of their block agrees.
        let stride = layout.record.stride();
        let (one, other) = file[layout.rows.clone()].split_at_mut(stride);
        one[layout.record.row_bytes()..][..8].swap_with_slice(&mut other[layout.record.row_bytes()..][..8]);
        let sum = crc32fast::hash(&file[layout.checked()]).to_le_bytes();
        file[layout.checks.start + 4..].copy_from_slice(&sum);
        fs::write(&path, file).unwrap();
        let to = directory.path().join("without");
        let error = crate::freeze_without(&path, &to, &[77]).unwrap_err().to_string();
        assert!(error.contains("its index does not find id"), "{error}");
        assert!(!to.exists());
    }

    #[test]
    fn equal_rows_give_equal_files() {
        let [one, other] = [0, 1].map(|_| tempfile::tempdir().unwrap());
        for step in [1, 3, 1 << 40] {
            let ids: Vec<i64> = (0..100).map(|id| id * step).collect();
            let mut turned = ids.clone();
            turned.reverse();
            let [first, second] = [(&one, &ids), (&other, &turned)]
                .map(|(directory, ids)| fs::read(frozen(directory.path(), ids, Encoding::Int8)).unwrap());
            assert!(first == second, "step {step}");
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
        let newer = String::from_utf8_lossy(&whole).replace(r#""version":"2""#, r#""version":"3""#);
        let other = directory.path().join("newer");
        // The bytes behind the header need not be text.
        let header = whole.len().min(newer.find('}').unwrap_or(0) + 400);
        fs::write(&other, [&newer.as_bytes()[..header.min(newer.len())], &whole[header..]].concat()).unwrap();
        let error = FrozenTable::open(&other, FrozenMemory::Mapped).unwrap_err().to_string();
        assert!(error.contains("version 3 of the format, this program reads 1 and 2"), "{error}");
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
