//! Answers that are too large for one frame: rows come in parts, each of which goes where it belongs.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cluster::{Cluster, connect};
use numbered::Numbered;
use recstore::{
    BagInput, EmbeddingStore, GradientChunk, LocalStore, PLACES_TAG, PoolingMode, Serial, Step, TableConfig,
    TableId, TableUpdate,
};
use recstore_ps::RemoteStore;
use recstore_ps::codec::{Frame, Kind, read_frame};

/// The elements of rows: of many in a part, and of one that is more than a part.
const DIMS: [usize; 3] = [3, 64, 70_000];

/// Opens a table for each of [`DIMS`] and gives the ids from 0 on rows, as many as are worth some parts.
fn filled(store: &dyn EmbeddingStore) -> Vec<TableId> {
    let fill = |&dim: &usize| {
        let mut config = TableConfig::new(dim);
        config.block_size = 64;
        let table = store.open_numbered(&format!("t{dim}"), &config).unwrap();
        let ids: Vec<i64> = (0..rows_of(dim)).collect();
        let rows: Vec<f32> =
            ids.iter().flat_map(|&id| (0..dim).map(move |at| (id * 7) as f32 + at as f32)).collect();
        store.write(table, &ids, &rows).unwrap();
        table
    };
    DIMS.iter().map(fill).collect()
}

fn rows_of(dim: usize) -> i64 {
    (400_000 / dim as i64).min(5_000)
}

/// Ids of a lookup: in no order, some of them often or without a row.
fn ids_of(dim: usize) -> Vec<i64> {
    let rows = rows_of(dim);
    (0..2 * rows + 3).map(|at| (at * 7_919) % (rows + 2)).collect()
}

fn read(store: &dyn EmbeddingStore, table: TableId, ids: &[i64]) -> Vec<f32> {
    let mut rows = vec![f32::NAN; ids.len() * store.dim(table).unwrap()];
    store.read(table, ids, &mut rows).unwrap();
    rows
}

/// Sums bags of three ids in two tables.
fn bag(store: &dyn EmbeddingStore, tables: &[TableId]) -> Vec<f32> {
    let count = 3 * 500;
    let ids: Vec<i64> = tables.iter().flat_map(|_| (0..count).map(|at| (at * 31) % 1_000)).collect();
    let offsets: Vec<i64> = (0..=ids.len() as i64).step_by(3).collect();
    let input = BagInput {
        ids: &ids,
        offsets: &offsets,
        per_sample_weights: None,
        mode: PoolingMode::Sum,
        padding_idx: None,
    };
    let stride: usize = tables.iter().map(|&table| store.dim(table).unwrap()).sum();
    let mut pooled = vec![f32::NAN; count as usize / 3 * stride];
    let mut places = vec![0; ids.len() + tables.len() * PLACES_TAG];
    store.bag(tables, input, &mut pooled, &mut [], &mut places).unwrap();
    pooled
}

fn assert_equal(remote: &RemoteStore) {
    let local = LocalStore::new(Box::new(Serial));
    let (ours, theirs) = (filled(remote), filled(&local));
    for ((&ours, &theirs), dim) in ours.iter().zip(&theirs).zip(DIMS) {
        let distinct: Vec<i64> = (0..rows_of(dim)).rev().collect();
        for ids in [ids_of(dim), distinct, vec![]] {
            assert!(read(remote, ours, &ids) == read(&local, theirs, &ids), "dim {dim}, {} ids", ids.len());
        }
    }
    assert!(bag(remote, &ours[..2]) == bag(&local, &theirs[..2]));
    // Gradients of distinct ids in no order are sent as they lie; others merged.
    for (ours, theirs, ids) in [(ours[1], theirs[1], ids_of(64)), (ours[1], theirs[1], vec![9, 3, 7])] {
        let gradients: Vec<f32> = (0..ids.len() * 64).map(|at| at as f32 * 0.37).collect();
        let update = |table| {
            let chunks = vec![GradientChunk::new(&ids, &gradients, 64)];
            [TableUpdate { table, chunks, step: Step::Next }]
        };
        remote.update(&update(ours)).unwrap();
        local.update(&update(theirs)).unwrap();
        assert!(read(remote, ours, &ids) == read(&local, theirs, &ids));
    }
}

