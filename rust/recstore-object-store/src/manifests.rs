//! The manifests of a checkpoint: one object a save, numbered, of which the one of the highest number counts.
//!
//! A number is taken by whoever first puts an object of its name, which every object store can decide. So of two that
//! save at once, one is refused. A manifest stays for a day after it was replaced, so that nobody who is slow can take
//! a number for free that was given out before.

use futures_util::TryStreamExt;
use object_store::{Error as ObjectError, ObjectMeta, PutMode, PutOptions};

use crate::location::Location;
use crate::{Error, Result};

const PREFIX: &str = "manifest-";
const SUFFIX: &str = ".json";

/// A manifest as it lies in the object store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub(crate) number: u64,
    pub(crate) text: Vec<u8>,
}

/// Returns the name of the manifest of this number; ten digits, so that lists are in order.
pub(crate) fn name_of(number: u64) -> String {
    format!("{PREFIX}{number:010}{SUFFIX}")
}

/// Returns the number of a manifest's name.
pub(crate) fn number_of(object: &str) -> Option<u64> {
    let number = object.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()?;
    (name_of(number) == object).then_some(number)
}

/// Returns all objects right below the prefix.
pub(crate) async fn list(location: &Location) -> Result<Vec<ObjectMeta>> {
    let listed = location.objects.list(Some(location.prefix())).try_collect::<Vec<_>>().await;
    let mut objects = listed.map_err(location.about(""))?;
    objects
        .retain(|object| object.location == location.path_of(object.location.filename().unwrap_or_default()));
    Ok(objects)
}

/// Returns the newest manifest, if there is one.
pub(crate) async fn newest(location: &Location) -> Result<Option<Numbered>> {
    loop {
        let objects = list(location).await?;
        let numbers = objects.iter().filter_map(|object| number_of(object.location.filename()?));
        let Some(number) = numbers.max() else { return Ok(None) };
        match read(location, number).await {
            // It was removed since it was listed: there are newer ones.
            Err(error) if error.is_missing() => {}
            found => return Ok(Some(Numbered { number, text: found? })),
        }
    }
}

async fn read(location: &Location, number: u64) -> Result<Vec<u8>> {
    location.read(&name_of(number)).await
}

/// What became of a manifest that was to be put.
#[derive(Debug)]
pub(crate) enum Put {
    /// It counts.
    Counts,
    /// It does not, and never will.
    Refused(Error),
    /// The object store failed in such a way that it may count.
    Unknown(Error),
}

/// Puts a manifest under its number.
pub(crate) async fn put(location: &Location, manifest: &Numbered) -> Put {
    let name = name_of(manifest.number);
    let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
    let payload = manifest.text.clone().into();
    let Err(error) = location.objects.put_opts(&location.path_of(&name), payload, options).await else {
        return Put::Counts;
    };
    // Asked here, as the error is moved further below.
    let was_taken = matches!(error, ObjectError::AlreadyExists { .. });
    // An attempt that failed may have gone through, and its repetition have found it there.
    match read(location, manifest.number).await {
        Ok(text) if text == manifest.text => Put::Counts,
        Ok(_) => Put::Refused(Error::Conflict { url: location.url.clone(), object: name }),
        Err(missing) if missing.is_missing() && !was_taken => Put::Refused(location.about(&name)(error)),
        Err(_) => Put::Unknown(location.about(&name)(error)),
    }
}
