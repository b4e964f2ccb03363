//! Servers with a log, each in a process of its own that may be killed at any moment.

#![allow(dead_code, reason = "every test file uses some of these")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::env;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use recstore::{LocalStore, Serial, Shard};
use recstore_ps::{KeptState, Server, ServerConfig};

/// Tells a child which server it is: directory, port, shard, number of shards.
const ROLE: &str = "RECSTORE_TEST_SERVER";

/// Starts a server with a log in this process.
pub(crate) fn start(directory: &Path, port: u16, shard: Shard) -> Server {
    let mut config = ServerConfig::default();
    (config.kept, config.port, config.shard) = (Some(KeptState::logged(directory)), port, shard);
    Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap()
}

/// Is a server, in a process of its own, until it is killed; and makes checkpoints all the time.
#[test]
fn serve() {
    let Ok(role) = env::var(ROLE) else { return };
    let parts: Vec<&str> = role.split(' ').collect();
    let [port, number, of] = [1, 2, 3].map(|place| parts[place].parse::<usize>().unwrap());
    let server = start(Path::new(parts[0]), port as u16, Shard { number, of });
    println!("serving");
    loop {
        thread::sleep(Duration::from_millis(30));
        server.handler().checkpoint().unwrap();
    }
}

/// A server process, killed at the end.
pub(crate) struct Process {
    child: Child,
    directory: PathBuf,
    port: u16,
    shard: Shard,
}

impl Process {
    /// Starts one with its tables in a part of `directory`, and waits until it serves.
    pub(crate) fn start(directory: &Path, port: u16, shard: Shard) -> Self {
        let directory = directory.join(format!("shard{}", shard.number));
        Self { child: spawn(&directory, port, shard), directory, port, shard }
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Ends it by SIGKILL, and starts one in its place.
    pub(crate) fn kill_and_start_again(&mut self) {
        self.kill();
        self.child = spawn(&self.directory, self.port, self.shard);
    }

    fn kill(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(directory: &Path, port: u16, shard: Shard) -> Child {
    let role = format!("{} {port} {} {}", directory.display(), shard.number, shard.of);
    run_test("processes::serve", ROLE, &role, "serving").0
}

/// Runs one test of this program in a process of its own, with `variable` set, until it prints `word`.
/// Returns it with that line.
pub(crate) fn run_test(test: &str, variable: &str, value: &str, word: &str) -> (Child, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    let mut child = command
        .args(["--exact", test, "--nocapture"])
        .env(variable, value)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find(|line| line.contains(word));
    (child, line.unwrap_or_else(|| panic!("{test} did not start")))
}

/// Returns a port below those that the system gives to clients: one of them could take it while its server is down.
pub(crate) fn free_port() -> u16 {
    static LAST: AtomicU32 = AtomicU32::new(0);
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 20_000;
    const OF_PROCESS: u32 = 64;
    loop {
        let next = std::process::id().wrapping_mul(OF_PROCESS) + LAST.fetch_add(1, Ordering::Relaxed);
        let port = (FIRST + next % COUNT) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
