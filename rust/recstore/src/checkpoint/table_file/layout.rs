//! How a table is cut into the tensors of a file.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use safetensors::Dtype as TensorType;
use safetensors::tensor::TensorInfo;

use crate::config::{Dtype, TableConfig};
use crate::lifecycle::Usage;
use crate::optimizer::{Slot, SlotType};
use crate::table::{AdmissionCounts, CopiedRows, Table};

const _: () = assert!(cfg!(target_endian = "little"), "tensors are written as they lie in memory");

pub(in crate::checkpoint) const IDS: &str = "ids";
const ROWS: &str = "rows";
const USAGE_STEP: &str = "usage.step";
const USAGE_COUNT: &str = "usage.count";
pub(in crate::checkpoint) const DELETED: &str = "deleted_ids";
pub(in crate::checkpoint) const ADMISSION_IDS: &str = "admission.ids";
pub(in crate::checkpoint) const ADMISSION_COUNTS: &str = "admission.counts";
const SHARED: &str = "admission.shared.";
pub(in crate::checkpoint) const LEAVING: &str = "eviction.ids";
pub(super) const HEADER: &str = "header";

/// What a column is made of.
#[derive(Debug, Clone)]
pub(super) struct Column {
    pub(super) name: String,
    tensor_type: TensorType,
    /// The elements of a row.
    width: usize,
    pub(super) row_bytes: usize,
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
pub(crate) struct Layout {
    pub(super) columns: Vec<Column>,
    pub(super) stride: usize,
    pub(super) has_admission: bool,
    /// The columns of shared rows, for a table that has any.
    shared: Vec<Column>,
    pub(super) has_eviction: bool,
}

/// What a table remembers that is not about its rows.
#[derive(Debug, Default)]
pub(crate) struct TableState {
    /// None for a table that admits all ids.
    pub(crate) admission: Option<AdmissionCounts>,
    /// The columns of shared rows: names and types, and their bytes.
    shared: Vec<(String, TensorType, Vec<u8>)>,
    /// Ids of rows that will leave; none for a table that no row leaves.
    pub(crate) leaving: Option<Vec<i64>>,
}

impl TableState {
    /// Returns the tensors: names, types and values.
    pub(super) fn tensors(&self) -> Vec<(&str, TensorType, &[u8])> {
        let mut tensors = Vec::new();
        if let Some(AdmissionCounts { ids, counts }) = &self.admission {
            tensors.push((ADMISSION_IDS, TensorType::I64, bytemuck::cast_slice(ids)));
            tensors.push((ADMISSION_COUNTS, TensorType::U32, bytemuck::cast_slice(counts)));
        }
        tensors.extend(self.shared.iter().map(|(name, kind, bytes)| (&name[..], *kind, &bytes[..])));
        if let Some(ids) = &self.leaving {
            tensors.push((LEAVING, TensorType::I64, bytemuck::cast_slice(ids)));
        }
        tensors
    }

    /// Returns the elements of each tensor.
    pub(super) fn lengths(&self) -> BTreeMap<String, usize> {
        let length = |(name, kind, bytes): (&str, TensorType, &[u8])| {
            (name.to_owned(), bytes.len() * 8 / kind.bitsize())
        };
        self.tensors().into_iter().map(length).collect()
    }

    /// Returns room for what a file has.
    pub(super) fn sized(layout: &Layout, lengths: &BTreeMap<String, usize>) -> Self {
        let length = |name: &str| lengths.get(name).copied().unwrap_or(0);
        let admission = || AdmissionCounts {
            ids: vec![0; length(ADMISSION_IDS)],
            counts: vec![0; length(ADMISSION_COUNTS)],
        };
        let shared = layout.shared.iter().map(|column| {
            let bytes = length(&column.name) * column.tensor_type.bitsize() / 8;
            (column.name.clone(), column.tensor_type, vec![0; bytes])
        });
        Self {
            admission: layout.has_admission.then(admission),
            shared: shared.collect(),
            leaving: layout.has_eviction.then(|| vec![0; length(LEAVING)]),
        }
    }

    pub(super) fn bytes_of(&mut self, name: &str) -> Option<&mut [u8]> {
        let Self { admission, shared, leaving } = self;
        match name {
            ADMISSION_IDS => admission.as_mut().map(|counts| bytemuck::cast_slice_mut(&mut counts.ids)),
            ADMISSION_COUNTS => admission.as_mut().map(|counts| bytemuck::cast_slice_mut(&mut counts.counts)),
            LEAVING => leaving.as_mut().map(|ids| bytemuck::cast_slice_mut(ids)),
            _ => shared.iter_mut().find(|(known, ..)| known == name).map(|(.., bytes)| &mut bytes[..]),
        }
    }

    /// Returns what was counted, the records of shared rows and the ids that will leave as the tensors have them.
    pub(crate) fn of(
        layout: &Layout,
        admission: Option<AdmissionCounts>,
        shared: Vec<f32>,
        leaving: Option<Vec<i64>>,
    ) -> Self {
        let (rows, mut buffer) = (CopiedRows { records: shared, ..CopiedRows::default() }, Vec::new());
        let columns = layout.shared.iter().map(|column| {
            let bytes = column.bytes(layout, &rows, &mut buffer).to_vec();
            (column.name.clone(), column.tensor_type, bytes)
        });
        Self { admission, shared: columns.collect(), leaving }
    }

