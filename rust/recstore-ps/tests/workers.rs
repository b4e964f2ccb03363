//! Workers that train together: synchronous steps, bounded staleness, barriers, and workers that die.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, config as remote};
use numbered::Numbered;
use recstore::{
    EmbeddingStore, Error, GradientChunk, LocalStore, Serial, Step, TableConfig, TableId, TableUpdate,
};
use recstore_ps::codec::{MergedUpdate, Request};
use recstore_ps::{ClientId, Combine, Consistency, KeptState, RemoteStore, Server, ServerConfig, WorkerSync};

const DIM: usize = 3;
const WORKERS: u32 = 3;
const SUM: Consistency = Consistency::Synchronous { combine: Combine::Sum };

fn worker_sync(consistency: Consistency) -> WorkerSync {
    let mut worker_sync = WorkerSync::default();
    (worker_sync.consistency, worker_sync.workers) = (consistency, Some(WORKERS));
    (worker_sync.patience, worker_sync.silence) = (Duration::from_secs(10), Duration::from_secs(5));
    worker_sync
}

fn cluster(shards: usize, worker_sync: WorkerSync) -> Cluster {
    Cluster::configured(shards, |config| config.worker_sync = worker_sync)
}

fn worker(servers: Vec<String>, number: u32) -> RemoteStore {
    let mut config = remote(servers, Duration::from_secs(5));
    (config.worker, config.heartbeat) = (Some(number), Duration::from_millis(50));
    RemoteStore::connect(config, Box::new(Serial)).unwrap()
}

fn table_config(optimizer: &str) -> TableConfig {
    TableConfig::from_json(DIM, &format!(r#"{{"optimizer": {{"kind": "{optimizer}", "lr": 0.125}}}}"#))
        .unwrap()
}

fn gradients(worker: u32, step: u64) -> (Vec<i64>, Vec<f32>) {
    let ids: Vec<i64> = (0..5).map(|place| (step as i64 * 3 + i64::from(worker) * 2 + place) % 11).collect();
    let values = (0..ids.len() * DIM).map(|place| ((place as u64 * 7 + step) % 9) as f32 / 8.0 - 0.5);
    let values = values.map(|value| value * (worker + 1) as f32).collect();
    (ids, values)
}

fn update(
    store: &dyn EmbeddingStore,
    table: TableId,
    parts: &[(Vec<i64>, Vec<f32>)],
) -> recstore::Result<()> {
    let chunks = parts.iter().map(|(ids, values)| GradientChunk::new(ids, values, DIM)).collect();
    store.update(&[TableUpdate { table, chunks, step: Step::Next }]).map(drop)
}

fn rows(store: &dyn EmbeddingStore, table: TableId) -> Vec<f32> {
    let (ids, mut rows) = ((0..11).collect::<Vec<i64>>(), vec![0.0; 11 * DIM]);
    store.read(table, &ids, &mut rows).unwrap();
    rows
}

/// Runs each worker on a thread of its own.
fn on_threads<R: Send>(work: impl Fn(u32) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let started: Vec<_> = (0..WORKERS)
            .map(|number| {
                scope.spawn({
                    let work = &work;
                    move || work(number)
                })
            })
            .collect();
        started.into_iter().map(|worker| worker.join().unwrap()).collect()
    })
}

#[test]
fn synchronous_workers_are_one_worker_with_the_joined_batch() {
    for (optimizer, combine) in [("sgd", Combine::Sum), ("adagrad", Combine::Mean), ("adam", Combine::Sum)] {
        let cluster = cluster(2, worker_sync(Consistency::Synchronous { combine }));
        let finals = on_threads(|number| {
            let store = worker(cluster.addresses(), number);
            let table = store.open_numbered("t", &table_config(optimizer)).unwrap();
            for step in 0..20 {
                // Now and then one has nothing to say, and its step counts all the same.
                let part = (step % 7 != u64::from(number)).then(|| gradients(number, step));
                update(&store, table, part.as_slice()).unwrap();
            }
            store.barrier("end", Duration::from_secs(10)).unwrap();
            assert_eq!(store.statistics(table).unwrap().step, 20);
            rows(&store, table)
        });
        let one = LocalStore::new(Box::new(Serial));
        let table = one.open_numbered("t", &table_config(optimizer)).unwrap();
        for step in 0..20 {
            let parts = (0..WORKERS).filter(|&number| step % 7 != u64::from(number)).map(|number| {
                let (ids, mut values) = gradients(number, step);
                if combine == Combine::Mean {
                    values.iter_mut().for_each(|value| *value /= WORKERS as f32);
                }
                (ids, values)
            });
            update(&one, table, &parts.collect::<Vec<_>>()).unwrap();
        }
        let expected = rows(&one, table);
        for found in finals {
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6;
            assert!(found.iter().zip(&expected).all(close), "{optimizer}: {found:?} {expected:?}");
        }
    }
}

