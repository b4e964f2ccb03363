//! Servers that follow others: what they copy, how they take over, and who may still change rows.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod replication;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use recstore::{EmbeddingStore, EmbeddingTable, LocalStore, Serial, TableConfig};
use recstore_ps::{Promoted, RemoteConfig, RemoteStore, Server, promote};
use replication::{Follows, config, figure, start, wait_until};

const GRACE: Duration = Duration::from_secs(2);

fn leader(directory: &Path) -> Server {
    start(config(directory, None))
}

fn follower(directory: &Path, leader: &Server, synchronous: bool) -> Server {
    start(config(directory, Follows::the(leader, synchronous)))
}

fn both(one: &Server, other: &Server) -> RemoteStore {
    let servers = vec![format!("{}|{}", one.address(), other.address())];
    RemoteStore::connect(RemoteConfig::new(servers), Box::new(Serial)).unwrap()
}

/// Opens the table `t`, of one column, on a server alone.
fn table_on(server: &Server) -> Arc<dyn EmbeddingTable> {
    both(server, server).open_table("t", &TableConfig::new(1)).unwrap()
}

fn promoted(server: &Server) -> recstore::Result<Promoted> {
    promote(&RemoteConfig::new(vec![server.address().to_string()]))
}

/// Waits until a follower has all that its leader has.
fn wait_for(leader: &Server) {
    wait_until("the follower has everything", || {
        figure(leader, "recstore_follower_lag_changes") == Some(0.0)
    });
}

fn row(table: &dyn EmbeddingTable, id: i64) -> Vec<f32> {
    let mut row = vec![0.0; table.dim()];
    table.read(&[id], &mut row).unwrap();
    row
}

#[test]
fn a_follower_takes_over_with_every_change() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let leading = leader(one.path());
    let following = follower(other.path(), &leading, true);
    let store = both(&leading, &following);
    let table = store.open_table("t", &TableConfig::new(2)).unwrap();
    for id in 0..50 {
        table.write(&[id], &[id as f32, 1.0]).unwrap();
    }
    wait_for(&leading);
    assert_eq!(figure(&following, "recstore_leads"), Some(0.0));
    leading.stop(Duration::ZERO);
    let done = promoted(&following).unwrap();
    assert_eq!(done.epoch, 1);
    for id in 0..50 {
        assert_eq!(row(&*table, id), [id as f32, 1.0]);
    }
    table.write(&[7], &[-1.0, -2.0]).unwrap();
    assert_eq!(row(&*table, 7), [-1.0, -2.0]);
    assert_eq!(figure(&following, "recstore_leads"), Some(1.0));
    following.stop(GRACE);
}

#[test]
fn a_leader_that_lives_hands_over_and_follows_then() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let leading = leader(one.path());
    let following = follower(other.path(), &leading, false);
    let store = both(&leading, &following);
    let table = store.open_table("t", &TableConfig::new(1)).unwrap();
    table.write(&[1], &[5.0]).unwrap();
    wait_for(&leading);
    promoted(&following).unwrap();
    // The client's connection to the first server ends, and it goes to the other one.
    table.write(&[2], &[6.0]).unwrap();
    let mut old = RemoteConfig::new(vec![leading.address().to_string()]);
    old.timeout = Duration::from_millis(200);
    let refused = RemoteStore::connect(old, Box::new(Serial)).unwrap_err().to_string();
    assert!(
        refused.contains("another server leads its shard since epoch 1: start it anew with --follow"),
        "{refused}"
    );
    leading.stop(GRACE);
    let refused =
        Server::start(Arc::new(LocalStore::default()), config(one.path(), None)).unwrap_err().to_string();
    assert!(refused.contains("another server leads its shard since epoch 1"), "{refused}");
    let back = follower(one.path(), &following, true);
    wait_for(&following);
    table.write(&[3], &[7.0]).unwrap();
    wait_for(&following);
    following.stop(Duration::ZERO);
    assert_eq!(promoted(&back).unwrap().epoch, 2);
    let table = table_on(&back);
    assert_eq!([1, 2, 3].map(|id| row(&*table, id)[0]), [5.0, 6.0, 7.0]);
    back.stop(GRACE);
}

