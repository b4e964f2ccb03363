//! The directory of a server says what it has, and what it has is compared with what is asked for: rows are right or
//! refused, never silently others.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cluster::connect;
use proptest::prelude::*;
use recstore::{EmbeddingStore, LocalStore, SaveOptions, Shard, TableConfig};
use recstore_ps::router::HashMethod;
use recstore_ps::{
    Durability, KeptState, RemoteConfig, RemoteStore, Server, ServerConfig, ServerError, reshard,
};

const TABLE: &str = "t";

type Rows = BTreeMap<i64, f32>;

fn config() -> TableConfig {
    TableConfig::from_json(
        1,
        r#"{"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}"#,
    )
    .unwrap()
}

fn directory(data: &Path, shard: Shard) -> PathBuf {
    data.join(format!("shard-{}-of-{}", shard.number, shard.of))
}

fn start(data: &Path, shard: Shard, durability: Durability) -> Result<Server, ServerError> {
    let mut config = ServerConfig::default();
    config.shard = shard;
    config.kept = Some(KeptState { directory: directory(data, shard), durability, follows: None });
    Server::start(Arc::new(LocalStore::default()), config)
}

fn start_all(data: &Path, of: usize, durability: Durability) -> Result<Vec<Server>, String> {
    let started = (0..of).map(|number| start(data, Shard { number, of }, durability));
    started.map(|server| server.map_err(|error| error.to_string())).collect()
}

fn addresses(servers: &[Server]) -> Vec<String> {
    servers.iter().map(|server| server.address().to_string()).collect()
}

fn client(servers: &[Server], hash_method: HashMethod) -> RemoteStore {
    let mut config = RemoteConfig::new(addresses(servers));
    (config.hash_method, config.timeout) = (hash_method, Duration::from_secs(5));
    RemoteStore::connect(config, Box::new(recstore::Serial)).unwrap()
}

fn write(store: &dyn EmbeddingStore, rows: &Rows) {
    let (ids, values): (Vec<i64>, Vec<f32>) = rows.iter().unzip();
    store.open_table(TABLE, &config()).unwrap().write(&ids, &values).unwrap();
}

/// Returns all rows that a store has, as a read of each id gives them.
fn rows(store: &dyn EmbeddingStore) -> Rows {
    let Some(table) = store.find_table(TABLE).unwrap() else { return Rows::new() };
    let ids = table.ids().unwrap();
    let mut values = vec![0.0; ids.len()];
    table.read(&ids, &mut values).unwrap();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "no row is there twice");
    ids.into_iter().zip(values).collect()
}

fn stop(servers: Vec<Server>, saves: bool) {
    for server in servers {
        if saves {
            server.handler().checkpoint().unwrap();
        }
        server.stop(Duration::from_secs(5));
    }
}

fn thousand() -> Rows {
    (0..1_000).map(|id| (id, id as f32)).collect()
}

/// Trains a cluster in `data` and stops it.
fn trained(data: &Path, of: usize, durability: Durability) -> Rows {
    let servers = start_all(data, of, durability).unwrap();
    write(&client(&servers, HashMethod::CityHash), &thousand());
    stop(servers, true);
    thousand()
}

#[test]
fn another_number_of_shards_is_refused_and_resharding_keeps_all_rows() {
    for durability in [Durability::Checkpoint, Durability::Wal] {
        let data = tempfile::tempdir().unwrap();
        let expected = trained(data.path(), 1, durability);
        let refused = start_all(data.path(), 2, durability).unwrap_err();
        let shown = data.path().display();
        assert_eq!(
            refused,
            format!(
                "checkpoint: {shown}: {shown}/shard-0-of-1 is one of 1 shards, and 2 are to be served: `recstore reshard {shown} --shards 2` spreads their rows anew, as `recstore serve --reshard` does at the start"
            )
        );
        for (of, hash_method) in
            [(2, None), (3, Some(HashMethod::SimpleMod)), (1, None), (1, Some(HashMethod::CityHash))]
        {
            let report = reshard(data.path(), data.path(), of, hash_method).unwrap();
            assert_eq!((report.rows.len(), report.rows.iter().sum::<usize>()), (of, expected.len()));
            assert!(report.moved_to.unwrap().is_dir());
            let servers = start_all(data.path(), of, durability).unwrap();
            assert_eq!(rows(&client(&servers, report.hash_method)), expected);
            stop(servers, true);
        }
    }
}

