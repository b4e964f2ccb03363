//! What a request may say: the ranges of numbers that a server keeps, the lengths of names, the form of paths.
//!
//! A log has requests of older servers, which did not know these bounds: they count for what peers send.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;

use recstore::{Error, Result, Shard, TableConfig, check_local_path};

use crate::wire::codec::{LoadShard, MAX_COUNTED_STEPS, Management, Request, SavePart};
use crate::wire::store_metadata::StoreMetadata;

/// Sequence numbers of a client rise by one, from 1.
const MAX_SEQUENCE: u64 = i64::MAX as u64;

/// The longest name of a table, a slot or a barrier, in bytes.
const MAX_NAME_BYTES: usize = 4096;

/// The most metadata of a save.
const MAX_METADATA_BYTES: usize = 16 << 20;

/// The most tables, and shards, that a request names.
const MAX_COUNT: usize = 1 << 16;

/// The numbers of workers, where servers do not say how many there are.
const MAX_WORKER: u32 = (1 << 16) - 1;

/// The longest wait for others: 30 days.
const MAX_PATIENCE_MS: u64 = 30 * 24 * 3600 * 1000;

/// The digits of a store's identity.
const STORE_DIGITS: usize = 16;

/// Checks a request of a peer.
///
/// # Errors
/// [`Error::Unsupported`] names the verb's call, the field, its range and what came.
pub(super) fn check(request: &Request<'_>, sequence: u64) -> Result<()> {
    const CHANGE: &str = "a call on a server";
    within(CHANGE, "the sequence number of a change", sequence, 0..=MAX_SEQUENCE)?;
    match request {
        Request::Slot { slot, .. } => check_name("read_slot", "the slot", slot),
        Request::Manage(management) => check_management(management),
        _ => Ok(()),
    }
}

fn check_management(request: &Management) -> Result<()> {
    match request {
        Management::OpenTable { name, config, .. } => check_table(name, config),
        Management::FindTable { name } => check_name("find_table", "the table's name", name),
        Management::DropTable { name } => check_name("drop_table", "the table's name", name),
        Management::SavePart(part) | Management::Commit(part) => check_save(part),
        Management::Load(load) => check_load(load),
        Management::BeginPublication { tables } | Management::EndPublication { tables, .. } => {
            within("publish", "the number of tables", tables.len(), 1..=MAX_COUNT)
        }
        Management::TakeChanges(take) => {
            within("publish", "the number of tables", take.tables.len(), 1..=MAX_COUNT)
        }
        Management::CountSteps { from, to, .. } => {
            within("open_table", "the step", *to, *from..=from.saturating_add(MAX_COUNTED_STEPS))
        }
        Management::Join { worker } | Management::Beat { worker } => {
            within("heartbeat", "the number of the worker", *worker, 0..=MAX_WORKER)
        }
        Management::Agree { facts, .. } => check_facts(facts),
        Management::Barrier { name, patience_ms } => {
            check_name("barrier", "the barrier's name", name)?;
            within("barrier", "patience_ms", *patience_ms, 0..=MAX_PATIENCE_MS)
        }
        _ => Ok(()),
    }
}

fn check_table(name: &str, config: &TableConfig) -> Result<()> {
    check_name("open_table", "the table's name", name)?;
    config.disk.as_deref().map_or(Ok(()), |disk| check_path("open_table", "disk", Path::new(disk)))
}

fn check_save(part: &SavePart) -> Result<()> {
    check_path("save", "the directory", &part.directory)?;
    check_shard("save", part.shard)?;
    within("save", "the number of bytes of metadata", part.metadata.as_str().len(), 0..=MAX_METADATA_BYTES)
}

fn check_load(load: &LoadShard) -> Result<()> {
    check_path("load", "the directory", &load.directory)?;
    check_shard("load", load.shard)?;
    within(
        "load",
        "the number of tables",
        load.tables.as_ref().map_or(0, |tables| tables.len()),
        0..=MAX_COUNT,
    )
}

fn check_shard(operation: &'static str, Shard { number, of }: Shard) -> Result<()> {
    // First: the next line subtracts one from it.
    within(operation, "the number of shards", of, 1..=MAX_COUNT)?;
    within(operation, "the number of the shard", number, 0..=of - 1)
}

fn check_facts(facts: &StoreMetadata) -> Result<()> {
    let is_digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    match facts.store.len() == STORE_DIGITS && facts.store.bytes().all(is_digit) {
        true => Ok(()),
        false => Err(refused(
            "connect",
            format!("the store must be {STORE_DIGITS} hexadecimal digits, got \"{}\"", shown(&facts.store)),
        )),
    }
}

fn check_name(operation: &'static str, what: &str, name: &str) -> Result<()> {
    within(operation, &format!("the number of bytes of {what}"), name.len(), 0..=MAX_NAME_BYTES)
}

/// Checks that a path means the same in whatever directory the server was started.
fn check_path(operation: &'static str, what: &str, path: &Path) -> Result<()> {
    check_local_path(path).map_err(|message| refused(operation, format!("{what}: {message}")))?;
    let text = path.to_string_lossy();
    match path.is_absolute() && text.len() <= MAX_NAME_BYTES && !text.contains('\0') {
        true => Ok(()),
        false => Err(refused(
            operation,
            format!(
                "{what} must be an absolute path on the server of at most {MAX_NAME_BYTES} bytes, got \"{}\"",
                shown(&text)
            ),
        )),
    }
}

fn within<N: PartialOrd + Display>(
    operation: &'static str,
    what: &str,
    number: N,
    range: RangeInclusive<N>,
) -> Result<()> {
    match range.contains(&number) {
        true => Ok(()),
        false => Err(refused(
            operation,
            format!("{what} must be from {} to {}, got {number}", range.start(), range.end()),
        )),
    }
}

/// Returns the beginning of a text that came.
fn shown(text: &str) -> String {
    const SHOWN: usize = 100;
    text.escape_debug().take(SHOWN).collect()
}

fn refused(operation: &'static str, message: String) -> Error {
    Error::Unsupported { operation, message }
}
