//! A specimen of every frame and message of version 1 is read to the same value, and that value written to the same
//! bytes, for ever.
//!
//! The bytes were written down once, in `fixtures/frames_v1`; its README says how. What later versions add, and what
//! servers say to clients that speak several, lies in `fixtures/frames_v2` and those beside it. A kind of frame,
//! section, request, answer, error or message without a specimen fails a test.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

#[path = "fixtures/frames_v1/conversation.rs"]
mod conversation;
#[path = "fixtures/frames_v1/messages.rs"]
mod messages;
#[path = "fixtures/frames_v1/specimens.rs"]
mod specimens;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use conversation::{answered, greeted, greetings, hello, script, server};
use messages::{assert_message, messages};
use recstore::{ChangedRows, Error, Serial};
use recstore_ps::codec::{
    Frame, HEADER_BYTES, Header, Kind, Managed, Management, Reply, Request, Section, WireError, decode,
};
use recstore_ps::{RemoteConfig, RemoteStore};
use serde_json::Value;
use specimens::{errors, managed, management, requests};

/// Bytes by name.
type Bytes = BTreeMap<String, Vec<u8>>;

const LIMIT: u64 = 1 << 20;
const REQUEST: u64 = 0x1122_3344_5566_7788;
const SEQUENCE: u64 = 0x0102_0304_0506_0708;

fn folder(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/frames_v{version}"))
}

/// Returns the specimens of version 1, with those that later versions add or have in their place.
fn recorded(file: &str) -> Bytes {
    (1..=5).flat_map(|version| recorded_of(version, file)).collect()
}

/// Reads lines of a name and bytes in hexadecimal; none where a version has no such file.
fn recorded_of(version: u32, file: &str) -> Bytes {
    let Ok(text) = fs::read_to_string(folder(version).join(file)) else { return Bytes::new() };
    let line = |line: &str| {
        let (name, hex) = line.split_once(' ').unwrap_or((line, ""));
        let byte = |place| u8::from_str_radix(&hex[2 * place..2 * place + 2], 16).unwrap();
        (name.to_owned(), (0..hex.len() / 2).map(byte).collect())
    };
    let bytes: Bytes = text.lines().map(line).collect();
    assert_eq!(bytes.len(), text.lines().count(), "{file}: a name comes twice");
    bytes
}

fn write_down(to: &Path, file: &str, bytes: &Bytes) {
    let mut text = String::new();
    for (name, bytes) in bytes {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{}", format!("{name} {hex}").trim_end()).unwrap();
    }
    fs::write(to.join(file), text).unwrap();
}

/// Compares bytes one by one, so that a difference can be read.
fn assert_written(file: &str, written: &Bytes) {
    let recorded = recorded(file);
    assert_eq!(written.keys().collect::<Vec<_>>(), recorded.keys().collect::<Vec<_>>(), "{file}");
    for (name, bytes) in recorded {
        assert_eq!(written[&name], bytes, "{file}: {name}");
    }
}

fn request_bytes(request: &Request<'_>) -> Vec<u8> {
    request.with_frame(REQUEST, SEQUENCE, |frame| frame.to_bytes().unwrap()).unwrap()
}

fn frame_bytes(kind: Kind, sections: Vec<Section<'_>>) -> Vec<u8> {
    Frame { header: Header::new(kind, REQUEST), sections }.to_bytes().unwrap()
}

fn json_bytes(kind: Kind, value: &impl serde::Serialize) -> Vec<u8> {
    frame_bytes(kind, vec![Section::Json(&serde_json::to_string(value).unwrap())])
}

fn all_requests() -> Vec<(String, Request<'static>)> {
    let manage = |(name, request)| (format!("manage_{name}"), Request::Manage(request));
    requests().into_iter().chain(management().into_iter().map(manage)).collect()
}

fn written_requests() -> Bytes {
    all_requests().iter().map(|(name, request)| (name.clone(), request_bytes(request))).collect()
}

const INDICES: &[i64] = &[3, -1, i64::MAX];
const FLOATS: &[f32] = &[0.0, -0.0, 1.5, f32::MIN_POSITIVE, f32::NEG_INFINITY, 0.1];

