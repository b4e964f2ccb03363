//! Whatever a network does to a connection, a change is made once.

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cluster::{Cluster, connect};
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, MemoryUse, Serial, Step, TableConfig, TableId,
    TableUpdate,
};
use recstore_ps::RemoteStore;

const DIM: usize = 4;

/// What a server says first.
const WELCOME_BYTES: usize = 40;

/// What is done to the bytes of one direction of a connection, once that many have passed.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    Cut(usize),
    Duplicate(usize),
    Delay(usize),
}

/// Stands between clients and a server and spoils connections as it is told.
struct Proxy {
    address: String,
    faults: Arc<Mutex<dyn FnMut() -> [Fault; 2] + Send>>,
    connections: Arc<AtomicU64>,
    is_down: Arc<AtomicBool>,
    /// Keeps what a server says after its welcome.
    is_deaf: Arc<AtomicBool>,
}

impl Proxy {
    fn start(server: String, faults: impl FnMut() -> [Fault; 2] + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap().to_string(),
            faults: Arc::new(Mutex::new(faults)),
            connections: Arc::default(),
            is_down: Arc::default(),
            is_deaf: Arc::default(),
        };
        let (faults, connections) = (proxy.faults.clone(), proxy.connections.clone());
        let (is_down, is_deaf) = (proxy.is_down.clone(), proxy.is_deaf.clone());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                connections.fetch_add(1, Ordering::Relaxed);
                if is_down.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&server) else { continue };
                let [there, back] = (faults.lock().unwrap())();
                pump(&client, &server, there, [&is_down, &Arc::default()]);
                pump(&server, &client, back, [&is_down, &is_deaf]);
            }
        });
        proxy
    }

    /// Ends all connections, and those that come.
    fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }
}

fn pump(from: &TcpStream, to: &TcpStream, fault: Fault, flags: [&Arc<AtomicBool>; 2]) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    let [is_down, is_deaf] = flags.map(Arc::clone);
    from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    thread::spawn(move || {
        let (mut passed, mut buffer) = (0, [0; 1000]);
        while !is_down.load(Ordering::Relaxed) {
            let count = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(_) => break,
            };
            let hits = |place: usize| (passed..passed + count).contains(&place);
            if is_deaf.load(Ordering::Relaxed) && passed >= WELCOME_BYTES {
                break;
            }
            match fault {
                Fault::Cut(place) if hits(place) => {
                    _ = to.write_all(&buffer[..place - passed]);
                    break;
                }
                Fault::Duplicate(place) if hits(place) => {
                    _ = to.write_all(&buffer[..count]);
                    _ = to.write_all(&buffer[place - passed..count]);
                }
                // The delay is followed by an end, so that there is another connection to spoil.
                Fault::Delay(place) if hits(place + 1_500) => break,
                Fault::Delay(place) => {
                    if hits(place) {
                        thread::sleep(Duration::from_millis(30));
                    }
                    _ = to.write_all(&buffer[..count]);
                }
                _ => _ = to.write_all(&buffer[..count]),
            }
            passed += count;
        }
        _ = from.shutdown(Shutdown::Both);
        _ = to.shutdown(Shutdown::Both);
    });
}

/// Numbers that look random: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) % bound
    }
}

fn some_fault(random: &mut Random) -> Fault {
    let place = random.below(1_200) as usize;
    match random.below(5) {
        0..3 => Fault::Cut(place),
        3 => Fault::Duplicate(place),
        _ => Fault::Delay(place),
    }
}