#[test]
fn durability_changes_either_way_without_losing_a_row() {
    let data = tempfile::tempdir().unwrap();
    let mut expected = trained(data.path(), 1, Durability::Checkpoint);
    for (round, durability) in
        [Durability::Wal, Durability::Checkpoint, Durability::Wal, Durability::Wal, Durability::Checkpoint]
            .into_iter()
            .enumerate()
    {
        let servers = start_all(data.path(), 1, durability).unwrap();
        let store = client(&servers, HashMethod::CityHash);
        assert_eq!(rows(&store), expected);
        let more = Rows::from([(10_000 + round as i64, 1.5)]);
        write(&store, &more);
        expected.extend(more);
        // With a log a server that is killed loses nothing.
        stop(servers, durability == Durability::Checkpoint);
    }
    let servers = start_all(data.path(), 1, Durability::Checkpoint).unwrap();
    assert_eq!(rows(&client(&servers, HashMethod::CityHash)), expected);
    stop(servers, true);
}

#[test]
fn a_switch_that_was_cut_off_is_made_again() {
    for (first, then) in
        [(Durability::Checkpoint, Durability::Wal), (Durability::Wal, Durability::Checkpoint)]
    {
        let data = tempfile::tempdir().unwrap();
        let expected = trained(data.path(), 1, first);
        let place = directory(data.path(), Shard { number: 0, of: 1 });
        // What a switch leaves that ends between its save and the word that it counts.
        let copy = tempfile::tempdir().unwrap();
        trained(copy.path(), 1, then);
        let other = directory(copy.path(), Shard { number: 0, of: 1 });
        copy_into(&other, &place, |name| name != "recstore-shard.json" && name != "incarnation");
        let identity = fs::read_to_string(place.join("recstore-shard.json")).unwrap();
        let discarded = if then == Durability::Wal { "wal" } else { "checkpoint" };
        let identity = identity.replacen('{', &format!("{{\n  \"discarded\": \"{discarded}\","), 1);
        fs::write(place.join("recstore-shard.json"), identity).unwrap();
        let servers = start_all(data.path(), 1, then).unwrap();
        assert_eq!(rows(&client(&servers, HashMethod::CityHash)), expected);
        stop(servers, true);
    }
}

/// Copies the files of a directory and those below it.
fn copy_into(from: &Path, to: &Path, takes: impl Fn(&str) -> bool + Copy) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        match path.is_dir() {
            true => copy_into(&path, &to.join(&name), takes),
            false if takes(&name) => drop(fs::copy(&path, to.join(&name)).unwrap()),
            false => {}
        }
    }
}

#[test]
fn tables_of_both_kinds_from_older_releases_are_refused() {
    let data = tempfile::tempdir().unwrap();
    trained(data.path(), 1, Durability::Checkpoint);
    let place = directory(data.path(), Shard { number: 0, of: 1 });
    fs::create_dir_all(place.join("log")).unwrap();
    fs::remove_file(place.join("recstore-shard.json")).unwrap();
    let refused = start_all(data.path(), 1, Durability::Wal).unwrap_err();
    assert!(refused.contains("it has tables twice: manifest.json of a server that keeps checkpoints, and checkpoint and log of one with a log. Move away what is older"), "{refused}");
}