const BFLOAT16: &[u16] = &[0, 0x8000, 0x3FC0, 0x7F80, 0x7F7F, 0x3DCD];

/// Answers of each form: name, kind and sections.
fn answers() -> Vec<(&'static str, Kind, Vec<Section<'static>>)> {
    vec![
        ("done", Kind::Reply, vec![]),
        ("slot", Kind::Reply, vec![Section::F32(FLOATS)]),
        ("rows", Kind::Reply, vec![Section::F32(FLOATS), Section::F32(&[]), Section::F32(&FLOATS[2..3])]),
        ("ids", Kind::Reply, vec![Section::I64(INDICES)]),
        ("found", Kind::Reply, vec![Section::I64(INDICES), Section::F32(FLOATS)]),
        ("count", Kind::Reply, vec![Section::I64(&[7])]),
        (
            "changed",
            Kind::Reply,
            vec![Section::I64(&[7]), Section::I64(INDICES), Section::F32(FLOATS), Section::I64(&[-5])],
        ),
        ("rows_as_bfloat16", Kind::Reply, vec![Section::Bf16(BFLOAT16), Section::Bf16(&[])]),
        ("part", Kind::Part, vec![Section::F32(FLOATS), Section::F32(&FLOATS[..1])]),
        ("in_segment", Kind::InSegment, vec![Section::I64(&[70_000])]),
        ("piece", Kind::Piece, vec![Section::I64(&[70_000, 24]), Section::I64(INDICES)]),
    ]
}

fn written_replies() -> Bytes {
    let answers =
        answers().into_iter().map(|(name, kind, sections)| (name.to_owned(), frame_bytes(kind, sections)));
    let managed = managed()
        .into_iter()
        .map(|(name, value)| (format!("managed_{name}"), json_bytes(Kind::Reply, &value)));
    let refused = errors().into_iter().map(|(name, error)| {
        (format!("refused_{name}"), json_bytes(Kind::Refused, &WireError::from(&error)))
    });
    answers.chain(managed).chain(refused).collect()
}

/// Greets a server, and says all of the script on a connection: each greeting and frame, and what came back.
fn written_conversation() -> Bytes {
    let server = server();
    let mut said = Bytes::new();
    for (name, greeting) in greetings() {
        let welcome = greeted(&server, &greeting).1;
        said.insert(format!("00_{name}_hello"), greeting);
        said.insert(format!("00_{name}_welcome"), welcome);
    }
    let (mut stream, _) = greeted(&server, &greetings()[0].1);
    for (number, (name, sequence, request)) in (1..).zip(script()) {
        let frame = request.with_frame(number, sequence, |frame| frame.to_bytes().unwrap()).unwrap();
        said.insert(format!("{number:02}_{name}_reply"), answered(&mut stream, &frame));
        said.insert(format!("{number:02}_{name}"), frame);
    }
    drop(stream);
    server.stop(Duration::from_secs(5));
    said
}

#[test]
fn requests_are_written_as_they_were() {
    assert_written("requests.txt", &written_requests());
}

#[test]
fn requests_are_read_as_they_were() {
    let recorded = recorded("requests.txt");
    for (name, request) in all_requests() {
        let frame = decode(&recorded[&name], LIMIT).unwrap();
        assert_eq!((frame.header.request, frame.header.sequence), (REQUEST, SEQUENCE), "{name}");
        assert_eq!(Request::of(&frame).unwrap(), request, "{name}");
    }
}

#[test]
fn replies_are_written_as_they_were() {
    assert_written("replies.txt", &written_replies());
}

fn read_reply(bytes: &[u8]) -> Result<Reply, Error> {
    Reply::of(decode(bytes, LIMIT).unwrap(), REQUEST).unwrap()
}

