//! Leaders that are killed while workers train, and followers that take their place: no acknowledged change is lost, and
//! none is made twice.
//!
//! `RECSTORE_KILL_ROUNDS` says how often leaders are killed, by default 20 times.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod processes;
mod replication;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use processes::run_test;
use recstore::{EmbeddingStore, GradientChunk, Serial, Step, TableConfig, TableUpdate};
use recstore_ps::{RemoteConfig, RemoteStore, promote};
use replication::{Follows, config, figure_at, wait_until};

/// Tells a child which server it is: directory, and the address of the server that it follows.
const ROLE: &str = "RECSTORE_TEST_REPLICA";

const WORKERS: usize = 3;

/// Is a server, in a process of its own, until it is killed; and makes checkpoints all the time.
#[test]
fn serve() {
    let Ok(role) = env::var(ROLE) else { return };
    let (directory, leader) = role.split_once(' ').unwrap();
    let follows = Some(leader).filter(|leader| !leader.is_empty());
    let follows = follows.map(|leader| Follows { leader: leader.to_owned(), synchronous: true });
    let server = replication::start(config(Path::new(directory), follows));
    println!("serving {} {}", server.address(), server.metrics_address().unwrap());
    loop {
        thread::sleep(Duration::from_millis(100));
        server.handler().checkpoint().unwrap();
    }
}

/// A server process, killed at the end.
struct Replica {
    child: Child,
    directory: PathBuf,
    address: String,
    metrics: String,
}

impl Replica {
    fn start(directory: &Path, leader: &str) -> Self {
        let role = format!("{} {leader}", directory.display());
        let (child, line) = run_test("serve", ROLE, &role, "serving ");
        let mut words = line.split(' ').skip_while(|word| *word != "serving").skip(1).map(str::to_owned);
        let (address, metrics) = (words.next().unwrap(), words.next().unwrap());
        Self { child, directory: directory.to_owned(), address, metrics }
    }

    fn kill(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }

    fn is_followed_in_step(&self) -> bool {
        figure_at(&self.metrics, "recstore_follower_in_step") == Some(1.0)
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What the threads of a round share.
#[derive(Default)]
struct Training {
    /// The changes of each worker that were acknowledged.
    made: [AtomicU64; WORKERS],
    is_over: AtomicBool,
}

fn connect(servers: &str) -> RemoteStore {
    let mut config = RemoteConfig::new(vec![servers.to_owned()]);
    config.timeout = Duration::from_secs(60);
    RemoteStore::connect(config, Box::new(Serial)).unwrap()
}

/// Adds one to a row of the worker's own, again and again; moves with the servers, whose ports change.
fn work(worker: usize, servers: &std::sync::Mutex<String>, training: &Training) {
    let mut known = servers.lock().unwrap().clone();
    let store = connect(&known);
    let config = TableConfig::from_json(4, r#"{"optimizer": {"kind": "sgd", "lr": 1.0}}"#).unwrap();
    let table = store.open_table("t", &config).unwrap();
    table.write(&[worker as i64], &[0.0; 4]).unwrap();
    while !training.is_over.load(Ordering::Relaxed) {
        let now = servers.lock().unwrap().clone();
        if now != known {
            store.move_servers(std::slice::from_ref(&now)).unwrap();
            known = now;
        }
        let (ids, ones) = ([worker as i64], [-1.0_f32; 4]);
        let chunks = vec![GradientChunk::new(&ids, &ones, 4)];
        store.update(&[TableUpdate { table: table.id(), chunks, step: Step::Next }]).unwrap();
        training.made[worker].fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn no_acknowledged_change_is_lost_or_made_twice() {
    let rounds: usize = env::var("RECSTORE_KILL_ROUNDS").map_or(20, |rounds| rounds.parse().unwrap());
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut leading = Replica::start(one.path(), "");
    let mut following = Replica::start(other.path(), &leading.address);
    let both = |leading: &Replica, following: &Replica| format!("{}|{}", leading.address, following.address);
    let servers = std::sync::Mutex::new(both(&leading, &following));
    let training = Arc::new(Training::default());
    let mut pauses = Vec::new();
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (servers, training) = (&servers, &*training);
            scope.spawn(move || work(worker, servers, training));
        }
        // A failed assertion ends the workers too.
        let _end = End(&training);
        for round in 0..rounds {
            wait_until("a follower is in step", || leading.is_followed_in_step());
            wait_until("every worker goes on", || training.go_on());
            leading.kill();
            let killed = Instant::now();
            let promoted = promote(&RemoteConfig::new(vec![following.address.clone()])).unwrap();
            assert_eq!(promoted.epoch, round as u64 + 1);
            wait_until("every worker goes on", || training.go_on());
            pauses.push(killed.elapsed());
            let back = Replica::start(&leading.directory, &following.address);
            leading = std::mem::replace(&mut following, back);
            *servers.lock().unwrap() = both(&leading, &following);
        }
    });
    pauses.sort();
    let (median, longest) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    println!("{rounds} kills: workers went on after {median:?} (median), {longest:?} at most");
    let store = connect(&leading.address);
    let table = store.find_table("t").unwrap().unwrap();
    for worker in 0..WORKERS {
        let mut row = [0.0; 4];
        table.read(&[worker as i64], &mut row).unwrap();
        let made = training.made[worker].load(Ordering::Relaxed) as f32;
        assert_eq!(row, [made; 4], "worker {worker}");
    }
}

impl Training {
    /// Waits until each worker has made two changes more: the first may have been under way.
    fn go_on(&self) -> bool {
        let made = || self.made.each_ref().map(|made| made.load(Ordering::Relaxed));
        let before = made();
        wait_until("every worker goes on", || {
            made().iter().zip(before).all(|(now, before)| *now >= before + 2)
        });
        true
    }
}

struct End<'a>(&'a Training);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}
