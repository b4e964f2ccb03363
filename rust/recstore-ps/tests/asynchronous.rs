//! Requests that a thread carries out, over a store of the process and over servers.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cluster::Cluster;
use numbered::Numbered;
use recstore::{EmbeddingStore, Error, LocalStore, Serial, TableConfig, TableId};
use recstore_ps::{AsyncConfig, AsyncError, AsyncStore, Callback, Timestamp};

const TIMEOUT: Option<Duration> = Some(Duration::from_secs(20));
const SHORT: Duration = Duration::from_millis(50);

/// A store with a table of one column whose rows are the negative sums of their gradients.
fn sums(store: Arc<dyn EmbeddingStore>) -> (Arc<dyn EmbeddingStore>, TableId) {
    let text = r#"{"initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1.0}}"#;
    let table = store.open_numbered("t", &TableConfig::from_json(1, text).unwrap()).unwrap();
    (store, table)
}

fn embedded() -> (Arc<dyn EmbeddingStore>, TableId) {
    sums(Arc::new(LocalStore::new(Box::new(Serial))))
}

fn requests(store: &Arc<dyn EmbeddingStore>, change: impl FnOnce(&mut AsyncConfig)) -> AsyncStore {
    let mut config = AsyncConfig::default();
    change(&mut config);
    AsyncStore::new(Arc::clone(store), config).unwrap()
}

/// Keeps the thread busy until the sender is used or dropped.
fn hold(requests: &AsyncStore, table: TableId) -> Sender<()> {
    let (began, has_begun) = mpsc::channel();
    let (release, released): (_, Receiver<()>) = mpsc::channel();
    let callback = move |_| {
        began.send(()).unwrap();
        _ = released.recv();
    };
    requests.pull(table, [0], i32::MAX, Some(Box::new(callback))).unwrap();
    has_begun.recv().unwrap();
    release
}

/// The names of callbacks, as they were called.
type Notes = Arc<Mutex<Vec<&'static str>>>;

