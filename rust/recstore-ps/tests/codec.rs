//! Frames come back as they were sent, and whatever else comes is refused without harm.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use proptest::prelude::*;
use recstore::{Error, Step, TableConfig, TableId};
use recstore_ps::ClientId;
use recstore_ps::codec::{
    Frame, FrameError, HEADER_BYTES, Header, Kind, Management, MergedUpdate, Request, RoundMember, Section,
    TableIds, WireError, decode,
};

const LIMIT: u64 = 1 << 20;

/// A request's arrays, owned.
#[derive(Debug, Clone)]
struct Arrays {
    kind: usize,
    table: i64,
    ids: Vec<i64>,
    more: Vec<i64>,
    rows: Vec<f32>,
    step: u64,
    name: String,
}

impl Arrays {
    fn request(&self) -> Request<'_> {
        let (table, ids, rows) = (TableId(self.table), &self.ids[..], &self.rows[..]);
        let update = |ids, step| MergedUpdate { table, step, ids, sums: rows };
        match self.kind {
            0 => Request::Read(vec![TableIds { table, ids }, TableIds { table, ids: &self.more }]),
            1 => Request::Write { table, ids, rows },
            2 => Request::Update(vec![update(ids, Step::Next), update(&self.more, Step::At(self.step))]),
            3 => Request::Lookup { table, ids, insert: self.step % 2 == 1 },
            4 => Request::Delete { table, ids },
            5 => Request::Ids { table },
            6 => Request::Slot { table, slot: self.name.clone(), ids },
            7 => {
                let client = ClientId(u128::from(self.step) << 64 | self.table as u128);
                let members = vec![RoundMember { client, sequence: self.step }; self.more.len()];
                Request::Round { members, updates: vec![update(ids, Step::Next); 2] }
            }
            8 => Request::Manage(Management::Barrier { name: self.name.clone(), patience_ms: self.step }),
            _ => {
                let config = TableConfig { seed: self.step, ..TableConfig::default() };
                Request::Manage(Management::OpenTable { name: self.name.clone(), dim: 3, config })
            }
        }
    }
}

fn arrays() -> impl Strategy<Value = Arrays> {
    let rows = prop::collection::vec((-99..99i32).prop_map(|value| value as f32 / 7.0), 0..20);
    let ids = || prop::collection::vec(any::<i64>(), 0..20);
    (0..10usize, any::<i64>(), ids(), ids(), rows, 1..u64::MAX, ".*").prop_map(
        |(kind, table, ids, more, rows, step, name)| Arrays { kind, table, ids, more, rows, step, name },
    )
}

fn bytes(request: &Request<'_>) -> Vec<u8> {
    request.with_frame(7, 9, |frame| frame.to_bytes().unwrap()).unwrap()
}

/// Reads a request as a server does; what it refuses is refused in words.
fn read(bytes: &[u8]) -> Result<String, FrameError> {
    let frame = decode(bytes, LIMIT)?;
    Ok(format!("{:?}", Request::of(&frame)?))
}

proptest! {
    #[test]
    fn a_request_comes_back_as_it_was_sent(arrays in arrays()) {
        let request = arrays.request();
        let frame = decode(&bytes(&request), LIMIT).unwrap();
        prop_assert_eq!((frame.header.request, frame.header.sequence), (7, 9));
        prop_assert_eq!(Request::of(&frame).unwrap(), request);
    }

    #[test]
    fn what_is_cut_changed_or_longer_is_refused(
        arrays in arrays(),
        place in any::<prop::sample::Index>(),
        bit in 0..8u32,
    ) {
        let whole = bytes(&arrays.request());
        prop_assert!(read(&whole[..place.index(whole.len())]).is_err());
        let mut flipped = whole.clone();
        flipped[place.index(whole.len())] ^= 1 << bit;
        prop_assert!(read(&flipped).is_err());
        let mut longer = whole;
        longer.push(0);
        prop_assert!(read(&longer).is_err());
    }

    #[test]
    fn hostile_bytes_with_a_good_checksum_never_panic(
        arrays in arrays(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = bytes(&arrays.request());
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        _ = read(&sealed(bytes));
    }

    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&noise).is_err());
    }
}

/// CRC-32 of IEEE 802.3, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| step(crc)))
}

