//! Directories of durable servers, of version 1 of the log, are taken up to the bit for ever.
//!
//! They were made once; `fixtures/log_v1/README.md` says how. Servers of these tests run on copies.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

#[path = "fixtures/log_v1/make.rs"]
mod make;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;
#[path = "../../recstore/tests/fixtures/checkpoint_v1/recorded.rs"]
mod recorded;
#[path = "fixtures/log_v1/runs.rs"]
mod runs;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use make::{
    FIRST, FOURTH, LARGE_DIM, LARGE_ROWS, SECOND, THIRD, WORKERS, bounded, make_bounded, make_changes,
    make_large, make_workers, started, step_together, tidy, together, update,
};
use numbered::Numbered;
use recorded::{Recorded, lines, recorded};
use recstore::{EmbeddingStore, LocalStore, Result, Serial, Step, TableId};
use recstore_ps::codec::{Answer, Managed, Management, Request};
use recstore_ps::{ClientId, Handler, KeptState, Server, ServerConfig, WorkerSync};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

/// What is written down of a directory.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Expected {
    /// The numbers of the tables.
    numbers: BTreeMap<String, i64>,
    tables: BTreeMap<String, Recorded>,
    /// By client, the sequence number of its last change and what came of it.
    clients: BTreeMap<String, (u64, Value)>,
    /// The name of the file in which the log goes on.
    next_file: String,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/log_v1").join(name)
}

fn expected(name: &str) -> Expected {
    serde_json::from_slice(&fs::read(fixture(&format!("{name}.json"))).unwrap()).unwrap()
}

/// Copies a fixture to where a server may run; files of runs become those they stand for.
fn copied(name: &str) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    copy(&fixture(name), to.path());
    to
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap().path();
        let copied = to.join(file.file_name().unwrap());
        if file.is_dir() {
            copy(&file, &copied);
        } else if file.extension().is_some_and(|extension| extension == "runs") {
            let bytes = runs::unpacked(&fs::read_to_string(&file).unwrap());
            fs::write(copied.with_extension("log"), bytes).unwrap();
        } else {
            fs::copy(&file, &copied).unwrap();
        }
    }
}

/// Returns what a change gave.
fn outcome(answer: Result<Answer>) -> Value {
    match answer {
        Ok(Answer::Done) => json!("done"),
        Ok(Answer::Count(count)) => json!({"count": count}),
        Ok(Answer::Managed(managed)) => serde_json::to_value(managed).unwrap(),
        Ok(other) => panic!("no change gives {other:?}"),
        Err(error) => json!({"refused": error.to_string()}),
    }
}

/// Asks for the last change of a client: one with the same number is answered as it was, one with a lower is refused.
fn last_change(handler: &Handler, client: ClientId) -> (u64, Value) {
    let nothing = Request::Delete { table: TableId(1), ids: &[] };
    // A change with the number of one long past is refused with that of the last.
    let sequence = (1..100).find(|&sequence| {
        let late = handler.handle(client, sequence, &nothing).err().map(|error| error.to_string());
        !late.is_some_and(|late| late.contains("of a client that has made change"))
    });
    let sequence = sequence.unwrap();
    (sequence, outcome(handler.handle(client, sequence, &nothing)))
}

fn found(directory: &Path, handler: &Handler, store: &LocalStore, clients: &[ClientId]) -> Expected {
    let number = |name: &String| (name.clone(), store.find_numbered(name).unwrap().unwrap().0);
    let names = fs::read_dir(directory.join("log")).unwrap().map(|file| file.unwrap().file_name());
    let mut files: Vec<_> = names.filter(|name| name.to_string_lossy().ends_with(".log")).collect();
    files.sort();
    let last = |client: &ClientId| (format!("{:032x}", client.0), last_change(handler, *client));
    Expected {
        numbers: store.table_names().unwrap().iter().map(number).collect(),
        tables: recorded(store),
        clients: clients.iter().map(last).collect(),
        next_file: files.pop().unwrap().into_string().unwrap(),
    }
}

