//! A server's errors in the words of the call: its numbers of tables and positions become the caller's.

use recstore::Error;

use super::session::Session;
use super::tables::RemoteTable;
use crate::wire::codec::FrameError;

/// Puts the caller's number of a table, and its positions, in the place of the server's.
pub(super) fn translated(
    error: Error,
    session: &Session,
    operation: &'static str,
    table: &RemoteTable,
    positions: &[usize],
) -> Error {
    match error {
        Error::UnknownHandle { .. } => {
            session.lock_tables().forget_number(table.id);
            Error::UnknownHandle { operation, handle: table.id.0 }
        }
        Error::IdOutOfRange { table, id, position, num_embeddings, operation } => {
            let position = positions.get(position).copied().unwrap_or(position);
            Error::IdOutOfRange { operation, table, id, position, num_embeddings }
        }
        Error::NonFinite { operation, what, table, id, position, value } => {
            let position = positions.get(position).copied().unwrap_or(position);
            Error::NonFinite { operation, what, table, id, position, value }
        }
        other => other,
    }
}

/// Turns an answer of another form into an error that names the server.
pub(super) fn misfit(
    session: &Session,
    operation: &'static str,
    shard: usize,
) -> impl Fn(FrameError) -> Error {
    move |error| session.unavailable(operation, shard, error.to_string())
}
