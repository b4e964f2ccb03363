//! Servers with a log know the snapshots that they saved and loaded when they come back; older and other copies of their
//! directories, which have the same number, do not.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod groups;
mod replication;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use groups::{
    Group, Outcome, another_saves, connect, copy_into, fill, manifest, new_directory, shard_directory,
};
use recstore::{EmbeddingStore, SaveOptions};
use recstore_ps::{Durability, RemoteConfig, Server, promote, reshard};
use replication::{Follows, figure, wait_until};
use serde_json::{Value, json};

const FILE: &str = "recstore-saves.json";

fn goes_on(outcome: Outcome) -> String {
    let (snapshot, kept) = outcome.unwrap();
    assert_eq!(kept, None, "the store goes on with what is there");
    snapshot
}

const WAYS_OUT: &str =
    ": save elsewhere, load the newest one before training, or drop what is here (replace=True)";

fn overtaken(newest: &str, own: &str) -> String {
    format!(
        "another store has saved the newest snapshot here, {newest}, since this one saved or loaded {own}{WAYS_OUT}"
    )
}

fn copied(newest: &str, own: Option<&str>) -> String {
    let since = own.map_or(String::new(), |own| format!(", since this one saved or loaded {own}"));
    format!(
        "a later state or a copy of this store has saved the newest snapshot here, {newest}{since}{WAYS_OUT}"
    )
}

fn assert_refused(outcome: Outcome, expected: &str) {
    let refused = outcome.unwrap_err();
    assert!(refused.ends_with(expected), "expected {expected}, got {refused}");
}

#[test]
fn a_store_that_was_overtaken_is_refused_after_a_restart_too() {
    for (of, saves, loads) in [(1, false, false), (2, true, false), (2, false, true)] {
        let (_root, data, place) = new_directory();
        let mut group = Group::start(&data, of);
        if loads {
            another_saves(&place, false).unwrap();
        }
        let own = if loads { group.load(&place) } else { goes_on(group.save(&place)) };
        let newest = another_saves(&place, true).unwrap();
        let before = manifest(&place);
        for _ in 0..2 {
            assert_refused(group.save(&place), &overtaken(&newest, &own));
            group.restart(saves);
        }
        assert_eq!(manifest(&place), before, "nothing is dropped");
        group.load(&place);
        group.restart(saves);
        goes_on(group.save(&place));
    }
}

#[test]
fn an_older_copy_does_not_replace_what_the_store_saved_since() {
    for of in [1, 2] {
        let (root, data, place) = new_directory();
        let (copy, mut group) = (root.path().join("copy"), Group::start(&data, of));
        let own = goes_on(group.save(&place));
        group.copy(&copy);
        goes_on(group.save(&place));
        group.restart(false);
        let newest = goes_on(group.save(&place));
        group.restore(&copy);
        let before = manifest(&place);
        assert_refused(group.save(&place), &copied(&newest, Some(&own)));
        group.restart(true);
        assert_refused(group.save(&place), &copied(&newest, Some(&own)));
        assert_eq!(manifest(&place), before, "nothing is dropped");
        // Each of the ways out that the message names.
        let elsewhere = root.path().join("elsewhere");
        goes_on(group.save(&elsewhere));
        if of == 1 {
            group.load(&place);
            goes_on(group.save(&place));
        } else {
            goes_on(group.save_with(&place, true));
            goes_on(group.save(&place));
        }
    }
}

#[test]
fn a_copy_that_runs_beside_is_another_store() {
    let (root, data, place) = new_directory();
    let group = Group::start(&data, 2);
    // The number of the store is drawn by its first client.
    fill(&group.client(), 1);
    let cloned = root.path().join("clone");
    group.copy(&cloned);
    let clone = Group::start(&cloned, 2);
    let newest = goes_on(group.save(&place));
    assert_refused(clone.save(&place), &copied(&newest, None));
    goes_on(group.save(&place));
    let newest = goes_on(clone.save_with(&place, true));
    assert!(group.save(&place).unwrap_err().contains(&format!("the newest snapshot here, {newest}")));
}

#[test]
fn a_save_that_was_cut_off_locks_nobody_out() {
    for of in [1, 2] {
        let (root, data, place) = new_directory();
        let (before, mut group) = (root.path().join("before"), Group::start(&data, of));
        goes_on(group.save(&place));
        copy_into(&place, &before);
        goes_on(group.save(&place));
        // The servers saved their parts, and nobody made them count.
        fs::remove_dir_all(&place).unwrap();
        copy_into(&before, &place);
        group.restart(false);
        goes_on(group.save(&place));
        // They count, and the servers ended at once.
        group.restart(false);
        goes_on(group.save(&place));
    }
}