/// Starts a server on a copy, compares all it has, and gives it to `more`; a server started after it has the same.
fn is_taken_up(name: &str, worker_sync: WorkerSync, clients: &[ClientId], more: impl FnOnce(&Handler)) {
    let (directory, expected) = (copied(name), expected(name));
    let (handler, store) = started(directory.path(), worker_sync);
    let found = found(directory.path(), &handler, &store, clients);
    assert_same(&found.tables, &expected.tables, name);
    assert_eq!(found, expected);
    more(&handler);
    let after: BTreeMap<String, Recorded> = serde_json::from_value(after_of(name)).unwrap();
    assert_same(&recorded(&store), &after, &format!("{name}, after more changes"));
    drop(handler);
    let (handler, store) = started(directory.path(), worker_sync);
    assert_same(&recorded(&store), &after, &format!("{name}, started once more"));
    handler.checkpoint().unwrap();
    drop(handler);
    assert_same(
        &recorded(&started(directory.path(), worker_sync).1),
        &after,
        &format!("{name}, from a checkpoint"),
    );
}

fn after_of(name: &str) -> Value {
    let text = fs::read(fixture(&format!("{name}_after.json"))).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["tables"].take()
}

/// Compares tables one by one, so that a difference can be read.
fn assert_same(found: &BTreeMap<String, Recorded>, expected: &BTreeMap<String, Recorded>, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (name, expected) in expected {
        assert_eq!(&found[name], expected, "{what}: {name}");
    }
}

/// Goes on with tables that were there before the log and after it.
fn more_changes(handler: &Handler) {
    update(handler, (FIRST, 13), (TableId(1), 3, Step::Next), &[7, 11, 300], 6).unwrap();
    update(handler, (SECOND, 5), (TableId(3), 2, Step::Next), &[5, 300], 7).unwrap();
}

/// Makes the step of which one worker had sent its part: all send it now, and each part counts once.
fn finish_the_step(handler: &Handler) {
    step_together(handler, &[0, 1], 4);
    step_together(handler, &[0, 1], 4);
}

fn one_step_more(handler: &Handler) {
    update(handler, (WORKERS[0], 6), (TableId(1), 1, Step::Next), &[1, 2], 8).unwrap();
}

#[test]
fn every_kind_of_change_is_made_again() {
    is_taken_up("changes", WorkerSync::default(), &[FIRST, SECOND, THIRD, FOURTH], more_changes);
}

#[test]
fn steps_of_workers_that_go_together_are_made_again_and_the_staged_one_is_finished() {
    is_taken_up("workers", together(), &WORKERS, finish_the_step);
}

#[test]
fn steps_of_workers_with_bounded_staleness_are_counted_again() {
    is_taken_up("bounded", bounded(), &WORKERS[..2], |handler| {
        let states = Request::Manage(Management::Workers {});
        let states = handler.handle(ClientId(0), 0, &states).unwrap();
        let Answer::Managed(Managed::Workers { workers, .. }) = states else { panic!("{states:?}") };
        let steps: Vec<(u32, u64)> = workers.iter().map(|state| (state.worker, state.steps)).collect();
        assert_eq!(steps, [(0, 5), (1, 1)]);
        one_step_more(handler);
    });
}

