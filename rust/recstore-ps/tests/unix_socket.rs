//! Clients of the same machine: by a Unix socket, with and without memory that they share with the server. All results
//! equal those of a store in this process, to the bit.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cluster::{Cluster, config, hello};
use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    BagInput, EmbeddingStore, GradientChunk, LocalStore, PLACES_TAG, PoolingMode, Serial, Step, TableConfig,
    TableId, TableUpdate,
};
use recstore_ps::codec::{Frame, Header, Kind, Management, Request, Section, read_frame};
use recstore_ps::{RemoteStore, Server, ServerConfig, ServerError};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const DIM: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(20);

fn at(path: &Path) -> Cluster {
    limited(path, ServerConfig::default().max_frame_bytes)
}

fn limited(path: &Path, max_frame_bytes: u64) -> Cluster {
    Cluster::configured(1, |config| {
        config.unix_socket = Some(path.to_owned());
        config.max_frame_bytes = max_frame_bytes;
    })
}

fn connect(cluster: &Cluster, shared_memory: bool) -> RemoteStore {
    let mut config = config(cluster.addresses(), TIMEOUT);
    config.shared_memory = shared_memory;
    RemoteStore::connect(config, Box::new(Serial)).unwrap()
}

#[derive(Debug, Clone)]
enum Act {
    Read(Vec<i64>),
    Bag(Vec<i64>),
    Write(Vec<i64>),
    Step(Vec<i64>, Vec<i64>),
}

/// From a few ids, which go over the socket, to many, for which a segment grows several times.
fn ids() -> impl Strategy<Value = Vec<i64>> {
    let len = prop_oneof![0..9usize, 900..1_200usize, 20_000..30_000usize];
    (len, any::<u32>(), 1..40_000i64).prop_map(|(len, seed, most)| {
        (0..len as i64).map(|place| (place * 7_919 + i64::from(seed)) % most).collect()
    })
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => ids().prop_map(Act::Read),
        2 => ids().prop_map(Act::Bag),
        1 => ids().prop_map(Act::Write),
        3 => (ids(), ids()).prop_map(|(one, other)| Act::Step(one, other)),
    ]
}

fn values(ids: &[i64]) -> Vec<f32> {
    let value = |place: usize, id: i64| ((place as f32 * 0.37 + id as f32) % 5.0) - 2.5;
    (0..ids.len() * DIM).map(|place| value(place, ids[place / DIM])).collect()
}