#[test]
fn a_step_that_lacks_a_worker_is_refused_with_its_number_and_can_be_repeated() {
    let mut impatient = worker_sync(SUM);
    impatient.patience = Duration::from_millis(300);
    let cluster = cluster(2, impatient);
    let stores: Vec<RemoteStore> = (0..WORKERS).map(|number| worker(cluster.addresses(), number)).collect();
    let tables: Vec<TableId> =
        stores.iter().map(|store| store.open_numbered("t", &table_config("sgd")).unwrap()).collect();
    let before = rows(&stores[0], tables[0]);
    let step =
        |number: u32| update(&stores[number as usize], tables[number as usize], &[gradients(number, 1)]);
    let refused = thread::scope(|scope| {
        [0, 1].map(|number| scope.spawn(move || step(number))).map(|one| one.join().unwrap().unwrap_err())
    });
    for error in refused {
        let message = error.to_string();
        assert!(message.starts_with("emb_update: shard "), "{message}");
        // Whoever gives up first is missing for the other as well.
        let is_told =
            message.contains("waited 0.3 s for the updates of the workers [") && message.ends_with("2]");
        assert!(is_told, "{message}");
    }
    assert_eq!(rows(&stores[0], tables[0]), before);
    on_threads(|number| step(number).unwrap());
    assert_ne!(rows(&stores[0], tables[0]), before);
    assert_eq!(stores[0].statistics(tables[0]).unwrap().step, 1);
}

#[test]
fn a_dead_worker_is_reported_and_its_successor_takes_its_place() {
    let mut watchful = worker_sync(SUM);
    watchful.silence = Duration::from_millis(400);
    let cluster = cluster(1, watchful);
    let mut stores: Vec<RemoteStore> =
        (0..WORKERS).map(|number| worker(cluster.addresses(), number)).collect();
    let table = stores[0].open_numbered("t", &table_config("sgd")).unwrap();
    drop(stores.pop());
    let began = Instant::now();
    let error = update(&stores[0], table, &[gradients(0, 1)]).unwrap_err().to_string();
    assert!(error.contains("worker 2 was not heard of for 0."), "{error}");
    assert!(began.elapsed() < Duration::from_secs(60));
    let barred = stores[1].barrier("b", Duration::from_secs(5)).unwrap_err().to_string();
    assert!(barred.contains("worker 2 was not heard of") && barred.contains("arrivals"), "{barred}");
    stores.push(worker(cluster.addresses(), 2));
    on_threads(|number| {
        update(&stores[number as usize], table_of(&stores[number as usize]), &[gradients(number, 1)]).unwrap()
    });
    // Another that says it is worker 2 takes its place; the one before is none any more.
    let successor = worker(cluster.addresses(), 2);
    let error = update(&stores[2], table, &[gradients(2, 2)]).unwrap_err().to_string();
    assert!(error.contains("must have joined as a worker, and have its number still"), "{error}");
    successor.leave().unwrap();
    let both = thread::scope(|scope| {
        [0, 1]
            .map(|number: usize| {
                let store = &stores[number];
                scope.spawn(move || update(store, table_of(store), &[gradients(number as u32, 2)]))
            })
            .map(|one| one.join().unwrap())
    });
    assert_eq!(both, [Ok(()), Ok(())], "nobody waits for one that has left");
}

#[test]
fn steps_of_several_tables_go_together_in_any_order() {
    let cluster = cluster(1, worker_sync(SUM));
    let ends = on_threads(|number| {
        let store = worker(cluster.addresses(), number);
        let tables = ["a", "b"].map(|name| store.open_numbered(name, &table_config("sgd")).unwrap());
        let (ids, values) = gradients(number, 1);
        let step = |table| {
            let chunks = vec![GradientChunk::new(&ids, &values, DIM)];
            TableUpdate { table, chunks, step: Step::Next }
        };
        // The first table takes two steps in one call.
        let order = if number == 1 { [0, 0, 1] } else { [1, 0, 0] };
        store.update(&order.map(|place| step(tables[place]))).unwrap();
        store.barrier("end", Duration::from_secs(10)).unwrap();
        tables.map(|table| (store.statistics(table).unwrap().step, rows(&store, table)))
    });
    assert_eq!([ends[0][0].0, ends[0][1].0], [2, 1]);
    assert!(ends.iter().all(|end| *end == ends[0]));
}