#[test]
fn frames_that_went_to_the_log_while_they_came_are_made_again() {
    let directory = copied("large");
    let (handler, store) = started(directory.path(), WorkerSync::default());
    let ids: Vec<i64> = (0..LARGE_ROWS).collect();
    let mut rows = vec![0.0; ids.len() * LARGE_DIM];
    store.read(store.find_numbered("large").unwrap().unwrap(), &ids, &mut rows).unwrap();
    for (id, row) in ids.iter().zip(rows.chunks(LARGE_DIM)) {
        assert!(row.iter().all(|value| value.to_bits() == (*id as f32 / 2.0).to_bits()), "{id}");
    }
    let [half, whole] = [3, 4].map(|byte| ClientId(u128::from_le_bytes([byte; 16])));
    assert_eq!(last_change(&handler, half), (1, json!({"count": 0})), "nothing came of what half came");
    assert_eq!(last_change(&handler, whole), (1, json!("done")), "what was refused was taken back");
    let nan = vec![f32::NAN; LARGE_DIM];
    let again = handler.handle(whole, 2, &Request::Write { table: TableId(1), ids: &[39], rows: &nan });
    let refused = r#"emb_write: row of id 39 at position 0 of table "large" holds NaN"#;
    assert_eq!(again.unwrap_err().to_string(), refused);
}

#[test]
fn a_server_keeps_the_number_that_tells_it_from_others() {
    let directory = copied("changes");
    let mut config = ServerConfig::default();
    config.kept = Some(KeptState::logged(directory.path()));
    let server = Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap();
    let mut stream = TcpStream::connect(server.address().tcp().unwrap()).unwrap();
    stream.write_all(b"RECSTORE\x01\0\x01\0\0\0\0\0................").unwrap();
    let mut welcome = [0; 40];
    stream.read_exact(&mut welcome).unwrap();
    assert_eq!(u64::from_le_bytes(welcome[16..24].try_into().unwrap()), 0x00c0_ffee_0000_0007);
    drop(stream);
    server.stop(Duration::from_secs(1));
}

#[test]
fn the_same_changes_write_the_same_log() {
    let made = tempfile::tempdir().unwrap();
    let contents = |directory: &Path| -> BTreeMap<String, Vec<u8>> {
        let files = fs::read_dir(directory.join("log")).unwrap().map(|file| file.unwrap().path());
        let named = |file: PathBuf| {
            (file.file_name().unwrap().to_string_lossy().into_owned(), fs::read(file).unwrap())
        };
        files.map(named).collect()
    };
    // In the record of a step of several workers is whoever came last.
    for (name, make) in [("changes", make_changes as fn(&Path)), ("bounded", make_bounded)] {
        make(&made.path().join(name));
        assert!(contents(&made.path().join(name)) == contents(&fixture(name)), "{name}");
    }
}

fn write_down(
    to: &Path,
    name: &str,
    worker_sync: WorkerSync,
    clients: &[ClientId],
    more: impl FnOnce(&Handler),
) {
    let copied = tempfile::tempdir().unwrap();
    copy(&to.join(name), copied.path());
    let (handler, store) = started(copied.path(), worker_sync);
    let found = found(copied.path(), &handler, &store, clients);
    fs::write(to.join(format!("{name}.json")), lines(&serde_json::to_value(found).unwrap())).unwrap();
    more(&handler);
    let after = lines(&json!({"tables": recorded(&store)}));
    fs::write(to.join(format!("{name}_after.json")), after).unwrap();
}

/// Makes such directories where `RECSTORE_FIXTURES` says, as those of this version were made; they are never made again.
#[test]
fn fixtures_are_made_where_a_variable_says() {
    let temporary = tempfile::tempdir().unwrap();
    let asked_for = env::var_os("RECSTORE_FIXTURES").map(|to| PathBuf::from(to).join("log_v1"));
    let to = asked_for.unwrap_or_else(|| temporary.path().to_owned());
    make_changes(&to.join("changes"));
    make_workers(&to.join("workers"));
    make_bounded(&to.join("bounded"));
    make_large(&to.join("large"));
    ["changes", "workers", "bounded", "large"].iter().for_each(|name| tidy(&to.join(name)));
    write_down(&to, "changes", WorkerSync::default(), &[FIRST, SECOND, THIRD, FOURTH], more_changes);
    write_down(&to, "workers", together(), &WORKERS, finish_the_step);
    write_down(&to, "bounded", bounded(), &WORKERS[..2], one_step_more);
    assert!(!fs::read_to_string(to.join("large/log/0000000000000001.runs")).unwrap().is_empty());
}
