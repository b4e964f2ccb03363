//! Messages as requests, and answers and errors as messages.

use recstore::{Error, Metadata, SaveKind, Shard, TableConfig};
use tonic::{Code, Status};

use super::proto;
use crate::wire::codec::{ClientId, LoadShard, Managed, SavePart};

/// Returns the client and sequence number of a change.
pub(super) fn change(change: Option<proto::Change>) -> Result<(ClientId, u64), Status> {
    match change {
        None => Ok((ClientId(0), 0)),
        Some(change) => Ok((client(&change.client, change.sequence)?, change.sequence)),
    }
}

/// Returns a client's number, which a change with a sequence number must have.
pub(super) fn client(bytes: &[u8], sequence: u64) -> Result<ClientId, Status> {
    match (<[u8; 16]>::try_from(bytes), bytes.len(), sequence) {
        (Ok(bytes), ..) => Ok(ClientId(u128::from_le_bytes(bytes))),
        (_, 0, 0) => Ok(ClientId(0)),
        (_, len, _) => Err(Status::invalid_argument(format!("client must be 16 bytes, got {len}"))),
    }
}

/// Returns the configuration in a message.
pub(super) fn config(dim: u64, text: &str) -> Result<TableConfig, Error> {
    let too_large = |_| Error::InvalidConfig { message: format!("dim {dim} is too large") };
    TableConfig::from_json(usize::try_from(dim).map_err(too_large)?, text)
}

/// Returns what is to be saved.
pub(super) fn save_part(request: proto::SavePartRequest) -> Result<SavePart, Status> {
    let kind = match request.kind.as_str() {
        "" | "full" => SaveKind::Full,
        "delta" => SaveKind::Delta,
        "auto" => SaveKind::Auto,
        other => {
            let message = format!("kind must be full, delta or auto, got \"{other}\"");
            return Err(Status::invalid_argument(message));
        }
    };
    let metadata = if request.metadata.is_empty() { "null" } else { &request.metadata };
    let metadata = Metadata::parse(metadata);
    Ok(SavePart {
        directory: request.directory.into(),
        snapshot: request.snapshot,
        shard: shard(request.shard, request.num_shards),
        kind,
        keep: request.keep as usize,
        metadata: metadata.map_err(|error| Status::invalid_argument(format!("metadata: {error}")))?,
        compression: request.compression,
        replace: request.replace,
    })
}

/// Returns what is to be loaded.
pub(super) fn load_shard(request: proto::LoadRequest) -> Result<LoadShard, Status> {
    let proto::LoadRequest { directory, shard: number, num_shards, hash_method, tables, snapshot } = request;
    if number >= num_shards {
        let message = format!("there is no shard {number} of {num_shards}");
        return Err(Status::invalid_argument(message));
    }
    let hash_method = hash_method.parse().map_err(status)?;
    let tables = (!tables.is_empty()).then(|| tables.into_iter().collect());
    let snapshot = Some(snapshot).filter(|snapshot| !snapshot.is_empty());
    let (directory, shard) = (directory.into(), shard(number, num_shards));
    Ok(LoadShard { directory, shard, hash_method, tables, snapshot })
}

fn shard(number: u32, of: u32) -> Shard {
    Shard { number: number as usize, of: of as usize }
}

/// Returns an error as a status: its text, and the code of its kind.
#[expect(clippy::needless_pass_by_value, reason = "it is mapped over errors")]
pub(super) fn status(error: Error) -> Status {
    let code = match error {
        Error::UnknownTable { .. } | Error::UnknownHandle { .. } => Code::NotFound,
        Error::ConfigMismatch { .. } => Code::AlreadyExists,
        Error::IdOutOfRange { .. } => Code::OutOfRange,
        Error::TableFull { .. } | Error::RequestTooLarge { .. } => Code::ResourceExhausted,
        Error::Checkpoint { .. } | Error::ForkedChild { .. } => Code::FailedPrecondition,
        Error::Unavailable { .. } => Code::Unavailable,
        Error::Unsupported { .. } => Code::Unimplemented,
        _ => Code::InvalidArgument,
    };
    Status::new(code, error.to_string())
}

/// Declares how an answer of one form becomes a message.
macro_rules! answers {
    ($($message:ident: $pattern:pat => $value:expr;)*) => {
        $(impl TryFrom<Managed> for proto::$message {
            type Error = Status;

            fn try_from(managed: Managed) -> Result<Self, Status> {
                match managed {
                    $pattern => Ok($value),
                    other => {
                        Err(Status::internal(format!("an answer that does not fit, {}", other.form())))
                    }
                }
            }
        })*
    };
}

answers! {
    DoneReply: Managed::Done {} => Self {};
    TableReply: Managed::Table { table } => Self { table };
    TableNamesReply: Managed::Names { names } => Self { names };
    NumRowsReply: Managed::Count { count } => Self { rows: count as u64 };
    DescribeTableReply: Managed::Description { name, dim, config, slots } => {
        let slot = |(name, width)| proto::SlotDescription { name, width: width as u64 };
        let slots = slots.into_iter().map(slot).collect();
        Self { name, dim: dim as u64, config: config.to_json().map_err(status)?, slots }
    };
    StatisticsReply: Managed::Statistics { statistics } => Self {
        rows: statistics.rows as u64,
        bytes: statistics.bytes as u64,
        inserts: statistics.inserts,
        updates: statistics.updates,
        deletes: statistics.deletes,
        refusals: statistics.refusals,
        step: statistics.step,
        learning_rate: statistics.learning_rate,
        learning_rate_was_set: statistics.learning_rate_was_set,
    };
    SaveReply: Managed::Saved { report } => Self {
        snapshot: report.snapshot,
        is_delta: report.is_delta,
        rows: report.rows as u64,
        deleted: report.deleted as u64,
        bytes: report.bytes,
        kept: report.kept.unwrap_or_default(),
    };
    LoadReply: Managed::Loaded { report } => Self {
        snapshot: report.snapshot,
        metadata: report.metadata.as_str().to_owned(),
        rows: report.tables.into_iter().map(|(name, rows)| (name, rows as u64)).collect(),
        bytes: report.bytes,
    };
}
