//! What the manifest of a bundle says: its files, its tables, and what its program takes and gives.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::checked_json;
use crate::element::DType;
use crate::error::{Error, Result};

const NAME: &str = "manifest.json";
const FORMAT: &str = "recstore bundle";
const VERSION: u64 = 2;

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

/// What is read of a manifest.
#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    files: BTreeMap<String, Sum>,
    pub(crate) tables: Vec<BundledTable>,
    #[serde(default)]
    pub(crate) inputs: Vec<Described>,
    #[serde(default)]
    pub(crate) outputs: Vec<Described>,
}

impl Manifest {
    pub(crate) fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(NAME);
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => return Err(Error::unfit(directory, format!("it is no bundle: {NAME}: {error}"))),
        };
        let fields = checked_json::parse(&text, &path, FORMAT, VERSION)?;
        for tensors in ["inputs", "outputs"] {
            check_tensors(&path, tensors, fields.get(tensors))?;
        }
        serde_json::from_value(Value::Object(fields))
            .map_err(|error| Error::damaged(&path, error.to_string()))
    }

    /// Returns the bytes of a file of the program, None if the bundle has none of that name.
    pub(crate) fn read_file(&self, directory: &Path, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(expected) = self.files.get(name) else { return Ok(None) };
        let path: PathBuf = directory.join(name);
        let bytes = fs::read(&path).map_err(|error| Error::damaged(&path, error.to_string()))?;
        let found = Sum { bytes: bytes.len() as u64, crc32: crc32fast::hash(&bytes) };
        if found != *expected {
            let told = |sum: &Sum| format!("{} bytes with checksum {:08x}", sum.bytes, sum.crc32);
            let reason = format!("expected {}, got {}", told(expected), told(&found));
            return Err(Error::damaged(&path, reason));
        }
        Ok(Some(bytes))
    }
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