#[test]
fn replies_are_read_as_they_were() {
    let recorded = recorded("replies.txt");
    for (name, kind, sections) in answers() {
        let frame = decode(&recorded[name], LIMIT).unwrap();
        assert_eq!(
            (frame.header, frame.sections().unwrap()),
            (Header::new(kind, REQUEST), sections),
            "{name}"
        );
    }
    for (name, value) in managed() {
        let reply = read_reply(&recorded[&format!("managed_{name}")]).unwrap();
        assert_eq!(reply.managed().unwrap(), value, "{name}");
    }
    let reply = |name: &str| read_reply(&recorded[name]).unwrap();
    reply("done").done().unwrap();
    assert_eq!(reply("done").slot(3).unwrap(), None);
    assert_eq!(reply("slot").slot(6).unwrap(), Some(FLOATS));
    assert_eq!(reply("rows").rows(&[6, 0, 1]).unwrap(), [FLOATS, &[], &FLOATS[2..3]]);
    assert_eq!(reply("rows").matrices().unwrap(), [FLOATS, &[], &FLOATS[2..3]]);
    assert_eq!(reply("ids").ids().unwrap(), INDICES);
    assert_eq!(reply("found").found(3, 2).unwrap(), (INDICES, FLOATS));
    assert_eq!(reply("count").count().unwrap(), 7);
    let changed = ChangedRows { ids: INDICES.to_vec(), rows: FLOATS.to_vec(), deleted: vec![-5] };
    assert_eq!(reply("changed").changed(&[2]).unwrap(), (7, vec![changed]));
    assert!(reply("changed").changed(&[3]).is_err(), "rows of another width");
}

#[test]
fn errors_are_read_as_they_were() {
    let recorded = recorded("replies.txt");
    for (name, error) in errors() {
        let found = read_reply(&recorded[&format!("refused_{name}")]).unwrap_err();
        let expected = match name.as_str() {
            "Other" => Error::Unsupported { operation: "a call on a server", message: error.to_string() },
            _ => error,
        };
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn a_server_answers_as_it_did() {
    assert_written("conversation.txt", &written_conversation());
}

/// Waits for a client, sends it a welcome, and returns its greeting.
fn welcomed(welcome: Vec<u8>) -> (Result<RemoteStore, Error>, Vec<u8>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = RemoteConfig::new(vec![listener.local_addr().unwrap().to_string()]);
    (config.token, config.timeout) = (Some("secret".to_owned()), Duration::from_secs(20));
    let expected = hello([1, 1], "secret").len();
    let serving = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut greeting = vec![0; expected];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&welcome).unwrap();
        greeting
    });
    let connected = RemoteStore::connect(config, Box::new(Serial));
    (connected, serving.join().unwrap())
}

