//! What the manifest of a bundle says: its files, its tables, and what its program takes and gives.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

use recstore::{Directory, FileError};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::checked_json;
use crate::element::DType;
use crate::error::{Error, Result};

const NAME: &str = "manifest.json";
const FORMAT: &str = "recstore bundle";
const VERSION: u64 = 3;
/// The version before, whose sizes have no bounds.
const WITHOUT_RANGES: u64 = 2;
const MAX_BYTES: u64 = 64 << 20;
/// The files of a program.
const FILES: [&str; 4] = ["program.pt2", "graph.json", "state.safetensors", "compiled.pt2"];

/// A tensor that a bundle takes or gives.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its sizes; those that vary are -1.
    pub shape: Vec<i64>,
    /// The names of sizes that vary. Sizes of one name are equal in every call.
    pub sizes: Vec<Option<String>>,
}

impl Described {
    /// Whether the sizes that vary have names, and they alone.
    fn has_whole_sizes(&self) -> bool {
        let fits = |(&size, name): (&i64, &Option<String>)| size >= -1 && (size == -1) == name.is_some();
        self.shape.len() == self.sizes.len() && self.shape.iter().zip(&self.sizes).all(fits)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BundledTable {
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) fingerprint: u32,
    pub(crate) constants: Vec<String>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sum {
    bytes: u64,
    crc32: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    #[serde(rename = "torch")]
    _torch: String,
    #[serde(rename = "recstore_ops")]
    _recstore_ops: String,
    files: BTreeMap<String, Sum>,
    pub(crate) tables: Vec<BundledTable>,
    pub(crate) inputs: Vec<Described>,
    pub(crate) outputs: Vec<Described>,
    #[serde(rename = "compiled_for")]
    _compiled_for: Option<String>,
    pub(crate) ranges: Ranges,
}

/// The bounds of sizes that have some, by their names.
pub(crate) type Ranges = BTreeMap<String, Range>;

/// The bounds of a size, of which the upper one may lack.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct Range(u64, Option<u64>);

impl Range {
    pub(crate) fn has(self, size: i64) -> bool {
        u64::try_from(size).is_ok_and(|size| self.0 <= size && self.1.is_none_or(|most| size <= most))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self(least, None) => write!(f, "{least} or more"),
            Self(0, Some(most)) => write!(f, "{most} or less"),
            Self(least, Some(most)) => write!(f, "{least} to {most}"),
        }
    }
}

impl Manifest {
    pub(crate) fn read(directory: &Directory) -> Result<Self> {
        let path = directory.path().join(NAME);
        let bytes = directory.read(NAME, MAX_BYTES).map_err(|error| {
            let reason = FileError::at(&path, &error).reason;
            Error::unfit(directory.path(), format!("it is no bundle: {NAME}: {reason}"))
        })?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (mut fields, version) = checked_json::parse(&text, &path, FORMAT, &[VERSION, WITHOUT_RANGES])?;
        if version == WITHOUT_RANGES {
            fields.insert("ranges".to_owned(), Value::Object(Map::new()));
        }
        for tensors in ["inputs", "outputs"] {
            check_tensors(&path, tensors, fields.get(tensors))?;
        }
        let manifest: Self = serde_json::from_value(Value::Object(fields))
            .map_err(|error| Error::damaged(&path, error.to_string()))?;
        manifest.check().map_err(|reason| Error::damaged(&path, reason))?;
        Ok(manifest)
    }

    /// Says which of its parts is none that bundles have.
    fn check(&self) -> std::result::Result<(), String> {
        if let Some(name) = self.files.keys().find(|name| !FILES.contains(&name.as_str())) {
            return Err(format!("{name:?} is no file of a bundle"));
        }
        if let Some(table) = self.tables.iter().find(|table| !is_file_of_a_table(&table.file)) {
            return Err(format!("{:?} is no file of a table", table.file));
        }
        if self.files.contains_key("graph.json") != self.files.contains_key("state.safetensors") {
            return Err("it has one of graph.json and state.safetensors".to_owned());
        }
        let tables = self.tables.iter();
        check_different("a name of its tables", tables.clone().map(|table| &table.name))?;
        check_different("a file of its tables", tables.clone().map(|table| &table.file))?;
        check_different("a constant of its tables", tables.flat_map(|table| &table.constants))?;
        check_different("an input", self.inputs.iter().map(|tensor| &tensor.name))?;
        self.check_ranges()?;
        match self.inputs.iter().chain(&self.outputs).find(|tensor| !tensor.has_whole_sizes()) {
            Some(tensor) => {
                let Described { name, shape, sizes, .. } = tensor;
                Err(format!("{name:?} has shape {shape:?} with the names {sizes:?}"))
            }
            None => Ok(()),
        }
    }

    /// Says which of the bounds is none of a size of an input.
    fn check_ranges(&self) -> std::result::Result<(), String> {
        let names: HashSet<_> = self.inputs.iter().flat_map(|tensor| &tensor.sizes).flatten().collect();
        let is_whole = |name: &String, range: &Range| {
            names.contains(name) && range.1.is_none_or(|most| range.0 <= most) && range.0 <= i64::MAX as u64
        };
        match self.ranges.iter().find(|(name, range)| !is_whole(name, range)) {
            Some((name, range)) => Err(format!("its inputs have no size {name:?} of {range}")),
            None => Ok(()),
        }
    }

    /// Returns the bytes of a file of the program, None if the bundle has none of that name.
    pub(crate) fn read_file(&self, directory: &Directory, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(expected) = self.files.get(name) else { return Ok(None) };
        let path = directory.path().join(name);
        let bytes = directory.read(name, expected.bytes).map_err(|error| Error::unreadable(&path, &error))?;
        let found = Sum { bytes: bytes.len() as u64, crc32: crc32fast::hash(&bytes) };
        if found != *expected {
            let told = |sum: &Sum| format!("{} bytes with checksum {:08x}", sum.bytes, sum.crc32);
            let reason = format!("expected {}, got {}", told(expected), told(&found));
            return Err(Error::damaged(&path, reason));
        }
        Ok(Some(bytes))
    }
}

fn check_different<'a>(
    what: &str,
    names: impl Iterator<Item = &'a String>,
) -> std::result::Result<(), String> {
    let mut known = HashSet::new();
    let twice = names.into_iter().find(|name| !known.insert(name.as_str()));
    twice.map_or(Ok(()), |name| Err(format!("it has {what} twice, {name:?}")))
}

/// Whether a name is `tables/N.safetensors`.
fn is_file_of_a_table(name: &str) -> bool {
    let number = name.strip_prefix("tables/").and_then(|rest| rest.strip_suffix(".safetensors"));
    number.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Says which of the tensors is none that this runtime can take or give.
fn check_tensors(path: &Path, which: &str, tensors: Option<&Value>) -> Result<()> {
    for tensor in tensors.and_then(Value::as_array).into_iter().flatten() {
        let known = tensor.get("dtype").and_then(Value::as_str).and_then(DType::named);
        if known.is_none() {
            let reason = format!("this runtime has no type for one of its {which}: {tensor}");
            return Err(Error::unfit(path, reason));
        }
    }
    Ok(())
}
