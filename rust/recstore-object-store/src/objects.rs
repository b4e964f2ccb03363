//! Files to objects and back, a piece at a time.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStoreExt;
use object_store::buffered::BufWriter;
use tokio::fs::File;
use tokio::io::{AsyncWriteExt, BufReader, copy_buf};

use crate::location::Location;
use crate::manifests;
use crate::{Error, Result};

/// How many bytes go into one request.
const PIECE: usize = 8 << 20;

/// How many files are on their way at once.
const AT_ONCE: usize = 4;

/// How long that lies about which nobody needs: a save that takes longer may lose its files.
const GRACE: Duration = Duration::from_secs(24 * 60 * 60);

/// Uploads the files of these names in a directory.
pub(crate) async fn upload_all(location: &Location, directory: &Path, names: &[String]) -> Result<()> {
    let uploads = names.iter().map(|name| upload(location, directory.join(name), name));
    stream::iter(uploads).buffer_unordered(AT_ONCE).try_collect::<()>().await
}

#[expect(clippy::disallowed_methods, reason = "the caller's own path")]
pub(crate) async fn upload(location: &Location, path: PathBuf, name: &str) -> Result<()> {
    let file = File::open(&path).await.map_err(staging(location, &path))?;
    let mut source = BufReader::with_capacity(PIECE, file);
    let mut target = BufWriter::with_capacity(Arc::clone(&location.objects), location.path_of(name), PIECE);
    if let Err(error) = copy_buf(&mut source, &mut target).await {
        // What was uploaded of a large file would lie about, and cost; a `shutdown` that fails sees to it by itself.
        _ = target.abort().await;
        return Err(location.about(name)(as_object_error(error)));
    }
    target.shutdown().await.map_err(as_object_error).map_err(location.about(name))
}

/// Downloads the objects of these names to a directory.
pub(crate) async fn download_all<'a>(
    location: &Location,
    names: impl Iterator<Item = &'a String>,
    directory: &Path,
) -> Result<()> {
    let downloads = names.map(|name| download(location, name, directory.join(name)));
    stream::iter(downloads).buffer_unordered(AT_ONCE).try_collect::<()>().await
}

#[expect(clippy::disallowed_methods, reason = "the caller's own path")]
pub(crate) async fn download(location: &Location, name: &str, path: PathBuf) -> Result<()> {
    let found = location.objects.get(&location.path_of(name)).await.map_err(location.about(name))?;
    let mut pieces = found.into_stream();
    let mut file = File::create(&path).await.map_err(staging(location, &path))?;
    while let Some(piece) = pieces.try_next().await.map_err(location.about(name))? {
        file.write_all(&piece).await.map_err(staging(location, &path))?;
    }
    file.flush().await.map_err(staging(location, &path))
}

/// Removes objects. One that cannot be removed does no harm.
pub(crate) async fn remove(location: &Location, names: impl Iterator<Item = &String>) {
    for name in names {
        _ = location.objects.delete(&location.path_of(name)).await;
    }
}

/// Removes what saves left that never ended, and replaced manifests, once they are old.
pub(crate) async fn remove_old(location: &Location, is_needed: impl Fn(&str) -> bool) {
    let Ok(objects) = manifests::list(location).await else { return };
    let is_old = |changed: SystemTime| changed.elapsed().is_ok_and(|age| age > GRACE);
    for object in objects.iter().filter(|object| is_old(object.last_modified.into())) {
        let name = object.location.filename().unwrap_or_default();
        if is_own(name) && !is_needed(name) {
            _ = location.objects.delete(&object.location).await;
        }
    }
}

/// Whether an object is one of ours by its name.
fn is_own(name: &str) -> bool {
    let hexadecimal = name.bytes().take_while(u8::is_ascii_hexdigit).count();
    let is_of_rows =
        hexadecimal == 16 && name.as_bytes().get(16) == Some(&b'-') && name.contains(".safetensors");
    is_of_rows || manifests::number_of(name).is_some()
}

fn staging(location: &Location, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let (of, url, path) = (location.of, location.url.clone(), path.display().to_string());
    move |source| Error::Staging { of, url, path, source }
}

/// Returns what the object store said, which came as an error of input and output.
fn as_object_error(error: io::Error) -> object_store::Error {
    error
        .downcast()
        .unwrap_or_else(|error| object_store::Error::Generic { store: "upload", source: Box::new(error) })
}
