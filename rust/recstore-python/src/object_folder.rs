//! Files in object stores.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use recstore_object_store::{Error, ObjectFolder};

/// What messages call it.
const PUBLICATION: &str = "publication";

/// The folder of a publication in an object store.
#[pyclass(frozen, module = "recstore_ops")]
pub(crate) struct PublicationFolder(ObjectFolder);

#[pymethods]
impl PublicationFolder {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn new(url: &str, options: BTreeMap<String, String>) -> PyResult<Self> {
        let options = options.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        ObjectFolder::from_url(PUBLICATION, url, options).map(Self).map_err(raise)
    }

    /// The names of all files.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.0.names()).map_err(raise)
    }

    /// The content of a file; None: there is no such file.
    fn read<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let content = py.detach(|| self.0.read(name)).map_err(raise)?;
        Ok(content.map(|content| PyBytes::new(py, &content)))
    }

    /// Copies a file to a path; False: there is no such file.
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn download(&self, py: Python<'_>, name: &str, path: PathBuf) -> PyResult<bool> {
        py.detach(|| self.0.download(name, &path)).map_err(raise)
    }

    /// Writes a file.
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn write(&self, py: Python<'_>, name: &str, content: PyBackedBytes) -> PyResult<()> {
        py.detach(|| self.0.write(name, content.to_vec())).map_err(raise)
    }

    /// Copies the file of a path.
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python are converted")]
    fn upload(&self, py: Python<'_>, name: &str, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.upload(name, &path)).map_err(raise)
    }

    /// Deletes a file, if there is one.
    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.0.remove(name)).map_err(raise)
    }
}

fn raise(error: Error) -> PyErr {
    match error {
        error @ Error::Url { .. } => PyValueError::new_err(error.to_string()),
        error => PyOSError::new_err(error.to_string()),
    }
}
