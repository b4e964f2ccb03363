//! Where things lie in the file of a frozen table.
//!
//! | tensor | type | shape | |
//! |---|---|---|---|
//! | `index` | uint8 | `[lines, 64]` | says where the row of an id is; see `index` |
//! | `rows` | float32, bfloat16 or float16 | `[rows, dim]` | the row of each id |
//! | | uint8 | `[rows, bytes]` | the same as codes of 8 or 4 bits; where the index is a hash rows of any encoding, each with its id behind it, int64 |
//! | `checks` | uint32 | `[blocks + 1]` | CRC-32 of the header and of every 64 KiB before this tensor |
//!
//! In version 1 the first tensor is `ids`, int64 `[lines, 8]`, and no row has its id behind it.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype as TensorType;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::blocks::BLOCK_BYTES;
use super::encoding::Encoding;
use super::index::IndexShape;
use super::record::Record;
use crate::config::TableConfig;
use crate::kernel::cache::LINE_BYTES;

/// What the file says of itself, beside its tensors.
pub(super) const FORMAT: &str = "recstore frozen table";
const VERSION: &str = "2";

/// The version whose index is lines of ids; it is read, and written no more.
const VERSION_OF_LINES: &str = "1";

/// The most bytes of a header: that of a real one takes about a kilobyte.
const HEADER_LIMIT: usize = 1 << 20;
const LENGTH_BYTES: usize = 8;

/// The most rows, or lines of an index, and the most values of a row: the bytes of all have an address.
const COUNT_LIMIT: usize = u32::MAX as usize;
const DIM_LIMIT: usize = 1 << 24;

/// The table that a file holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Described {
    pub(super) name: String,
    pub(super) encoding: Encoding,
    pub(super) dim: usize,
    /// The table's configuration when it was frozen.
    pub(super) config: serde_json::Value,
    #[serde(default, skip_serializing_if = "IndexShape::is_lines")]
    pub(super) index: IndexShape,
}

/// The places of all parts, in bytes from the beginning of the file.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) described: Described,
    pub(super) num_rows: usize,
    pub(super) record: Record,
    /// Length and text of the header.
    pub(super) header: Range<usize>,
    pub(super) index: Range<usize>,
    pub(super) rows: Range<usize>,
    pub(super) checks: Range<usize>,
}

