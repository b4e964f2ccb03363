//! The gRPC service answers as the bulk port does, over the same tables.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
#[path = "../../recstore/tests/numbered/mod.rs"]
mod numbered;

use cluster::Cluster;
use numbered::Numbered;
use recstore::{Step, TableConfig, TableId};
use recstore_ps::codec::{MergedUpdate, Received, Reply, Request, TableIds, decode};
use recstore_ps::grpc::proto;
use recstore_ps::grpc::proto::rec_store_client::RecStoreClient;
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

const LIMIT: u64 = 1 << 20;

fn cluster(token: Option<&str>) -> Cluster {
    let token = token.map(str::to_owned);
    Cluster::configured(1, |config| {
        config.grpc_port = Some(0);
        config.token.clone_from(&token);
    })
}

async fn channel(cluster: &Cluster) -> Channel {
    let address = cluster.servers[0].grpc_address().unwrap();
    Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

fn frame(request: &Request<'_>, sequence: u64) -> proto::FrameRequest {
    let frame = request.with_frame(3, sequence, |frame| frame.to_bytes().unwrap()).unwrap();
    proto::FrameRequest { client: vec![5; 16].into(), frame: frame.into() }
}

fn reply(reply: tonic::Response<proto::FrameReply>) -> recstore::Result<Reply> {
    let received: Received = decode(&reply.into_inner().frame, LIMIT).unwrap();
    Reply::of(received, 3).unwrap()
}

#[test]
fn a_table_is_trained_and_managed() {
    let cluster = cluster(None);
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::new(channel(&cluster).await);
        let config = r#"{"optimizer": {"kind": "sgd", "lr": 0.5}, "initializer": {"kind": "zeros"}}"#;
        let open = proto::OpenTableRequest { name: "t".into(), dim: 2, config: config.into() };
        let table = client.open_table(open).await.unwrap().into_inner().table.unwrap();
        let id = TableId(table);

        let write = Request::Write { table: id, ids: &[7, -7], rows: &[1.0, 2.0, 3.0, 4.0] };
        reply(client.write(frame(&write, 1)).await.unwrap()).unwrap().done().unwrap();
        let update = MergedUpdate { table: id, step: Step::Next, ids: &[7], sums: &[1.0, -1.0] };
        for _ in 0..3 {
            // One change, sent three times.
            let answer = client.update(frame(&Request::Update(vec![update]), 2)).await.unwrap();
            reply(answer).unwrap().done().unwrap();
        }
        let read = Request::Read(vec![TableIds { table: id, ids: &[7, 8, -7] }]);
        let rows = reply(client.read(frame(&read, 0)).await.unwrap()).unwrap();
        assert_eq!(rows.rows(&[6]).unwrap(), [[0.5, 2.5, 0.0, 0.0, 3.0, 4.0]]);
        let lookup = Request::Lookup { table: id, ids: &[-7, 9], insert: false };
        let found = reply(client.lookup(frame(&lookup, 0)).await.unwrap()).unwrap();
        assert_eq!(found.found(2, 2).unwrap().0, [1, -1]);
        let slot = Request::Slot { table: id, slot: "sum".into(), ids: &[7] };
        assert_eq!(reply(client.slot(frame(&slot, 0)).await.unwrap()).unwrap().slot(2).unwrap(), None);
        let ids = reply(client.ids(frame(&Request::Ids { table: id }, 0)).await.unwrap()).unwrap();
        assert_eq!(ids.ids().unwrap(), [7, -7]);

        let rate = proto::SetLearningRateRequest { table, learning_rate: 0.25, explicit: true };
        client.set_learning_rate(rate).await.unwrap();
        let statistics = client.statistics(proto::TableRequest { table }).await.unwrap().into_inner();
        assert_eq!((statistics.rows, statistics.step, statistics.updates), (2, 1, 1));
        assert_eq!((statistics.learning_rate, statistics.learning_rate_was_set), (0.25, true));
        let described = client.describe_table(proto::TableRequest { table }).await.unwrap().into_inner();
        let described_config = TableConfig::from_json(2, &described.config).unwrap();
        assert_eq!(described_config, TableConfig::from_json(2, config).unwrap());

        let delete = Request::Delete { table: id, ids: &[7, 8] };
        let deleted = reply(client.delete(frame(&delete, 3)).await.unwrap()).unwrap();
        assert_eq!(deleted.count().unwrap(), 1);
        assert_eq!(client.num_rows(proto::TableRequest { table }).await.unwrap().into_inner().rows, 1);
        client.clear_table(proto::ClearTableRequest { table, change: None }).await.unwrap();
        let names = client.table_names(proto::TableNamesRequest {}).await.unwrap().into_inner().names;
        assert_eq!(names, ["t"]);
        // The bulk port has the same table.
        let bulk = cluster.connect();
        assert_eq!(bulk.find_numbered("t").unwrap().map(|table| bulk.num_rows(table)), Some(Ok(0)));
        let change = Some(proto::Change { client: vec![5; 16].into(), sequence: 4 });
        let drop = proto::DropTableRequest { name: "t".into(), change };
        client.drop_table(drop.clone()).await.unwrap();
        client.drop_table(drop).await.unwrap();
        let find = proto::FindTableRequest { name: "t".into() };
        assert_eq!(client.find_table(find).await.unwrap().into_inner().table, None);
    });
}

