//! Where objects are: an object store and a prefix.

use std::env;
use std::str::FromStr;
use std::sync::Arc;

use object_store::aws::AmazonS3ConfigKey;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, parse_url_opts};
use url::Url;

use crate::{Error, Result};

const SCHEMES: [&str; 3] = ["s3", "s3a", "file"];

/// A prefix in an object store.
#[derive(Debug, Clone)]
pub(crate) struct Location {
    pub(crate) objects: Arc<dyn ObjectStore>,
    prefix: Path,
    /// How messages call it.
    pub(crate) url: String,
    /// What is there.
    pub(crate) of: &'static str,
}

/// What messages call a checkpoint.
pub(crate) const CHECKPOINT: &str = "checkpoint";

impl Location {
    pub(crate) fn new(objects: Arc<dyn ObjectStore>, prefix: Path) -> Self {
        let url = format!("{objects}/{prefix}");
        Self { objects, prefix, url, of: CHECKPOINT }
    }

    /// Opens what a URL names. Options come before those of the environment, `AWS_ACCESS_KEY_ID` and the like.
    pub(crate) fn from_url<'a>(
        of: &'static str,
        text: &str,
        options: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self> {
        let refused = |message: String| Error::Url { of, url: text.to_owned(), message };
        let url = Url::parse(text).map_err(|error| refused(format!("this is no URL: {error}")))?;
        let scheme = url.scheme();
        if !SCHEMES.contains(&scheme) {
            return Err(refused(format!("expected a URL of s3:// or file://, got {scheme}://")));
        }
        let given: Vec<_> = options.into_iter().collect();
        if let Some((unknown, _)) = given.iter().find(|(key, _)| scheme == "file" || !is_known(key)) {
            return Err(refused(format!("{scheme}:// has no storage option \"{unknown}\"")));
        }
        let all = environment(scheme)
            .chain(given.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())));
        // TLS takes the library that the process chose, if it has.
        _ = rustls::crypto::ring::default_provider().install_default();
        let (objects, prefix) = parse_url_opts(&url, all).map_err(|error| refused(error.to_string()))?;
        Ok(Self { objects: objects.into(), prefix, url: text.trim_end_matches('/').to_owned(), of })
    }

    /// Returns the path of an object below the prefix.
    pub(crate) fn path_of(&self, object: &str) -> Path {
        object.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    pub(crate) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Returns the content of an object.
    pub(crate) async fn read(&self, object: &str) -> Result<Vec<u8>> {
        let found = self.objects.get(&self.path_of(object)).await.map_err(self.about(object))?;
        Ok(found.bytes().await.map_err(self.about(object))?.to_vec())
    }

    /// Says which object an error is about.
    pub(crate) fn about(&self, object: &str) -> impl FnOnce(object_store::Error) -> Error {
        let (of, url, object) = (self.of, self.url.clone(), object.to_owned());
        move |source| Error::Object { of, url, object, source: Box::new(source) }
    }
}

fn is_known(key: &str) -> bool {
    AmazonS3ConfigKey::from_str(&key.to_ascii_lowercase()).is_ok()
}

/// Returns the options that the environment gives.
fn environment(scheme: &str) -> impl Iterator<Item = (String, String)> {
    let is_s3 = scheme != "file";
    let variables =
        env::vars_os().filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
    let own = variables.filter(move |(key, _)| is_s3 && key.starts_with("AWS_") && is_known(key));
    own.map(|(key, value)| (key.to_ascii_lowercase(), value))
}
