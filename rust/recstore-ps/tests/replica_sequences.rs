//! Any sequence of changes, checkpoints, loads, stops, starts and promotions of a leader and its follower: the rows are
//! those of a plain map.
//!
//! `RECSTORE_REPLICA_SEQUENCES` says how many sequences are tried, by default 12.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod processes;
mod replication;

use std::collections::BTreeMap;
use std::env;
use std::path::Path;
use std::time::Duration;

use processes::free_port;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use recstore::{EmbeddingStore, LoadOptions, LocalStore, SaveOptions, Serial, TableConfig};
use recstore_ps::{RemoteConfig, RemoteStore, Server, promote};
use replication::{Follows, config, figure, start, wait_until};
use tempfile::TempDir;

const TABLE: &str = "t";

/// One step of a sequence.
#[derive(Debug, Clone)]
enum Act {
    Write(Vec<i64>, f32),
    Delete(Vec<i64>),
    Clear,
    Checkpoint,
    FollowerCheckpoint,
    Load(i64),
    RestartLeader,
    StopFollower,
    StartFollower {
        synchronous: bool,
    },
    /// The leader dies when its follower has all its changes.
    FailOver,
    /// The leader lives, and hands over whatever the follower lacks.
    HandOver,
}

fn act() -> impl Strategy<Value = Act> {
    let ids = || proptest::collection::vec(-20_i64..20, 1..6);
    prop_oneof![
        6 => (ids(), -9_i32..9).prop_map(|(ids, value)| Act::Write(ids, value as f32)),
        1 => ids().prop_map(Act::Delete),
        1 => Just(Act::Clear),
        2 => Just(Act::Checkpoint),
        1 => Just(Act::FollowerCheckpoint),
        1 => (0_i64..9).prop_map(Act::Load),
        1 => Just(Act::RestartLeader),
        2 => Just(Act::StopFollower),
        4 => any::<bool>().prop_map(|synchronous| Act::StartFollower { synchronous }),
        2 => Just(Act::FailOver),
        2 => Just(Act::HandOver),
    ]
}

/// A place for a server: its directory, and the port that it has whenever it runs.
struct ServerSlot {
    directory: TempDir,
    port: u16,
}

impl ServerSlot {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), port: free_port() }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn start(&self, follows: Option<Follows>) -> Server {
        let mut config = config(self.directory.path(), follows);
        config.port = self.port;
        start(config)
    }
}

/// A leader and what may follow it, the client that changes rows, and the rows that there should be.
struct Shard {
    places: [ServerSlot; 2],
    leading: usize,
    leader: Option<Server>,
    follower: Option<Server>,
    client: RemoteStore,
    rows: BTreeMap<i64, f32>,
    loads: TempDir,
}

impl Shard {
    fn new() -> Self {
        let places = [ServerSlot::new(), ServerSlot::new()];
        let leader = places[0].start(None);
        let mut config = RemoteConfig::new(vec![format!("{}|{}", places[0].address(), places[1].address())]);
        config.timeout = Duration::from_secs(20);
        let client = RemoteStore::connect(config, Box::new(Serial)).unwrap();
        client.open_table(TABLE, &TableConfig::new(1)).unwrap();
        let loads = tempfile::tempdir().unwrap();
        let (leader, rows) = (Some(leader), BTreeMap::new());
        Self { places, leading: 0, leader, follower: None, client, rows, loads }
    }

    fn leader(&self) -> &Server {
        self.leader.as_ref().unwrap()
    }

    fn carry_out(&mut self, act: &Act) {
        let table = self.client.open_table(TABLE, &TableConfig::new(1)).unwrap();
        match act {
            Act::Write(ids, value) => {
                table.write(ids, &vec![*value; ids.len()]).unwrap();
                self.rows.extend(ids.iter().map(|id| (*id, *value)));
            }
            Act::Delete(ids) => {
                table.delete(ids).unwrap();
                ids.iter().for_each(|id| _ = self.rows.remove(id));
            }
            Act::Clear => {
                table.clear().unwrap();
                self.rows.clear();
            }
            Act::Checkpoint => _ = self.leader().handler().checkpoint().unwrap(),
            Act::FollowerCheckpoint => {
                self.follower.iter().for_each(|follower| _ = follower.handler().checkpoint().unwrap());
            }
            Act::Load(value) => self.load(*value),
            Act::RestartLeader => {
                self.leader.take().unwrap().stop(Duration::ZERO);
                self.leader = Some(self.places[self.leading].start(None));
            }
            Act::StopFollower => {
                self.follower.take().into_iter().for_each(|server| server.stop(Duration::ZERO))
            }
            Act::StartFollower { synchronous } => {
                if self.follower.is_none() {
                    let leader = self.places[self.leading].address();
                    let follows = Follows { leader, synchronous: *synchronous };
                    self.follower = Some(self.places[1 - self.leading].start(Some(follows)));
                }
            }
            Act::FailOver => self.promote(true),
            Act::HandOver => self.promote(false),
        }
    }

    /// Replaces all rows by those of a checkpoint, of which there is one for each value.
    fn load(&mut self, value: i64) {
        let directory = self.loads.path().join(value.to_string());
        if !directory.exists() {
            save_rows(&directory, value);
        }
        self.client.load(&directory, &LoadOptions::default()).unwrap();
        self.rows = (0..value).map(|id| (id, value as f32)).collect();
    }

    fn wait_for_follower(&self) {
        wait_until("the follower has everything", || {
            figure(self.leader(), "recstore_follower_lag_changes") == Some(0.0)
        });
    }

    fn promote(&mut self, dies: bool) {
        if self.follower.is_none() {
            return;
        }
        self.wait_for_follower();
        let mut before = self.leader.take();
        if dies {
            before.take().into_iter().for_each(|server| server.stop(Duration::ZERO));
        }
        promote(&RemoteConfig::new(vec![self.places[1 - self.leading].address()])).unwrap();
        before.into_iter().for_each(|server| server.stop(Duration::ZERO));
        self.leader = self.follower.take();
        self.leading = 1 - self.leading;
    }

    fn check(&self) {
        let table = self.client.open_table(TABLE, &TableConfig::new(1)).unwrap();
        let mut ids = table.ids().unwrap();
        ids.sort_unstable();
        let mut rows = vec![0.0; ids.len()];
        table.read(&ids, &mut rows).unwrap();
        assert_eq!(ids.into_iter().zip(rows).collect::<BTreeMap<_, _>>(), self.rows);
    }

    fn end(self) {
        let servers = self.leader.into_iter().chain(self.follower);
        servers.for_each(|server| server.stop(Duration::ZERO));
    }
}

fn save_rows(directory: &Path, value: i64) {
    let store = LocalStore::new(Box::new(Serial));
    let table = store.open_table(TABLE, &TableConfig::new(1)).unwrap();
    let ids: Vec<i64> = (0..value).collect();
    table.write(&ids, &vec![value as f32; ids.len()]).unwrap();
    store.save(directory, &SaveOptions::default()).unwrap();
}

#[test]
fn the_rows_are_those_of_a_plain_map_whatever_happens() {
    let cases = env::var("RECSTORE_REPLICA_SEQUENCES").map_or(12, |cases| cases.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        max_shrink_iters: 60,
        ..Config::with_cases(cases)
    });
    let acts = proptest::collection::vec(act(), 1..40);
    runner
        .run(&acts, |acts| {
            let mut shard = Shard::new();
            for act in &acts {
                shard.carry_out(act);
            }
            shard.check();
            // What follows is as good as what leads.
            shard.promote(true);
            shard.check();
            shard.end();
            Ok(())
        })
        .unwrap();
}