#[test]
fn rows_in_parts_are_those_of_one_store() {
    for shards in [1, 3] {
        assert_equal(&Cluster::start(shards).connect());
    }
}

#[test]
fn so_are_those_of_several_requests() {
    assert_equal(&Cluster::configured(2, |config| config.max_frame_bytes = 1 << 20).connect());
}

/// What becomes of a part of rows on its way.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Lost,
    Doubled,
}

/// Lets a connection through to a server, but for the first `faults` parts of answers.
fn pass(client: TcpStream, server: &str, fault: Fault, faults: &AtomicUsize) -> io::Result<()> {
    let mut server = TcpStream::connect(server)?;
    let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        _ = io::copy(&mut from, &mut to);
        _ = to.shutdown(std::net::Shutdown::Both);
    });
    let mut client = client;
    let mut welcome = [0; 40];
    server.read_exact(&mut welcome)?;
    client.write_all(&welcome)?;
    let mut text = vec![0; u32::from_le_bytes(welcome[12..16].try_into().unwrap_or_default()) as usize];
    server.read_exact(&mut text)?;
    client.write_all(&text)?;
    loop {
        let received = read_frame(&mut server, 1 << 30).map_err(io::Error::other)?;
        let is_part = received.header.kind == Kind::Part;
        let spend = |left: usize| left.checked_sub(1);
        let has_fault = is_part && faults.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok();
        let times = match fault {
            Fault::Lost if has_fault => 0,
            Fault::Doubled if has_fault => 2,
            _ => 1,
        };
        let frame =
            Frame { header: received.header, sections: received.sections().map_err(io::Error::other)? };
        (0..times).try_for_each(|_| frame.write(&mut client))?;
    }
}

/// Reads through a peer that has so many faults, and returns what comes of it.
fn read_through(fault: Fault, faults: usize) -> Result<Vec<f32>, String> {
    let cluster = Cluster::start(1);
    let (server, listener) = (cluster.addresses().remove(0), TcpListener::bind("127.0.0.1:0").unwrap());
    let address = listener.local_addr().unwrap().to_string();
    let faults = Arc::new(AtomicUsize::new(faults));
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let (server, faults) = (server.clone(), Arc::clone(&faults));
            thread::spawn(move || pass(client, &server, fault, &faults));
        }
    });
    let store = connect(vec![address], Duration::from_secs(1));
    let table = filled(&store)[1];
    let ids = ids_of(64);
    let mut rows = vec![f32::NAN; ids.len() * 64];
    let outcome = store.read(table, &ids, &mut rows).map_err(|error| error.to_string());
    outcome.map(|()| rows)
}

#[test]
fn a_part_too_many_or_too_few_is_no_answer() {
    // Arrival for again until the time is over, which may be in the middle of an answer.
    let error = read_through(Fault::Doubled, usize::MAX).unwrap_err();
    let words = ["floats of rows that nobody asked for", "no answer in time"];
    assert!(error.contains("shard 0") && words.iter().any(|words| error.contains(words)), "{error}");
    let error = read_through(Fault::Lost, usize::MAX).unwrap_err();
    assert!(error.contains("shard 0") && error.contains("floats of rows, expected"), "{error}");
}

#[test]
fn after_a_part_too_many_the_rows_are_asked_for_again() {
    let local = LocalStore::new(Box::new(Serial));
    let table = filled(&local)[1];
    assert!(read_through(Fault::Doubled, 1).unwrap() == read(&local, table, &ids_of(64)));
}
