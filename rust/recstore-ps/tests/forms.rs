//! JSON of every form for every verb: an error is answered, the connection and the server go on, and memory stays within
//! sixteen times the bytes that came.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod cluster;
mod peer;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cluster::Cluster;
use peer::Peer;
use recstore_ps::KeptState;
use recstore_ps::codec::{Kind, Section};
use recstore_ps::grpc::proto;
use recstore_ps::grpc::proto::rec_store_client::RecStoreClient;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// A request of each verb that the server would carry out, but for a follower's.
fn requests() -> BTreeMap<&'static str, Value> {
    let shard = json!({"number": 0, "of": 1});
    let save = json!({"directory": "/proc/none/recstore", "snapshot": "0123456789abcdef", "shard": shard,
        "kind": "full", "keep": 1, "metadata": {"epoch": 1}});
    let facts = json!({"store": "0123456789abcdef", "hash_method": "city_hash"});
    BTreeMap::from([
        (
            "open_table",
            json!({"name": "t", "dim": 2, "config": {"optimizer": {"kind": "adam"},
            "initializer": {"kind": "zeros"}, "eviction": {"ttl": 3, "keep": [1]},
            "admission": {"kind": "count", "threshold": 2}}}),
        ),
        ("find_table", json!({"name": "t"})),
        ("drop_table", json!({"name": "t"})),
        ("table_names", json!({})),
        ("describe", json!({"table": 1})),
        ("clear", json!({"table": 1})),
        ("evict", json!({"table": 1, "ttl": 3, "dry_run": true})),
        ("num_rows", json!({"table": 1})),
        ("set_learning_rate", json!({"table": 1, "learning_rate": 0.5, "explicit": true})),
        ("statistics", json!({"table": 1})),
        ("save_part", save.clone()),
        ("commit", save),
        (
            "load",
            json!({"directory": "/proc/none/recstore", "shard": shard, "hash_method": "city_hash",
            "tables": ["t"]}),
        ),
        ("checkpoint", json!({})),
        ("begin_publication", json!({"tables": [1]})),
        ("take_changes", json!({"tables": [1], "publication": 1, "told": 0})),
        ("end_publication", json!({"tables": [1], "publication": 1})),
        ("join", json!({"worker": 0})),
        ("beat", json!({"worker": 0})),
        ("leave", json!({})),
        ("agree", json!({"facts": facts, "replaces": false})),
        ("barrier", json!({"name": "b", "patience_ms": 1})),
        ("workers", json!({})),
        ("confirm", json!({"number": 1})),
        ("promote", json!({})),
        ("narrow", json!({})),
        ("attach_segment", json!({})),
        ("stand_down", json!({"epoch": 1})),
    ])
}

fn text(verb: &str, fields: &Value) -> String {
    let mut object = fields.clone();
    object["verb"] = verb.into();
    object.to_string()
}

/// Values of other types, sizes and depths.
fn strange() -> Vec<String> {
    let deep = |open: &str, close: &str| format!("{}1{}", open.repeat(100_000), close.repeat(100_000));
    let many = |item: &str| format!("[{}{item}]", format!("{item},").repeat(5_000));
    let mut values: Vec<String> = [
        "null",
        "true",
        "-1",
        "0.5",
        "1e400",
        "18446744073709551615",
        "-9223372036854775809",
        "\"\"",
        "\"\\ud800\"",
        "\"\\u0000\"",
        "[]",
        "{}",
        "[[]]",
        "{\"kind\":\"adam\",\"kind\":\"sgd\"}",
        "NaN",
        "",
    ]
    .map(str::to_owned)
    .into();
    values.push("9".repeat(5_000));
    values.push(format!("\"{}\"", "x".repeat(100_000)));
    values.extend([deep("[", "]"), deep("{\"a\":", "}")]);
    values.extend(["0", "[]", "{}", "\"\"", "{\"a\":0}"].map(many));
    values
}

/// Texts of a verb with each of its values, at every depth, in the place of another.
fn changed(verb: &str, fields: &Value) -> Vec<String> {
    const MARK: &str = "\"a value that is changed\"";
    let mut texts = Vec::new();
    for path in paths(fields) {
        let mut marked = fields.clone();
        *marked.pointer_mut(&path).unwrap() = serde_json::from_str(MARK).unwrap();
        let marked = text(verb, &marked);
        texts.extend(strange().iter().map(|value| marked.replace(MARK, value)));
    }
    texts
}

