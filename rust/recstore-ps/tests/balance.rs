//! How even the work of a thousand servers is: their rows, what is asked of them, and what a hot id costs.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cluster::{Cluster, connect};
use numbered::Numbered;
use recstore::{EmbeddingStore, GradientChunk, Serial, Step, TableConfig, TableUpdate, unique};
use recstore_ps::router::{HashMethod, Router};

const SHARDS: usize = 1_000;
const IDS: i64 = 1_000_000;

fn router(shards: usize) -> Router {
    Router::new(HashMethod::CityHash, shards)
}

fn rows_a_shard(shards: usize, ids: impl Iterator<Item = i64>) -> Vec<u32> {
    let mut rows = vec![0; shards];
    ids.for_each(|id| rows[router(shards).shard_of(id)] += 1);
    rows
}

/// Six deviations of a binomial count either way: rows that fall on shards by chance stay within, and a pattern of the
/// ids that comes through the hash does not.
fn assert_even(what: &str, rows: &[u32]) {
    let mean = rows.iter().sum::<u32>() as f64 / rows.len() as f64;
    let bound = 6.0 * mean.sqrt();
    let (least, most) = (rows.iter().min().unwrap(), rows.iter().max().unwrap());
    let is_even = mean - f64::from(*least) < bound && f64::from(*most) - mean < bound;
    assert!(
        is_even,
        "{what}: from {least} to {most} rows a shard, expected {mean} and less than {bound} off"
    );
}

struct Random(u64);

impl Random {
    /// Splitmix64 (Steele et al. 2014).
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to 1.
    fn fraction(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[test]
fn rows_are_even_over_a_thousand_shards_whatever_the_ids_look_like() {
    let mut random = Random(1);
    // As many shards as make the remainder of a hash look at few of its bits, too.
    for shards in [SHARDS, 1_024] {
        assert_even("uniform", &rows_a_shard(shards, (0..IDS).map(|_| random.bits() as i64)));
        assert_even("sequential", &rows_a_shard(shards, 0..IDS));
        assert_even("negative", &rows_a_shard(shards, -IDS..0));
        for stride in [1_000, 1_024, 1 << 12, 1 << 20, 1 << 32, 1_000_003] {
            let ids = (0..IDS).map(|id| id * stride);
            assert_even(&format!("every {stride}th"), &rows_a_shard(shards, ids));
        }
        // The field in the upper bits, as one table for all fields has it.
        let fields = (0..26).flat_map(|field| (0..IDS / 26).map(move |id| field << 48 | id));
        assert_even("26 fields", &rows_a_shard(shards, fields));
    }
}

/// Draws ids by Zipf's law: the id `k` in proportion to `(k + 1)^-1.05`.
struct Zipf {
    sums: Vec<f64>,
    random: Random,
}

impl Zipf {
    fn new() -> Self {
        let weights = (1..=IDS).map(|rank| (rank as f64).powf(-1.05));
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { sums: sums.collect(), random: Random(2) }
    }

    fn batch(&mut self, count: usize) -> Vec<i64> {
        let total = self.sums[self.sums.len() - 1];
        let draw = |_| {
            let at = self.random.fraction() * total;
            self.sums.partition_point(|&sum| sum <= at) as i64
        };
        (0..count).map(draw).collect()
    }
}

fn most_over_mean(counts: &[usize]) -> f64 {
    let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
    *counts.iter().max().unwrap() as f64 / mean
}

#[test]
fn distinct_ids_make_the_load_of_zipf_lookups_even() {
    const BATCHES: usize = 16;
    const BATCH: usize = 65_536;
    let mut zipf = Zipf::new();
    let (mut asked, mut distinct) = (vec![0; SHARDS], vec![0; SHARDS]);
    for _ in 0..BATCHES {
        let ids = zipf.batch(BATCH);
        ids.iter().for_each(|&id| asked[router(SHARDS).shard_of(id)] += 1);
        let (mut once, mut inverse) = (vec![0; BATCH], vec![0; BATCH]);
        let count = unique(&Serial, &ids, &mut once, &mut inverse);
        once.truncate(count);
        for (shard, ids) in router(SHARDS).split(&once).ids.iter().enumerate() {
            distinct[shard] += ids.len();
        }
    }
    let rows = distinct.iter().sum::<usize>() as f64 / (BATCHES * BATCH) as f64;
    let (before, after) = (most_over_mean(&asked), most_over_mean(&distinct));
    println!(
        "busiest shard over the mean: {before:.1} by lookups, {after:.2} by rows; {rows:.2} rows a lookup"
    );
    // The first id alone is a tenth of all lookups, which is a hundred shards' fair share.
    assert!((70.0..130.0).contains(&before), "{before}");
    assert!(after < 1.5, "{after}");
    assert!(rows < 0.5, "{rows}");
}

/// Stands before a server and counts the bytes that pass, those of both directions together.
fn counted(server: String) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, bytes) = (listener.local_addr().unwrap().to_string(), Arc::<AtomicU64>::default());
    let counting = Arc::clone(&bytes);
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(&server) else { continue };
            pump(&client, &server, &counting);
            pump(&server, &client, &counting);
        }
    });
    (address, bytes)
}

fn pump(from: &TcpStream, to: &TcpStream, bytes: &Arc<AtomicU64>) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    let bytes = Arc::clone(bytes);
    thread::spawn(move || {
        let mut buffer = [0; 4_096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            // Counted first: whoever has an answer finds all its bytes counted.
            bytes.fetch_add(count as u64, Ordering::SeqCst);
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
    });
}

#[test]
fn a_hot_id_is_one_row_of_a_request_and_one_of_a_step() {
    const DIM: usize = 16;
    let cluster = Cluster::start(2);
    let (proxies, bytes): (Vec<_>, Vec<_>) = cluster.addresses().into_iter().map(counted).unzip();
    let store = connect(proxies, std::time::Duration::from_secs(20));
    let table = store.open_numbered("t", &TableConfig::new(DIM)).unwrap();
    let passed = |ids: &[i64]| {
        let before: u64 = bytes.iter().map(|bytes| bytes.load(Ordering::SeqCst)).sum();
        store.read(table, ids, &mut vec![0.0; ids.len() * DIM]).unwrap();
        let gradients = vec![1.0; ids.len() * DIM];
        let chunks = vec![GradientChunk::new(ids, &gradients, DIM)];
        store.update(&[TableUpdate { table, chunks, step: Step::Next }]).unwrap();
        bytes.iter().map(|bytes| bytes.load(Ordering::SeqCst)).sum::<u64>() - before
    };
    // Both servers are asked, so that nothing but the rows differs.
    passed(&[6, 7]);
    let once = passed(&[6, 7]);
    let hot: Vec<i64> = [6, 7].into_iter().chain([6; 10_000]).collect();
    assert_eq!(passed(&hot), once);
    let another = passed(&[6, 7, 8]);
    let row = (DIM * size_of::<f32>()) as u64;
    assert!(another >= once + 2 * row, "a row there and a gradient: {once} bytes, then {another}");
}