#[test]
fn a_directory_that_was_renamed_is_refused_by_what_it_says() {
    let data = tempfile::tempdir().unwrap();
    trained(data.path(), 2, Durability::Checkpoint);
    let [zero, one] = [0, 1].map(|number| directory(data.path(), Shard { number, of: 2 }));
    fs::rename(&zero, data.path().join("aside")).unwrap();
    fs::rename(&one, &zero).unwrap();
    let refused =
        start(data.path(), Shard { number: 0, of: 2 }, Durability::Checkpoint).unwrap_err().to_string();
    let file = zero.join("recstore-shard.json").display().to_string();
    assert_eq!(
        refused,
        format!(
            "checkpoint: {file}: the directory has shard 1 of 2, and shard 0 of 2 is to be served: `recstore reshard` spreads rows anew"
        )
    );
    fs::write(zero.join("recstore-shard.json"), r#"{"format": "recstore-shard", "version": 2, "shard": 1, "of": 2, "durability": "wal", "facts": null}"#).unwrap();
    let refused =
        start(data.path(), Shard { number: 0, of: 2 }, Durability::Checkpoint).unwrap_err().to_string();
    assert!(
        refused.ends_with(
            "expected the format \"recstore-shard\" of version 1, got \"recstore-shard\" of version 2"
        ),
        "{refused}"
    );
}

#[test]
fn a_checkpoint_is_not_served_but_can_be_spread() {
    let (data, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = LocalStore::default();
    write(&store, &thousand());
    store.save(data.path(), &SaveOptions::default()).unwrap();
    let before: Vec<_> = fs::read_dir(data.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    let refused = start_all(data.path(), 1, Durability::Checkpoint).unwrap_err();
    assert!(
        refused.contains(
            "it is a checkpoint of tables: serve an empty directory, and load the checkpoint there"
        ),
        "{refused}"
    );
    let after: Vec<_> = fs::read_dir(data.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(before, after);
    let report = reshard(data.path(), to.path(), 3, Some(HashMethod::SimpleMod)).unwrap();
    assert_eq!((report.before, report.moved_to), (None, None));
    let servers = start_all(to.path(), 3, Durability::Wal).unwrap();
    assert_eq!(rows(&client(&servers, HashMethod::SimpleMod)), thousand());
    stop(servers, true);
    let again = reshard(data.path(), to.path(), 2, None).unwrap_err().to_string();
    assert!(again.contains("it has shards, such as "), "{again}");
    let onto = reshard(to.path(), data.path(), 2, None).unwrap_err().to_string();
    assert!(onto.ends_with("it is a checkpoint of tables"), "{onto}");
}

#[test]
fn rows_without_a_manifest_are_not_begun_anew_and_stay() {
    let data = tempfile::tempdir().unwrap();
    trained(data.path(), 1, Durability::Checkpoint);
    let place = directory(data.path(), Shard { number: 0, of: 1 });
    fs::remove_file(place.join("manifest.json")).unwrap();
    let names =
        || -> BTreeSet<_> { fs::read_dir(&place).unwrap().map(|file| file.unwrap().file_name()).collect() };
    let before = names();
    for durability in [Durability::Checkpoint, Durability::Wal] {
        let refused = start_all(data.path(), 1, durability).unwrap_err();
        assert!(
            refused.contains("there is no manifest.json here, but a file of rows, such as "),
            "{refused}"
        );
        assert_eq!(names(), before);
    }
}

#[test]
fn one_server_has_a_directory_whatever_it_keeps() {
    for (first, second) in [
        (Durability::Checkpoint, Durability::Checkpoint),
        (Durability::Checkpoint, Durability::Wal),
        (Durability::Wal, Durability::Checkpoint),
    ] {
        let data = tempfile::tempdir().unwrap();
        let servers = start_all(data.path(), 1, first).unwrap();
        let refused = start_all(data.path(), 1, second).unwrap_err();
        assert!(refused.ends_with("another server uses the directory"), "{refused}");
        let refused = reshard(data.path(), data.path(), 2, None).unwrap_err().to_string();
        let expected = if first == Durability::Wal {
            "another server uses the directory"
        } else {
            "there are no shards and no checkpoint here"
        };
        assert!(refused.ends_with(expected), "{refused}");
        stop(servers, false);
    }
}

#[test]
fn a_reshard_that_lacks_a_shard_names_it_and_changes_nothing() {
    let data = tempfile::tempdir().unwrap();
    trained(data.path(), 3, Durability::Checkpoint);
    fs::rename(data.path().join("shard-1-of-3"), data.path().join("elsewhere")).unwrap();
    let refused = reshard(data.path(), data.path(), 2, None).unwrap_err().to_string();
    assert!(refused.ends_with("shard-1-of-3 missing here: bring all shards together first"), "{refused}");
    assert!(
        reshard(data.path(), data.path(), 0, None)
            .unwrap_err()
            .to_string()
            .ends_with("rows need one shard at least, got 0")
    );
    fs::rename(data.path().join("elsewhere"), data.path().join("shard-1-of-3")).unwrap();
    let servers = start_all(data.path(), 3, Durability::Checkpoint).unwrap();
    assert_eq!(rows(&client(&servers, HashMethod::CityHash)), thousand());
    stop(servers, false);
}

#[test]
fn clients_that_spread_ids_otherwise_are_refused_at_once() {
    let data = tempfile::tempdir().unwrap();
    let servers = start_all(data.path(), 2, Durability::Checkpoint).unwrap();
    write(&client(&servers, HashMethod::CityHash), &thousand());
    let mut config = RemoteConfig::new(addresses(&servers));
    config.hash_method = HashMethod::SimpleMod;
    let refused = RemoteStore::connect(config.clone(), Box::new(recstore::Serial)).unwrap_err().to_string();
    let expected = "its store spreads ids by hash_method \"city_hash\", and this client by \"simple_mod\": it would look for rows where they are not";
    assert!(refused.ends_with(expected), "{refused}");
    stop(servers, true);
    // Servers that are started again know it from their directories.
    let servers = start_all(data.path(), 2, Durability::Checkpoint).unwrap();
    config.servers = addresses(&servers);
    assert!(
        RemoteStore::connect(config, Box::new(recstore::Serial)).unwrap_err().to_string().ends_with(expected)
    );
    stop(servers, false);
}

#[test]
fn servers_of_two_stores_are_not_one() {
    let data = [0, 1].map(|_| tempfile::tempdir().unwrap());
    for data in &data {
        trained(data.path(), 2, Durability::Checkpoint);
    }
    let mixed: Vec<Server> = (0..2)
        .map(|number| start(data[number].path(), Shard { number, of: 2 }, Durability::Checkpoint).unwrap())
        .collect();
    let refused = client(&mixed, HashMethod::CityHash).open_table(TABLE, &config()).unwrap_err().to_string();
    assert!(refused.contains("shard 1") && refused.contains(", and shard 0 of the store "), "{refused}");
    stop(mixed, false);
}

#[test]
fn a_server_that_forgot_its_rows_is_refused_until_they_are_loaded() {
    let saved = tempfile::tempdir().unwrap();
    let start = |number| {
        let mut config = ServerConfig::default();
        config.shard = Shard { number, of: 2 };
        Server::start(Arc::new(LocalStore::default()), config).unwrap()
    };
    let mut servers = vec![start(0), start(1)];
    let store = connect(addresses(&servers), Duration::from_secs(5));
    write(&store, &thousand());
    store.save(saved.path(), &SaveOptions::default()).unwrap();
    for lost in [1, 0] {
        servers[lost] = start(lost);
        store.move_servers(&addresses(&servers)).unwrap();
        let message =
            "it was started without the rows that it had: load a checkpoint, or start all servers anew";
        // The table that was opened, the table opened again, and a program that starts now.
        let again = store.open_table(TABLE, &config()).map(drop).unwrap_err().to_string();
        let other = connect(addresses(&servers), Duration::from_secs(5));
        let new = other.open_table(TABLE, &config()).map(drop).unwrap_err().to_string();
        let found = other.find_table(TABLE).map(drop).unwrap_err().to_string();
        let elsewhere =
            other.save(&saved.path().join("elsewhere"), &SaveOptions::default()).unwrap_err().to_string();
        for refused in [again, new, found, elsewhere] {
            assert!(refused.ends_with(message), "{refused}");
        }
        other.load(saved.path(), &recstore::LoadOptions::default()).unwrap();
        assert_eq!(rows(&other), thousand());
    }
    stop(servers, false);
}

#[test]
fn a_table_of_a_server_that_was_restarted_is_refused_by_name_too() {
    let (data, saved) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut servers = start_all(data.path(), 2, Durability::Checkpoint).unwrap();
    let store = client(&servers, HashMethod::CityHash);
    write(&store, &thousand());
    store.checkpoint().unwrap();
    store.save(saved.path(), &SaveOptions::default()).unwrap();
    let table = store.open_table(TABLE, &config()).unwrap();
    store.open_table("unsaved", &config()).unwrap();
    table.write(&[5], &[500.0]).unwrap();
    for restarted in 0..2 {
        let shard = Shard { number: restarted, of: 2 };
        servers.remove(restarted).stop(Duration::from_secs(5));
        servers.insert(restarted, start(data.path(), shard, Durability::Checkpoint).unwrap());
        store.move_servers(&addresses(&servers)).unwrap();
        for name in [TABLE, "unsaved"] {
            let found = store.find_table(name).map(drop).unwrap_err();
            let opened = store.open_table(name, &config()).map(drop).unwrap_err();
            for refused in [found, opened] {
                let shown = refused.to_string();
                let (shard, address) = (restarted, servers[restarted].address());
                assert!(shown.contains(&format!("shard {shard} at {address}")), "{shown}");
                assert!(shown.ends_with("it was restarted since its tables were opened: load a checkpoint, or restart the program"), "{shown}");
            }
        }
        assert!(table.read(&(0..1_000).collect::<Vec<_>>(), &mut [0.0; 1_000]).is_err());
        // A program that starts now has not seen what was lost.
        assert!(client(&servers, HashMethod::CityHash).find_table(TABLE).unwrap().is_some());
        store.load(saved.path(), &recstore::LoadOptions::default()).unwrap();
        assert_eq!(rows(&store), thousand());
        table.write(&[5], &[5.0]).unwrap();
        store.drop_table("unsaved").unwrap();
        store.open_table("unsaved", &config()).unwrap();
    }
    stop(servers, false);
}

#[derive(Debug, Clone)]
enum Op {
    Write(Vec<(i64, i8)>),
    Checkpoint,
    /// Stopped in order or killed, and started anew with another durability.
    Restart {
        saves: bool,
        durability: bool,
    },
    Reshard {
        shards: usize,
        simple: bool,
    },
    /// Started with another number of shards, which is refused.
    WrongShards,
    WrongHash,
    /// Another directory goes on with a copy.
    Copy,
    /// A copy without one file, which is right or refused.
    PartialCopy(usize),
    Save,
    Load,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let writes = prop::collection::vec((-40..40_i64, any::<i8>()), 1..12).prop_map(Op::Write);
    let op = prop_oneof![
        6 => writes,
        1 => Just(Op::Checkpoint),
        3 => any::<(bool, bool)>().prop_map(|(saves, durability)| Op::Restart { saves, durability }),
        2 => (1..4_usize, any::<bool>()).prop_map(|(shards, simple)| Op::Reshard { shards, simple }),
        1 => Just(Op::WrongShards),
        1 => Just(Op::WrongHash),
        1 => Just(Op::Copy),
        2 => any::<usize>().prop_map(Op::PartialCopy),
        1 => Just(Op::Save),
        1 => Just(Op::Load),
    ];
    prop::collection::vec(op, 1..12)
}

/// A cluster and what its rows should be.
struct Subject {
    root: tempfile::TempDir,
    data: PathBuf,
    copies: usize,
    servers: Vec<Server>,
    durability: Durability,
    hash_method: HashMethod,
    now: Rows,
    /// What survives servers that are killed.
    kept: Rows,
    saved: Option<Rows>,
}

impl Subject {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let (data, durability) = (root.path().join("data"), Durability::Checkpoint);
        let servers = start_all(&data, 2, durability).unwrap();
        let (now, kept) = (Rows::new(), Rows::new());
        let hash_method = HashMethod::CityHash;
        let mut subject =
            Self { root, data, copies: 0, servers, durability, hash_method, now, kept, saved: None };
        subject.act(Op::Write(vec![(0, 1)]));
        subject.checkpoint();
        subject
    }

    fn client(&self) -> RemoteStore {
        client(&self.servers, self.hash_method)
    }

    fn shards(&self) -> usize {
        self.servers.len()
    }

    fn checkpoint(&mut self) {
        self.servers.iter().for_each(|server| drop(server.handler().checkpoint().unwrap()));
        self.kept = self.now.clone();
    }

    fn stop(&mut self, saves: bool) {
        if saves {
            self.checkpoint();
        }
        stop(std::mem::take(&mut self.servers), false);
        if self.durability == Durability::Checkpoint {
            self.now = self.kept.clone();
        }
        self.kept = self.now.clone();
    }

    fn start(&mut self, of: usize) {
        self.servers = start_all(&self.data, of, self.durability).unwrap();
        assert_eq!(rows(&self.client()), self.now);
    }

    /// Starts servers on a copy of the directory without its file number `left_out`.
    fn start_copy(&mut self, left_out: Option<usize>) -> (PathBuf, Result<Vec<Server>, String>) {
        self.copies += 1;
        let to = self.root.path().join(format!("copy-{}", self.copies));
        copy_into(&self.data, &to, |name| name != ".lock" && name != "lock");
        let mut files = Vec::new();
        all_files(&to, &mut files);
        if let Some(place) = left_out {
            fs::remove_file(&files[place % files.len()]).unwrap();
        }
        let started = start_all(&to, self.shards(), self.durability);
        (to, started)
    }

    fn act(&mut self, op: Op) {
        let of = self.shards();
        match op {
            Op::Write(writes) => {
                let more: Rows = writes.into_iter().map(|(id, value)| (id, f32::from(value))).collect();
                write(&self.client(), &more);
                self.now.extend(more);
                if self.durability == Durability::Wal {
                    self.kept = self.now.clone();
                }
            }
            Op::Checkpoint => self.checkpoint(),
            Op::Restart { saves, durability } => {
                self.stop(saves);
                self.durability = if durability { Durability::Wal } else { Durability::Checkpoint };
                self.start(of);
            }
            Op::Reshard { shards, simple } => {
                self.stop(true);
                self.hash_method = if simple { HashMethod::SimpleMod } else { HashMethod::CityHash };
                reshard(&self.data, &self.data, shards, Some(self.hash_method)).unwrap();
                self.start(shards);
            }
            Op::WrongShards => {
                self.stop(true);
                assert!(start_all(&self.data, of + 1, self.durability).is_err());
                self.start(of);
            }
            Op::WrongHash => {
                let mut config = RemoteConfig::new(addresses(&self.servers));
                config.hash_method = match self.hash_method {
                    HashMethod::CityHash => HashMethod::SimpleMod,
                    HashMethod::SimpleMod => HashMethod::CityHash,
                };
                assert!(RemoteStore::connect(config, Box::new(recstore::Serial)).is_err());
            }
            Op::Copy => {
                self.stop(true);
                // `stop` took the servers; the copy has as many.
                self.servers = start_all(&self.data, of, self.durability).unwrap();
                let (to, started) = self.start_copy(None);
                stop(std::mem::replace(&mut self.servers, started.unwrap()), false);
                self.data = to;
                assert_eq!(rows(&self.client()), self.now);
            }
            Op::PartialCopy(left_out) => {
                self.checkpoint();
                let (_, started) = self.start_copy(Some(left_out));
                let Ok(servers) = started else { return };
                // What can be left out without a word is what no row lies in.
                let store = client(&servers, self.hash_method);
                let found = store.open_table(TABLE, &config()).map(|_| rows(&store));
                assert!(found.is_err() || found == Ok(self.kept.clone()), "{found:?} for {:?}", self.kept);
                stop(servers, false);
            }
            Op::Save => {
                self.client().save(&self.root.path().join("saved"), &SaveOptions::default()).unwrap();
                self.saved = Some(self.now.clone());
            }
            Op::Load => {
                let loaded =
                    self.client().load(&self.root.path().join("saved"), &recstore::LoadOptions::default());
                match self.saved.clone() {
                    None => assert!(loaded.is_err()),
                    Some(saved) => {
                        self.now = saved;
                        if self.durability == Durability::Wal {
                            self.kept = self.now.clone();
                        }
                    }
                }
            }
        }
        assert_eq!(rows(&self.client()), self.now);
    }
}

fn all_files(directory: &Path, files: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            all_files(&path, files);
        } else {
            files.push(path);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: recstore_cases(), ..ProptestConfig::default() })]
    #[test]
    fn after_any_sequence_rows_are_right_or_refused(ops in ops()) {
        let mut subject = Subject::new();
        for op in ops {
            subject.act(op);
        }
        stop(std::mem::take(&mut subject.servers), false);
    }
}

/// Twenty sequences, unless the environment asks for more.
fn recstore_cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(20)
}