#[test]
fn a_load_that_was_cut_off_behind_its_checkpoint_is_known() {
    let (root, data, place) = new_directory();
    let mut group = Group::start(&data, 1);
    another_saves(&place, false).unwrap();
    let file = shard_directory(&data, 0, 1).join(FILE);
    let before = root.path().join("before");
    fs::copy(&file, &before).unwrap();
    let own = group.load(&place);
    group.stop(false);
    fs::copy(&before, &file).unwrap();
    let mut group = Group::start(&data, 1);
    let newest = another_saves(&place, true).unwrap();
    assert_refused(group.save(&place), &overtaken(&newest, &own));
    group.load(&place);
    group.restart(false);
    goes_on(group.save(&place));
}

#[test]
fn a_directory_of_before_goes_on_by_its_number() {
    let (root, data, place) = new_directory();
    let [copy, elsewhere] = ["copy", "elsewhere"].map(|name| root.path().join(name));
    let mut group = Group::start(&data, 2);
    goes_on(group.save(&place));
    goes_on(group.save(&elsewhere));
    group.copy(&copy);
    group.stop(false);
    for number in 0..2 {
        fs::remove_file(shard_directory(&data, number, 2).join(FILE)).unwrap();
    }
    let group = Group::start(&data, 2);
    goes_on(group.save(&place));
    // Also one that it has not saved to since it has the file.
    let known = goes_on(group.save(&elsewhere));
    drop(group);
    let mut group = Group::start(&copy, 2);
    assert!(group.save(&elsewhere).unwrap_err().contains(&known));
    group.restart(false);
    assert!(group.save(&elsewhere).unwrap_err().contains(&known));
}

#[test]
fn shards_that_were_spread_anew_go_on() {
    let (_root, data, place) = new_directory();
    let mut group = Group::start(&data, 2);
    let own = goes_on(group.save(&place));
    group.stop(true);
    reshard(&data, &data, 3, None).unwrap();
    let mut group = Group::start(&data, 3);
    let newest = another_saves(&place, true).unwrap();
    assert_refused(group.save(&place), &overtaken(&newest, &own));
    group.load(&place);
    let own = goes_on(group.save(&place));
    // The old shards are an older copy.
    let mut old = Group::start(&data.join("before-reshard-1"), 2);
    assert!(old.save(&place).unwrap_err().contains(&format!("has saved the newest snapshot here, {own}")));
    old.stop(true);
    group.stop(true);
    reshard(&data, &data, 1, None).unwrap();
    let group = Group::start(&data, 1);
    goes_on(group.save(&place));
}

#[test]
fn servers_that_kept_no_log_for_a_while_go_on() {
    let (_root, data, place) = new_directory();
    let mut group = Group::start(&data, 1);
    goes_on(group.save(&place));
    group.stop(true);
    let mut group = Group::kept(&data, 1, Durability::Checkpoint).unwrap();
    let own = goes_on(group.save(&place));
    group.stop(true);
    let group = Group::start(&data, 1);
    let newest = another_saves(&place, true).unwrap();
    assert_refused(group.save(&place), &overtaken(&newest, &own));
}

#[test]
fn a_promoted_follower_goes_on_with_the_snapshots_of_its_leader() {
    let (root, data, place) = new_directory();
    let [copy, second] = ["copy", "second"].map(|name| root.path().join(name));
    let directory = shard_directory(&data, 0, 1);
    let leader = replication::start(replication::config(&directory, None));
    let save = |server: &Server| {
        let store = connect(vec![server.address().to_string()]);
        fill(&store, 10);
        let saved = store.save(&place, &SaveOptions::default());
        saved.map(|report| (report.snapshot, report.kept)).map_err(|error| error.to_string())
    };
    goes_on(save(&leader));
    let follower = replication::start(replication::config(&second, Follows::the(&leader, true)));
    wait_until("it follows", || figure(&leader, "recstore_follower_in_step") == Some(1.0));
    goes_on(save(&leader));
    copy_into(&data, &copy);
    leader.stop(Duration::from_secs(5));
    promote(&RemoteConfig::new(vec![follower.address().to_string()])).unwrap();
    goes_on(save(&follower));
    // A moment later, which a copy of the leader must not have.
    std::thread::sleep(Duration::from_millis(1100));
    let newest = goes_on(save(&follower));
    follower.stop(Duration::from_secs(5));
    let follower = replication::start(replication::config(&second, None));
    let old = Group::start(&copy, 1);
    assert!(
        old.save(&place)
            .unwrap_err()
            .contains(&format!("a copy of this store has saved the newest snapshot here, {newest}"))
    );
    goes_on(save(&follower));
    follower.stop(Duration::from_secs(5));
}