#[test]
fn a_client_greets_as_it_did_and_understands_the_welcome() {
    let recorded = recorded_of(1, "conversation.txt");
    // It takes shard 2 of 3 for what it is: another server than the first of one.
    let (connected, mut greeting) = welcomed(recorded["00_accepted_welcome"].clone());
    let number = 16..32;
    assert!(greeting[number.clone()].iter().any(|byte| *byte != 7), "a client draws its number");
    greeting[number].fill(7);
    assert_eq!(greeting[10], 5, "the highest version that it speaks");
    greeting[10] = 1;
    assert_eq!(greeting, recorded["00_accepted_hello"]);
    let error = connected.unwrap_err().to_string();
    assert!(error.contains("shard 2 of 3"), "{error}");
    for (name, expected) in [
        (
            "00_refused_for_its_versions_welcome",
            "the server speaks the versions 1 to 1 of the protocol, the client 2 to 3",
        ),
        ("00_refused_for_its_token_welcome", "the token is not the server's"),
    ] {
        let error = welcomed(recorded[name].clone()).0.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn messages_are_written_and_read_as_they_were() {
    let written: Bytes = messages().into_iter().collect();
    assert_written("grpc.txt", &written);
    for (name, bytes) in recorded("grpc.txt") {
        assert_message(&name, &bytes);
    }
}

/// The lines of the service's description that begin with a word.
fn described(word: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/recstore.proto");
    let text = fs::read_to_string(path).unwrap();
    let rest = |line: &str| {
        line.trim().strip_prefix(word).map(|rest| rest.trim_end_matches([' ', '{', '}', ';']).to_owned())
    };
    text.lines().filter_map(rest).collect()
}

#[test]
fn every_message_has_a_specimen_and_no_method_changed() {
    let recorded: BTreeSet<String> = recorded("grpc.txt").into_keys().collect();
    assert_eq!(described("message "), recorded);
    let methods = fs::read_to_string(folder(1).join("grpc_methods.txt")).unwrap();
    assert_eq!(described("rpc "), methods.lines().map(str::to_owned).collect());
}

/// CRC-32 of IEEE 802.3, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| step(crc)))
}

/// Whether this program knows frames of a kind.
fn is_known(kind: u8) -> bool {
    let mut frame = frame_bytes(Kind::Reply, vec![]);
    frame[1] = kind;
    frame[4..8].fill(0);
    let header = crc32(&frame[..HEADER_BYTES]);
    frame[4..8].copy_from_slice(&header.to_le_bytes());
    let whole = crc32(&frame[..HEADER_BYTES]);
    frame[HEADER_BYTES + 4..].copy_from_slice(&whole.to_le_bytes());
    match decode(&frame, LIMIT) {
        Ok(_) => true,
        Err(error) => {
            assert!(error.to_string().contains("the unknown kind"), "{error}");
            false
        }
    }
}

#[test]
fn every_kind_of_frame_and_section_has_a_specimen() {
    let specimens: Vec<Vec<u8>> =
        recorded("requests.txt").into_values().chain(recorded("replies.txt").into_values()).collect();
    let kinds: BTreeSet<u8> = specimens.iter().map(|bytes| bytes[1]).collect();
    assert_eq!((0..=255).filter(|kind| is_known(*kind)).collect::<BTreeSet<u8>>(), kinds);
    let mut sections = BTreeSet::new();
    for bytes in &specimens {
        let frame = decode(bytes, LIMIT).unwrap();
        sections.extend(frame.sections().unwrap().iter().map(|section| match section {
            Section::I64(_) => "i64",
            Section::F32(_) => "f32",
            Section::U32(_) => "u32",
            Section::Json(_) => "json",
            Section::Bf16(_) => "bf16",
        }));
    }
    assert_eq!(sections.into_iter().collect::<Vec<_>>(), ["bf16", "f32", "i64", "json", "u32"]);
}

/// The variants that a type has in JSON, as the refusal of one that it has not lists them.
fn variants<T: serde::de::DeserializeOwned + std::fmt::Debug>(tag: &str) -> BTreeSet<String> {
    let refused = serde_json::from_str::<T>(&format!(r#"{{"{tag}": "?"}}"#)).unwrap_err().to_string();
    let listed = refused.split_once("expected one of ").unwrap().1;
    listed.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The variants among the specimens, by the tag of their JSON.
fn recorded_variants(file: &str, tag: &str) -> BTreeSet<String> {
    let variant = |bytes: &Vec<u8>| {
        let frame = decode(bytes, LIMIT).unwrap();
        let &[Section::Json(text), ..] = &frame.sections().unwrap()[..] else { return None };
        let value: Value = serde_json::from_str(text).unwrap();
        Some(value.get(tag)?.as_str()?.to_owned())
    };
    recorded(file).values().filter_map(variant).collect()
}

#[test]
fn every_request_answer_and_error_in_json_has_a_specimen() {
    assert_eq!(recorded_variants("requests.txt", "verb"), variants::<Management>("verb"));
    assert_eq!(recorded_variants("replies.txt", "answer"), variants::<Managed>("answer"));
    assert_eq!(recorded_variants("replies.txt", "error"), variants::<WireError>("error"));
}

/// Writes such specimens where `RECSTORE_FIXTURES` says, as those of this version were; they are never written again.
#[test]
fn fixtures_are_made_where_a_variable_says() {
    let temporary = tempfile::tempdir().unwrap();
    let asked_for = env::var_os("RECSTORE_FIXTURES").map(|to| PathBuf::from(to).join("frames_v1"));
    let to = asked_for.unwrap_or_else(|| temporary.path().to_owned());
    fs::create_dir_all(&to).unwrap();
    write_down(&to, "requests.txt", &written_requests());
    write_down(&to, "replies.txt", &written_replies());
    write_down(&to, "conversation.txt", &written_conversation());
    write_down(&to, "grpc.txt", &messages().into_iter().collect());
    let methods: Vec<String> = described("rpc ").into_iter().collect();
    fs::write(to.join("grpc_methods.txt"), methods.join("\n") + "\n").unwrap();
    assert!(fs::read_dir(&to).unwrap().count() >= 5);
}