#[test]
fn a_follower_copies_what_the_log_does_not_have() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let leading = leader(one.path());
    let store = both(&leading, &leading);
    let table = store.open_table("t", &TableConfig::new(3)).unwrap();
    table.write(&[1, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    leading.handler().checkpoint().unwrap();
    table.write(&[2], &[7.0; 3]).unwrap();
    let following = follower(other.path(), &leading, false);
    wait_for(&leading);
    // A load replaces all rows, and no log tells it.
    let saved = tempfile::tempdir().unwrap();
    let source = LocalStore::default();
    source.open_table("other", &TableConfig::new(1)).unwrap().write(&[9], &[9.0]).unwrap();
    source.save(saved.path(), &recstore::SaveOptions::default()).unwrap();
    store.load(saved.path(), &recstore::LoadOptions::default()).unwrap();
    let table = store.open_table("other", &TableConfig::new(1)).unwrap();
    table.write(&[10], &[10.0]).unwrap();
    wait_for(&leading);
    leading.stop(Duration::ZERO);
    promoted(&following).unwrap();
    let store = both(&following, &following);
    assert_eq!(store.table_names().unwrap(), ["other", "t"]);
    let table = store.open_table("other", &TableConfig::new(1)).unwrap();
    assert_eq!([9, 10].map(|id| row(&*table, id)[0]), [9.0, 10.0]);
    let table = store.open_table("t", &TableConfig::new(3)).unwrap();
    assert_eq!([1, 2].map(|id| row(&*table, id)), [vec![1.0, 2.0, 3.0], vec![7.0; 3]]);
    following.stop(GRACE);
}

#[test]
fn a_follower_that_was_away_goes_on_or_copies_what_the_log_has_no_more() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let leading = leader(one.path());
    let table = table_on(&leading);
    table.write(&[1], &[1.0]).unwrap();
    for (round, is_trimmed) in [(1, false), (2, true), (3, false)] {
        let following = follower(other.path(), &leading, false);
        wait_for(&leading);
        following.handler().checkpoint().unwrap();
        following.stop(GRACE);
        table.write(&[round], &[10.0 * round as f32]).unwrap();
        if is_trimmed {
            leading.handler().checkpoint().unwrap();
        }
    }
    let following = follower(other.path(), &leading, false);
    wait_for(&leading);
    leading.stop(Duration::ZERO);
    promoted(&following).unwrap();
    let table = table_on(&following);
    assert_eq!([1, 2, 3].map(|id| row(&*table, id)[0]), [10.0, 20.0, 30.0]);
    following.stop(GRACE);
}

#[test]
fn rows_of_another_store_are_not_replaced() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [leading, strange] = [leader(one.path()), leader(other.path())];
    for (server, value) in [(&leading, 1.0), (&strange, 2.0)] {
        let store = both(server, server);
        store.open_table("t", &TableConfig::new(1)).unwrap().write(&[1], &[value]).unwrap();
    }
    strange.stop(GRACE);
    let following = follower(other.path(), &leading, true);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(figure(&following, "recstore_leader_connected"), Some(0.0));
    let refused = promoted(&following).unwrap_err().to_string();
    assert!(refused.contains("it has not copied the tables of the server that it follows yet"), "{refused}");
    following.stop(GRACE);
    // Its own rows are still there: its log is read at the next start.
    let stores = Arc::new(LocalStore::default());
    let again =
        Server::start(Arc::clone(&stores) as _, config(other.path(), Follows::the(&leading, true))).unwrap();
    assert_eq!(row(&*stores.find_table("t").unwrap().unwrap(), 1), [2.0]);
    again.stop(GRACE);
    leading.stop(GRACE);
}

#[test]
fn a_server_without_a_log_follows_none_and_is_not_followed() {
    let directory = tempfile::tempdir().unwrap();
    let plain = Server::start(Arc::new(LocalStore::default()), recstore_ps::ServerConfig::default()).unwrap();
    let refused = promoted(&plain).unwrap_err().to_string();
    assert!(refused.contains("only a server that follows another one is promoted"), "{refused}");
    let following = follower(directory.path(), &plain, false);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(figure(&following, "recstore_leader_connected"), Some(0.0));
    following.stop(GRACE);
    plain.stop(GRACE);
    let follows = Follows { leader: "127.0.0.1:1".to_owned(), synchronous: false };
    let mut kept = config(directory.path(), Some(follows));
    kept.kept.as_mut().unwrap().durability = recstore_ps::Durability::Checkpoint;
    let refused = Server::start(Arc::new(LocalStore::default()), kept).unwrap_err().to_string();
    assert!(
        refused.contains("without which none follows another: serve with --data and --durability wal"),
        "{refused}"
    );
}

#[test]
fn changes_that_only_a_demoted_leader_has_are_given_up() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let leading = leader(one.path());
    let following = follower(other.path(), &leading, false);
    let table = table_on(&leading);
    table.write(&[1], &[1.0]).unwrap();
    wait_for(&leading);
    let address = leading.address().to_string();
    following.stop(GRACE);
    table.write(&[1, 2], &[-1.0, -2.0]).unwrap();
    leading.stop(Duration::ZERO);
    // It has what the other one had when it was there last.
    let mut again = config(other.path(), Some(Follows { leader: address, synchronous: false }));
    again.port = 0;
    let promoted_one = start(again);
    promoted(&promoted_one).unwrap();
    let back = follower(one.path(), &promoted_one, true);
    wait_for(&promoted_one);
    let table = table_on(&promoted_one);
    table.write(&[3], &[3.0]).unwrap();
    wait_for(&promoted_one);
    promoted_one.stop(Duration::ZERO);
    promoted(&back).unwrap();
    let table = table_on(&back);
    let mut ids = table.ids().unwrap();
    ids.sort_unstable();
    assert_eq!(ids, [1, 3]);
    assert_eq!([1, 3].map(|id| row(&*table, id)[0]), [1.0, 3.0]);
    back.stop(GRACE);
}