#[test]
fn snapshots_are_saved_and_loaded() {
    let (cluster, directory) = (cluster(None), tempfile::tempdir().unwrap());
    let store = cluster.connect();
    let table = store.open_numbered("t", &TableConfig::new(1)).unwrap();
    store.write(table, &[1, 2], &[1.0, 2.0]).unwrap();
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::new(channel(&cluster).await);
        let directory = directory.path().display().to_string();
        let part = proto::SavePartRequest {
            directory: directory.clone(),
            snapshot: recstore::new_snapshot_name(),
            num_shards: 1,
            kind: "full".into(),
            keep: 1,
            metadata: r#"{"epoch": 3}"#.into(),
            shard: 0,
            compression: Some(3),
            replace: false,
        };
        assert_eq!(client.save_part(part.clone()).await.unwrap().into_inner().rows, 2);
        client.commit_snapshot(part).await.unwrap();
        client.clear_table(proto::ClearTableRequest { table: table.0, change: None }).await.unwrap();
        let load = proto::LoadRequest {
            directory,
            shard: 0,
            num_shards: 1,
            hash_method: "city_hash".into(),
            tables: vec![],
            snapshot: String::new(),
        };
        let loaded = client.load(load).await.unwrap().into_inner();
        assert_eq!((loaded.metadata.as_str(), loaded.rows["t"]), (r#"{"epoch":3}"#, 2));
        assert!(loaded.bytes > 0);
    });
    assert_eq!(store.num_rows(table), Ok(2));
}

#[test]
fn errors_have_codes_and_words() {
    let cluster = cluster(None);
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::new(channel(&cluster).await);
        let is = |status: Status, code, words: &str| {
            assert_eq!(status.code(), code, "{status}");
            assert!(status.message().contains(words), "{status}");
        };
        let open =
            |dim, config: &str| proto::OpenTableRequest { name: "t".into(), dim, config: config.into() };
        is(
            client.open_table(open(0, "")).await.unwrap_err(),
            Code::InvalidArgument,
            "dim must be at least 1",
        );
        is(
            client.open_table(open(1, "{\"a\": 1}")).await.unwrap_err(),
            Code::InvalidArgument,
            "unknown field `a`",
        );
        client.open_table(open(1, "")).await.unwrap();
        is(
            client.open_table(open(2, "")).await.unwrap_err(),
            Code::AlreadyExists,
            "exists with the configuration",
        );
        let unknown = client.num_rows(proto::TableRequest { table: 9 }).await.unwrap_err();
        is(unknown, Code::NotFound, "table handle 9 is unknown");
        let read = Request::Ids { table: TableId(9) };
        is(client.read(frame(&read, 0)).await.unwrap_err(), Code::InvalidArgument, "kind Ids, expected Read");
        let refused = reply(client.ids(frame(&read, 0)).await.unwrap()).unwrap_err();
        assert_eq!(refused.to_string(), "hashtable_size: table handle 9 is unknown, released or dropped");
        let noise = proto::FrameRequest { client: vec![].into(), frame: vec![1, 2, 3].into() };
        assert_eq!(client.read(noise).await.unwrap_err().code(), Code::InvalidArgument);
        let mut anonymous = frame(&Request::Delete { table: TableId(1), ids: &[] }, 1);
        anonymous.client = vec![1, 2].into();
        is(
            client.delete(anonymous).await.unwrap_err(),
            Code::InvalidArgument,
            "client must be 16 bytes, got 2",
        );
        let part = proto::SavePartRequest { kind: "half".into(), ..Default::default() };
        is(
            client.save_part(part).await.unwrap_err(),
            Code::InvalidArgument,
            "full, delta or auto, got \"half\"",
        );
        let load = proto::LoadRequest::default();
        is(client.load(load).await.unwrap_err(), Code::InvalidArgument, "there is no shard 0 of 0");
    });
}