/// Returns what makes callbacks that note their names, and the notes.
fn notes() -> (impl Fn(&'static str) -> Option<Callback>, Notes) {
    let notes = Notes::default();
    let callback = {
        let notes = Arc::clone(&notes);
        move |name| {
            let notes = Arc::clone(&notes);
            Some(Box::new(move |_| notes.lock().unwrap().push(name)) as Callback)
        }
    };
    (callback, notes)
}

#[test]
fn a_pull_sees_the_pushes_before_it_here_and_on_servers() {
    let cluster = Cluster::start(2);
    for (store, table) in [embedded(), sums(Arc::new(cluster.connect()))] {
        let requests = requests(&store, |_| {});
        let ids: Vec<i64> = (0..50).collect();
        for _ in 0..12 {
            requests.push(table, &ids[..], [-1.0; 50], 0, None).unwrap();
        }
        let pulled = requests.pull(table, &ids[..], 0, None).unwrap();
        assert_eq!(pulled, Timestamp(12));
        assert_eq!(requests.wait_rows(pulled, TIMEOUT).unwrap(), [12.0; 50]);
        let both = requests.push_pull(table, [7, 7, 49], [-1.0, -2.0, -4.0], 0, None).unwrap();
        assert_eq!(requests.wait_rows(both, TIMEOUT).unwrap(), [15.0, 15.0, 16.0]);
        let (send, rows) = mpsc::channel();
        requests.pull(table, [49], 0, Some(Box::new(move |rows| send.send(rows).unwrap()))).unwrap();
        assert_eq!(rows.recv().unwrap(), Ok(vec![16.0]));
        let empty = requests.push_pull(table, [], [], 0, None).unwrap();
        assert!(requests.wait_rows(empty, TIMEOUT).unwrap().is_empty());
        requests.wait_all(TIMEOUT).unwrap();
        assert_eq!(requests.num_pending(), Ok(0));
        assert_eq!(store.statistics(table).unwrap().step, 14);
    }
}

#[test]
fn higher_priorities_come_first_and_pushes_of_a_table_keep_their_order() {
    let (store, table) = embedded();
    let other = store.open_numbered("other", &TableConfig::new(1)).unwrap();
    let (named, order) = notes();
    let requests = requests(&store, |_| {});
    let release = hold(&requests, table);
    requests.pull(table, [1], 0, named("pull 0")).unwrap();
    requests.push(table, [1], [1.0], -1, named("push -1")).unwrap();
    requests.push(other, [1], [1.0], 0, named("other 0")).unwrap();
    requests.push(table, [1], [1.0], 5, named("push 5")).unwrap();
    requests.pull(table, [1], 7, named("pull 7")).unwrap();
    requests.pull(table, [1], 0, named("last pull 0")).unwrap();
    release.send(()).unwrap();
    requests.wait_all(TIMEOUT).unwrap();
    let expected = ["pull 7", "push -1", "push 5", "pull 0", "other 0", "last pull 0"];
    assert_eq!(*order.lock().unwrap(), expected);
}

#[test]
fn what_finds_no_room_waits_and_is_then_refused_with_the_limit() {
    let (store, table) = embedded();
    let requests = requests(&store, |config| {
        (config.max_pending, config.max_pending_bytes, config.issue_timeout) = (2, 64, SHORT);
    });
    let release = hold(&requests, table);
    requests.push(table, [1], [1.0], 0, None).unwrap();
    let full = |limit_name, limit, in_use, requested| {
        let (operation, waited) = ("push", SHORT);
        Err(AsyncError::Full { operation, limit_name, limit, in_use, requested, waited })
    };
    let refused = requests.push(table, [1], [1.0], 0, None);
    assert_eq!(refused, full("max_pending", 2, 2, 1));
    let text = "push: max_pending is 2, of which 2 are pending: no room for 1 more within 0.05 s";
    assert_eq!(refused.unwrap_err().to_string(), text);
    let too_large = requests.push_pull(table, [1; 6], [1.0; 6], 0, None).unwrap_err();
    assert_eq!(too_large.to_string(), "push_pull: a request of 96 bytes exceeds max_pending_bytes, 64");
    thread::scope(|scope| {
        // It waits until the thread goes on.
        let waiting = scope.spawn(|| {
            loop {
                match requests.push(table, [1], [1.0], 0, None) {
                    Err(AsyncError::Full { .. }) => {}
                    issued => break issued,
                }
            }
        });
        release.send(()).unwrap();
        waiting.join().unwrap().unwrap();
    });
    requests.wait_all(TIMEOUT).unwrap();
    // Rows that nobody takes count too.
    let rows = requests.pull(table, [1; 4], 0, None).unwrap();
    requests.wait(rows, TIMEOUT).unwrap();
    assert_eq!(requests.push(table, [1; 5], [1.0; 5], 0, None), full("max_pending_bytes", 64, 16, 60));
    assert_eq!(requests.wait_rows(rows, TIMEOUT).unwrap(), [-2.0; 4]);
    requests.push(table, [1; 5], [1.0; 5], 0, None).unwrap();
    requests.wait_all(TIMEOUT).unwrap();
}

#[test]
fn a_wait_has_an_end_and_the_request_goes_on() {
    let (store, table) = embedded();
    let requests = requests(&store, |_| {});
    let release = hold(&requests, table);
    let pushed = requests.push(table, [1], [1.0], 0, None).unwrap();
    let late = requests.wait(pushed, Some(SHORT)).unwrap_err();
    assert_eq!(late.to_string(), "request 1 did not finish within 0.05 s; 2 requests are pending");
    let late = requests.wait_all(Some(SHORT)).unwrap_err();
    assert_eq!(late, AsyncError::TimedOut { timestamp: Timestamp(0), waited: SHORT, pending: 2 });
    release.send(()).unwrap();
    assert_eq!(requests.wait(pushed, TIMEOUT), Ok(()));
    assert_eq!(requests.wait(pushed, TIMEOUT), Ok(()));
    let unknown = requests.wait(Timestamp(2), TIMEOUT).unwrap_err();
    assert_eq!(unknown.to_string(), "request 2 was never issued");
    let none = requests.wait_rows(pushed, TIMEOUT).unwrap_err();
    assert!(none.to_string().starts_with("request 1 has no rows to give: it is a push"), "{none}");
}

#[test]
fn errors_go_to_whoever_waits_to_the_callback_and_to_the_wait_for_all() {
    let (store, table) = embedded();
    let requests = requests(&store, |_| {});
    let unknown = requests.push(TableId(99), [1], [1.0], 0, None).unwrap_err();
    assert_eq!(unknown, AsyncError::Store(Error::UnknownHandle { operation: "dim", handle: 99 }));
    let bad = || requests.push(table, [5], [f32::INFINITY], 0, None).unwrap();
    let (first, second, third) = (bad(), bad(), bad());
    let failed = requests.wait(first, TIMEOUT).unwrap_err();
    assert_eq!(
        failed.to_string(),
        "request 0: emb_update: gradient of id 5 at position 0 of table \"t\" holds inf"
    );
    assert_eq!(requests.wait(first, TIMEOUT), Err(failed));
    let (send, told) = mpsc::channel();
    let callback = move |outcome| send.send(outcome).unwrap();
    let fourth = requests.push(table, [5, 6], [1.0], 0, Some(Box::new(callback))).unwrap();
    let failed = told.recv().unwrap().unwrap_err();
    assert!(failed.to_string().starts_with("request 3: emb_update: "), "{failed}");
    assert_eq!(requests.wait(fourth, TIMEOUT), Err(failed));
    // Nobody was told of two.
    let untold = requests.wait_all(TIMEOUT).unwrap_err();
    let AsyncError::Several { first, others: 1 } = &untold else { panic!("{untold}") };
    assert!(matches!(**first, AsyncError::Failed { timestamp, .. } if timestamp == second));
    assert!(untold.to_string().ends_with("holds inf (and 1 more requests failed)"), "{untold}");
    assert_eq!(requests.wait_all(TIMEOUT), Ok(()));
    assert!(matches!(requests.wait(third, TIMEOUT), Err(AsyncError::Failed { .. })));
    assert_eq!(store.num_rows(table), Ok(0));
}

#[test]
fn a_callback_that_panics_ends_nothing() {
    let (store, table) = embedded();
    let requests = requests(&store, |_| {});
    let panics: Callback = Box::new(|_| panic!("no rows, please"));
    let pulled = requests.pull(table, [1], 0, Some(panics)).unwrap();
    let failed = requests.wait(pulled, TIMEOUT).unwrap_err();
    assert_eq!(failed.to_string(), "request 0: its callback panicked: no rows, please");
    let pulled = requests.pull(table, [1], 0, None).unwrap();
    assert_eq!(requests.wait_rows(pulled, TIMEOUT), Ok(vec![0.0]));
}

#[test]
fn a_callback_may_issue_requests_and_is_refused_what_would_wait_for_itself() {
    let (store, table) = embedded();
    let requests = Arc::new(requests(&store, |config| config.max_pending = 2));
    let (send, seen) = mpsc::channel();
    let within = Arc::clone(&requests);
    let callback = move |_| {
        let issued = within.push(table, [1], [1.0], 0, None);
        let waited = within.wait(*issued.as_ref().unwrap(), None);
        let full = within.push(table, [1], [1.0], 0, None);
        send.send((issued, waited, full)).unwrap();
        // What is dropped here last does not wait for itself either.
        drop(within);
    };
    requests.pull(table, [1], 0, Some(Box::new(callback))).unwrap();
    let (issued, waited, full) = seen.recv().unwrap();
    let timestamp = issued.unwrap();
    assert_eq!(waited, Err(AsyncError::InCallback { timestamp }));
    assert_eq!(waited.unwrap_err().to_string(), "request 1 cannot finish while a callback waits for it");
    assert!(matches!(full, Err(AsyncError::Full { waited: Duration::ZERO, .. })));
    requests.wait(timestamp, TIMEOUT).unwrap();
}

#[test]
fn what_is_pending_is_finished_by_a_drop_unless_it_is_cancelled() {
    let (store, table) = embedded();
    let first = requests(&store, |_| {});
    let release = hold(&first, table);
    first.push(table, [1], [-1.0], 0, None).unwrap();
    drop(release);
    drop(first);
    let mut row = [0.0];
    store.read(table, &[1], &mut row).unwrap();
    assert_eq!(row, [1.0]);

    let second = requests(&store, |_| {});
    let release = hold(&second, table);
    let cancelled = second.push(table, [1], [-1.0], 0, None).unwrap();
    let (named, order) = notes();
    second.pull(table, [1], 0, named("told")).unwrap();
    assert_eq!(second.cancel(), Ok(2));
    assert_eq!(*order.lock().unwrap(), ["told"]);
    drop(release);
    let refused = second.wait(cancelled, TIMEOUT).unwrap_err();
    assert_eq!(refused.to_string(), "request 1: cancelled before it began");
    second.wait_all(TIMEOUT).unwrap();
    store.read(table, &[1], &mut row).unwrap();
    assert_eq!(row, [1.0]);
}

#[test]
fn a_push_to_a_server_that_is_gone_fails_and_the_next_requests_go_on() {
    let mut cluster = Cluster::start(1);
    let remote = cluster::connect(cluster.addresses(), Duration::from_millis(300));
    let (store, table) = sums(Arc::new(remote));
    let requests = requests(&store, |_| {});
    requests.push(table, [1], [1.0], 0, None).unwrap();
    requests.wait_all(TIMEOUT).unwrap();
    cluster.servers.pop().unwrap().stop(Duration::ZERO);
    let pushed = requests.push(table, [1], [1.0], 0, None).unwrap();
    let pulled = requests.pull(table, [1], 0, None).unwrap();
    for (timestamp, operation) in [(pushed, "emb_update"), (pulled, "emb_read")] {
        let failed = requests.wait(timestamp, TIMEOUT).unwrap_err().to_string();
        assert!(failed.starts_with(&format!("request {timestamp}: {operation}: shard 0 at ")), "{failed}");
    }
}

#[test]
fn several_threads_may_issue_and_nothing_is_lost() {
    let (store, table) = embedded();
    let requests = requests(&store, |config| config.max_pending = 3);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let pushed = requests.push(table, [1], [-1.0], 0, None).unwrap();
                    requests.wait(pushed, TIMEOUT).unwrap();
                }
            });
        }
    });
    let pulled = requests.pull(table, [1], 0, None).unwrap();
    assert_eq!(requests.wait_rows(pulled, TIMEOUT), Ok(vec![200.0]));
}
