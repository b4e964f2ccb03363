//! Bundles: opened from a directory, asked with tensors.

use std::collections::HashMap;
use std::path::Path;

use bytemuck::checked;
use cxx::UniquePtr;
use recstore::{Directory, FileError, FrozenMemory};
use recstore_bridge::registry;

use crate::element::{DType, Element};
use crate::error::{Error, Result};
use crate::graph;
use crate::inputs::{self, Input};
use crate::manifest::{BundledTable, Described, Manifest, Ranges};
use crate::operators::Operators;
use crate::program::{Kept, Program, has_operators, new_program};
use crate::state::{State, StateTensor};

const GRAPH: &str = "graph.json";
const STATE: &str = "state.safetensors";

/// A model that predicts. Any number of threads may ask it at once.
pub struct Bundle {
    inputs: Vec<Described>,
    outputs: Vec<Described>,
    ranges: Ranges,
    // Before the tables, which it reads.
    program: UniquePtr<Program>,
    _tables: Vec<OpenTable>,
}

impl Bundle {
    /// Opens a bundle. Its tables are mapped: what a lookup reads is compared with its checksum when it is first read.
    ///
    /// # Errors
    /// [`Error::Unfit`]: there is no bundle, one of another version, or one that needs Python. [`Error::Damaged`],
    /// [`Error::Table`]: a file is missing, cut off, changed, or of another bundle. [`Error::Run`]: libtorch lacks an
    /// operator, or another copy of the operators is in the process.
    pub fn open(directory: &Path) -> Result<Self> {
        Self::open_with(directory, FrozenMemory::Mapped, &[])
    }

    /// Opens a bundle whose tables are mapped or copied, and whose program may call further operators than those of
    /// the list: exact names, such as `mine::op.default`, which were registered in this process.
    ///
    /// # Errors
    /// As [`Bundle::open`]. [`Error::Input`]: a name is not exact.
    pub fn open_with(directory: &Path, memory: FrozenMemory, operators: &[&str]) -> Result<Self> {
        let operators = Operators::with(operators)?;
        register_operators()?;
        let not_there = |error| Error::unfit(directory, FileError::at(directory, &error).reason);
        let directory = Directory::open(directory).map_err(not_there)?;
        let manifest = Manifest::read(&directory)?;
        let tables = manifest.tables.iter().map(|table| OpenTable::open(&directory, table, memory));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        let program = open_program(&directory, &manifest, &tables, &operators)?;
        let Manifest { inputs, outputs, ranges, .. } = manifest;
        Ok(Self { inputs, outputs, ranges, program, _tables: tables })
    }

    /// Returns what the bundle takes.
    #[must_use]
    pub fn inputs(&self) -> &[Described] {
        &self.inputs
    }

    /// Returns what the bundle gives.
    #[must_use]
    pub fn outputs(&self) -> &[Described] {
        &self.outputs
    }

    /// Returns the outputs for inputs, both in their order.
    ///
    /// # Errors
    /// [`Error::Input`]: tensors of another number, type or shape. [`Error::Run`]: an operator failed.
    pub fn run(&self, inputs: &[Input<'_>]) -> Result<Vec<Output>> {
        inputs::check(&self.inputs, &self.ranges, inputs)?;
        let views: Vec<_> = inputs.iter().map(Input::view).collect();
        let failed = |error: cxx::Exception| Error::Run(error.to_string());
        let mut given = self.program.run(&views).map_err(failed)?;
        let output = |(place, description): (usize, &Described)| {
            Ok(Output { name: description.name.clone(), kept: given.pin_mut().take(place).map_err(failed)? })
        };
        self.outputs.iter().enumerate().map(output).collect()
    }
}

/// A tensor that a bundle gave.
pub struct Output {
    name: String,
    kept: UniquePtr<Kept>,
}

impl Output {
    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its sizes.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        self.kept.shape()
    }