impl Layout {
    /// Returns the layout of a table, and the header that says it.
    pub(super) fn new(
        described: Described,
        num_rows: usize,
        lines: usize,
    ) -> Result<(Self, Vec<u8>), String> {
        described.check_counts(num_rows, lines)?;
        let sizes = sizes(&described, num_rows, lines);
        let tensors = tensors(&described, num_rows, sizes);
        let entries = [("format", FORMAT), ("version", VERSION), ("table", &as_text(&described)?)];
        let entries = entries.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let metadata =
            Metadata::new(Some(HashMap::from(entries)), tensors).map_err(|error| error.to_string())?;
        // By way of a value, whose names have an order: equal rows give equal files.
        let text = serde_json::to_value(&metadata).map_err(|error| error.to_string())?;
        let mut text = text.to_string().into_bytes();
        // Whole cache lines, so that the index and the rows begin with one.
        text.resize((LENGTH_BYTES + text.len()).next_multiple_of(LINE_BYTES) - LENGTH_BYTES, b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(&text);
        Ok((Self::at(described, num_rows, header.len(), sizes), header))
    }

    /// Reads the layout of a file, whose length it must agree with.
    ///
    /// # Errors
    /// Says what is wrong.
    pub(super) fn read(file: &[u8]) -> Result<Self, String> {
        let length = file.first_chunk::<LENGTH_BYTES>().map(|bytes| u64::from_le_bytes(*bytes) as usize);
        let length = length.ok_or("it is no frozen table: it has no header")?;
        let text = file.get(LENGTH_BYTES..LENGTH_BYTES.saturating_add(length));
        let text = text.filter(|text| text.len() <= HEADER_LIMIT);
        let text =
            text.ok_or_else(|| format!("it is cut off, or no frozen table: a header of {length} bytes"))?;
        let metadata: Metadata =
            serde_json::from_slice(text).map_err(|error| format!("the header: {error}"))?;
        let layout = Self::of_header(&metadata, LENGTH_BYTES + length)?;
        match layout.checks.end == file.len() {
            true => Ok(layout),
            false => Err(format!("expected {} bytes, got {}", layout.checks.end, file.len())),
        }
    }

    /// Returns the layout that a header of so many bytes describes.
    ///
    /// # Errors
    /// As [`Layout::read`].
    pub(super) fn of_header(metadata: &Metadata, bytes: usize) -> Result<Self, String> {
        let entries = metadata.metadata().clone().unwrap_or_default();
        let entry = |name: &str| entries.get(name).map_or("", String::as_str);
        if entry("format") != FORMAT {
            return Err(format!("it is no frozen table, but of the format \"{}\"", entry("format")));
        }
        let version = entry("version");
        if ![VERSION, VERSION_OF_LINES].contains(&version) {
            return Err(format!(
                "it has version {version} of the format, this program reads {VERSION_OF_LINES} and {VERSION}"
            ));
        }
        let described: Described =
            serde_json::from_str(entry("table")).map_err(|error| format!("the table: {error}"))?;
        if described.index.is_lines() != (version == VERSION_OF_LINES) {
            return Err(format!("it has version {version} of the format, and the index of the other"));
        }
        let first = |name| metadata.info(name).and_then(|info| info.shape.first().copied()).unwrap_or(0);
        let counts = (first("rows"), first(index_name(&described)));
        Self::agreed(metadata, described, counts, bytes)
    }

    /// Returns the layout of the table that a header describes, if the header has these tensors.
    fn agreed(
        metadata: &Metadata,
        described: Described,
        (num_rows, lines): (usize, usize),
        header: usize,
    ) -> Result<Self, String> {
        // Numbers of the file are multiplied only after their products are known to fit.
        described.check_counts(num_rows, lines)?;
        let expected = described.index.lines(num_rows).ok_or("a hash that no memory has")?;
        if !expected.contains(&lines) {
            return Err(format!("expected {} lines of the index or more, got {lines}", expected.start()));
        }
        let sizes = sizes(&described, num_rows, lines);
        for (name, expected) in tensors(&described, num_rows, sizes) {
            match metadata.info(&name) {
                Some(found) if is_same(found, &expected) => {}
                found => {
                    return Err(format!(
                        "expected the tensor {name} {}, got {}",
                        shown(Some(&expected)),
                        shown(found)
                    ));
                }
            }
        }
        // Places come from these sizes. The file's own offsets only had to agree, so none can point
        // elsewhere.
        Ok(Self::at(described, num_rows, header, sizes))
    }

    fn at(described: Described, num_rows: usize, header: usize, sizes: [usize; 3]) -> Self {
        let mut end = header;
        let record = described.record();
        let [index, rows, checks] = sizes.map(|size| {
            end += size;
            end - size..end
        });
        Self { described, num_rows, record, header: 0..header, index, rows, checks }
    }

    /// Returns the bytes that are in blocks, as a range of the file.
    pub(super) fn checked(&self) -> Range<usize> {
        self.header.end..self.checks.start
    }
}

impl Described {
    fn check_counts(&self, num_rows: usize, lines: usize) -> Result<(), String> {
        if (1..=DIM_LIMIT).contains(&self.dim) && num_rows.max(lines) <= COUNT_LIMIT {
            return Ok(());
        }
        Err(format!(
            "{num_rows} rows of {} values, {lines} lines of the index: a file has at most {COUNT_LIMIT} rows and lines, \
             and {DIM_LIMIT} values a row",
            self.dim
        ))
    }

