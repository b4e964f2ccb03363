//! Where things lie in the file of a frozen table.
//!
//! | tensor | type | shape | |
//! |---|---|---|---|
//! | `ids` | int64 | `[lines, 8]` | up to 7 ids a line in the order of their hashes, and how many there are; see `index.rs` |
//! | `rows` | float32, bfloat16 or float16 | `[rows, dim]` | the row of each id |
//! | | uint8 | `[rows, bytes]` | the same as codes of 8 or 4 bits |
//! | `checks` | uint32 | `[blocks + 1]` | CRC-32 of the header and of every 64 KiB before this tensor |

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype as TensorType;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::encoding::Encoding;
use super::index::{Line, num_buckets};
use crate::config::TableConfig;

/// The bytes that have a checksum together.
pub(super) const BLOCK_BYTES: usize = 64 << 10;

/// What the file says of itself, beside its tensors.
pub(super) const FORMAT: &str = "recstore frozen table";
const VERSION: &str = "1";

/// The most bytes of a header: that of a real one takes about a kilobyte.
const HEADER_LIMIT: usize = 1 << 20;
const LENGTH_BYTES: usize = 8;

/// The table that a file holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Described {
    pub(super) name: String,
    pub(super) encoding: Encoding,
    pub(super) dim: usize,
    /// The table's configuration when it was frozen.
    pub(super) config: serde_json::Value,
}

/// The places of all parts, in bytes from the beginning of the file.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) described: Described,
    pub(super) num_rows: usize,
    /// Length and text of the header.
    pub(super) header: Range<usize>,
    pub(super) lines: Range<usize>,
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
        if u32::try_from(num_rows).is_err() {
            return Err(format!("{num_rows} rows: a file has at most {}", u32::MAX));
        }
        let sizes = sizes(&described, num_rows, lines);
        let tensors = tensors(&described, num_rows, sizes);
        let entries = [("format", FORMAT), ("version", VERSION), ("table", &as_text(&described)?)];
        let entries = entries.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let metadata =
            Metadata::new(Some(HashMap::from(entries)), tensors).map_err(|error| error.to_string())?;
        let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
        // Whole cache lines, so that ids begin with one.
        text.resize((LENGTH_BYTES + text.len()).next_multiple_of(64) - LENGTH_BYTES, b' ');
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
        let entries = metadata.metadata().clone().unwrap_or_default();
        let entry = |name: &str| entries.get(name).map_or("", String::as_str);
        if entry("format") != FORMAT {
            return Err(format!("it is no frozen table, but of the format \"{}\"", entry("format")));
        }
        if entry("version") != VERSION {
            return Err(format!(
                "it has version {} of the format, this program reads {VERSION}",
                entry("version")
            ));
        }
        let described: Described =
            serde_json::from_str(entry("table")).map_err(|error| format!("the table: {error}"))?;
        let first = |name| metadata.info(name).and_then(|info| info.shape.first().copied()).unwrap_or(0);
        let counts = (first("rows"), first("ids"));
        Self::agreed(&metadata, described, counts, LENGTH_BYTES + length, file.len())
    }

    /// Returns the layout of the table that a header describes, if the header has these tensors and the file this length.
    fn agreed(
        metadata: &Metadata,
        described: Described,
        (num_rows, lines): (usize, usize),
        header: usize,
        length: usize,
    ) -> Result<Self, String> {
        // Numbers of the file are multiplied only after their products are known to fit.
        if described.dim == 0 || num_rows.checked_mul(described.encoding.row_bytes(described.dim)).is_none() {
            return Err(format!("{num_rows} rows of {} values", described.dim));
        }
        if lines < num_buckets(num_rows) || lines.checked_mul(size_of::<Line>()).is_none() {
            return Err(format!("expected {} lines of ids or more, got {lines}", num_buckets(num_rows)));
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
        let layout = Self::at(described, num_rows, header, sizes);
        match layout.checks.end == length {
            true => Ok(layout),
            false => Err(format!("expected {} bytes, got {length}", layout.checks.end)),
        }
    }

    fn at(described: Described, num_rows: usize, header: usize, sizes: [usize; 3]) -> Self {
        let mut end = header;
        let [lines, rows, checks] = sizes.map(|size| {
            end += size;
            end - size..end
        });
        Self { described, num_rows, header: 0..header, lines, rows, checks }
    }

    /// Returns the bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.described.encoding.row_bytes(self.described.dim)
    }

    /// Returns the bytes that are in blocks, as a range of the file.
    pub(super) fn checked(&self) -> Range<usize> {
        self.header.end..self.checks.start
    }
}

impl Described {
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

/// The bytes of lines, rows and checks.
fn sizes(described: &Described, num_rows: usize, lines: usize) -> [usize; 3] {
    let lines = lines * size_of::<Line>();
    let rows = num_rows * described.encoding.row_bytes(described.dim);
    let blocks = (lines + rows).div_ceil(BLOCK_BYTES);
    // One checksum more than there are blocks: that of the header.
    [lines, rows, (blocks + 1) * size_of::<u32>()]
}

fn tensors(described: &Described, num_rows: usize, sizes: [usize; 3]) -> Vec<(String, TensorInfo)> {
    let (row_type, width) = match described.encoding {
        Encoding::Float32 => (TensorType::F32, described.dim),
        Encoding::Bfloat16 => (TensorType::BF16, described.dim),
        Encoding::Float16 => (TensorType::F16, described.dim),
        Encoding::Int8 | Encoding::Int4 => (TensorType::U8, described.encoding.row_bytes(described.dim)),
    };
    let kinds = [
        ("ids", TensorType::I64, vec![sizes[0] / size_of::<Line>(), 8]),
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
