//! The standard health check alone, for those who watch a server and have neither its certificates nor its token.

use std::io;
use std::net::{SocketAddr, TcpListener};

use tokio::sync::oneshot;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::server::Server as Builder;

use super::proto::rec_store_server::RecStoreServer;
use super::{Grpc, service::Service};

impl Grpc {
    /// Answers at `address` that the server serves, without encryption, and nothing else.
    pub(crate) fn start_probe(address: SocketAddr) -> io::Result<Self> {
        Self::launch(address, 1, answer)
    }
}

async fn answer(listener: TcpListener, stopped: oneshot::Receiver<()>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<RecStoreServer<Service>>().await;
    let stop = async { _ = stopped.await };
    let server = Builder::default().add_service(health);
    _ = server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop).await;
}