/// Returns a frame's bytes with both checksums made right.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[4..8].fill(0);
    let header = crc32(&bytes[..HEADER_BYTES]);
    bytes[4..8].copy_from_slice(&header.to_le_bytes());
    let end = bytes.len() - 4;
    let whole = crc32(&bytes[..end - 4]);
    bytes[end..].copy_from_slice(&whole.to_le_bytes());
    bytes
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}

#[test]
fn lengths_are_refused_before_memory_is_taken_for_them() {
    let frame = bytes(&Request::Ids { table: TableId(1) });
    assert_eq!(frame.len(), HEADER_BYTES + 8);
    let of_len = |len: u64| {
        let mut frame = frame.clone();
        frame[8..16].copy_from_slice(&len.to_le_bytes());
        sealed(frame)
    };
    let too_large = format!("a frame of {} bytes exceeds the limit of {LIMIT}", LIMIT + 8);
    assert_eq!(refusal(&of_len(LIMIT + 8)), too_large);
    assert!(matches!(read(&of_len(LIMIT)), Err(FrameError::Io(_))));
    assert!(refusal(&of_len(3)).contains("a body of 3 bytes"));
    let mut other = frame;
    other[0] = 2;
    assert_eq!(refusal(&other), "a frame of version 2, expected 1");
}

#[test]
fn other_sections_than_a_request_has_are_named() {
    let frame = |kind, sections| Frame { header: Header::new(kind, 1), sections }.to_bytes().unwrap();
    let ids = Section::I64(&[1]);
    assert_eq!(
        refusal(&frame(Kind::Write, vec![ids, ids])),
        "malformed frame: Write with 2 sections [\"i64\", \"i64\"]"
    );
    assert!(refusal(&frame(Kind::Update, vec![ids; 3])).contains("Update with 3 sections"));
    assert!(refusal(&frame(Kind::Read, vec![ids])).contains("Read with 1 sections"));
    assert!(refusal(&frame(Kind::Lookup, vec![Section::U32(&[2]), ids])).contains("Lookup with 2"));
    assert!(refusal(&frame(Kind::Reply, vec![])).contains("Reply with 0"));
    let unknown = frame(Kind::Manage, vec![Section::Json(r#"{"verb": "format_disk"}"#)]);
    assert!(refusal(&unknown).contains("unknown variant `format_disk`"), "{}", refusal(&unknown));
}

#[test]
fn errors_travel_with_type_and_text() {
    let (operation, table) = ("emb_write", "t".to_owned());
    let errors = [
        Error::UnknownTable { operation: "drop_table", table: table.clone() },
        Error::UnknownHandle { operation, handle: -3 },
        Error::ConfigMismatch { table: table.clone(), existing: "a".into(), requested: "b".into() },
        Error::InvalidConfig { message: "m".into() },
        Error::IdOutOfRange {
            operation,
            table: table.clone(),
            id: -1,
            position: 4,
            num_embeddings: u64::MAX,
        },
        Error::DimMismatch { operation, table: table.clone(), expected: 3, actual: "rows of 4".into() },
        Error::LengthMismatch { operation, what: "w".into(), expected: 1, actual: 2 },
        Error::NonFinite {
            operation,
            what: "row",
            table: table.clone(),
            id: 5,
            position: 6,
            value: f32::NEG_INFINITY,
        },
        Error::InvalidBag { message: "m".into() },
        Error::TableFull { operation, table: table.clone(), rows: 1, requested: 2, limit: 3 },
        Error::InvalidLearningRate { table: table.clone(), value: f64::INFINITY },
        Error::InvalidStep { table: table.clone() },
        Error::ForkedChild { operation, table },
        Error::Checkpoint { path: "p".into(), message: "m".into() },
        Error::Unavailable { operation: "connect", shard: 1, address: "a".into(), message: "m".into() },
        Error::RequestTooLarge { operation, shard: 1, bytes: 2, limit: 3 },
        Error::Unsupported { operation: "save", message: "m".into() },
    ];
    for error in errors {
        let text = serde_json::to_string(&WireError::from(&error)).unwrap();
        let back: WireError = serde_json::from_str(&text).unwrap();
        assert_eq!(Error::from(back), error);
    }
    let other = WireError::from(&Error::UnknownPrefetch { prefetch: 1 });
    assert!(Error::from(other).to_string().contains("prefetch handle 1 is unknown"));
    let unheard: WireError =
        serde_json::from_str(r#"{"error": "UnknownTable", "operation": "x", "table": "t"}"#).unwrap();
    assert_eq!(Error::from(unheard).to_string(), "a call on a server: there is no table \"t\"");
}