#[test]
fn when_all_have_left_the_next_ones_wait_for_each_other_again() {
    let mut impatient = worker_sync(SUM);
    impatient.patience = Duration::from_millis(200);
    let cluster = cluster(1, impatient);
    on_threads(|number| worker(cluster.addresses(), number)).iter().for_each(|store| store.leave().unwrap());
    let first = worker(cluster.addresses(), 0);
    let message = update(&first, table_of(&first), &[gradients(0, 1)]).unwrap_err().to_string();
    assert!(message.contains("the updates of the workers [1, 2]"), "{message}");
}

fn table_of(store: &RemoteStore) -> TableId {
    store.open_numbered("t", &table_config("sgd")).unwrap()
}

#[test]
fn no_worker_is_further_ahead_than_allowed() {
    const STALENESS: u64 = 2;
    let cluster = cluster(2, worker_sync(Consistency::Bounded { staleness: STALENESS }));
    on_threads(|number| {
        let store = worker(cluster.addresses(), number);
        let table = table_of(&store);
        store.barrier("begin", Duration::from_secs(10)).unwrap();
        for step in 0..30 {
            rows(&store, table);
            update(&store, table, &[gradients(number, step)]).unwrap();
            thread::sleep(Duration::from_millis(u64::from(number) * 2));
        }
        store.leave().unwrap();
    });
    let store = cluster.connect();
    let known = store.workers().unwrap();
    assert!(known.iter().all(|(workers, ahead)| workers.is_empty() && *ahead == STALENESS), "{known:?}");
    assert_eq!(store.statistics(table_of(&store)).unwrap().step, 90);
}

#[test]
fn a_worker_too_far_ahead_is_told_who_is_behind() {
    let mut impatient = worker_sync(Consistency::Bounded { staleness: 1 });
    impatient.patience = Duration::from_millis(200);
    let cluster = cluster(1, impatient);
    let stores: Vec<RemoteStore> = (0..WORKERS).map(|number| worker(cluster.addresses(), number)).collect();
    let table = table_of(&stores[0]);
    let steps = |store: usize, count: u64| {
        (0..count)
            .try_for_each(|step| update(&stores[store], table_of(&stores[store]), &[gradients(0, step)]))
    };
    steps(0, 2).unwrap();
    steps(1, 1).unwrap();
    let message = steps(0, 1).unwrap_err().to_string();
    assert!(
        message.contains("emb_update: shard 0: waited 0.2 s for the steps of the workers [2]"),
        "{message}"
    );
    let message = stores[0].read(table, &[1], &mut [0.0; DIM]).unwrap_err().to_string();
    assert!(message.starts_with("emb_read: shard 0: waited 0.2 s"), "{message}");
    // One that takes part in nothing may look.
    let onlooker = cluster.connect();
    rows(&onlooker, table_of(&onlooker));
    let error = update(&onlooker, table_of(&onlooker), &[]).unwrap_err();
    assert!(matches!(error, Error::Workers { shard: 0, .. }), "{error}");
    steps(2, 1).unwrap();
    steps(0, 1).unwrap();
}

#[test]
fn barriers_hold_until_all_are_there_and_again() {
    let cluster = cluster(2, worker_sync(Consistency::Asynchronous));
    let arrived = std::sync::atomic::AtomicU32::new(0);
    on_threads(|number| {
        let store = worker(cluster.addresses(), number);
        for round in 1..=5 {
            thread::sleep(Duration::from_millis(u64::from(number) * 10));
            arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            store.barrier("b", Duration::from_secs(10)).unwrap();
            assert!(arrived.load(std::sync::atomic::Ordering::SeqCst) >= round * WORKERS);
        }
    });
    let alone = worker(cluster.addresses(), 1);
    let message = alone.barrier("b", Duration::from_millis(100)).unwrap_err().to_string();
    assert!(message.contains("barrier: shard 0: "), "{message}");
    let unknown = Cluster::start(1);
    let message =
        worker(unknown.addresses(), 0).barrier("b", Duration::from_secs(1)).unwrap_err().to_string();
    assert!(message.contains("the server was not told how many workers there are"), "{message}");
}

