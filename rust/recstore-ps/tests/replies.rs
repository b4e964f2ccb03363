//! What a client makes of replies: a server's are read as they were sent, and no others do harm.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use proptest::prelude::*;
use recstore_ps::codec::{Frame, FrameError, Header, Kind, Reply, Section, decode};

const LIMIT: u64 = 1 << 20;
const REQUEST: u64 = 7;

/// A section, owned.
#[derive(Debug, Clone)]
enum Part {
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Flags(Vec<u32>),
    Text(String),
}

impl Part {
    fn section(&self) -> Section<'_> {
        match self {
            Self::Integers(values) => Section::I64(values),
            Self::Floats(values) => Section::F32(values),
            Self::Flags(values) => Section::U32(values),
            Self::Text(text) => Section::Json(text),
        }
    }
}

fn part() -> impl Strategy<Value = Part> {
    let answer = r#"\{"answer":"(done|ids|count|table)"(,"(ids|count|table)":(\[1\]|1|null))?\}"#;
    prop_oneof![
        prop::collection::vec(any::<i64>(), 0..9).prop_map(Part::Integers),
        prop::collection::vec((-9..9i32).prop_map(|value| value as f32), 0..9).prop_map(Part::Floats),
        prop::collection::vec(any::<u32>(), 0..4).prop_map(Part::Flags),
        prop_oneof![answer, ".*"].prop_map(Part::Text),
    ]
}

fn bytes(kind: Kind, parts: &[Part]) -> Vec<u8> {
    let sections = parts.iter().map(Part::section).collect();
    Frame { header: Header::new(kind, REQUEST), sections }.to_bytes().unwrap()
}

/// Reads a reply in every way that a client does.
fn read(bytes: &[u8]) -> Result<(), FrameError> {
    let Ok(reply) = Reply::of(decode(bytes, LIMIT)?, REQUEST)? else { return Ok(()) };
    _ = (reply.managed(), reply.done(), reply.ids(), reply.count(), reply.matrices());
    for count in 0..9 {
        _ = (reply.found(count, 1), reply.slot(count), reply.rows(&[count]));
    }
    Ok(())
}

proptest! {
    #[test]
    fn matrices_come_back_as_they_were_sent(
        matrices in prop::collection::vec(prop::collection::vec(-9.0..9.0f32, 0..9), 0..4),
    ) {
        let parts: Vec<_> = matrices.iter().cloned().map(Part::Floats).collect();
        let frame = decode(&bytes(Kind::Reply, &parts), LIMIT).unwrap();
        let reply = Reply::of(frame, REQUEST).unwrap().unwrap();
        prop_assert_eq!(reply.matrices().unwrap(), matrices);
    }

    #[test]
    fn other_sections_than_expected_never_panic(
        kind in prop::sample::select(vec![Kind::Reply, Kind::Refused, Kind::Read]),
        parts in prop::collection::vec(part(), 0..4),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut bytes = bytes(kind, &parts);
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        bytes[4..8].fill(0);
        let checksum = crc32fast::hash(&bytes);
        bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        _ = read(&bytes);
    }
}

#[test]
fn a_reply_to_another_request_is_refused() {
    let frame = decode(&bytes(Kind::Reply, &[]), LIMIT).unwrap();
    let error = Reply::of(frame, REQUEST + 1).unwrap_err().to_string();
    assert_eq!(error, "malformed frame: a reply to request 7, expected 8");
}