fn paths(value: &Value) -> Vec<String> {
    let Value::Object(fields) = value else { return Vec::new() };
    let of_field = |(key, value): (&String, &Value)| {
        let below = paths(value).into_iter().map(move |path| format!("/{key}{path}"));
        std::iter::once(format!("/{key}")).chain(below.collect::<Vec<_>>())
    };
    fields.iter().flat_map(of_field).collect()
}

fn resident(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn cluster_at(directory: &Path) -> Cluster {
    Cluster::configured(1, |config| config.kept = Some(KeptState::logged(&directory.join("shard-0-of-1"))))
}

#[test]
fn every_form_of_every_verb_is_answered() {
    for (verb, fields) in requests() {
        let directory = tempfile::tempdir().unwrap();
        let cluster = cluster_at(directory.path());
        let mut peer = Peer::connect(&cluster);
        _ = peer.ask(&text("open_table", &requests()["open_table"]));
        for changed in changed(verb, &fields) {
            // An answer, whatever it is: the connection stays.
            _ = peer.ask(&changed);
        }
        _ = peer.ask(&text(verb, &fields));
        let mut other = Peer::connect(&cluster);
        // A server that stood down answers nothing but that.
        assert!(verb == "stand_down" || other.ask(r#"{"verb":"workers"}"#).contains("answer"), "{verb}");
    }
}

#[test]
fn a_tag_stands_anywhere_and_once() {
    let cluster = Cluster::start(1);
    let mut peer = Peer::connect(&cluster);
    for text in [
        r#"{"verb":"find_table","name":"t"}"#,
        r#" { "name" : "t" , "verb" : "find_table" } "#,
        r#"{"name":"\"verb\":\"x\",","verb":"find_table"}"#,
    ] {
        assert_eq!(peer.ask(text), r#"{"answer":"table","table":null}"#, "{text}");
    }
    for (text, expected) in [
        (r#"{"verb":"table_names","verb":"workers"}"#, "duplicate field `verb`"),
        (r#"{"name":"t"}"#, "missing field `verb`"),
        (r#"{"verb":3}"#, "verb must be a string"),
        (r#"["find_table","t"]"#, "expected an object with the key \\\"verb\\\""),
        (r#"{"verb":"find_table","name":"t","name":"u"}"#, "duplicate field `name`"),
        (r#"{"verb":"find_table","name":"t","other":1}"#, "unknown field `other`"),
        (r#"{"verb":"fly"}"#, "unknown variant `fly`"),
        (r#"{"verb":"find_table","name":"t"}}"#, "trailing characters"),
        ("", "EOF while parsing"),
    ] {
        let answer = peer.ask(text);
        assert!(answer.contains("unreadable JSON") && answer.contains(expected), "{text}: {answer}");
    }
}

#[test]
fn values_that_would_be_kept_have_ranges() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster_at(directory.path());
    let mut peer = Peer::connect(&cluster);
    let long = "x".repeat(5_000);
    for (verb, field, value, expected) in [
        ("save_part", "/directory", "\"s3://bucket/x\"", "got a URL of the scheme \\\"s3\\\""),
        ("commit", "/directory", "\"file:///tmp/x\"", "got a URL of the scheme \\\"file\\\""),
        ("load", "/directory", "\"s3://bucket/x\"", "got a URL of the scheme \\\"s3\\\""),
        ("save_part", "/directory", "\"x/y\"", "must be an absolute path on the server"),
        ("load", "/directory", "\"\"", "must be an absolute path on the server"),
        ("open_table", "/config", r#"{"memory_limit": 1, "disk": "x"}"#, "disk must be an absolute path"),
        ("open_table", "/config", r#"{"memory_limit": 1, "disk": "s3://b"}"#, "got a URL of the scheme"),
        ("open_table", "/name", &format!("\"{long}\""), "bytes of the table's name must be from 0 to 4096"),
        ("save_part", "/shard/number", "1", "the number of the shard must be from 0 to 0, got 1"),
        ("commit", "/shard/of", "1000000000", "the number of shards must be from 1 to 65536, got 1000000000"),
        ("load", "/shard/of", "0", "the number of shards must be from 1 to 65536, got 0"),
        ("save_part", "/snapshot", "\"../../x\"", "is not the name of a snapshot"),
        ("stand_down", "/epoch", "18446744073709551615", "epoch 18446744073709551615 must be at most 65536"),
        ("join", "/worker", "4294967295", "the number of the worker must be from 0 to 65535, got 4294967295"),
        ("beat", "/worker", "65536", "the number of the worker must be from 0 to 65535, got 65536"),
        ("barrier", "/patience_ms", "18446744073709551615", "patience_ms must be from 0 to"),
        ("barrier", "/name", &format!("\"{long}\""), "bytes of the barrier's name must be from 0 to 4096"),
        ("agree", "/facts/store", "\"x\"", "the store must be 16 hexadecimal digits, got \\\"x\\\""),
        ("take_changes", "/publication", "77", "NotPublished"),
        ("begin_publication", "/tables", "[]", "the number of tables must be from 1 to 65536, got 0"),
        ("set_learning_rate", "/learning_rate", "-1", "InvalidLearningRate"),
        ("set_learning_rate", "/learning_rate", "1e300", "InvalidLearningRate"),
    ] {
        _ = peer.ask(&text("open_table", &requests()["open_table"]));
        let mut fields = requests().remove(verb).unwrap();
        *fields.pointer_mut(field).unwrap() = serde_json::from_str(value).unwrap();
        let answer = peer.ask(&text(verb, &fields));
        assert!(answer.contains(expected), "{verb} {field} {value}: {answer}");
    }
    assert!(!Path::new("s3:").exists());
    // A step and a sequence number are words of other frames.
    for step in [-1, i64::MIN, i64::MAX, (1 << 53) + 1] {
        let head = [1, step];
        let sections = [Section::I64(&head), Section::I64(&[5]), Section::F32(&[1.0, 1.0])];
        let answer = peer.send(Kind::Update, &sections, 1);
        assert!(answer.contains("InvalidStep"), "{step}: {answer}");
    }
    let answer = peer.send(Kind::Delete, &[Section::I64(&[5])], u64::MAX);
    assert!(answer.contains("the sequence number of a change must be from 0 to"), "{answer}");
    assert!(peer.ask(r#"{"verb":"statistics","table":1}"#).contains(r#""step":0"#));
}

#[test]
fn json_and_paths_over_grpc_have_the_same_bounds() {
    let cluster = Cluster::configured(1, |config| config.grpc_port = Some(0));
    let address = format!("http://{}", cluster.servers[0].grpc_address().unwrap());
    let save = |directory: &str, metadata: &str| proto::SavePartRequest {
        directory: directory.into(),
        snapshot: "0123456789abcdef".into(),
        num_shards: 1,
        metadata: metadata.into(),
        ..Default::default()
    };
    Runtime::new().unwrap().block_on(async {
        let mut client = RecStoreClient::connect(address).await.unwrap();
        for strange in strange() {
            for config in [strange.clone(), format!("{{\"optimizer\":{strange}}}")] {
                let open = proto::OpenTableRequest { name: "t".into(), dim: 2, config };
                // A table or an error of the call: the server goes on.
                _ = client.open_table(open).await;
            }
            assert!(client.save_part(save("/proc/none/recstore", &strange)).await.is_err());
        }
        for (directory, expected) in
            [("s3://bucket/x", "got a URL of the scheme \"s3\""), ("x", "must be an absolute path")]
        {
            let refused = client.save_part(save(directory, "")).await.unwrap_err();
            assert!(refused.message().contains(expected), "{refused}");
            let load = proto::LoadRequest {
                directory: directory.into(),
                num_shards: 1,
                hash_method: "city_hash".into(),
                ..Default::default()
            };
            let refused = client.load(load).await.unwrap_err();
            assert!(refused.message().contains(expected), "{refused}");
        }
        assert!(client.table_names(proto::TableNamesRequest {}).await.is_ok());
    });
}

#[test]
fn a_server_saves_neither_in_nor_around_its_own_directory() {
    let directory = tempfile::tempdir().unwrap();
    let (data, link) = (directory.path().join("data"), directory.path().join("link"));
    fs::create_dir(&data).unwrap();
    std::os::unix::fs::symlink(&data, &link).unwrap();
    let cluster = cluster_at(&data);
    let mut peer = Peer::connect(&cluster);
    let own = data.join("shard-0-of-1");
    for place in
        [&data, &link, &own, &own.join("log"), &own.join("new"), &link.join("shard-0-of-1/checkpoint")]
    {
        for verb in ["save_part", "commit"] {
            let mut fields = requests().remove(verb).unwrap();
            fields["directory"] = place.to_str().unwrap().into();
            let answer = peer.ask(&text(verb, &fields));
            assert!(answer.contains("a server keeps its tables in"), "{verb} {}: {answer}", place.display());
        }
    }
    drop((peer, cluster));
    assert!(Peer::connect(&cluster_at(&data)).ask(r#"{"verb":"table_names"}"#).contains("names"));
}

#[test]
fn what_a_table_costs_at_once_is_refused_as_a_product() {
    let cluster = Cluster::start(1);
    let mut peer = Peer::connect(&cluster);
    for (dim, config, expected) in [
        (
            1024,
            r#"{"admission": {"kind": "count", "threshold": 2, "shared_rows": 1073741824}}"#,
            "admission.shared_rows 1073741824 of dim 1024",
        ),
        (
            64,
            r#"{"memory_limit": 1000000, "admission": {"kind": "probability", "probability": 0.5, "shared_rows": 100000}}"#,
            "more than the limit of 1000000",
        ),
        (
            4,
            r#"{"memory_limit": 1000000, "admission": {"kind": "sketch", "threshold": 2, "epsilon": 1e-7}}"#,
            "the sketch of admission.epsilon and admission.delta",
        ),
        (1i64 << 40, "{}", "exceeds 1 GiB"),
        (1 << 20, "{}", "exceeds 1 GiB"),
        (4, r#"{"block_size": 18446744073709551615}"#, "exceeds 1 GiB"),
        (4, r#"{"admission": {"kind": "sketch", "threshold": 2, "epsilon": 1e-30}}"#, "exceeds 4 GiB"),
    ] {
        let config: Value = serde_json::from_str(config).unwrap();
        let answer = peer.ask(&text("open_table", &json!({"name": "t", "dim": dim, "config": config})));
        assert!(answer.contains("InvalidConfig") && answer.contains(expected), "{dim}: {answer}");
    }
}

/// A process of its own measures: the peaks of other tests are not those of this one.
#[test]
fn memory_stays_within_sixteen_times_the_bytes() {
    const OWN: &str = "RECSTORE_FORMS_MEMORY";
    if std::env::var_os(OWN).is_some() {
        measure();
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "memory_stays_within_sixteen_times_the_bytes", "--nocapture"]).env(OWN, "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn measure() {
    const BYTES: usize = 4 << 20;
    let cluster = Cluster::start(1);
    let mut peer = Peer::connect(&cluster);
    let save = requests().remove("save_part").unwrap();
    let load = requests().remove("load").unwrap();
    let open = requests().remove("open_table").unwrap();
    let list = |item: &str| format!("[{}{item}]", format!("{item},").repeat(BYTES / (item.len() + 1)));
    let nested = format!("{}{}", "[".repeat(BYTES / 2), "]".repeat(BYTES / 2));
    let mut shapes: Vec<String> =
        ["0", "[]", "{}", "\"\"", r#"{"":0}"#, r#"{"a":[]}"#, "1.5", "null", "\"ab\""].map(list).into();
    shapes.push(nested);
    shapes.push(format!("\"{}\"", "\\u0041".repeat(BYTES / 6)));
    let before = resident("VmRSS:");
    for shape in &shapes {
        for (verb, fields, path) in [
            ("save_part", &save, "/metadata"),
            ("load", &load, "/tables"),
            ("open_table", &open, "/config/eviction/keep"),
            ("open_table", &open, "/config/optimizer"),
            ("open_table", &open, "/config"),
            ("begin_publication", &requests()["begin_publication"], "/tables"),
            ("find_table", &requests()["find_table"], "/name"),
        ] {
            let mut fields = fields.clone();
            *fields.pointer_mut(path).unwrap() = json!("here");
            let text = text(verb, &fields).replacen("\"here\"", shape, 1);
            let limit = before + 16 * text.len() as u64 + (64 << 20);
            _ = peer.ask(&text);
            _ = peer.ask(&text.replacen(&format!("\"{verb}\""), "\"fly\"", 1));
            let peak = resident("VmHWM:");
            assert!(peak <= limit, "{verb} {path} of {}..: {peak} bytes beside {before}", &shape[..9]);
        }
    }
}