#[test]
fn health_reflection_and_the_bulk_port_are_told() {
    let cluster = cluster(None);
    Runtime::new().unwrap().block_on(async {
        let channel = channel(&cluster).await;
        let check = HealthCheckRequest { service: "recstore.v1.RecStore".into() };
        let health = HealthClient::new(channel.clone()).check(check).await.unwrap().into_inner();
        assert_eq!(health.status(), tonic_health::pb::health_check_response::ServingStatus::Serving);
        let server =
            RecStoreClient::new(channel.clone()).server(proto::ServerRequest {}).await.unwrap().into_inner();
        assert_eq!(server.bulk_port, u32::from(cluster.servers[0].address().tcp().unwrap().port()));
        assert_eq!((server.shard, server.num_shards, server.frame_version), (0, 1, 1));
        let list = ServerReflectionRequest {
            message_request: Some(MessageRequest::ListServices(String::new())),
            ..Default::default()
        };
        let mut answers = ServerReflectionClient::new(channel)
            .server_reflection_info(tokio_stream::iter([list]))
            .await
            .unwrap()
            .into_inner();
        let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
        let MessageResponse::ListServicesResponse(services) = answer else { panic!("{answer:?}") };
        assert!(services.service.iter().any(|service| service.name == "recstore.v1.RecStore"));
    });
}

#[test]
fn calls_carry_the_token() {
    let cluster = cluster(Some("open sesame"));
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::new(channel(&cluster).await);
        let refused = client.server(proto::ServerRequest {}).await.unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (Code::Unauthenticated, "the token is not the server's")
        );
        let mut call = tonic::Request::new(proto::ServerRequest {});
        call.metadata_mut().insert("authorization", "Bearer open sesame".parse().unwrap());
        assert!(client.server(call).await.is_ok());
    });
}

#[test]
fn a_port_for_probes_tells_health_without_the_token_and_nothing_else() {
    let cluster = Cluster::configured(1, |config| {
        config.token = Some("a secret".to_owned());
        (config.grpc_port, config.health_port) = (Some(0), Some(0));
    });
    let address = cluster.servers[0].health_address().unwrap();
    Runtime::new().unwrap().block_on(async {
        let check = HealthCheckRequest { service: String::new() };
        let refused = HealthClient::new(channel(&cluster).await).check(check.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let probe = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let health = HealthClient::new(probe.clone()).check(check).await.unwrap().into_inner();
        assert_eq!(health.status(), tonic_health::pb::health_check_response::ServingStatus::Serving);
        let names = RecStoreClient::new(probe).table_names(proto::TableNamesRequest {}).await.unwrap_err();
        assert_eq!(names.code(), Code::Unimplemented);
    });
    let mut taken = recstore_ps::ServerConfig::default();
    (taken.grpc_port, taken.health_port) = (Some(0), Some(address.port()));
    let store = std::sync::Arc::new(recstore::LocalStore::default());
    let refused = recstore_ps::Server::start(store, taken).unwrap_err().to_string();
    assert!(refused.starts_with(&format!("cannot listen on {address}: ")), "{refused}");
}
