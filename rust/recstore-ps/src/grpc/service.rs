//! The methods of the service.

use std::sync::Arc;

use hyper::HeaderMap;
use recstore::Shard;
use tonic::{Request as Call, Response, Status};

use super::messages::{change, client, config, load_shard, save_part, status};
use super::proto;
use super::proto::rec_store_server::RecStore;
use crate::config::ServerConfig;
use crate::handler::Handler;
use crate::metrics::Refusal;
use crate::ports::{Seat, is_authorized};
use crate::wire::codec::{
    Answer, ClientId, Kind, Managed, Management, Received, Request, VERSION, decode, with_reply_frame,
};

/// Refuses calls without the server's token.
#[derive(Debug)]
pub(super) struct TokenCheck(Option<String>);

impl TokenCheck {
    pub(super) fn new(token: Option<String>) -> Self {
        Self(token)
    }

    pub(super) fn check(&self, headers: &HeaderMap, seat: &Seat) -> Result<(), Status> {
        const WHY: &str = "the token is not the server's";
        if is_authorized(self.0.as_deref(), headers) {
            return Ok(());
        }
        seat.refused(Refusal::Token, WHY);
        Err(Status::unauthenticated(WHY))
    }
}

/// The service over a handler.
#[derive(Debug)]
pub(super) struct Service {
    handler: Arc<Handler>,
    shard: Shard,
    bulk_port: u16,
    max_frame_bytes: u64,
}

type Reply<T> = Result<Response<T>, Status>;

impl Service {
    pub(super) fn new(handler: Arc<Handler>, config: &ServerConfig, bulk_port: u16) -> Self {
        let ServerConfig { shard, max_frame_bytes, .. } = *config;
        Self { handler, shard, bulk_port, max_frame_bytes }
    }

    /// Does work that may take time, on a thread for such.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Handler) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let handler = Arc::clone(&self.handler);
        // The store waits for locks and disks, which must not hold up the threads that serve connections.
        let done = tokio::task::spawn_blocking(move || work(&handler)).await;
        done.unwrap_or_else(|_| Err(Status::internal("the server met an internal panic")))
    }

    async fn manage<T: TryFrom<Managed, Error = Status>>(&self, request: Management) -> Reply<T> {
        self.change((ClientId(0), 0), request).await
    }

    async fn change<T: TryFrom<Managed, Error = Status>>(
        &self,
        (client, sequence): (ClientId, u64),
        request: Management,
    ) -> Reply<T> {
        let handle = move |handler: &Handler| handler.handle(client, sequence, &Request::Manage(request));
        match self.work(move |handler| handle(handler).map_err(status)).await? {
            Answer::Managed(managed) => managed.try_into().map(Response::new),
            _ => Err(Status::internal("an answer that does not fit")),
        }
    }

    /// Carries out a frame, which must be of the method's kind.
    async fn frame(&self, kind: Kind, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        let (request, limit) = (call.into_inner(), self.max_frame_bytes);
        let invalid = |error: crate::wire::codec::FrameError| Status::invalid_argument(error.to_string());
        let carry_out = move |handler: &Handler| {
            let frame = decode(&request.frame, limit).and_then(Received::widened).map_err(invalid)?;
            // Each kind has a method of its own: a frame must not do another's work.
            if frame.header.kind != kind {
                let message = format!("a frame of kind {:?}, expected {kind:?}", frame.header.kind);
                return Err(Status::invalid_argument(message));
            }
            let (number, sequence) = (frame.header.request, frame.header.sequence);
            let client = client(&request.client, sequence)?;
            let outcome = handler.handle(client, sequence, &Request::of(&frame).map_err(invalid)?);
            let bytes = with_reply_frame(number, &outcome, |reply| reply.to_bytes()).map_err(invalid)?;
            let bytes = bytes.map_err(|error| Status::internal(error.to_string()))?;
            handler.metrics().bytes_received.inc_by(request.frame.len() as u64);
            handler.metrics().bytes_sent.inc_by(bytes.len() as u64);
            Ok(bytes.into())
        };
        self.work(carry_out).await.map(|frame| Response::new(proto::FrameReply { frame }))
    }
}

#[tonic::async_trait]
impl RecStore for Service {
    async fn server(&self, _: Call<proto::ServerRequest>) -> Reply<proto::ServerReply> {
        Ok(Response::new(proto::ServerReply {
            shard: self.shard.number as u32,
            num_shards: self.shard.of as u32,
            bulk_port: self.bulk_port.into(),
            frame_version: VERSION.into(),
            max_frame_bytes: self.max_frame_bytes,
        }))
    }

    async fn open_table(&self, call: Call<proto::OpenTableRequest>) -> Reply<proto::TableReply> {
        let proto::OpenTableRequest { name, dim, config: text } = call.into_inner();
        let config = config(dim, &text).map_err(status)?;
        self.manage(Management::OpenTable { name, dim: config.dim, config }).await
    }

    async fn find_table(&self, call: Call<proto::FindTableRequest>) -> Reply<proto::TableReply> {
        self.manage(Management::FindTable { name: call.into_inner().name }).await
    }

    async fn drop_table(&self, call: Call<proto::DropTableRequest>) -> Reply<proto::DoneReply> {
        let request = call.into_inner();
        self.change(change(request.change)?, Management::DropTable { name: request.name }).await
    }

    async fn table_names(&self, _: Call<proto::TableNamesRequest>) -> Reply<proto::TableNamesReply> {
        self.manage(Management::TableNames {}).await
    }

    async fn describe_table(&self, call: Call<proto::TableRequest>) -> Reply<proto::DescribeTableReply> {
        self.manage(Management::Describe { table: call.into_inner().table }).await
    }

    async fn clear_table(&self, call: Call<proto::ClearTableRequest>) -> Reply<proto::DoneReply> {
        let request = call.into_inner();
        self.change(change(request.change)?, Management::Clear { table: request.table }).await
    }

    async fn num_rows(&self, call: Call<proto::TableRequest>) -> Reply<proto::NumRowsReply> {
        self.manage(Management::NumRows { table: call.into_inner().table }).await
    }

    async fn set_learning_rate(&self, call: Call<proto::SetLearningRateRequest>) -> Reply<proto::DoneReply> {
        let proto::SetLearningRateRequest { table, learning_rate, explicit } = call.into_inner();
        self.manage(Management::SetLearningRate { table, learning_rate, explicit }).await
    }

    async fn statistics(&self, call: Call<proto::TableRequest>) -> Reply<proto::StatisticsReply> {
        self.manage(Management::Statistics { table: call.into_inner().table }).await
    }

    async fn save_part(&self, call: Call<proto::SavePartRequest>) -> Reply<proto::SaveReply> {
        self.manage(Management::SavePart(save_part(call.into_inner())?)).await
    }

    async fn commit_snapshot(&self, call: Call<proto::SavePartRequest>) -> Reply<proto::DoneReply> {
        self.manage(Management::Commit(save_part(call.into_inner())?)).await
    }

    async fn load(&self, call: Call<proto::LoadRequest>) -> Reply<proto::LoadReply> {
        self.manage(Management::Load(load_shard(call.into_inner())?)).await
    }

    async fn read(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Read, call).await
    }

    async fn write(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Write, call).await
    }

    async fn update(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Update, call).await
    }

    async fn lookup(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Lookup, call).await
    }

    async fn delete(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Delete, call).await
    }

    async fn ids(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Ids, call).await
    }

    async fn slot(&self, call: Call<proto::FrameRequest>) -> Reply<proto::FrameReply> {
        self.frame(Kind::Slot, call).await
    }
}
