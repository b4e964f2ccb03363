//! A folder in an object store: files by their names, which may have slashes.

use std::path::Path;

use futures_util::TryStreamExt;
use object_store::ObjectStoreExt;

use crate::Result;
use crate::location::Location;
use crate::objects::{download, upload};
use crate::waiting::Requests;

/// A folder in an object store.
#[derive(Debug)]
pub struct ObjectFolder {
    location: Location,
    requests: Requests,
}

impl ObjectFolder {
    /// Returns the folder at a URL, whether or not there is anything, as
    /// [`ObjectCheckpoint::from_url`](crate::ObjectCheckpoint::from_url) does. `of` says what it is in messages.
    ///
    /// # Errors
    /// [`crate::Error::Url`]: the URL or an option is not understood.
    pub fn from_url<'a>(
        of: &'static str,
        url: &str,
        options: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self> {
        let location = Location::from_url(of, url, options)?;
        Ok(Self { requests: Requests::to(&location)?, location })
    }

    /// Returns the names of all files.
    ///
    /// # Errors
    /// [`crate::Error::Object`]: the object store does not answer, or refuses; so below.
    pub fn names(&self) -> Result<Vec<String>> {
        let location = &self.location;
        let listed =
            self.requests.wait(|| location.objects.list(Some(location.prefix())).try_collect::<Vec<_>>());
        let name = |object: object_store::ObjectMeta| {
            let parts: Vec<_> = object.location.prefix_match(location.prefix())?.collect();
            let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
            Some(parts.join("/"))
        };
        Ok(listed.map_err(location.about(""))?.into_iter().filter_map(name).collect())
    }

    /// Returns the content of a file, None if there is no such file.
    ///
    /// # Errors
    /// As above.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        found(self.requests.wait(|| self.location.read(name)))
    }

    /// Copies a file to a path, and returns whether there is one.
    ///
    /// # Errors
    /// As above; [`crate::Error::Staging`]: the path cannot be written.
    pub fn download(&self, name: &str, path: &Path) -> Result<bool> {
        found(self.requests.wait(|| download(&self.location, name, path.to_owned())))
            .map(|found| found.is_some())
    }

    /// Writes a file, in the place of one that is there.
    ///
    /// # Errors
    /// As above.
    pub fn write(&self, name: &str, content: Vec<u8>) -> Result<()> {
        let location = &self.location;
        let path = location.path_of(name);
        let written = self.requests.wait(|| location.objects.put(&path, content.into()));
        written.map(drop).map_err(location.about(name))
    }

    /// Copies the file of a path to one of this folder.
    ///
    /// # Errors
    /// As above; [`crate::Error::Staging`]: the path cannot be read.
    pub fn upload(&self, name: &str, path: &Path) -> Result<()> {
        self.requests.wait(|| upload(&self.location, path.to_owned(), name))
    }

    /// Deletes a file, if there is one.
    ///
    /// # Errors
    /// As above.
    pub fn remove(&self, name: &str) -> Result<()> {
        let location = &self.location;
        let path = location.path_of(name);
        let removed = self.requests.wait(|| location.objects.delete(&path));
        found(removed.map_err(location.about(name))).map(drop)
    }
}

/// None in the place of the error that there is no such object.
fn found<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(error) if error.is_missing() => Ok(None),
        result => result.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_back_by_their_names() {
        let (directory, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let url = format!("file://{}/news", directory.path().display());
        let folder = ObjectFolder::from_url("publication", &url, []).unwrap();
        let (name, path) = ("updates/1-ab.update", local.path().join("file"));
        assert_eq!(folder.read(name).unwrap(), None);
        assert!(!folder.download(name, &path).unwrap());
        folder.remove(name).unwrap();
        folder.write(name, b"rows".to_vec()).unwrap();
        assert_eq!(folder.read(name).unwrap().unwrap(), b"rows");
        assert!(folder.download(name, &path).unwrap());
        folder.upload("current.json", &path).unwrap();
        let mut names = folder.names().unwrap();
        names.sort();
        assert_eq!(names, ["current.json", name]);
        folder.remove(name).unwrap();
        assert_eq!(folder.names().unwrap(), ["current.json"]);
        let error = folder.upload("other", &local.path().join("none")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("publication: {url}: the temporary file ")), "{error}");
        let error = ObjectFolder::from_url("publication", "gs://b", []).unwrap_err().to_string();
        assert_eq!(error, "publication: gs://b: expected a URL of s3:// or file://, got gs://");
    }
}