/// A change of the file, and what is said of it.
type Damage = (&'static str, fn(&mut Value));

#[test]
fn a_file_that_is_damaged_or_of_another_version_is_refused_by_name() {
    let (_root, data, place) = new_directory();
    let mut group = Group::start(&data, 2);
    goes_on(group.save(&place));
    group.stop(false);
    let file = shard_directory(&data, 0, 2).join(FILE);
    let whole = fs::read(&file).unwrap();
    let refused = |text: &[u8], expected: &str| {
        fs::write(&file, text).unwrap();
        let refused = Group::kept(&data, 2, Durability::Wal).err().unwrap_or_else(|| panic!("{expected}"));
        let start = format!("checkpoint: {}: ", file.display());
        assert!(refused.starts_with(&start) && refused.contains(expected), "{expected}: {refused}");
        assert!(refused.contains("Put back the file as it was, or remove it"), "{refused}");
    };
    let damages: [Damage; 12] = [
        ("expected the format \"recstore-saves\" of version 1, got \"recstore-saves\" of version 2", |all| {
            all["version"] = json!(2);
        }),
        ("got \"other\" of version 1", |all| all["format"] = json!("other")),
        ("unknown field `more`", |all| all["more"] = json!(1)),
        ("unknown field `more`", |all| all["known"]["more"] = json!(1)),
        ("unknown field `more`", |all| all["owner"]["more"] = json!(1)),
        ("missing field `share`", |all| _ = all["known"].as_object_mut().unwrap().remove("share")),
        ("missing field `store`", |all| _ = all["owner"].as_object_mut().unwrap().remove("store")),
        ("checksum mismatch: expected ", |all| all["known"]["saves"] = json!([])),
        ("checksum mismatch: expected ", |all| all["known"]["lineages"][0]["is_own"] = json!(false)),
        ("checksum mismatch: expected ", |all| all["known"]["number_counts_until"] = json!(u64::MAX)),
        ("checksum mismatch: expected ", |all| all["owner"]["store"] = json!("0123456789abcdef")),
        ("invalid type", |all| all["known"]["saves"] = json!(3)),
    ];
    for (expected, change) in damages {
        let mut changed = serde_json::from_slice(&whole).unwrap();
        change(&mut changed);
        refused(&serde_json::to_vec(&changed).unwrap(), expected);
    }
    for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
        refused(&whole[..cut], "it is no list of saves: EOF while parsing");
    }
    refused(&[whole.clone(), vec![b'x']].concat(), "trailing characters");
    let mut long = whole.clone();
    long.resize((1 << 20) + 1, b' ');
    fs::write(&file, &long).unwrap();
    assert!(Group::kept(&data, 2, Durability::Wal).is_err());
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink(&place, &file).unwrap();
    let linked = Group::kept(&data, 2, Durability::Wal).err().unwrap();
    assert!(linked.contains("symbolic link"), "{linked}");
    fs::remove_file(&file).unwrap();
    fs::write(&file, &whole).unwrap();
    goes_on(Group::start(&data, 2).save(&place));
}

#[test]
fn a_file_of_another_server_does_not_count() {
    let (root, data, place) = new_directory();
    let mut own = Group::start(&data, 1);
    fill(&own.client(), 1);
    let other = Group::start(&root.path().join("other"), 1);
    let newest = goes_on(other.save(&place));
    own.stop(false);
    let [from, to] = [&other.data, &data].map(|data| shard_directory(data, 0, 1).join(FILE));
    fs::copy(from, &to).unwrap();
    let own = Group::start(&data, 1);
    assert_eq!(
        own.save(&place).unwrap().1,
        Some(newest),
        "the store begins a lineage beside that of the other"
    );
}

/// Servers of this version, and the places that they saved to and loaded from.
fn specimen() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/saves_v1")
}

/// `RECSTORE_FIXTURES` names where to make it, which was done once for this version: the directories of two servers that
/// saved to one place and loaded from another, and both places.
#[test]
fn the_specimen_of_version_1_goes_on() {
    if let Some(made) = std::env::var_os("RECSTORE_FIXTURES").map(|to| PathBuf::from(to).join("saves_v1")) {
        let (saved, loaded) = (made.join("saved"), made.join("loaded"));
        let mut group = Group::start(&made.join("data"), 2);
        another_saves(&loaded, false).unwrap();
        group.load(&loaded);
        goes_on(group.save(&saved));
        group.stop(true);
        return;
    }
    let root = tempfile::tempdir().unwrap();
    copy_into(&specimen(), root.path());
    let mut group = Group::start(&root.path().join("data"), 2);
    goes_on(group.save(&root.path().join("saved")));
    group.restart(false);
    goes_on(group.save(&root.path().join("loaded")));
    // The same is written today, whatever the names and the time.
    let form = |data: &Path| {
        let text = fs::read(shard_directory(data, 0, 2).join(FILE)).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let known = &file["known"];
        [keys(&file), keys(&file["owner"]), keys(known), keys(&known["lineages"][0])]
    };
    assert_eq!(form(&specimen().join("data")), form(&root.path().join("data")));
}