    /// Returns how its rows lie.
    fn record(&self) -> Record {
        Record::new(self.encoding, self.dim, self.index.has_ids_in_rows())
    }

    /// Returns the configuration of the table when it was frozen.
    pub(super) fn table_config(&self) -> crate::Result<TableConfig> {
        TableConfig::from_json(self.dim, &self.config.to_string())
    }
}

fn as_text(described: &Described) -> Result<String, String> {
    serde_json::to_string(described).map_err(|error| error.to_string())
}

/// A tensor in words: type, shape and place.
fn shown(tensor: Option<&TensorInfo>) -> String {
    let Some(TensorInfo { dtype, shape, data_offsets: (start, end) }) = tensor else {
        return "none".to_owned();
    };
    let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("{dtype} [{}] in the bytes {start} to {end}", shape.join(", "))
}

fn is_same(one: &TensorInfo, other: &TensorInfo) -> bool {
    (one.dtype, &one.shape, one.data_offsets) == (other.dtype, &other.shape, other.data_offsets)
}

/// The bytes of index, rows and checks.
fn sizes(described: &Described, num_rows: usize, lines: usize) -> [usize; 3] {
    let index = lines * LINE_BYTES;
    let rows = num_rows * described.record().stride();
    let blocks = (index + rows).div_ceil(BLOCK_BYTES);
    // One checksum more than there are blocks: that of the header.
    [index, rows, (blocks + 1) * size_of::<u32>()]
}

fn index_name(described: &Described) -> &'static str {
    if described.index.is_lines() { "ids" } else { "index" }
}

fn tensors(described: &Described, num_rows: usize, sizes: [usize; 3]) -> Vec<(String, TensorInfo)> {
    let record = described.record();
    let (row_type, width) = match described.encoding {
        _ if record.has_id() => (TensorType::U8, record.stride()),
        Encoding::Float32 => (TensorType::F32, described.dim),
        Encoding::Bfloat16 => (TensorType::BF16, described.dim),
        Encoding::Float16 => (TensorType::F16, described.dim),
        Encoding::Int8 | Encoding::Int4 => (TensorType::U8, record.stride()),
    };
    let (line_type, line) = match described.index.is_lines() {
        true => (TensorType::I64, LINE_BYTES / size_of::<i64>()),
        false => (TensorType::U8, LINE_BYTES),
    };
    let kinds = [
        (index_name(described), line_type, vec![sizes[0] / LINE_BYTES, line]),
        ("rows", row_type, vec![num_rows, width]),
        ("checks", TensorType::U32, vec![sizes[2] / size_of::<u32>()]),
    ];
    let mut end = 0;
    let tensor = |((name, dtype, shape), size): ((&str, TensorType, Vec<usize>), usize)| {
        end += size;
        (name.to_owned(), TensorInfo { dtype, shape, data_offsets: (end - size, end) })
    };
    kinds.into_iter().zip(sizes).map(tensor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_read_again_is_not_written() {
        let layout = |dim, num_rows| {
            let described = Described {
                name: "t".to_owned(),
                encoding: Encoding::Float32,
                dim,
                config: serde_json::Value::Null,
                index: IndexShape::Consecutive { first: 0 },
            };
            Layout::new(described, num_rows, 0)
        };
        let (written, header) = layout(DIM_LIMIT, 1).unwrap();
        let length = written.header.end;
        let metadata: Metadata = serde_json::from_slice(&header[LENGTH_BYTES..]).unwrap();
        assert_eq!(Layout::of_header(&metadata, length).unwrap().checks, written.checks);
        for (dim, num_rows) in [(DIM_LIMIT + 1, 1), (0, 1), (1, COUNT_LIMIT + 1)] {
            let message = layout(dim, num_rows).unwrap_err();
            assert!(message.contains("a file has at most 4294967295 rows and lines"), "{message}");
        }
    }
}