fn config() -> TableConfig {
    TableConfig::from_json(DIM, r#"{"optimizer": {"kind": "adam", "lr": 0.1}, "dtype": "bfloat16"}"#).unwrap()
}

fn step(store: &dyn EmbeddingStore, table: TableId, number: i64) -> recstore::Result<()> {
    let ids: Vec<i64> = (0..20).map(|place| (place * number) % 37 - 9).collect();
    let gradients: Vec<f32> =
        (0..20 * DIM).map(|value| (value as f32 - 30.0) * 0.1 + number as f32).collect();
    let chunks = vec![GradientChunk::new(&ids, &gradients, DIM)];
    store.update(&[TableUpdate { table, chunks, step: Step::Next }])
}

/// Steps, writes, deletes and drops of a test, by number.
fn act(store: &dyn EmbeddingStore, table: TableId, number: i64) -> recstore::Result<usize> {
    match number % 5 {
        3 => store.write(table, &[number, -number], &[number as f32; 2 * DIM]).map(|()| 0),
        4 => store.delete(table, &[number % 37, 5, number - 1, 3]),
        _ => step(store, table, number).map(|()| 0),
    }
}

fn contents(store: &dyn EmbeddingStore, table: TableId) -> String {
    let mut ids = store.ids(table).unwrap();
    ids.sort_unstable();
    let mut rows = vec![0.0; ids.len() * DIM];
    store.read(table, &ids, &mut rows).unwrap();
    let mut statistics = store.statistics(table).unwrap();
    statistics.bytes = 0;
    statistics.memory = MemoryUse::default();
    let slots = store.read_slot(table, "exp_avg", &ids).unwrap();
    format!("{ids:?} {rows:?} {slots:?} {statistics:?}")
}

fn undisturbed(acts: std::ops::Range<i64>) -> (String, Vec<recstore::Result<usize>>) {
    let local = LocalStore::new(Box::new(Serial));
    let table = local.open_table("t", &config()).unwrap();
    let made = acts.map(|number| act(&local, table, number)).collect();
    (contents(&local, table), made)
}

/// A cluster behind a proxy for each server.
fn behind_proxies(
    shards: usize,
    timeout: Duration,
    mut faults: impl FnMut(usize) -> Box<dyn FnMut() -> [Fault; 2] + Send>,
) -> (Cluster, Vec<Proxy>, RemoteStore) {
    let cluster = Cluster::start(shards);
    let proxies: Vec<_> = cluster
        .addresses()
        .into_iter()
        .enumerate()
        .map(|(shard, address)| Proxy::start(address, faults(shard)))
        .collect();
    let addresses = proxies.iter().map(|proxy| proxy.address.clone()).collect();
    let store = connect(addresses, timeout);
    (cluster, proxies, store)
}

#[test]
fn changes_are_made_once_over_connections_that_break() {
    const ACTS: i64 = 150;
    for seed in 0..4 {
        let (_cluster, proxies, store) = behind_proxies(2, Duration::from_secs(60), |shard| {
            let mut random = Random(seed * 2 + shard as u64);
            // The first connection is good, so that all begin with a welcome.
            let mut first = true;
            Box::new(move || match std::mem::take(&mut first) {
                true => [Fault::Cut(2_000), Fault::None],
                false => [some_fault(&mut random), some_fault(&mut random)],
            })
        });
        let table = store.open_table("t", &config()).unwrap();
        let made: Vec<_> = (0..ACTS).map(|number| act(&store, table, number)).collect();
        assert_eq!((contents(&store, table), made), undisturbed(0..ACTS), "seed {seed}");
        let connections: u64 = proxies.iter().map(|proxy| proxy.connections.load(Ordering::Relaxed)).sum();
        assert!(connections > 10, "{connections}");
    }
}

#[test]
fn a_step_that_some_servers_have_is_repeated_on_the_others_alone() {
    let (_cluster, proxies, store) =
        behind_proxies(3, Duration::from_millis(300), |_| Box::new(|| [Fault::None, Fault::None]));
    let table = store.open_table("t", &config()).unwrap();
    step(&store, table, 1).unwrap();
    for (number, down) in [(2, 1), (3, 0), (4, 2)] {
        proxies[down].set_down(true);
        thread::sleep(Duration::from_millis(60));
        for _ in 0..2 {
            let error = step(&store, table, number).unwrap_err();
            let Error::Unavailable { operation, shard, address, .. } = &error else { panic!("{error}") };
            assert_eq!((*operation, *shard, address), ("emb_update", down, &proxies[down].address));
        }
        proxies[down].set_down(false);
        step(&store, table, number).unwrap();
    }
    let local = LocalStore::new(Box::new(Serial));
    let twin = local.open_table("t", &config()).unwrap();
    (1..5).for_each(|number| step(&local, twin, number).unwrap());
    assert_eq!(contents(&store, table), contents(&local, twin));
}

#[test]
fn an_answer_that_was_lost_does_not_make_a_failed_call_happen_twice() {
    // While a proxy is deaf the server does all it is asked, and nobody hears of it.
    let (_cluster, proxies, store) =
        behind_proxies(2, Duration::from_millis(150), |_| Box::new(|| [Fault::None, Fault::None]));
    let table = store.open_table("t", &config()).unwrap();
    let mut made = Vec::new();
    for number in 0..15 {
        let deaf = &proxies[number as usize % 2].is_deaf;
        deaf.store(number % 3 == 0, Ordering::Relaxed);
        if number % 3 == 0 {
            let error = act(&store, table, number).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
        deaf.store(false, Ordering::Relaxed);
        made.push(act(&store, table, number));
    }
    assert_eq!((contents(&store, table), made), undisturbed(0..15));
}

#[test]
fn several_clients_change_tables_side_by_side() {
    const STEPS: i64 = 40;
    let cluster = Cluster::start(2);
    let sgd = TableConfig::from_json(
        1,
        r#"{"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}"#,
    );
    let config = sgd.unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = cluster.connect();
                let table = store.open_table("t", &config).unwrap();
                for _ in 0..STEPS {
                    let chunks = vec![GradientChunk::new(&[0, 1, 2], &[-1.0; 3], 1)];
                    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
                }
            });
        }
    });
    let store = cluster.connect();
    let table = store.find_table("t").unwrap().unwrap();
    let mut rows = [0.0; 3];
    store.read(table, &[0, 1, 2], &mut rows).unwrap();
    assert_eq!(rows, [4.0 * STEPS as f32; 3]);
    assert_eq!(store.statistics(table).unwrap().step, 4 * STEPS as u64);
}