    /// Returns the records of shared rows.
    ///
    /// # Errors
    /// Says which of their columns has another number of them.
    pub(crate) fn shared_records(&self, layout: &Layout) -> Result<Vec<f32>, String> {
        let columns = || layout.shared.iter().zip(&self.shared).map(|(column, (.., bytes))| (column, bytes));
        let count = columns().map(|(column, bytes)| bytes.len() / column.row_bytes).next().unwrap_or(0);
        let mut rows = CopiedRows { records: vec![0.0; count * layout.stride], ..CopiedRows::default() };
        for (column, bytes) in columns() {
            if bytes.len() != count * column.row_bytes {
                return Err(format!("expected {count} rows of \"{}\", as of the others", column.name));
            }
            column.put(layout, bytes, &mut rows);
        }
        Ok(rows.records)
    }
}

impl Layout {
    pub(crate) fn of(table: &Table) -> Self {
        let (weight_words, stride) = table.record_words();
        let mut columns = vec![integers(IDS, Origin::Ids)];
        columns.extend(weights(table.config()));
        let mut word = weight_words;
        for slot in table.record_slots() {
            columns.extend(state(slot, word * size_of::<f32>()));
            word += slot.words();
        }
        let has_eviction = table.config().eviction.is_some();
        if has_eviction {
            columns.push(integers(USAGE_STEP, Origin::UsageStep));
            columns.push(integers(USAGE_COUNT, Origin::UsageCount));
        }
        let has_admission = table.config().admission.is_some();
        let of_record = columns.iter().filter(|column| matches!(column.origin, Origin::Record(_)));
        let shared = |column: &Column| Column { name: format!("{SHARED}{}", column.name), ..column.clone() };
        let shared = match table.config().shared_rows() {
            Some(_) => of_record.map(shared).collect(),
            None => Vec::new(),
        };
        Self { columns, stride, has_admission, shared, has_eviction }
    }

    /// Returns the tensors about the table, of these lengths.
    fn state_tensors(&self, lengths: &BTreeMap<String, usize>) -> Vec<(String, TensorType, Vec<usize>)> {
        let admission = [(ADMISSION_IDS, TensorType::I64), (ADMISSION_COUNTS, TensorType::U32)];
        let admission = admission.into_iter().filter(|_| self.has_admission);
        let eviction = self.has_eviction.then_some((LEAVING, TensorType::I64));
        let length = |name: &str| lengths.get(name).copied().unwrap_or(0);
        let tensor = |(name, kind): (&str, _)| (name.to_owned(), kind, vec![length(name)]);
        let shared = self.shared.iter().map(|column| {
            let shape = vec![length(&column.name) / column.width, column.width];
            (column.name.clone(), column.tensor_type, shape)
        });
        admission.map(tensor).chain(shared).chain(eviction.map(tensor)).collect()
    }

    /// Returns the bytes of a row in a file.
    pub(crate) fn row_bytes(&self) -> usize {
        self.columns.iter().map(|column| column.row_bytes).sum()
    }

    pub(super) fn tensors(
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

/// Returns the columns of the weights in a record.
fn weights(config: &TableConfig) -> Vec<Column> {
    let plain = |tensor_type| vec![column(ROWS, tensor_type, config.dim, 0)];
    let coded = |tensor_type| coded(ROWS, tensor_type, config.dim, 0);
    match config.dtype {
        Dtype::Float32 => plain(TensorType::F32),
        Dtype::Bfloat16 => plain(TensorType::BF16),
        Dtype::Float16 => plain(TensorType::F16),
        Dtype::Int8 => coded(TensorType::I8),
        Dtype::Float8E4m3fn => coded(TensorType::F8_E4M3),
    }
}

/// Returns the columns of a slot that lies in a record from this byte on.
fn state(slot: &Slot, first_byte: usize) -> Vec<Column> {
    let name = format!("slot.{}", slot.name);
    match slot.slot_type {
        SlotType::Float32 => vec![column(&name, TensorType::F32, slot.width, first_byte)],
        SlotType::Bfloat16 => vec![column(&name, TensorType::BF16, slot.width, first_byte)],
        SlotType::Float8 => coded(&name, TensorType::F8_E4M3, slot.width, first_byte),
        SlotType::Squares8 => coded(&name, TensorType::U8, slot.width, first_byte),
    }
}

/// Returns the columns of codes, and of the scale before them.
fn coded(name: &str, tensor_type: TensorType, width: usize, first_byte: usize) -> Vec<Column> {
    let scale = column(&format!("{name}.scale"), TensorType::F32, 1, first_byte);
    // In a record the scale lies before its codes.
    vec![column(name, tensor_type, width, first_byte + scale.row_bytes), scale]
}

fn column(name: &str, tensor_type: TensorType, width: usize, first_byte: usize) -> Column {
    let row_bytes = width * tensor_type.bitsize() / 8;
    Column { name: name.to_owned(), tensor_type, width, row_bytes, origin: Origin::Record(first_byte) }
}

fn integers(name: &str, origin: Origin) -> Column {
    let tensor_type = TensorType::I64;
    Column { name: name.to_owned(), tensor_type, width: 1, row_bytes: size_of::<i64>(), origin }
}

impl Column {
    /// Returns the column of `rows`; it may lie in `buffer`.
    pub(super) fn bytes<'a>(
        &self,
        layout: &Layout,
        rows: &'a CopiedRows,
        buffer: &'a mut Vec<u8>,
    ) -> &'a [u8] {
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
    pub(super) fn put(&self, layout: &Layout, bytes: &[u8], rows: &mut CopiedRows) {
        let values = || bytes.as_chunks().0.iter().map(|value| u64::from_le_bytes(*value));
        match self.origin {
            Origin::Ids => bytemuck::cast_slice_mut(&mut rows.ids).copy_from_slice(bytes),
            Origin::UsageStep => {
                let usages = rows.usages.iter_mut().zip(values());
                // The count comes with a column of its own, before or after: each keeps the other's half.
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