/// Does the same on any store, and returns the bits of what it gives.
fn play(store: &dyn EmbeddingStore, acts: &[Act]) -> Vec<Vec<u32>> {
    let config: TableConfig =
        serde_json::from_str(r#"{"optimizer": {"kind": "adagrad", "lr": 0.5}}"#).unwrap();
    let tables = ["a", "b"]
        .map(|name| store.open_numbered(name, &TableConfig { dim: DIM, ..config.clone() }).unwrap());
    acts.iter().map(|act| bits(&given(store, tables, act))).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn given(store: &dyn EmbeddingStore, [a, b]: [TableId; 2], act: &Act) -> Vec<f32> {
    match act {
        Act::Read(ids) => {
            let mut rows = vec![0.0; ids.len() * DIM];
            store.read(a, ids, &mut rows).unwrap();
            rows
        }
        Act::Bag(ids) => {
            let bags = ids.len() / 2;
            let offsets: Vec<i64> = (0..=2 * bags as i64).collect();
            let input = BagInput {
                ids: &ids[..2 * bags],
                offsets: &offsets,
                mode: PoolingMode::Sum,
                per_sample_weights: None,
                padding_idx: None,
            };
            let mut pooled = vec![0.0; 2 * bags * DIM];
            let mut places = vec![0; 2 * bags + 2 * PLACES_TAG];
            store.bag(&[a, b], input, &mut pooled, &mut [], &mut places).unwrap();
            pooled
        }
        Act::Write(ids) => {
            store.write(b, ids, &values(ids)).unwrap();
            Vec::new()
        }
        Act::Step(ids_of_a, ids_of_b) => {
            let (sums_of_a, sums_of_b) = (values(ids_of_a), values(ids_of_b));
            let update = |table, ids, sums| TableUpdate {
                table,
                chunks: vec![GradientChunk::new(ids, sums, DIM)],
                step: Step::Next,
            };
            store.update(&[update(a, ids_of_a, &sums_of_a), update(b, ids_of_b, &sums_of_b)]).unwrap();
            Vec::new()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn sockets_and_shared_memory_give_the_bits_of_this_process(acts in prop::collection::vec(act(), 1..7)) {
        let directory = tempfile::tempdir().unwrap();
        let expected = play(&LocalStore::new(Box::new(Serial)), &acts);
        for shared_memory in [false, true] {
            let cluster = at(&directory.path().join("store"));
            prop_assert_eq!(&play(&connect(&cluster, shared_memory), &acts), &expected);
        }
        prop_assert_eq!(&play(&Cluster::start(1).connect(), &acts), &expected);
    }
}

#[test]
fn a_segment_grows_with_what_goes_through_it() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = at(&directory.path().join("store"));
    let store = connect(&cluster, true);
    let table = store.open_numbered("t", &TableConfig::new(DIM)).unwrap();
    for count in [10i64, 40_000, 200_000] {
        let ids: Vec<i64> = (0..count).collect();
        let expected = values(&ids);
        store.write(table, &ids, &expected).unwrap();
        for _ in 0..2 {
            let mut rows = vec![0.0; expected.len()];
            store.read(table, &ids, &mut rows).unwrap();
            assert_eq!(rows, expected);
        }
    }
}

#[test]
fn a_server_that_takes_no_memory_is_called_over_its_socket() {
    let directory = tempfile::tempdir().unwrap();
    // Too small for the least segment: the requests come in several frames besides.
    let cluster = limited(&directory.path().join("store"), 64 << 10);
    let store = connect(&cluster, true);
    let table = store.open_numbered("t", &TableConfig::new(DIM)).unwrap();
    let ids: Vec<i64> = (0..9_000).collect();
    let expected = values(&ids);
    store.write(table, &ids, &expected).unwrap();
    let mut rows = vec![0.0; expected.len()];
    store.read(table, &ids, &mut rows).unwrap();
    assert_eq!(rows, expected);
}

fn waits_until(is_so: impl Fn() -> bool) -> bool {
    (0..200).any(|_| {
        thread::sleep(Duration::from_millis(20));
        is_so()
    })
}

fn start(path: &Path) -> Result<Server, ServerError> {
    let mut config = ServerConfig::default();
    config.unix_socket = Some(path.to_owned());
    Server::start(std::sync::Arc::new(LocalStore::default()), config)
}

#[test]
fn a_socket_is_its_users_own_and_goes_with_its_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let server = start(&path).unwrap();
    let found = fs::symlink_metadata(&path).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    assert_eq!(server.address().to_string(), format!("unix:{}", path.display()));
    let taken = start(&path).unwrap_err().to_string();
    assert!(taken.ends_with("another server listens on this socket"), "{taken}");
    // It was called to find out whether it is there.
    assert!(waits_until(|| server.unused_for().is_some()));
    server.stop(Duration::from_secs(1));
    assert!(!path.exists());
}

#[test]
fn what_is_left_over_is_replaced_and_what_is_no_socket_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    drop(UnixListener::bind(&path).unwrap());
    let store = RemoteStore::connect(
        config(vec![format!("unix:{}", path.display())], Duration::from_millis(100)),
        Box::new(Serial),
    );
    let refused = store.unwrap_err().to_string();
    assert!(refused.contains("no server listens on the socket any more: its file is left over"), "{refused}");
    start(&path).unwrap().stop(Duration::ZERO);
    fs::write(&path, "rows").unwrap();
    let refused = start(&path).unwrap_err().to_string();
    assert!(refused.ends_with("there is a file that is no socket"), "{refused}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "rows");
    let missing = format!("unix:{}/none", directory.path().display());
    let refused = RemoteStore::connect(config(vec![missing], Duration::from_millis(100)), Box::new(Serial));
    assert!(refused.unwrap_err().to_string().contains("there is no socket"));
}

#[test]
fn a_path_that_is_too_long_is_refused_on_both_sides() {
    let path = Path::new("/tmp").join("x".repeat(108));
    let refused = start(&path).unwrap_err().to_string();
    assert!(
        refused.ends_with("a path of 113 bytes is too long for a Unix socket, which takes 107"),
        "{refused}"
    );
    let address = format!("unix:{}", path.display());
    let refused = RemoteStore::connect(config(vec![address], TIMEOUT), Box::new(Serial)).unwrap_err();
    assert!(refused.to_string().contains("a path of 113 bytes is too long"), "{refused}");
}

/// Speaks to the server without the client.
struct Peer(UnixStream);

impl Peer {
    fn greeted(path: &Path) -> Self {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(&hello(3)).unwrap();
        let mut head = [0; 40];
        stream.read_exact(&mut head).unwrap();
        let len = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
        stream.read_exact(&mut vec![0; len as usize]).unwrap();
        Self(stream)
    }

    /// Hands memory over, and returns what the server says.
    fn hand_over(&mut self, file: Option<&OwnedFd>) -> String {
        let request = Request::Manage(Management::AttachSegment {});
        let bytes = request.with_frame(1, 0, |frame| frame.to_bytes().unwrap()).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let descriptors = file.map(|file| [file.as_fd()]);
        if let Some(descriptors) = &descriptors {
            with.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut with, SendFlags::empty()).unwrap();
        let frame = read_frame(&mut self.0, 1 << 20).unwrap();
        match frame.sections().unwrap()[0] {
            Section::Json(text) => text.to_owned(),
            ref other => panic!("{other:?}"),
        }
    }

    /// Says that frames lie in the segment, and returns whether the server ends the connection.
    fn is_cut_off_after(&mut self, sections: Vec<Section<'_>>) -> bool {
        let frame = Frame { header: Header::new(Kind::InSegment, 2), sections };
        self.0.write_all(&frame.to_bytes().unwrap()).unwrap();
        read_frame(&mut self.0, 1 << 20).is_err()
    }
}

fn sealed(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create(c"peer", MemfdFlags::ALLOW_SEALING).unwrap();
    File::from(file.try_clone().unwrap()).set_len(bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

#[test]
fn peers_that_break_the_rules_of_shared_memory_lose_their_connection_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let cluster = limited(&path, 1 << 20);
    let store = connect(&cluster, true);
    let table = store.open_numbered("t", &TableConfig::new(DIM)).unwrap();
    let ids: Vec<i64> = (0..9_000).collect();
    store.write(table, &ids, &values(&ids)).unwrap();
    let peer = || Peer::greeted(&path);

    assert!(peer().hand_over(None).contains("no descriptor came with it"));
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    assert!(peer().hand_over(Some(&file)).contains("it is no memory that cannot shrink"));
    assert!(peer().hand_over(Some(&sealed(0))).contains("it has 0 bytes"));
    assert!(peer().hand_over(Some(&sealed(1 << 30))).contains("it has 1073741824 bytes, of 1 to 4194304"));
    // No memory is shared.
    assert!(peer().is_cut_off_after(vec![Section::I64(&[64])]));
    for (noise, lens) in
        [(0u8, vec![64i64]), (0xFF, vec![1 << 20]), (1, vec![i64::MAX]), (1, vec![-1]), (1, vec![])]
    {
        let (file, mut peer) = (sealed(1 << 20), peer());
        let mut writable = File::from(file.try_clone().unwrap());
        writable.write_all(&vec![noise; 1 << 20]).unwrap();
        assert!(peer.hand_over(Some(&file)).contains("done"));
        assert!(peer.is_cut_off_after(vec![Section::I64(&lens)]));
    }
    // A good frame whose lengths are none, as a client that overwrites it while it is read.
    for place in 8..64 {
        let (file, mut peer) = (sealed(1 << 20), peer());
        let request = Request::Delete { table, ids: &[1, 2, 3] };
        let mut bytes = request.with_frame(2, 1, |frame| frame.to_bytes().unwrap()).unwrap();
        bytes[place] ^= 0xF1;
        File::from(file.try_clone().unwrap()).write_all(&bytes).unwrap();
        assert!(peer.hand_over(Some(&file)).contains("done"));
        _ = peer.is_cut_off_after(vec![Section::I64(&[bytes.len() as i64])]);
    }
    let mut rows = vec![0.0; ids.len() * DIM];
    store.read(table, &ids, &mut rows).unwrap();
    assert_eq!(rows.len(), values(&ids).len());
}
