//! Checkpoints in object stores: S3 and what speaks its protocol, or a file system.
//!
//! An [`ObjectCheckpoint`] is saved to and loaded from as a directory is. A save writes to a temporary directory, uploads
//! the new files and, last, the manifest under the next number, which is refused if somebody else has taken it. A load
//! downloads the files of the newest snapshot, and checks them as those of any directory.
//! `docs/checkpoint_format.md` tells which objects there are.
//!
//! ```
//! use recstore::{EmbeddingStore, LoadOptions, LocalStore, SaveOptions, TableConfig};
//! use recstore_object_store::ObjectCheckpoint;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let url = format!("file://{}/model", directory.path().display());
//! let store = LocalStore::new(Box::new(recstore::Serial));
//! let user = store.open_table("user", &TableConfig::new(2))?;
//! user.write(&[7], &[0.5, 1.5])?;
//! let checkpoint = ObjectCheckpoint::from_url(&url, [])?; // or "s3://bucket/prefix", [("region", "eu-west-1")]
//! checkpoint.save(&store, &SaveOptions::default())?;
//! checkpoint.load(&store, &LoadOptions::default())?;
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod checkpoint;
mod error;
mod folder;
mod location;
mod manifests;
mod objects;
mod waiting;

pub use checkpoint::ObjectCheckpoint;
pub use error::{Error, Result};
pub use folder::ObjectFolder;
