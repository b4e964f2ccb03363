//! Directories that are held open.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use recstore::FileError;

/// A directory that is held open: files are opened relative to it, over no symbolic link.
#[pyclass(frozen)]
pub(crate) struct Directory {
    path: PathBuf,
    held: Mutex<Option<recstore::Directory>>,
}

impl Directory {
    fn new(directory: recstore::Directory) -> Self {
        Self { path: directory.path().to_owned(), held: Mutex::new(Some(directory)) }
    }

    fn held(&self) -> PyResult<recstore::Directory> {
        // A clone, so that a call that runs without the GIL keeps the directory open if another thread closes
        // it.
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        held.ok_or_else(|| PyValueError::new_err(format!("{}: the directory is closed", self.path.display())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file inside.
    pub(crate) fn file(&self, py: Python<'_>, name: &Path) -> PyResult<File> {
        self.call(py, |held| held.open_file(name))
    }

    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(recstore::Directory) -> io::Result<T> + Send,
    ) -> PyResult<T> {
        let held = self.held()?;
        py.detach(|| work(held)).map_err(|error| refusal(py, &error))
    }

    fn descriptor(
        &self,
        py: Python<'_>,
        open: impl FnOnce(recstore::Directory) -> io::Result<File> + Send,
    ) -> PyResult<i32> {
        // Python owns the descriptor from here on and closes it.
        self.call(py, |held| open(held).map(IntoRawFd::into_raw_fd))
    }
}

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
impl Directory {
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| recstore::Directory::open(path)).map(Self::new).map_err(|error| refusal(py, &error))
    }

    #[staticmethod]
    fn create(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| recstore::Directory::create(path)).map(Self::new).map_err(|error| refusal(py, &error))
    }

    fn subdirectory(&self, py: Python<'_>, name: PathBuf) -> PyResult<Self> {
        self.call(py, |held| held.subdirectory(name)).map(Self::new)
    }

    fn create_subdirectory(&self, py: Python<'_>, name: PathBuf) -> PyResult<Self> {
        self.call(py, |held| held.create_subdirectory(name)).map(Self::new)
    }

    /// The descriptor of a file, which is the caller's to close.
    fn open_file(&self, py: Python<'_>, name: PathBuf) -> PyResult<i32> {
        self.descriptor(py, |held| held.open_file(name))
    }

    fn read<'py>(&self, py: Python<'py>, name: PathBuf, at_most: u64) -> PyResult<Bound<'py, PyBytes>> {
        let content = self.call(py, |held| held.read(name, at_most))?;
        Ok(PyBytes::new(py, &content))
    }

    fn create_new(&self, py: Python<'_>, name: PathBuf) -> PyResult<i32> {
        self.descriptor(py, |held| held.create_new(name))
    }

    fn append_to(&self, py: Python<'_>, name: PathBuf) -> PyResult<i32> {
        self.descriptor(py, |held| held.append_to(name))
    }

    fn lock_file(&self, py: Python<'_>, name: PathBuf) -> PyResult<i32> {
        self.descriptor(py, |held| held.lock_file(name))
    }

    fn replace(&self, py: Python<'_>, name: PathBuf, content: PyBackedBytes) -> PyResult<()> {
        self.call(py, |held| held.replace(name, &content))
    }

    fn remove_file(&self, py: Python<'_>, name: PathBuf) -> PyResult<()> {
        self.call(py, |held| held.remove_file(name))
    }

    fn remove_directory(&self, py: Python<'_>, name: PathBuf) -> PyResult<()> {
        self.call(py, |held| held.remove_directory(name))
    }

    fn remove_tree(&self, py: Python<'_>, name: PathBuf) -> PyResult<()> {
        self.call(py, |held| held.remove_tree(name))
    }

    fn rename(&self, py: Python<'_>, old: PathBuf, new: PathBuf) -> PyResult<()> {
        self.call(py, |held| held.rename(old, new))
    }

    fn link(&self, py: Python<'_>, name: PathBuf, other: &Self) -> PyResult<()> {
        let other = other.held()?;
        self.call(py, |held| held.link(name, &other))
    }

    /// What has a name: "a regular file", "a directory", "a symbolic link" ... or `None`.
    fn kind(&self, py: Python<'_>, name: PathBuf) -> PyResult<Option<String>> {
        Ok(self.call(py, |held| held.kind(name))?.map(|kind| kind.to_string()))
    }

    fn names(&self, py: Python<'_>) -> PyResult<Vec<OsString>> {
        let entries = self.call(py, |held| held.entries())?;
        Ok(entries.into_iter().map(|(name, _)| name).collect())
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |held| held.sync())
    }

    fn close(&self) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Checks that a name stays in its directory.
#[pyfunction]
pub(crate) fn check_file_name(name: PathBuf, whose: &str) -> PyResult<()> {
    recstore::check_name(name, &whose).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Raises an error about a file: Python chooses the class by its number.
pub(crate) fn refusal(py: Python<'_>, error: &io::Error) -> PyErr {
    match FileError::of(error) {
        Some(found) => match found.path.as_os_str().into_pyobject(py) {
            Ok(path) => PyOSError::new_err((found.errno, found.reason.clone(), path.unbind())),
            Err(never) => match never {},
        },
        None => PyValueError::new_err(error.to_string()),
    }
}
