//! Servers of one store with their directories, which are copied and put back, and the places that they save to.

#![allow(dead_code, reason = "every test file uses some of these")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use recstore::{EmbeddingStore, LoadOptions, LocalStore, SaveOptions, Shard, TableConfig};
use recstore_ps::{Durability, KeptState, RemoteConfig, RemoteStore, Server, ServerConfig};
use serde_json::Value;

/// The servers of one store, which are killed at the end.
pub(crate) struct Group {
    pub(crate) data: PathBuf,
    pub(crate) servers: Vec<Server>,
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop(false);
    }
}

pub(crate) fn shard_directory(data: &Path, number: usize, of: usize) -> PathBuf {
    data.join(format!("shard-{number}-of-{of}"))
}

pub(crate) fn start(directory: PathBuf, shard: Shard, durability: Durability) -> Result<Server, String> {
    let mut config = ServerConfig::default();
    config.shard = shard;
    config.kept = Some(KeptState { directory, durability, follows: None });
    Server::start(Arc::new(LocalStore::default()), config).map_err(|error| error.to_string())
}

impl Group {
    pub(crate) fn start(data: &Path, of: usize) -> Self {
        Self::kept(data, of, Durability::Wal).unwrap()
    }

    pub(crate) fn kept(data: &Path, of: usize, durability: Durability) -> Result<Self, String> {
        let start = |number| start(shard_directory(data, number, of), Shard { number, of }, durability);
        let servers = (0..of).map(start).collect::<Result<_, _>>()?;
        Ok(Self { data: data.to_owned(), servers })
    }

    pub(crate) fn stop(&mut self, saves: bool) {
        for server in self.servers.drain(..) {
            if saves {
                server.handler().checkpoint().unwrap();
            }
            server.stop(Duration::from_secs(5));
        }
    }

    pub(crate) fn restart(&mut self, saves: bool) {
        let of = self.servers.len();
        self.stop(saves);
        *self = Self::start(&self.data.clone(), of);
    }

    /// Copies the directories of the servers, which run: they are as after a crash.
    pub(crate) fn copy(&self, to: &Path) {
        copy_into(&self.data, to);
    }

    /// Goes on with a copy of its directories.
    pub(crate) fn restore(&mut self, copy: &Path) {
        let of = self.servers.len();
        self.stop(false);
        fs::remove_dir_all(&self.data).unwrap();
        copy_into(copy, &self.data);
        *self = Self::start(&self.data.clone(), of);
    }

    pub(crate) fn client(&self) -> RemoteStore {
        connect(self.servers.iter().map(|server| server.address().to_string()).collect())
    }

    pub(crate) fn save(&self, place: &Path) -> Outcome {
        self.save_with(place, false)
    }

    pub(crate) fn save_with(&self, place: &Path, replace: bool) -> Outcome {
        let store = self.client();
        fill(&store, 10);
        let mut options = SaveOptions::default();
        options.replace = replace;
        store
            .save(place, &options)
            .map(|report| (report.snapshot, report.kept))
            .map_err(|error| error.to_string())
    }

    pub(crate) fn load(&self, place: &Path) -> String {
        self.client().load(place, &LoadOptions::default()).unwrap().snapshot
    }
}

/// The snapshot, and the one of another store that stays.
pub(crate) type Outcome = Result<(String, Option<String>), String>;

pub(crate) fn connect(servers: Vec<String>) -> RemoteStore {
    let mut config = RemoteConfig::new(servers);
    config.timeout = Duration::from_secs(20);
    RemoteStore::connect(config, Box::new(recstore::Serial)).unwrap()
}

pub(crate) fn fill(store: &dyn EmbeddingStore, rows: i64) {
    let ids: Vec<i64> = (0..rows).collect();
    store.open_table("t", &TableConfig::new(1)).unwrap().write(&ids, &vec![1.0; ids.len()]).unwrap();
}

pub(crate) fn copy_into(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (entry, name) = (entry.as_ref().unwrap().path(), entry.as_ref().unwrap().file_name());
        if entry.is_dir() {
            copy_into(&entry, &to.join(name));
        } else {
            fs::copy(&entry, to.join(name)).unwrap();
        }
    }
}

/// Another store loads what a place has and goes on with it, or begins beside it. Returns its snapshot.
pub(crate) fn another_saves(place: &Path, loads: bool) -> Result<String, String> {
    let store = LocalStore::default();
    if loads {
        store.load(place, &LoadOptions::default()).map_err(|error| error.to_string())?;
    }
    fill(&store, 5);
    let saved = store.save(place, &SaveOptions::default());
    saved.map(|report| report.snapshot).map_err(|error| error.to_string())
}

pub(crate) fn manifest(place: &Path) -> Value {
    fs::read(place.join("manifest.json")).map_or(Value::Null, |text| serde_json::from_slice(&text).unwrap())
}

pub(crate) fn new_directory() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let (data, place) = (root.path().join("data"), root.path().join("place"));
    (root, data, place)
}