#[test]
fn workers_that_cannot_be_are_refused() {
    let cluster = cluster(1, worker_sync(SUM));
    let mut config = remote(cluster.addresses(), Duration::from_secs(5));
    config.worker = Some(WORKERS);
    let message = RemoteStore::connect(config, Box::new(Serial)).unwrap_err().to_string();
    assert!(message.contains("there is no worker 3 of 3"), "{message}");
    let start = |workers, consistency| {
        let mut config = ServerConfig::default();
        (config.worker_sync.workers, config.worker_sync.consistency) = (workers, consistency);
        Server::start(Arc::new(LocalStore::default()), config).map(drop).unwrap_err().to_string()
    };
    assert!(start(None, SUM).contains("synchronous consistency needs the number of workers"));
    let bounded = Consistency::Bounded { staleness: 0 };
    assert!(start(None, bounded).contains("bounded staleness needs the number of workers"));
    assert!(start(Some(0), Consistency::Asynchronous).contains("workers must be at least 1, got 0"));
}

fn durable(directory: &Path, consistency: Consistency) -> Server {
    let mut config = ServerConfig::default();
    (config.kept, config.worker_sync) = (Some(KeptState::logged(directory)), worker_sync(consistency));
    Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap()
}

/// Sends a change as client `number` would, by its sequence number.
fn send(server: &Server, number: u32, sequence: u64, table: TableId) -> recstore::Result<()> {
    let (ids, values) = ([7], [f32::from(number as u8 + 1); DIM]);
    let updates = vec![MergedUpdate { table, step: Step::Next, ids: &ids, sums: &values }];
    let client = ClientId(u128::from(number) + 1);
    server.handler().handle(client, sequence, &Request::Update(updates)).map(drop)
}

#[test]
fn a_step_of_all_survives_a_restart_and_is_made_once_however_often_it_comes() {
    use recstore_ps::codec::Management;
    let directory = tempfile::tempdir().unwrap();
    let server = durable(directory.path(), SUM);
    let store = worker(vec![server.address().to_string()], 0);
    let table = table_of(&store);
    let join = |server: &Server, number: u32| {
        let join = Request::Manage(Management::Join { worker: number });
        server.handler().handle(ClientId(u128::from(number) + 1), 0, &join).unwrap();
    };
    (0..WORKERS).for_each(|number| join(&server, number));
    on_threads(|number| send(&server, number, 1, TableId(1)).unwrap());
    on_threads(|number| send(&server, number, 1, TableId(1)).unwrap());
    server.handler().checkpoint().unwrap();
    on_threads(|number| send(&server, number, 2, TableId(1)).unwrap());
    let before = rows(&store, table);
    server.stop(Duration::from_secs(1));
    let server = durable(directory.path(), SUM);
    let store = RemoteStore::connect(
        remote(vec![server.address().to_string()], Duration::from_secs(5)),
        Box::new(Serial),
    )
    .unwrap();
    // Those who had no answer ask again, and are answered without the others.
    send(&server, 1, 2, TableId(1)).unwrap();
    let table = store.find_numbered("t").unwrap().unwrap();
    assert_eq!(rows(&store, table), before);
    assert_eq!(store.statistics(table).unwrap().step, 2);
    on_threads(|number| send(&server, number, 3, TableId(1)).unwrap());
    assert_eq!(store.statistics(table).unwrap().step, 3);
    let round = Request::Round { members: Vec::new(), updates: Vec::new() };
    let refused = server.handler().handle(ClientId(1), 9, &round).unwrap_err().to_string();
    assert!(refused.contains("a step of several clients comes from each of them"), "{refused}");
    server.stop(Duration::from_secs(1));
}

#[test]
fn steps_that_workers_have_made_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let bounded = Consistency::Bounded { staleness: 5 };
    let made = |server: &Server, store: &RemoteStore, steps: u64| {
        (0..steps).for_each(|step| update(store, table_of(store), &[gradients(0, step)]).unwrap());
        server.handler().checkpoint().unwrap();
        update(store, table_of(store), &[gradients(0, 9)]).unwrap();
        store.workers().unwrap()[0].0[0].steps
    };
    let server = durable(directory.path(), bounded);
    let store = worker(vec![server.address().to_string()], 0);
    assert_eq!(made(&server, &store, 2), 3);
    let port = server.address().tcp().unwrap().port();
    server.stop(Duration::from_secs(1));
    let mut config = ServerConfig::default();
    (config.kept, config.worker_sync, config.port) =
        (Some(KeptState::logged(directory.path())), worker_sync(bounded), port);
    let server = Server::start(Arc::new(LocalStore::new(Box::new(Serial))), config).unwrap();
    assert_eq!(store.workers().unwrap()[0].0[0].steps, 3);
    server.stop(Duration::from_secs(1));
}
