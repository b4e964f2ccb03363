//! The log of a server that is started on it.
#![no_main]

use std::fs;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use recstore::{LocalStore, Serial, Shard};
use recstore_fuzz::repair_log;
use recstore_ps::{Handler, KeptState, WorkerSync};

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    repair_log(&mut bytes);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir(directory.path().join("log")).unwrap();
    fs::write(directory.path().join("log/0000000000000001.log"), bytes).unwrap();
    fs::write(directory.path().join("incarnation"), "0123456789abcdef\n").unwrap();
    let store = Arc::new(LocalStore::new(Box::new(Serial)));
    let kept = KeptState::logged(directory.path());
    _ = Handler::kept(store, Shard { number: 0, of: 1 }, 1 << 20, WorkerSync::default(), &kept);
});