    /// Returns the type of its elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        DType::named(self.kept.dtype()).expect("the program gives no others")
    }

    /// Returns its elements, one behind the other.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.kept.bytes()
    }

    /// Returns its elements as those of a type.
    ///
    /// # Errors
    /// [`Error::Output`]: they are of another type. [`Error::Run`]: they are bytes that are no bools.
    pub fn values<T: Element>(&self) -> Result<&[T]> {
        if self.dtype() != T::DTYPE {
            let (expected, found) = (T::DTYPE.name(), self.dtype().name());
            return Err(Error::Output { name: self.name.clone(), expected, found });
        }
        checked::try_cast_slice(self.bytes())
            .map_err(|error| Error::Run(format!("output {}: {error}", self.name)))
    }
}

/// A table of a bundle; it is closed when it is dropped.
struct OpenTable {
    words: Vec<i64>,
    constants: Vec<String>,
}

impl OpenTable {
    fn open(directory: &Directory, bundled: &BundledTable, memory: FrozenMemory) -> Result<Self> {
        let path = directory.path().join(&bundled.file);
        let file = directory.open_file(&bundled.file).map_err(|error| Error::unreadable(&path, &error))?;
        let registry = registry().map_err(|failure| Error::Run(failure.to_string()))?;
        let opened = registry.open_frozen(&file, &path, memory)?;
        let table = Self { words: opened.handle, constants: bundled.constants.clone() };
        let name = opened.table.describe()?.name;
        if (&name, opened.fingerprint) != (&bundled.name, bundled.fingerprint) {
            let (expected, fingerprint) = (&bundled.name, bundled.fingerprint);
            let reason = format!(
                "it is not of this bundle: expected table {expected} with fingerprint {fingerprint:08x}, got {name} \
                 with {:08x}",
                opened.fingerprint
            );
            return Err(Error::damaged(&path, reason));
        }
        Ok(table)
    }
}

impl Drop for OpenTable {
    fn drop(&mut self) {
        if let Ok(registry) = registry() {
            // It was open until now, so that there is nothing that could fail.
            drop(registry.close_frozen(&self.words));
        }
    }
}

/// The words of the tables' handles, by the constants that hold them.
fn handles_of(tables: &[OpenTable]) -> HashMap<&str, &[i64]> {
    let mut handles = HashMap::new();
    for table in tables {
        handles.extend(table.constants.iter().map(|name| (name.as_str(), table.words.as_slice())));
    }
    handles
}

fn register_operators() -> Result<()> {
    static REGISTERED: std::sync::OnceLock<std::result::Result<(), String>> = std::sync::OnceLock::new();
    REGISTERED.get_or_init(register).clone().map_err(Error::Run)
}

fn register() -> std::result::Result<(), String> {
    if has_operators() {
        return Err(
            "this process has the operators of recstore-ops already, such as those of its Python package: \
                    open the bundle there"
                .to_owned(),
        );
    }
    recstore_bridge::register_ops().map_err(|error| error.to_string())
}

fn open_program(
    directory: &Directory,
    manifest: &Manifest,
    tables: &[OpenTable],
    operators: &Operators,
) -> Result<UniquePtr<Program>> {
    let no_graph =
        || Error::unfit(directory.path(), "it has no graph: only torch's own program, which needs Python");
    let graph = manifest.read_file(directory, GRAPH)?.ok_or_else(no_graph)?;
    let unfit = |reason: String| Error::unfit(&directory.path().join(GRAPH), reason);
    let (inputs, outputs) = (manifest.inputs.len(), manifest.outputs.len());
    let graph = graph::parse(&graph, inputs, outputs, operators).map_err(unfit)?;
    let (path, bytes) =
        (directory.path().join(STATE), manifest.read_file(directory, STATE)?.unwrap_or_default());
    let state = State::parse(&path, &bytes)?;
    let handles = handles_of(tables);
    let tensors = graph.state.iter().map(|name| match handles.get(name.as_str()) {
        Some(words) => Ok(StateTensor::of_words(words)),
        None => state.tensor(name),
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let views: Vec<_> = tensors.iter().map(StateTensor::view).collect();
    let made = new_program(&views, inputs, &graph.calls, &graph.outputs);
    made.map_err(|error| unfit(error.to_string()))
}
